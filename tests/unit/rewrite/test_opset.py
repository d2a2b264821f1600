"""Which opset serves a target best, what a move changes, and what holds a model where it is."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.opset import at_opset
from amp_rewrite.settings.choices import AUTO_OPSET as AUTO
from amp_rewrite.settings.choices import Opset, Target
from support.paths import TESTS

MODELS = TESTS / "models"
POOL = "a = Conv (x, w)  y = MaxPool <kernel_shape = [2, 2]> (a)"
IMAGE = {"inputs": "float[1,3,6,6] x, float[4,3,3,3] w", "outputs": "float[1,4,3,3] y"}
GELU = "q = Div (x, root)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)"
NUMBERS = "<float root = {1.41421354}, float one = {1}, float half = {0.5}, int64[1] last = {-1}>"


def model_of(body: str, opset: int, inputs: str = "float[2,4] x", outputs: str = "float[2,4] y") -> ModelProto:
    head = f'<ir_version: 8, opset_import: ["": {opset}]> g ({inputs}) => ({outputs}) {NUMBERS}'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    for node in model.graph.node:
        node.name = f"the_{node.output[0]}"
    return model


def moved(
    model: ModelProto, wanted: Opset = AUTO, to: DType = DType.FLOAT16, **options: bool
) -> tuple[ModelProto, str]:
    """The model at another opset, and what was said; its type checked, its argument untouched."""
    before = model.SerializeToString()
    view, told = at_opset(View.of(Model.load(model)), wanted, to, Target.ORT_CUDA, **options)
    assert model.SerializeToString() == before
    onnx.checker.check_model(view.model.proto, full_check=True)
    return view.model.proto, " | ".join(f.message for f in told)


def opset(model: ModelProto) -> int:
    return model.opset_import[0].version


# -- the best one -------------------------------------------------------------------------------------


def test_max_pool_gets_its_kernel_back_one_opset_earlier() -> None:
    made, told = moved(model_of(POOL, 22, **IMAGE))
    assert (opset(made), told) == (21, "opset 22 became 21; the target serves MaxPool better")


def test_bfloat16_conv_gets_its_kernel_where_nothing_is_lost() -> None:
    made, told = moved(model_of("y = Conv (x, w)", 17, IMAGE["inputs"], "float[1,4,4,4] y"), to=DType.BFLOAT16)
    assert (opset(made), told) == (22, "opset 17 became 22; the target serves Conv better")


def test_no_kernel_is_lost_for_another() -> None:
    model = model_of(POOL, 21, **IMAGE)
    made, told = moved(model, to=DType.BFLOAT16)
    stays = "opset 21 stays: no other one serves more of the model without serving some of it less"
    assert (opset(made), told) == (21, f"{stays}; opset 22 serves Conv better, but not MaxPool")
    assert made.SerializeToString() == model.SerializeToString()


def test_an_operator_of_its_own_counts_only_if_something_will_be_fused_into_it() -> None:
    made, told = moved(model_of(GELU, 17))
    assert (opset(made), told) == (20, "opset 17 became 20; the target serves gelu erf as one op better")
    stays = "opset 17 stays: no other one serves more of the model without serving some of it less"
    assert moved(model_of(GELU, 17), fuse="none")[1] == stays


# -- the move -----------------------------------------------------------------------------------------


def test_axes_become_an_input_and_a_split_says_into_how_many() -> None:
    body = "a, b = Split <axis = 1> (x)  y = ReduceMax <axes = [1]> (a)"
    made, _ = moved(model_of(body, 17, outputs="float[2,1] y, float[2,2] b"), 18)
    split, reduce = made.graph.node
    assert {a.name: helper.get_attribute_value(a) for a in split.attribute} == {"axis": 1, "num_outputs": 2}
    assert (list(reduce.input), list(reduce.attribute)) == (["a", "y_axes"], [])
    assert made.ir_version == 8


def test_axes_become_an_attribute_on_the_way_back() -> None:
    made, _ = moved(model_of("y = ReduceMax (x, last)", 18, outputs="float[2,1] y"), 17)
    (reduce,) = made.graph.node
    assert (list(reduce.input), helper.get_attribute_value(reduce.attribute[0])) == (["x"], [-1])


def test_an_attribute_that_says_what_holds_anyway_goes_on_the_way_back() -> None:
    made, _ = moved(model_of("y = Reshape <allowzero = 0> (x, shape)", 14, "float[2,4] x, int64[2] shape"), 13)
    assert (opset(made), list(made.graph.node[0].attribute)) == (13, [])


@pytest.mark.parametrize(
    ("body", "start", "wanted", "why"),
    [
        ("y = Relu (x)", 6, 17, "opset 6 is older than 7"),
        (
            "s = Shape <start = 1> (x)  y = Cast <to = 1> (s)",
            15,
            14,
            "Shape 'the_s' states start, which is not one of its attributes there: onnx's converter: No Adapter From"
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
def test_what_can_not_be_moved_says_why(body: str, start: int, wanted: int, why: str) -> None:
    inputs = "int32[2,4] x" if "Bitwise" in body else "float[2,4] x"
    outputs = "int32[2,4] y" if "Bitwise" in body else "float[A] y" if "Shape" in body else "float[A,B] y"
    text = f"the model cannot be moved to opset {wanted}: {why}; leave opset= out, or export again"
    with pytest.raises(ModelError, match=f"^{re.escape(text)}$"):
        at_opset(View.of(Model.load(model_of(body, start, inputs, outputs))), wanted, DType.FLOAT16, Target.ORT_CUDA)


def test_a_number_is_obeyed_and_what_it_costs_is_said() -> None:
    made, told = moved(model_of(POOL, 21, **IMAGE), 22)
    assert (opset(made), told) == (22, "opset 21 became 22; it no longer serves MaxPool as well")
    assert made.ir_version == 10  # that of the opset


@pytest.mark.parametrize("name", ["lstm_ts13", "moe_ts17"])
def test_a_moved_model_computes_the_same(name: str) -> None:
    """To the bit: neither its operators nor its weights changed, and nothing is optimized."""
    model = onnx.load(MODELS / f"{name}.onnx")
    view, _ = at_opset(View.of(Model.load(model)), 21, DType.FLOAT16, Target.ORT_CUDA)
    with np.load(MODELS / f"{name}.npz") as stored:
        feed = {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    found = []
    for proto in (model, view.model.to_proto()):
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.append(session.run(None, feed))
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(after, before)
