"""Masks added to scores, and fills followed by other ops: flags and finite numbers stay the same."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.attention.recognize import ABSORBING, NEGLIGIBLE, hides_scores
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.passes.attention_masks import select_masks, shrink_score_constants
from amp_rewrite.rewrite.replacement import Context, run_round
from support import cases
from support.fusing import kinds, outputs_of

LOWEST = -3.4028234663852886e38
SHOWN = np.array([[True, False, True], [False, False, False], [True, True, True]])
"""The second row is fully masked."""
WHERE = "mask = Where (seen, zero, least)"
LEFT, RIGHT = np.random.default_rng(3).standard_normal((2, 3, 8)).astype(np.float32) * 4
SCORES = {"x": LEFT, "w": RIGHT.T.copy(), "seen": SHOWN}


def model(source: str = WHERE, reader: str = "y = Softmax (z)", opset: int = 18, **stored: NDArray[Any]) -> ModelProto:
    """Return the model with a computed mask, or with a stored one."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
    g (float[3,8] x, float[8,3] w, bool[3,3] seen) => (float[3,3] y)
    <float zero = {{0}}, float least = {{{LOWEST}}}, float ten = {{10}}, float fair = {{-1e4}}> {{
        a = MatMul (x, w)
        {"" if "mask" in stored else source}
        z = Add (a, mask)
        {reader}
    }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored.items())
    return proto


def selected(proto: ModelProto) -> View:
    return run_round(View.of(Model.load(proto)), (select_masks, shrink_score_constants), Context(DType.FLOAT16))[0]


def op_types(view: View) -> str:
    return " ".join(op.op_type for op in view.ops)


def run(proto: ModelProto, feed: Mapping[str, Any] = SCORES) -> NDArray[np.float32]:
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    result: NDArray[np.float32] = session.run(None, {k: v for k, v in feed.items() if k in names})[0]
    return result


LEAST = np.where(SHOWN, np.float32(0), np.float32(LOWEST))
SELECTED = {
    "a Where": model(),
    "a reversed Where": model("hidden = Not (seen)  mask = Where (hidden, least, zero)"),
    "a constant": model(mask=LEAST),
    "a broadcast constant": model(mask=LEAST[1:2]),
    "a Where, before LogSoftmax": model(reader="y = LogSoftmax (z)"),
}


@pytest.mark.parametrize("name", SELECTED)
def test_scores_are_selected_and_no_bit_of_a_float32_result_changes(name: str) -> None:
    view = selected(SELECTED[name])
    assert "Where" in op_types(view)
    assert "Add" not in op_types(view)
    assert run(view.model.proto).tobytes() == run(SELECTED[name]).tobytes()


@pytest.mark.parametrize("name", [name for name in SELECTED if "Log" not in name])
def test_in_float16_a_fully_masked_row_is_as_uniform_as_in_float32(name: str) -> None:
    converted = amp_rewrite.convert(SELECTED[name], lower=["op=Softmax"])
    assert [row.dtype for row in converted.report.rows if row.op in ("Where", "Softmax")] == ["float16"] * 2
    actual = run(amp_rewrite.emulate(converted.model).to_proto())
    expected = run(SELECTED[name])
    assert np.isfinite(actual).all()
    assert (expected[1] == np.float32(1 / 3)).all()
    assert (actual == 0).tolist() == (expected < 2.0**-25).tolist()
    assert np.abs(actual - expected).max() <= 0.03  # scores up to 64 are rounded by up to 2⁻⁵


@pytest.mark.parametrize(
    "proto",
    [
        model("mask = Where (seen, zero, fair)"),
        model("mask = Where (seen, ten, least)"),
        model("mask = Where (seen, least, least)"),
        model("c = Cast <to = 1> (seen)  mask = Mul (c, least)"),
        model(reader="y = Relu (z)"),
        model(mask=np.where(SHOWN, np.float32(1), np.float32(LOWEST))),
        model(mask=np.where(SHOWN, np.float32(0), np.float32(-np.inf))),
        model(mask=np.zeros((3, 3), np.float32)),
        model(mask=np.array([[0, -1e35, LOWEST]], np.float32)),
    ],
)
def test_other_addends_are_left_alone(proto: ModelProto) -> None:
    view = View.of(Model.load(proto))
    assert list(select_masks(view, Context(DType.FLOAT16))) == []


