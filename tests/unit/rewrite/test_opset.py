"""Opsets: the best one for a target, the changes of a move, including those from opsets 7 to 12, and obstacles."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx.numpy_helper import from_array, to_array

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import is_stub
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.opset import at_opset, moved_to
from amp_rewrite.settings.choices import AUTO_OPSET as AUTO
from amp_rewrite.settings.choices import Opset, Target
from support.fusing import kinds, parsed
from support.objections import session as opened

POOL = "a = Conv (x, w)  y = MaxPool <kernel_shape = [2, 2]> (a)"
IMAGE = {"inputs": "float[1,3,6,6] x, float[4,3,3,3] w", "outputs": "float[1,4,3,3] y"}
GELU = "q = Div (x, root)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)"
NUMBERS = "<float root = {1.41421354}, float one = {1}, float half = {0.5}, int64[1] last = {-1}>"


def model_of(
    body: str, opset: int, inputs: str = "float[2,4] x", outputs: str = "float[2,4] y", *, domains: str = ""
) -> ModelProto:
    ir, numbers = 8 if opset > 12 else 6, NUMBERS if re.search(r"\b(root|last)\b", body) else ""
    head = f'<ir_version: {ir}, opset_import: ["": {opset}{domains}]> g ({inputs}) => ({outputs}) {numbers}'
    return parsed(f"{head} {{ {body} }}")


def moved(
    model: ModelProto, requested: Opset = AUTO, to: DType = DType.FLOAT16, **options: bool
) -> tuple[ModelProto, str]:
    """Return the model at another opset, checked, and the messages; the argument stays unchanged."""
    before = model.SerializeToString()
    view, findings = at_opset(View.of(Model.load(model)), requested, to, Target.ORT_CUDA, **options)
    assert model.SerializeToString() == before
    onnx.checker.check_model(view.model.proto, full_check=True)
    return view.model.proto, " | ".join(f.message for f in findings)


def opset(model: ModelProto) -> int:
    return model.opset_import[0].version


CONV = {"inputs": IMAGE["inputs"], "outputs": "float[1,4,4,4] y"}
KEPT = "is kept: no other opset supports more of the model without losing support elsewhere"


@pytest.mark.parametrize(
    ("body", "shapes", "start", "options", "end", "message"),
    [
        (POOL, IMAGE, 22, {}, 21, "became 21; the target supports MaxPool better"),
        ("y = Conv (x, w)", CONV, 17, {"to": DType.BFLOAT16}, 22, "became 22; the target supports Conv better"),
        (POOL, IMAGE, 21, {"to": DType.BFLOAT16}, 21, f"{KEPT}; opset 22 supports Conv better, but MaxPool less"),
        (GELU, {}, 17, {}, 20, "became 20; the target supports gelu erf as one op better"),
        (GELU, {}, 17, {"fuse": "none"}, 17, KEPT),
        (POOL, IMAGE, 21, {"requested": 22}, 22, "became 22; it supports MaxPool less well"),
    ],
)
def test_the_smallest_opset_that_serves_most_is_chosen(
    body: str, shapes: dict[str, str], start: int, options: dict[str, Any], end: int, message: str
) -> None:
    model = model_of(body, start, **shapes)
    result, messages = moved(model, **options)
    assert (opset(result), messages) == (end, f"opset {start} {message}")
    if start == end:
        assert result.SerializeToString() == model.SerializeToString()
    else:
        assert result.ir_version >= helper.find_min_ir_version_for([helper.make_opsetid("", end)])


def test_axes_become_an_input_and_a_split_states_its_number() -> None:
    body = "a, b = Split <axis = 1> (x)  y = ReduceMax <axes = [1]> (a)"
    result, _ = moved(model_of(body, 17, outputs="float[2,1] y, float[2,2] b"), 18)
    split, reduce = result.graph.node
    assert {a.name: helper.get_attribute_value(a) for a in split.attribute} == {"axis": 1, "num_outputs": 2}
    assert (list(reduce.input), list(reduce.attribute)) == (["a", "y_axes"], [])
    assert result.ir_version == 8


def test_axes_become_an_attribute_at_an_older_opset() -> None:
    result, _ = moved(model_of("y = ReduceMax (x, last)", 18, outputs="float[2,1] y"), 17)
    (reduce,) = result.graph.node
    assert (list(reduce.input), helper.get_attribute_value(reduce.attribute[0])) == (["x"], [-1])


def test_a_redundant_attribute_is_dropped_at_an_older_opset() -> None:
    result, _ = moved(model_of("y = Reshape <allowzero = 0> (x, shape)", 14, "float[2,4] x, int64[2] shape"), 13)
    assert (opset(result), list(result.graph.node[0].attribute)) == (13, [])


@pytest.mark.parametrize(
    ("body", "start", "requested", "why"),
    [
        ("y = Relu (x)", 6, 17, "opset 6 is older than 7"),
        (
            "s = Shape <start = 1> (x)  y = Cast <to = 1> (s)",
            15,
            14,
            "Shape 'the_s' has the attribute start, which opset 14 does not define: onnx's converter: No Adapter From"
            " Version $15 for Shape",
        ),
        (
            "y = BitwiseNot (x)",
            18,
            17,
            "BitwiseNot 'the_y' does not exist at opset 17: onnx's converter: No Previous Version of BitwiseNot exists",
        ),
    ],
)
def test_an_unmovable_op_has_a_reason(body: str, start: int, requested: int, why: str) -> None:
    inputs = "int32[2,4] x" if "Bitwise" in body else "float[2,4] x"
    outputs = "int32[2,4] y" if "Bitwise" in body else "float[A] y" if "Shape" in body else "float[A,B] y"
    text = f"the model cannot be moved to opset {requested}: {why}; omit opset=, or export the model again"
    with pytest.raises(ModelError, match=f"^{re.escape(text)}$"):
        at_opset(View.of(Model.load(model_of(body, start, inputs, outputs))), requested, DType.FLOAT16, Target.ORT_CUDA)


def raised(model: ModelProto, opset: int = 13) -> ModelProto:
    """Return the model at another opset; the argument stays unchanged."""
    before = model.SerializeToString()
    move = moved_to(View.of(Model.load(model)), opset)
    assert not isinstance(move, str), move
    assert model.SerializeToString() == before
    onnx.checker.check_model(move.model.proto, full_check=True)
    assert move.model.proto.opset_import[0].version == opset
    return move.model.proto


def refusal(model: ModelProto, opset: int = 13) -> str:
    move = moved_to(View.of(Model.load(model)), opset)
    assert isinstance(move, str)
    return move


def run(model: ModelProto) -> list[np.ndarray]:
    """Return onnxruntime's outputs without optimizations, for random numbers, or zeros and ones as indices."""
    session: Any = opened(model, "DISABLE_ALL")
    rng, feed = np.random.default_rng(0), {}
    for port in session.get_inputs():
        shape = [size if isinstance(size, int) else 2 for size in port.shape]
        numbers = np.asarray(3 * rng.standard_normal(shape))
        feed[port.name] = numbers.astype(np.float32) if "float" in port.type else (numbers > 0).astype(np.int64)
        if port.type == "tensor(bool)":
            feed[port.name] = np.asarray(numbers > 0)
        if port.name == "scales":
            feed[port.name] = np.float32([1, 1, 2, 3])
    return session.run(None, feed)


