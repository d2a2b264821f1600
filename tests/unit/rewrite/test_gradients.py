"""The backward pass of whole graphs: sums of gradients, zeros and refusals."""

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, helper, numpy_helper

from amp_rewrite import GradientError, Model, View, gradients
from amp_rewrite.rewrite.autodiff.builder import Builder
from support.cases import build
from support.paths import TESTS
from support.train.vjp_case import Feed, run_float32

LOSS: dict[str, tuple[int, ...]] = {"loss": ()}
TOTAL = "loss=ReduceSum[keepdims=0](y)"


def graph(text: str, **inputs: tuple[int, ...]) -> ModelProto:
    """Build a graph that computes y, with the sum of y as the loss."""
    return build(f"{text};{TOTAL}", ["loss"], shapes={**inputs, **LOSS}, opset=20)


def ops(model: Model) -> list[str]:
    return [n.op_type for n in model.proto.graph.node]


def test_the_gradients_follow_the_outputs_in_the_requested_order() -> None:
    model = graph("y=Mul(a,b)", a=(2, 3), b=(3,))
    after = gradients(model, "loss", ["b", "a"]).proto.graph
    assert [o.name for o in after.output] == ["loss", "b_grad", "a_grad"]
    dims = [[d.dim_value for d in o.type.tensor_type.shape.dim] for o in after.output]
    assert dims == [[], [3], [2, 3]]


def test_taken_names_are_not_reused() -> None:
    model = graph("a_grad=Mul(a,a);y=Neg(a_grad)", a=(2,))
    assert [o.name for o in gradients(model, "loss", ["a"]).proto.graph.output] == ["loss", "a_grad_2"]


def test_inputs_without_effect_on_the_loss_get_zeros() -> None:
    model = graph("y=Neg(a);z=Exp(b)", a=(2,), b=(3, 2))
    feed = {"a": np.ones(2, "f"), "b": np.ones((3, 2), "f")}
    grads = run_float32(gradients(model, "loss", ["a", "b"]).to_proto(), feed, ["a_grad", "b_grad"])
    assert [g.tolist() for g in grads] == [[-1, -1], [[0, 0], [0, 0], [0, 0]]]


def test_a_norm_of_zeros_has_a_gradient_of_zeros() -> None:
    model = graph("s=Mul(x,x);t=ReduceSum[keepdims=1](s);y=Sqrt(t)", x=(3,))
    grads = run_float32(gradients(model, "loss", ["x"]).to_proto(), {"x": np.zeros(3, "f")}, ["x_grad"])
    assert grads[0].tolist() == [0, 0, 0]


def test_equal_nodes_are_appended_once() -> None:
    model = graph("a=Sigmoid(x);b=Mul(a,x);c=Mul(a,b);y=Add(b,c)", x=(2, 3))
    nodes = gradients(model, "loss", ["x"]).proto.graph.node
    kinds = [(n.op_type, tuple(n.input), str(n.attribute)) for n in nodes if n.name.startswith("backward/")]
    assert len(kinds) == len(set(kinds))


def test_a_gradient_can_be_differentiated_again() -> None:
    cube = graph("s=Mul(x,x);y=Mul(s,x)", x=(2,))
    slope = gradients(cube, "loss", ["x"]).to_proto()
    slope.graph.node.append(onnx.helper.make_node("ReduceSum", ["x_grad"], ["total"], keepdims=0))
    grads = run_float32(gradients(slope, "total", ["x"]).to_proto(), {"x": np.array([1, -2], "f")}, ["x_grad_2"])
    np.testing.assert_allclose(grads[0], [6, -12])


@pytest.mark.parametrize(
    ("a", "b", "compared"),
    [
        (["N", 4], [4], False),
        (["N", 1], ["N", 4], False),
        (["N", 4], ["N", 4], False),
        ([1, 4], ["N", 4], False),
        ([None, 4], [1, 4], True),
        (["N", 4], ["M", 4], True),
        ([None, 4], [None, 4], True),
        (["N", 4], [4, 4], True),
    ],
)
def test_shapes_are_compared_at_run_time_if_dims_are_unknown(a: list[object], b: list[object], compared: bool) -> None:
    model = graph("y=Add(a,b)", a=(4, 4), b=(4, 4))
    for formal, dims in zip(model.graph.input, (a, b), strict=True):
        formal.CopyFrom(onnx.helper.make_tensor_value_info(formal.name, onnx.TensorProto.FLOAT, dims))
    assert ("NonZero" in ops(gradients(model, "loss", ["a", "b"]))) == compared