CAUSAL = np.where(np.tri(3, dtype=bool), np.float32(0), np.float32(LOWEST))


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("mask = Where (tri, zero, least)", np.tri(3, dtype=bool)),
        ("mask = Where (tri, least, zero)", ~np.tri(3, dtype=bool)),
    ],
)
def test_a_mask_chosen_by_a_constant_condition_is_a_constant(text: str, condition: NDArray[np.bool_]) -> None:
    proto = model(text, tri=condition)
    view = selected(proto)
    assert op_types(view) == "MatMul Add Softmax"
    assert run(view.model.proto).tobytes() == run(proto).tobytes()
    stored = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in view.model.proto.graph.initializer}
    assert list(stored) == ["ten", "fair", "mask_bounded"]  # constants read only by the mask are removed
    assert stored["mask_bounded"] == np.where(np.tri(3) > 0, 0.0, -16376.0).tolist()


@pytest.mark.parametrize("rows", [SHOWN, np.ones((3, 3), bool)])
def test_a_constant_condition_selects_if_it_masks_a_whole_row_or_nothing(rows: NDArray[np.bool_]) -> None:
    assert op_types(selected(model("mask = Where (rows, zero, least)", rows=rows))) == "MatMul Where Softmax"


@pytest.mark.parametrize(
    ("reader", "opset"), [("y = LogSoftmax (z)", 18), ("y = Softmax <axis = 0> (z)", 18), ("y = Softmax (z)", 11)]
)
def test_a_selection_is_used_if_a_row_may_be_masked_or_a_masked_score_is_read(reader: str, opset: int) -> None:
    assert op_types(selected(model("", reader, opset, mask=CAUSAL))).split()[1] == "Where"


def test_a_sum_keeps_its_fill_if_it_is_an_output() -> None:
    shown = model(mask=CAUSAL)
    shown.graph.output.insert(0, shown.graph.output[0])
    shown.graph.output[0].name = "z"
    view = selected(shown)
    assert op_types(view).split()[1] == "Where"
    assert run(view.model.proto).tobytes() == run(shown).tobytes()


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        (None, False),
        (np.array(True), True),
        (np.array([True, False]), True),
        (np.array([False, False]), False),
        (np.array([[True, False], [False, True]]), True),
        (np.array([[True, True], [False, False]]), False),
    ],
)
def test_a_fill_masks_beside_an_unmasked_score_or_if_it_is_huge(shown: NDArray[np.bool_] | None, seen: bool) -> None:
    fills = (NEGLIGIBLE / 2, NEGLIGIBLE, ABSORBING / 2, ABSORBING)
    assert [hides_scores(fill, shown) for fill in fills] == [False, seen, seen, True]