X4, Y4 = "float[2,3,4,5] x", "float[A,B,C,D] y"
MATRIX = "float[2,3] x"
BATCH_NORM = "float[2,3,4] x, float[3] a, float[3] b, float[3] c, float[3] d"
BRANCHES = """
    y = If (c) <then_branch = one () => (float[2,3,4] a) { a = Softmax <axis = 2> (x) },
                else_branch = two () => (float[2,3,4] a) { a = Clip <max = 1.0> (x) }>
"""
MOVABLE = [
    ("y = Clip <min = -1.0, max = 1.0> (x)", 7, MATRIX, "float[2,3] y"),
    ("y = Clip <min = -1.0> (x)", 10, MATRIX, "float[2,3] y"),
    ("y = Max (x, a)", 8, "float[2,3] x, float[3] a", "float[2,3] y"),
    ("y = Sum (x, a, x)", 8, "float[2,3] x, float[3] a", "float[2,3] y"),
    ("y = Dropout <ratio = 0.3> (x)", 7, MATRIX, "float[2,3] y"),
    ("e = Abs (d) y = BatchNormalization <spatial = 1> (x, a, b, c, e)", 7, BATCH_NORM, "float[2,3,4] y"),
    ("y = Upsample <mode = 'linear', scales = [1.0,1.0,2.0,3.0]> (x)", 8, X4, "float[2,3,8,15] y"),
    ("y = Upsample <mode = 'nearest', scales = [1.0,1.0,2.0,3.0]> (x)", 8, X4, "float[2,3,8,15] y"),
    ("y = Upsample <mode = 'linear'> (x, scales)", 9, f"{X4}, float[4] scales", Y4),
    ("y = Resize <mode = 'linear'> (x, scales)", 10, f"{X4}, float[4] scales", Y4),
    ("y = Pad <pads = [1,0,2,1], value = 1.5> (x)", 7, MATRIX, "float[5,4] y"),
    ("y = Pad <pads = [1,0,1,1], mode = 'reflect'> (x)", 10, MATRIX, "float[4,4] y"),
    ("y = Slice <starts = [0, -2], ends = [1, 9]> (x)", 7, MATRIX, "float[1,2] y"),
    ("y, i = TopK <k = 2, axis = 1> (x)", 7, MATRIX, "float[2,2] y, int64[2,2] i"),
    ("y = Squeeze <axes = [1]> (x)", 11, "float[N,1,3] x", "float[N,3] y"),
    ("y = Squeeze (x)", 7, "float[2,1,3] x", "float[2,3] y"),
    ("y = Unsqueeze <axes = [0, 2]> (x)", 9, MATRIX, "float[1,2,1,3] y"),
    ("y = ReduceSum <axes = [1], keepdims = 0> (x)", 11, MATRIX, "float[2] y"),
    ("y = ReduceMean <axes = [-1]> (x)", 11, MATRIX, "float[2,1] y"),
    ("y, z = Split <axis = 1, split = [10, 90]> (x)", 11, "float[2,100] x", "float[2,10] y, float[2,90] z"),
    ("y = Scatter <axis = 1> (x, i, u)", 9, "float[2,3] x, int64[2,1] i, float[2,1] u", "float[2,3] y"),
    (BRANCHES, 9, "bool c, float[2,3,4] x", "float[2,3,4] y"),
]