def test_an_initializer_becomes_an_input() -> None:
    b = Builder.of(
        Model(build(f"y=Mul(a,w);{TOTAL}", ["loss"], shapes={"a": (2,), **LOSS}, constants={"w": [1.0, 2.0]}))
    )
    b.promote("w")
    after = b.model().proto.graph
    assert ([v.name for v in after.input], list(after.initializer)) == (["a", "w"], [])
    with pytest.raises(GradientError) as caught:
        b.promote("a")
    assert str(caught.value) == "'a' is not an initializer of the main graph, so it cannot become an input"


def test_an_older_model_is_moved_to_opset_16() -> None:
    model = build(f"h=Gemm(x,w,b);r=Relu(h);y=Squeeze[axes=0](r);{TOTAL}", ["loss"],
                  shapes={"x": (1, 3), "w": (3, 2), "b": (2,), **LOSS}, opset=12)  # fmt: skip
    after = gradients(model, "loss", ["w", "b"]).to_proto()
    assert after.opset_import[0].version == 16
    feed = {"x": np.ones((1, 3), "f"), "w": np.ones((3, 2), "f"), "b": np.ones(2, "f")}
    grads = run_float32(after, feed, ["w_grad", "b_grad"])
    assert [g.tolist() for g in grads] == [[[1, 1]] * 3, [1, 1]]


def refusal(model: ModelProto, loss: str = "loss", wrt: list[str] | None = None) -> str:
    with pytest.raises(GradientError) as caught:
        gradients(model, loss, ["a"] if wrt is None else wrt)
    return str(caught.value)


PATH = "node 'd' (Det) has no gradient rule, but it lies on the path a → … → Det 'd' → … → loss"


@pytest.mark.parametrize(
    ("body", "shapes", "options", "message"),
    [
        ("y=Neg(a)", {}, {"loss": "lass"}, "the model has no value 'lass' to use as the loss; its outputs are"),
        ("y=Neg(a)", {}, {"loss": "y"}, "the loss 'y' must have one element, but its shape is [2]; take its"),
        ("y=Neg(a);n=Shape(a)", {}, {"loss": "n"}, "the loss 'n' is int64, but must be a floating-point tensor"),
        ("y=Neg(b);z=Neg(a)", {"b": (2,)}, {}, "the loss 'loss' has no differentiable path from 'a'; name inputs or"),
        ("y=Floor(a)", {}, {}, "the loss 'loss' has no differentiable path from 'a'; name inputs or initializers on"),
        ("y=Neg(a)", {}, {"wrt": ["w", "y"]}, "cannot differentiate 'loss' with respect to 'w', 'y'; name"),
        ("y=Neg(a)", {}, {"wrt": []}, "cannot differentiate 'loss' with respect to nothing; name"),
        ("h=Exp(a);d=Det(h);y=Neg(d)", {"a": (2, 2)}, {}, f"{PATH}; replace the op, or freeze"),
        (
            "h,m,y=LayerNormalization(a,s)",
            {"a": (2, 3), "s": (3,)},
            {},
            "node 'h' (LayerNormalization): its output 2, 'y', has no gradient rule, but lies on the path a → … → "
            "LayerNormalization 'h' → … → loss; compute it with other ops",
        ),
    ],
)
def test_unsupported_models_are_refused_by_name(body: str, shapes: Any, options: Any, message: str) -> None:
    assert refusal(graph(body, **{"a": (2,), **shapes}), **options).startswith(message)