KEYS = 256
POSITIONS = np.arange(float(KEYS))
LOWER = np.tri(KEYS, dtype=bool)
FILL = np.array(-1e9)
BOUND = -16376.0
PLAIN = "s=MatMul(q,k);b=Add(s,bias);y=Softmax(b)"
CHOSEN = "s=MatMul(q,k);b=Add(s,bias);m=Where(seen,b,fill);y=Softmax(m)"
HIDDEN = "s=MatMul(q,k);b=Add(bias,s);m=Where(seen,fill,b);y=Softmax(m)"
MASKED_FIRST = "s=MatMul(q,k);m=Add(s,mask);b=Add(m,bias);y=Softmax(b)"
MASKED_LAST = "s=MatMul(q,k);b=Add(s,bias);m=Add(b,mask);y=Softmax(m)"
COUNTED = "s=MatMul(q,k);r=Range(zero,length,one);f=Cast[to=float](r);bias=Mul(f,slope);b=Add(s,bias);y=Softmax(b)"
MASK = np.where(LOWER, 0, BOUND)
COUNT = {"zero": np.array(0), "one": np.array(1), "length": np.array(KEYS), "slope": np.array(0.5)}
REBASED: dict[str, tuple[str, dict[str, Any]]] = {
    "absolute positions": (PLAIN, {"bias": 0.5 * POSITIONS}),
    "counted positions": (COUNTED, COUNT),
    "two heads": (PLAIN, {"bias": np.array([0.5, 0.25]).reshape(2, 1, 1) * POSITIONS}),
    "an offset": (PLAIN, {"bias": -0.5 * abs(POSITIONS[:, None] - POSITIONS) - 300}),
    "early rows": (CHOSEN, {"bias": 0.5 * (POSITIONS - KEYS + 1), "seen": LOWER, "fill": FILL}),
    "early rows of hidden keys": (HIDDEN, {"bias": 0.5 * POSITIONS, "seen": ~LOWER, "fill": FILL}),
    "a mask added first": (MASKED_FIRST, {"bias": 0.5 * POSITIONS, "mask": MASK}),
    "a mask added last": (MASKED_LAST, {"bias": 0.5 * POSITIONS, "mask": MASK}),
    "a mask in the bias": (PLAIN, {"bias": np.where(LOWER, 0.5 * POSITIONS, -3e38)}),
}


def biased(text: str, constants: dict[str, Any], outputs: str = "y", **options: Any) -> ModelProto:
    shapes = {"q": (2, KEYS, 8), "k": (2, 8, KEYS), "seen": (KEYS, KEYS)}
    return cases.build(text, outputs.split(), shapes=shapes, types={"seen": "bool"}, constants=constants, **options)


def rebased(proto: ModelProto, to: DType = DType.FLOAT16) -> ModelProto:
    return run_round(View.of(Model.load(proto)), (shrink_score_constants,), Context(to))[0].model.to_proto()


def stored(proto: ModelProto) -> list[Any]:
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    return [array for name, array in arrays.items() if name.endswith("_rebased")]


def feeds(step: float) -> dict[str, Any]:
    """Return operands rounded to multiples of a step, or unrounded if it is 0."""
    rng = np.random.default_rng(0)
    arrays = {"q": rng.standard_normal((2, KEYS, 8)), "k": rng.standard_normal((2, 8, KEYS))}
    return {n: (np.round(a / step) * step if step else a).astype(np.float32) for n, a in arrays.items()}


@pytest.mark.parametrize("name", REBASED)
def test_exactly_added_numbers_leave_every_bit_of_the_result(name: str) -> None:
    proto = biased(*REBASED[name])
    moved = rebased(proto)
    (bias,) = stored(moved)
    assert bias.max() == 0
    assert outputs_of(moved, feeds(0.25))[0].tobytes() == outputs_of(proto, feeds(0.25))[0].tobytes()


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("name", REBASED)
def test_the_scores_are_low_without_more_casts_and_close_to_float32(name: str, to: DType) -> None:
    proto = biased(*REBASED[name])
    converted = amp_rewrite.convert(proto, to=to, lower=["op=Softmax"])
    low = [row.dtype for row in converted.report.rows if row.op in ("MatMul", "Add", "Where", "Softmax")]
    assert set(low) == {to.spelling}
    assert sum(node.op_type == "Cast" for node in converted.model.graph.node) - ("Cast" in REBASED[name][0]) <= 3
    actual, exact = (outputs_of(m, feeds(0))[0] for m in (amp_rewrite.emulate(converted.model).to_proto(), proto))
    assert np.abs(actual - exact).max() <= (2e-2 if to is DType.FLOAT16 else 16e-2) * exact.max()
    assert [f.subject for f in converted.report.findings if f.kind == "bias"] == ["bias"]


