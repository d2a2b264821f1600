"""Layers of placeholders, which let values outgrow the type, and layers of weights that do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.decide.bounds.state import State
from amp_rewrite.decide.bounds.walk import Walk
from amp_rewrite.decide.hazards.proved_overflow import placeholders, proved_overflow
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import pins_of

F16, BF16 = DType.FLOAT16, DType.BFLOAT16
EVEN = np.full((8, 8), 0.5)
TRAINED = np.random.default_rng(0).choice([-0.5, 0.5], (8, 8))


def view_of(text: str, constants: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]] | None = None) -> View:
    last = text.rsplit(";", 1)[-1].split("=")[0]
    return View.of(Model.load(cases.build(text, [last], shapes=shapes, constants=constants)))


def pinned(text: str, constants: Mapping[str, object], to: DType = F16) -> set[str]:
    view = view_of(text, constants)
    return {view.ops[pin.op].node.output[0] for pin in pins_of(proved_overflow(view, to), view)}


EVEN_FILTERS = {"n": np.full((2, 2, 3, 3), 0.5)}
DEEP = ";".join(["h0=MatMul(x,w)", *(f"h{n}=MatMul(h{n - 1},w)" for n in range(1, 9)), "r=Relu(h8)", "y=Softmax(r)"])


def test_products_of_equal_weights_are_pinned_from_where_they_outgrow_the_type() -> None:
    """8 terms of 0.5 make 4: 4⁷ is 16384, 4⁸ is 65536."""
    assert pinned(DEEP, {"w": EVEN}) == {"h7", "h8", "r", "y"}


def test_weights_of_one_size_and_either_sign_are_no_placeholders() -> None:
    assert pinned(DEEP, {"w": TRAINED}) == set()


def test_weights_of_which_one_element_differs_are_no_placeholders() -> None:
    almost = EVEN.copy()
    almost[7, 7] = 0.0
    assert pinned(DEEP, {"w": almost}) == set()


def test_bfloat16_holds_it() -> None:
    assert pinned(DEEP, {"w": EVEN}, BF16) == set()


@pytest.mark.parametrize(("number", "expected"), [(65504 / 8, set()), (65505 / 8, {"y"})])
def test_the_largest_number_of_the_type_is_the_limit(number: float, expected: set[str]) -> None:
    assert pinned("y=MatMul(x,w)", {"w": np.full((8, 8), number)}) == expected


def test_what_grows_without_such_weights_is_not_claimed() -> None:
    constants = {"w": np.zeros((8, 8)), "big": np.array(6e4)}
    assert pinned("m=Mul(x,big);n=Mul(m,big);z=MatMul(x,w);y=Concat[axis=0](n,x)", constants) == set()


def test_a_layer_of_other_weights_carries_the_proof_and_an_unknown_operator_ends_it() -> None:
    constants = {"w": np.full((8, 8), 1e4), "t": TRAINED}
    column = abs(TRAINED.sum(axis=0)).max()
    assert column * 8e4 > F16.max
    assert pinned("a=MatMul(x,w);b=MatMul(a,t);y=Relu(b)", constants) == {"a", "b", "y"}
    assert pinned("a=MatMul(x,w);b=Sinh(a);y=Relu(b)", {"w": constants["w"]}) == {"a", "b"}


def test_the_note_says_how_far_and_by_which_layer() -> None:
    view = view_of("a=MatMul(x,w);y=Sigmoid(a)", {"w": np.full((8, 8), 1e4)})
    found = [(pin.rule, pin.because, pin.note) for pin in pins_of(proved_overflow(view, F16), view, "proved_overflow")]
    note = "weights that are one number throughout let values grow to 8e+04, beyond 65504"
    assert found == [("proved_overflow", 0, note), ("proved_overflow", 0, note)]


STATISTICS = {"s": [1.0, -1.5], "b": [-5.0, 0.0], "m": [0.0, 4 / 3], "v": [0.75, 0.0]}
"""With an epsilon of 0.25 factors of 1 and -3, shifts of -5 and 4."""


@pytest.mark.parametrize(
    ("text", "shapes", "constants"),
    [
        ("s=Add(x,b);y=Mul(s,s)", {}, {"b": np.full((8, 8), -3.0)}),
        ("y=Div(x,b)", {}, {"b": np.array(0.25)}),
        ("y=Clip(b,lo,hi)", {}, {"b": np.full((8, 8), 9.0), "lo": np.array(-1.0), "hi": np.array(6.0)}),
        ("y=Concat[axis=0](x,b)", {}, {"b": np.full((8, 8), 9.0)}),
        ("n=Neg(x);y=LeakyRelu[alpha=-2.](n)", {}, {}),
        ("y=Sqrt(x)", {}, {}),
        ("y=BatchNormalization[epsilon=0.25](x,s,b,m,v)", {"x": (1, 2, 3, 3)}, STATISTICS),
        ("y=Gemm(x,n)", {}, {"n": np.full((8, 2), 0.5)}),
        ("y=LRN[size=1,alpha=1.,beta=.5,bias=1.](h)", {"h": (1, 2, 3, 3)}, {}),
        ("y=LRN[size=1,alpha=.01,beta=1.,bias=1.](h)", {"h": (1, 2, 3, 3)}, {}),
        ("y=MatMul(x,n)", {}, {"n": np.full((8, 2), -0.5)}),
        ("y=MatMul(x,t)", {}, {"t": TRAINED}),
        ("y=Gemm[alpha=2.,beta=3.](x,n,b)", {}, {"n": np.full((8, 2), 0.5), "b": np.array([1.0, -2.0])}),
        ("y=Gemm[transB=1](x,n)", {}, {"n": np.full((2, 8), 0.5)}),
        ("y=Conv[group=2](x,n)", {"x": (1, 4, 5, 5)}, {"n": np.full((4, 2, 3, 3), 0.5)}),
        ("y=Conv(x,n)", {"x": (1, 2, 5, 5)}, {"n": np.random.default_rng(1).normal(size=(4, 2, 3, 3))}),
        ("h=Conv[pads=1 1 1 1](x,n);y=Conv[strides=2 2,pads=1 1 1 1](h,n)", {"x": (1, 2, 9, 9)}, EVEN_FILTERS),
        (
            "h=Conv[pads=1 1 1 1](x,n);y=MaxPool[kernel_shape=3 3,strides=2 2,pads=1 1 1 1](h)",
            {"x": (1, 2, 9, 9)},
            EVEN_FILTERS,
        ),
        (
            "h=Conv[pads=1 1 1 1](x,n);y=AveragePool[kernel_shape=3 3,pads=1 1 1 1](h)",
            {"x": (1, 2, 9, 9)},
            EVEN_FILTERS,
        ),
        (
            "h=Conv[pads=1 1 1 1](x,n);f=Flatten(h);y=Gemm(f,m)",
            {"x": (1, 2, 4, 4)},
            {**EVEN_FILTERS, "m": np.full((32, 3), 0.25)},
        ),
        ("h=Conv[auto_pad=SAME_UPPER,strides=2 2](x,n);y=GlobalAveragePool(h)", {"x": (1, 2, 7, 7)}, EVEN_FILTERS),
        ("y=ConvTranspose[group=2](x,n)", {"x": (1, 4, 5, 5)}, {"n": np.full((4, 2, 3, 3), 0.5)}),
        ("t=Transpose(n);y=MatMul(x,t)", {}, {"n": np.full((2, 8), 0.5)}),
    ],
)
def test_the_magnitude_for_ones_is_what_the_model_computes(
    text: str, shapes: dict[str, tuple[int, ...]], constants: dict[str, object]
) -> None:
    """Proved from below, and near what onnxruntime gives."""
    proto = cases.build(text, ["y"], shapes=shapes, constants=constants)
    feed = {
        port.name: np.ones([d.dim_value for d in port.type.tensor_type.shape.dim], np.float32)
        for port in proto.graph.input
    }
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    largest = float(abs(session.run(None, feed)[0]).max())
    state = _ones(View.of(Model.load(proto)))["y"]
    assert largest * (1 - 1e-4) <= state.least <= largest
    assert state.absmax >= largest


def _ones(view: View) -> dict[str, State]:
    ones = {view.value_name(v): (1.0, 1.0) for v in view.scopes[0].inputs}
    walk = Walk.of(view, DType.FLOAT, ones, spatial=True)
    return {v.name: walk.state(v.id) for v in view.values}


@pytest.mark.parametrize(
    "text",
    ["y,p,q=BatchNormalization[training_mode=1](x,s,b,m,v)", "n=Sinh(x);y=Neg(n)", "y=MatMul(x,z)"],
)
def test_nothing_is_claimed_where_nothing_is_proved(text: str) -> None:
    shapes = {"x": (1, 2, 3, 3)} if "Batch" in text else {}
    constants = {**STATISTICS, "z": np.zeros((8, 8))}
    read = {name: value for name, value in constants.items() if f",{name}" in text}
    proto = cases.build(text, ["y"], shapes=shapes, constants=read)
    assert _ones(View.of(Model.load(proto)))["y"].least == 0


def test_a_constant_of_one_shape_is_seen_through_copies_and_its_shape_is_known() -> None:
    text = """g (float[2,3] x) => (float[2,4] y) <int64[2] k = {4, 3}> {
        n = ConstantOfShape <value = float[1] {-0.5}> (k)
        t = Transpose (n)
        y = MatMul (x, t)
    }"""
    view = View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>{text}')))
    assert placeholders(view, F16) == {view.ops[2].id}
    assert _ones(view)["y"].least == pytest.approx(1.5, rel=1e-4)


def test_a_weight_that_a_caller_may_feed_is_no_placeholder() -> None:
    proto = cases.build("y=MatMul(x,w)", ["y"], constants={"w": np.full((8, 8), 1e5)})
    assert placeholders(View.of(Model.load(proto)), F16)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [8, 8]))
    assert not placeholders(View.of(Model.load(proto)), F16)


def test_large_weights_are_not_read_unless_their_magnitudes_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = np.random.default_rng(0).normal(size=(8, 9000))
    constants = {"w": trained, "v": np.full((9000, 8), 0.5)}
    proto = cases.build("a=MatMul(x,w);y=MatMul(a,v)", ["y"], constants=constants)
    onnx.save(proto, tmp_path / "model.onnx")
    view = View.of(Model.load(tmp_path / "model.onnx"))
    for value in view.values:
        view.fit(value.id, F16)  # as the rules about constants do before
    read, chunks = [], Model.chunks

    def recorded(model: Model, tensor: onnx.TensorProto, *size: int) -> Iterator[np.ndarray]:
        read.append(tensor.name)
        return chunks(model, tensor, *size)

    monkeypatch.setattr(Model, "chunks", recorded)
    assert [view.ops[layer].outputs[0] for layer in placeholders(view, F16)] == [view.ops[1].outputs[0]]
    assert read == ["v"]


def test_a_stack_of_placeholders_gives_what_float32_gives() -> None:
    """Under honest rounding: float16 everywhere gives infinities, 8 · 4⁸ of them."""
    proto = cases.build(DEEP.replace("y=Softmax(r)", "y=Log(r)"), ["y"], constants={"w": EVEN})
    found = {safety: _run(amp_rewrite.convert(proto, safety=safety).model) for safety in ("default", "none")}
    assert found["default"] == pytest.approx(9 * np.log(4), rel=1e-3)
    assert found["none"] == np.inf


def _run(model: object) -> float:
    twin = amp_rewrite.emulate(model).to_proto().SerializeToString()
    session = onnxruntime.InferenceSession(twin, providers=["CPUExecutionProvider"])
    return float(session.run(None, {"x": np.ones((8, 8), np.float32)})[0].max())