def test_ops_that_need_a_shape_name_it() -> None:
    loss = graph("y=Neg(a)", a=(2,))
    loss.graph.input[0].type.tensor_type.ClearField("shape")
    assert refusal(loss, "y") == "the loss 'y' must have one element, but its shape is unknown; take its mean or sum"
    kernel = graph("y=Conv(a,w)", a=(1, 2, 4, 4), w=(3, 2, 2, 2))
    kernel.graph.input[1].type.tensor_type.shape.dim[2].ClearField("dim_value")
    message = "node 'y' (Conv): its gradient needs the shape of input 'w'; declare fixed dims for the inputs"
    assert refusal(kernel) == message
    norm = build(f"y,n,w={NORM};{TOTAL}", ["loss"], shapes={"a": (2, 3), **CHANNELS, **LOSS}, opset=20)
    norm.graph.input[0].type.tensor_type.ClearField("shape")
    message = "node 'y' (BatchNormalization): the rank of input 'a' is unknown; declare the shapes of the inputs"
    assert refusal(norm) == message


NORM = "BatchNormalization[training_mode=1](a,s,b,m,v)"
CHANNELS = dict.fromkeys("sbmv", (3,))


def test_an_op_without_a_gradient_in_a_branch() -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    g (float[2,2] a, bool c) => (float loss) {
      loss = If (c) <
        then_branch = t () => (float d) { d = Det (a) },
        else_branch = e () => (float s) { s = ReduceSum <keepdims = 0> (a) }
      >
    }""")
    assert refusal(model) == (
        "node 'If_0/then_branch/Det_0' (Det): it has no gradient rule, but lies on the path a → … → Det"
        " 'If_0/then_branch/Det_0' → … → d; replace the op"
    )


MODELS = TESTS / "models"
NAMES = ("bert_dynamo20", "cnn_dynamo18", "if_ts13", "loop_ts16", "moe_ts17", "t5_dynamo18", "llama_dynamo23")
NAMES += ("bert_dynamo23", "unet_ts15", "cnn_ts13", "lstm_dynamo18")
_CLOSE = 5e-3
"""With a step of 1e-3, an error of 2⁻²⁴ in the loss is one of 1e-4 in the slope; some kinks of Relu add to it."""


def with_loss(name: str) -> ModelProto:
    """Return the model with an additional output "loss", a weighted mean of its first output."""
    model = onnx.load(str(MODELS / f"{name}.onnx"))
    first = model.graph.output[0].name
    shape = run_float32(model, feed_of(name, model), [first])[0].shape
    weights = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "loss_weights"))
    model.graph.node.append(helper.make_node("Mul", [first, "loss_weights"], ["weighted"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["weighted"], ["loss"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, ()))
    return model


def feed_of(name: str, model: ModelProto) -> Feed:
    constants = {t.name for t in model.graph.initializer}
    with np.load(MODELS / f"{name}.npz") as stored:
        return {v.name: stored[f"input/{v.name}"] for v in model.graph.input if v.name not in constants}


def parameters(model: ModelProto) -> dict[str, np.ndarray]:
    grads = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {n: a for n, a in grads.items() if a.dtype == np.float32 and a.ndim > 1 and n != "loss_weights"}


def promoted(model: ModelProto) -> ModelProto:
    """Return the model with its parameters as inputs."""
    out = ModelProto()
    out.CopyFrom(model)
    names = parameters(model)
    for tensor in [t for t in out.graph.initializer if t.name in names]:
        if tensor.name not in {v.name for v in out.graph.input}:
            out.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        out.graph.initializer.remove(tensor)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_the_norm_of_a_gradient_is_the_slope_along_it(name: str) -> None:
    model = with_loss(name)
    feed, weights = feed_of(name, model), parameters(model)
    after = gradients(model, "loss", list(weights)).to_proto()
    onnx.checker.check_model(after, full_check=True)
    View.of(Model(after))
    grads = run_float32(after, feed, [f"{n}_grad" for n in weights])
    size = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads))
    bare = promoted(model)
    sides = []
    for step in (1e-3, -1e-3):
        moved = {n: w + (step / size * g).astype(np.float32) for (n, w), g in zip(weights.items(), grads, strict=True)}
        sides.append(run_float32(bare, {**feed, **moved}, ["loss"])[0].item())
    assert (sides[0] - sides[1]) / 2e-3 == pytest.approx(size, rel=_CLOSE)