@pytest.mark.parametrize("name", REBASED)
def test_a_moved_bias_has_no_more_axes_than_its_rows_need(name: str) -> None:
    one_row = "positions" in name
    shape = (2, 1, KEYS) if name == "two heads" else (KEYS,) if one_row else (KEYS, KEYS)
    assert [array.shape for array in stored(rebased(biased(*REBASED[name])))] == [shape]


@pytest.mark.parametrize(
    ("text", "constants", "options"),
    [
        (PLAIN, {"bias": -0.5 * POSITIONS}, {}),  # already near 0 at the best key
        (PLAIN, {"bias": np.random.default_rng(0).standard_normal(KEYS) * 100}, {}),  # learned
        (PLAIN, {"bias": 0.5 * POSITIONS}, {"opset": 12}),  # a softmax over all axes from one on
        (PLAIN, {"bias": 0.5 * POSITIONS}, {"outputs": "y b"}),
        (f"{PLAIN};z=Neg(b)", {"bias": 0.5 * POSITIONS}, {"outputs": "y z"}),
        (PLAIN.replace("(b)", "[axis=1](b)"), {"bias": 0.5 * POSITIONS}, {}),
        (PLAIN.replace("Softmax", "LogSoftmax"), {"bias": 0.5 * POSITIONS}, {}),
        (PLAIN.replace("Add(s,bias)", "Sub(s,bias)"), {"bias": 0.5 * POSITIONS}, {}),
        (CHOSEN, {"bias": 0.5 * POSITIONS, "fill": FILL}, {}),  # the mask is an input
        (
            CHOSEN,
            {"bias": 0.5 * POSITIONS, "fill": FILL, "seen": np.tri(KEYS, k=-1, dtype=bool)},
            {},
        ),  # a row without visible keys
        (CHOSEN, {"bias": 0.5 * POSITIONS, "fill": np.array(0.0), "seen": LOWER}, {}),
    ],
)
def test_other_sums_are_left_alone(text: str, constants: dict[str, Any], options: dict[str, Any]) -> None:
    proto = biased(text, constants, **options)
    assert rebased(proto).SerializeToString() == proto.SerializeToString()


SEEN = np.tri(8, dtype=bool)
RNG = np.random.default_rng(0)
FEEDS = {name: RNG.standard_normal((2, 8, 8)).astype(np.float32) * 4 for name in ("q", "k")}
ADDED = "s=MatMul(q,k);b=Add(s,mask);y=Softmax(b)"
CHOSEN = "s=MatMul(q,k);m=Where(seen,zero,fill);b=Add(m,s);y=Softmax(b)"
SCALED = "s=MatMul(q,k);h=Mul(s,half);a=Sub(one,shown);m=Mul(a,fill);b=Add(h,m);y=Softmax(b)"
NUMBERS = {"seen": SEEN, "shown": np.where(SEEN, 1.0, 0.0), "half": 0.5, "one": 1.0, "zero": 0.0}
FILLS = (-40000.0, -3.4e38)


def mask(fill: float, shown: Any = 0.0) -> dict[str, Any]:
    return {"mask": np.where(SEEN, shown, fill)}


def masked(text: str, constants: dict[str, Any], outputs: str = "y", **options: Any) -> ModelProto:
    named = {name: value for name, value in constants.items() if name in text}
    shapes = {"q": (2, 8, 8), "k": (2, 8, 8), "other": (8, 8), "v": (2, 8, 8)}
    return cases.build(text, outputs.split(), shapes=shapes, constants=named, **options)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("text", [ADDED, CHOSEN, SCALED])
def test_a_single_fill_is_bounded_and_no_bit_of_a_float32_result_changes(text: str, fill: float) -> None:
    proto = masked(text, {**NUMBERS, **mask(fill), "fill": fill})
    after = rebased(proto)
    (stored,) = (t for t in after.graph.initializer if t.name.endswith("_bounded"))
    assert onnx.numpy_helper.to_array(stored).tolist() == np.where(SEEN, 0.0, -16376.0).tolist()
    assert outputs_of(after, FEEDS)[0].tobytes() == outputs_of(proto, FEEDS)[0].tobytes()