@pytest.mark.parametrize("opset", [13, 19])
@pytest.mark.parametrize(("body", "start", "inputs", "outputs"), MOVABLE)
def test_a_moved_op_computes_the_same(body: str, start: int, inputs: str, outputs: str, opset: int) -> None:
    model = model_of(body.replace("'", '"'), start, inputs, outputs)
    for before, after in zip(run(model), run(raised(model, opset)), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-6)


SOFTMAX = "y = {} <axis = {}> (x)"


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize(
    ("shape", "axis", "reshapes"),
    [
        ("2,3,4", 2, False),
        ("N,M,L", -1, False),
        ("2,3,1,1", 1, False),
        ("N,1,7,1", 1, False),
        ("2,3,4", 1, True),
        ("N,3,M", 1, True),
        ("2,3,4,5", -2, True),
        ("2,3,4", 0, True),
    ],
)
def test_an_operator_over_all_later_axes_keeps_its_meaning(kind: str, shape: str, axis: int, reshapes: bool) -> None:
    """Over one axis if the others have size 1, otherwise between Reshapes to known sizes."""
    model = model_of(SOFTMAX.format(kind, axis), 11, f"float[{shape}] x", f"float[{shape}] y")
    result = raised(model)
    assert kinds(result) == (["Reshape", kind, "Reshape"] if reshapes else [kind])
    for before, after in zip(run(model), run(result), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-6)


def test_names_docs_and_metadata_stay() -> None:
    model = model_of("a = Softmax <axis = 2> (x) y = Clip <min = 0.0> (a)", 10, "float[2,3,4] x", "float[2,3,4] y")
    model.doc_string, model.graph.node[0].doc_string = "of the model", "of the node"
    model.metadata_props.add(key="licence", value="free")
    model.graph.node[0].metadata_props.add(key="layer", value="4")
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 3, 4]))
    result = raised(model)
    assert (result.doc_string, result.metadata_props) == (model.doc_string, model.metadata_props)
    for field in ("name", "input", "output", "value_info"):
        assert getattr(result.graph, field) == getattr(model.graph, field)
    assert [node.name for node in result.graph.node] == ["the_a", "the_y"]
    assert result.graph.node[0].doc_string == "of the node"
    assert result.graph.node[0].metadata_props[0].value == "4"


def test_operators_of_other_domains_stay_unchanged() -> None:
    body = "z = com.example.Twice (x) y = Unsqueeze <axes = [0]> (z)"
    result = raised(model_of(body, 9, MATRIX, "float[A,B,C] y", domains=', "com.example": 1'))
    assert [(node.domain, node.op_type) for node in result.graph.node] == [("com.example", "Twice"), ("", "Unsqueeze")]
    clip = model_of("z = com.example.Twice (x) y = Clip <min = 0.0> (z)", 9, MATRIX, "float[A,B] y")
    clip.opset_import.add(domain="com.example", version=1)
    assert refusal(clip).endswith("the type of its input is not known")