def test_sum_and_softmax_are_low_without_a_cast_or_selection_between() -> None:
    proto = masked(f"{ADDED};z=MatMul(y,v)", mask(-1e9), "z")
    converted = amp_rewrite.convert(proto)
    assert [row.dtype for row in converted.report.rows] == ["float16"] * 4
    assert [kind for kind in kinds(converted.model) if kind != "Cast"] == ["MatMul", "Add", "Softmax", "MatMul"]
    assert [f.subject for f in converted.report.findings if f.kind == "selected"] == ["mask"]
    assert amp_rewrite.convert(converted.model).model == converted.model


@pytest.mark.parametrize(
    ("text", "constants", "options"),
    [
        (ADDED, mask(-1e4), {}),  # in range
        (ADDED, mask(-1e9), {"to": DType.BFLOAT16}),  # the same
        (ADDED, mask(-np.inf), {}),
        (ADDED, {"mask": np.where(np.tri(8, k=-1), 0, -1e9)}, {}),  # a row without visible keys
        (ADDED, mask(-1e9), {"opset": 12}),
        (ADDED, mask(-1e9), {"outputs": "y b"}),
        (ADDED.replace("Softmax", "LogSoftmax"), mask(-1e9), {}),
        (ADDED.replace("y=", "t=Mul(b,half);y=").replace("(b)", "(t)"), {**NUMBERS, **mask(-1e9)}, {}),  # scaled
        (ADDED.replace("y=", "t=Add(b,mask);y=").replace("x(b)", "x(t)"), mask(-1e9), {}),  # added twice
        (ADDED.replace("y=", "t=Add(b,other);y=").replace("x(b)", "x(t)"), mask(-1e9), {}),  # perhaps a mask
        (
            ADDED.replace("y=", "t=Where(seen,b,fill);y=").replace("x(b)", "x(t)"),
            {**NUMBERS, **mask(-1e9), "fill": -1e9},
            {},
        ),
        (SCALED, {**NUMBERS, "shown": np.zeros((8, 8)), "fill": -1e9}, {}),
    ],
)
def test_other_fills_are_left_alone(text: str, constants: dict[str, Any], options: dict[str, Any]) -> None:
    to = options.pop("to", DType.FLOAT16)
    proto = masked(text, constants, **options)
    assert rebased(proto, to).SerializeToString() == proto.SerializeToString()


SHAPES = {
    "q": (2, 6, 8),
    "k": (2, 8, 6),
    "m": (2, 6, 6),
    "t": (1,),
    "y": (2, 6, 6),
    "z": (2, 6, 8),
    "row": (2, 6, 1),
    "head": (2, 1, 6),
    "pair": (2, 6, 5),
}
ROWS = np.array([2])
FILL_NUMBERS: Mapping[str, Any] = {
    "lowest": -3e38,
    "near": -1e4,
    "far": -3e4,
    "farther": -1e8,
    "zero": 0.0,
    "half": 0.5,
    "two": 2.0,
    "eight": 8.0,
    "tenth": 0.1,
    "warm": 0.7,
    "cap": 30.0,
    "large": 1e8,
    "small": 0.05,
    "all": np.array([6]),
    "one": 1.0,
    "rows": ROWS,
    "heads": np.array([1]),
    "axis": np.array(2),
    "first": np.array([0]),
    "second": np.array([1]),
    "five": np.array([5]),
    "six": np.array([6]),
    "ends": np.array([0, 0, 1, 0, 0, 1]),
    "flat": np.array([2, 6, 1]),
    "hidden": np.array([1, 1, 1, 0, 0, 0], bool),
    "least": np.zeros((2, 6, 1), np.int64),
    "width": np.array([6]),
}
SEEN_KEYS = np.tri(6, dtype=bool) & np.array([[[True]], [[True]]])
SEEN_KEYS[1, 0] = False  # a row without visible keys
S = "a=MatMul(q,k);s=Where(m,a,fill);"
SOFT = "p=Softmax(d);z=MatMul(p,q)"
SORTED = "v,i=TopK(s,all);b=Slice(v,first,five,rows);c=Slice(v,second,six,rows);"
MAX = "r=ReduceMax(s,rows);"
BOUNDED = {
    "a softmax": f"{S}d=Identity(s);{SOFT}",
    "a temperature": f"{S}d=Div(s,warm);{SOFT}",
    "a product with two": f"{S}d=Mul(s,two);{SOFT}",
    "sorted, then a temperature": f"{S}v,i=TopK(s,all);d=Div(v,half);{SOFT}",
    "the larger of two": f"{S}o=Where(m,fill,a);b=Max(s,o);d=Div(b,half);{SOFT}",
    "the smaller of two": f"{S}o=Where(m,fill,a);b=Min(s,o);d=Div(b,half);{SOFT}",
    "bounds": f"{S}b=Max(s,lowest);c=Min(b,large);d=Div(c,half);{SOFT}",
    "a capped score": f"{S}b=Div(s,cap);c=Tanh(b);d=Mul(c,cap);{SOFT}",
    "padding": f"a=MatMul(q,k);b=Pad(a,ends,fill);c=Slice(b,first,six,rows);d=Div(c,half);{SOFT}",
    "scattered": f"a=MatMul(q,k);o=Expand(fill,flat);b=ScatterElements[axis=2](a,least,o);d=Div(b,half);{SOFT}",
    "a softmax written out": f"{S}{MAX}d=Sub(s,r);e=Exp(d);u=ReduceSum(e,rows);p=Div(e,u);z=MatMul(p,q)",
    "a maximum, scaled": f"{S}{MAX}b=Mul(r,two);c=Sigmoid(b);d=Mul(c,a);z=MatMul(d,q)",
    "log-probabilities": f"{S}b=Div(s,half);c=LogSoftmax(b);d=Exp(c);z=MatMul(d,q)",
    "a near number": f"{S}y=Less(s,near)",
}
EXACT = {
    "a product with eight": f"{S}d=Mul(s,eight);{SOFT}",
    "a cold temperature": f"{S}d=Div(s,tenth);{SOFT}",
    "a temperature that is an input": f"{S}d=Div(s,t);{SOFT}",
    "a gate": f"{S}g=Sigmoid(a);d=Mul(s,g);{SOFT}",
    "added to itself": f"{S}d=Add(s,s);{SOFT}",
    "two masks": f"{S}o=Where(hidden,zero,fill);d=Add(s,o);{SOFT}",
    "two masks, ordered": f"{S}o=Where(hidden,zero,fill);d=Add(s,o);row=ArgMax[axis=-1](d)",
    "the fill itself": f"{S}y=Equal(s,fill)",
    "a far number": f"{S}y=Less(s,far)",
    "the maximum of a row": f"{S}{MAX}row=Less(r,far)",
    "the maximum, divided": f"{S}{MAX}b=Div(r,two);row=Less(b,far)",
    "sorted scores": f"{S}v,i=TopK(s,all);y=Greater(v,farther)",
    "neighbors": f"{S}{SORTED}d=Sub(b,c);pair=Greater(d,large)",
    "summed over heads": f"{S}b=ReduceSum(s,heads);head=Less(b,farther)",
    "averaged over heads": f"{S}b=ReduceMean(s,heads);head=Less(b,near)",
    "a running sum": f"{S}b=CumSum(s,axis);y=Less(b,farther)",
    "its inverse": f"{S}b=Div(large,s);c=Abs(b);y=Less(c,one)",
    "an output": f"{S}y=Identity(s)",
    "a divided output": f"{S}y=Div(s,warm)",
}
FAR_FILLS = {"1e9": -1e9, "lowest": -1e37, "float16": -65504.0}