def test_weights_stay_in_place(tmp_path: Path) -> None:
    weight = np.ones((64, 128), np.float32)
    model = model_of("a = MatMul (x, w) y = Squeeze <axes = [0]> (a)", 11, "float[1,64] x", "float[128] y")
    model.graph.initializer.append(from_array(weight, "w"))
    onnx.save(model, tmp_path / "old.onnx", save_as_external_data=True, location="old.data", size_threshold=0)
    (tmp_path / "old.data").write_bytes(bytes(weight.nbytes))  # overwritten with zeros
    move = moved_to(View.of(Model.load(tmp_path / "old.onnx")), 13)
    assert not isinstance(move, str) and is_stub(move.model.proto.graph.initializer[0])
    assert not to_array(move.model.to_proto().graph.initializer[0]).any()


def test_weights_listed_as_inputs_become_constants() -> None:
    model = model_of("y = Clip <max = 1.0> (x)", 8, MATRIX, "float[2,3] y")
    model.ir_version = 3
    model.graph.initializer.append(from_array(np.ones(3, np.float32), "w"))
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3]))
    result = raised(model)
    assert [formal.name for formal in result.graph.input] == ["x"] and result.ir_version == 7


@pytest.mark.parametrize(
    ("body", "start", "inputs", "outputs", "why"),
    [
        (
            "y = BatchNormalization <spatial = 0> (x, a, b, c, d)",
            7,
            BATCH_NORM,
            "float[2,3,4] y",
            "BatchNormalization 'the_y' has the attribute spatial, which opset 13 does not define: onnx's converter:"
            " Attribute spatial must have value 1",
        ),
        (
            "y = Resize (x, scales)",
            10,
            f"{X4}, float[4] scales",
            Y4,
            "Resize 'the_y' has another meaning at opset 13: runtimes disagreed on the nearest pixel of a smaller"
            " image",
        ),
        (
            "y = Softmax <axis = 1> (x)",
            11,
            "float[N,M,L] x",
            "float[N,M,L] y",
            "Softmax 'the_y' has another meaning at opset 13: it is over several axes of unknown sizes",
        ),
        (
            "y, m = Dropout <ratio = 0.3> (x)",
            7,
            MATRIX,
            "float[2,3] y, float[2,3] m",
            "onnx rejects the moved model: [ShapeInferenceError] Inference error(s): (op_type:Dropout,",
        ),
    ],
)
def test_the_obstacle_to_a_move_is_named(body: str, start: int, inputs: str, outputs: str, why: str) -> None:
    assert refusal(model_of(body, start, inputs, outputs)).startswith(why)


CLIPPED = "a = MatMul (x, w) b = Clip <min = 0.0, max = 6.0> (a) y = MatMul (b, w)"
SQUARE = {"inputs": "float[64,64] x, float[64,64] w", "outputs": "float[64,64] y"}


def opset_messages(converted: amp_rewrite.Converted) -> list[str]:
    return [finding.message for finding in converted.report.findings if finding.kind == "opset"]


def test_an_old_model_is_moved_unless_told_to_keep_its_opset() -> None:
    model = model_of(CLIPPED, 10, **SQUARE)
    converted, unchanged = amp_rewrite.convert(model), amp_rewrite.convert(model, opset="keep")
    assert (opset(converted.result.proto), opset(unchanged.result.proto)) == (13, 10)
    assert [sum(op == "Cast" for op in kinds(c.result.proto)) for c in (converted, unchanged)] == [3, 5]
    assert opset_messages(converted)[0].startswith("opset 10 became 13; the target supports Clip better")
    unmoved = amp_rewrite.convert(model_of("y = MatMul (x, w)", 11, **SQUARE))
    assert (opset(unmoved.result.proto), opset_messages(unmoved), opset_messages(unchanged)) == (11, [], [])


def test_a_move_that_costs_more_kernels_than_it_gains_is_refused() -> None:
    """A Clip gains its kernel, and a Softmax becomes three ops."""
    body = f"{CLIPPED.replace('y =', 'z =')} y = Reshape (z, shape) s = Softmax <axis = 1> (free)"
    inputs = f"{SQUARE['inputs']}, int64[2] shape, float[2,3,4] free"
    converted = amp_rewrite.convert(model_of(body, 10, inputs, "float[A,B] y, float[2,3,4] s"))
    reason = "at opset 13 it would have 2 more ops, but only 1 more in the low type"
    assert opset_messages(converted) == [f"the model stays at opset 10: {reason}"]
    assert opset(converted.result.proto) == 10