def filled(text: str, fill: float) -> ModelProto:
    outputs = [name for name in ("y", "z", "row", "head", "pair") if f";{name}=" in text]
    numbers = {**FILL_NUMBERS, "fill": fill}
    read = {
        name: numbers[name]
        for name in re.findall(r"[(,](\w+)(?=[,)])", text)
        if name in numbers and f"{name}=" not in text
    }
    return cases.build(text, outputs, shapes=SHAPES, types={"m": "bool"}, constants=read, opset=18)


def lowered(converted: Converted) -> set[str]:
    """Return the first results of all low ops."""
    low = {op for (op, _), paint in converted.coloring.paints.items() if paint.dtype.low}
    return {converted.view.ops[op].node.output[0] for op in low}


def outputs_in_halves(proto: ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    halves = {name: (rng.integers(-2, 3, SHAPES[name]) / 2).astype(np.float32) for name in ("q", "k")}
    arrays = {**halves, "m": SEEN_KEYS, "t": np.array([0.05], np.float32)}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {i.name: arrays[i.name] for i in session.get_inputs()}), strict=True))


def judge(proto: ModelProto, converted: Converted, to: str) -> None:
    expected, actual = outputs_in_halves(proto), outputs_in_halves(emulate(converted.result).to_proto())
    for name, reference in expected.items():
        if reference.dtype != np.float32:
            np.testing.assert_array_equal(actual[name], reference)
            continue
        assert np.isfinite(actual[name]).all()
        limit = {"float16": 1e-2, "bfloat16": 8e-2}[to] * float(np.abs(reference).max())
        assert float(np.abs(actual[name] - reference).max()) <= limit


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("fill", FAR_FILLS.values(), ids=FAR_FILLS)
@pytest.mark.parametrize("name", [*BOUNDED, *EXACT])
def test_ops_after_a_fill_give_the_same_flags_and_finite_numbers(name: str, fill: float, to: str) -> None:
    proto = filled({**BOUNDED, **EXACT}[name], fill)
    judge(proto, convert(proto, to=to), to)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_fill_of_arbitrary_size_becomes_a_quarter_of_the_largest_number(name: str) -> None:
    converted = convert(filled(BOUNDED[name], -1e9), to="float16")
    (finding,) = (f for f in converted.report.findings if f.kind == "saturated" and f.subject in ("fill", "o"))
    assert finding.message == "the fill value -1e+09 becomes -16376 · harmless: it only selects"
    low = lowered(converted)
    assert low & {"s", "b", "p", "d"}


@pytest.mark.parametrize("name", EXACT)
def test_a_fill_whose_size_matters_stays_and_is_not_called_harmless(name: str) -> None:
    converted = convert(filled(EXACT[name], -1e9), to="float16")
    assert not any("harmless" in f.message and f.subject == "fill" for f in converted.report.findings)
    low = lowered(converted)
    assert "s" not in low
    assert "a" in low


def test_a_fill_in_range_stays_float32_if_a_temperature_makes_it_overflow() -> None:
    for fill, low in ((-1e4, False), (-1e3, True)):
        proto = filled(f"{S}d=Div(s,small);{SOFT}", fill)
        converted = convert(proto, to="float16")
        judge(proto, converted, "float16")
        assert ("d" in lowered(converted)) is low


def test_a_bound_keeps_the_whole_range_and_infinity_stays() -> None:
    bound = convert(filled("a=MatMul(q,k);s=Max(a,fill);p=Softmax(s);z=MatMul(p,q)", -1e9), to="float16")
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in bound.result.proto.graph.initializer}
    assert stored["fill"] == -65504
    infinite = convert(filled(f"{S}d=Div(s,half);{SOFT}", -np.inf), to="float16")
    assert any(np.isneginf(onnx.numpy_helper.to_array(t)).any() for t in infinite.result.proto.graph.initializer)
