"""Loss scaling for graphs with their own backward pass."""

from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.parser
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.interchange.external_gradients import ScaledGradients, scale_gradients
from amp_rewrite.train.loss_scale import DynamicLossScale
from support.paths import TESTS
from support.train import foreign_step

# loss = mean((x w)²) over 2 numbers and its gradient with respect to w, as another tool would write them
GRAPH = """
<ir_version: 10, opset_import: ["": 20]>
net (float[2,3] x, float[3,1] w, float loss_grad) => (float loss, float[3,1] w_grad)
<float half = {0.5}, float two = {2}> {
  [forward] y = MatMul (x, w)
  square = Mul (y, y)
  total = ReduceSum <keepdims = 0> (square)
  loss = Mul (total, half)
  share = Mul (loss_grad, half)
  double = Mul (y, two)
  dy = Mul (double, share)
  xt = Transpose (x)
  [backward] w_grad = MatMul (xt, dy)
}
"""
FEED = {
    "x": np.array([[1, 2, 3], [4, 5, 6]], np.float32),
    "w": np.array([[1], [0.5], [0.25]], np.float32),
    "loss_grad": np.array(1, np.float32),
}


def graph(text: str = GRAPH) -> ModelProto:
    return onnx.parser.parse_model(text)


def scaled(text: str = GRAPH, **options: Any) -> ScaledGradients:
    return scale_gradients(graph(text), **{"loss": "loss", "grads": ["w_grad"], "seed": "loss_grad", **options})


def run(made: Model, feed: dict[str, Array]) -> dict[str, Any]:
    return dict(Runner.open(made, SessionOptions(threads=1)).run(feed))


def state(made: ScaledGradients) -> dict[str, Array]:
    return {v.input: v.initial for v in made.state}


def test_gradients_are_scaled_inside() -> None:
    model = graph()
    before = model.SerializeToString(deterministic=True)
    made = scale_gradients(model, loss="loss", grads=["w_grad"], seed="loss_grad", loss_scale=1024)
    assert model.SerializeToString(deterministic=True) == before
    proto = made.model.to_proto()
    proto.graph.output.append(onnx.helper.make_tensor_value_info("dy", 1, [2, 1]))
    inside = run(Model.load(proto), FEED)["dy"]
    plain = graph()
    plain.graph.output.append(onnx.helper.make_tensor_value_info("dy", 1, [2, 1]))

    assert inside.tolist() == (run(Model.load(plain), FEED)["dy"] * 1024).tolist()
    assert made.state == ()


@pytest.mark.parametrize("seed", ["loss_grad", "share", "dy"])
def test_the_seed_may_be_any_value_that_starts_the_backward_pass(seed: str) -> None:
    made = scaled(seed=seed)
    plain, found = run(Model.load(graph()), FEED), run(made.model, {**FEED, **state(made)})

    assert (found["loss"], found["w_grad"].tolist()) == (plain["loss"], plain["w_grad"].tolist())
    assert (bool(found["finite"]), found["new/good_steps"], found["new/loss_scale"]) == (True, 1, 2.0**15)


def test_an_overflow_lowers_the_scale_and_duplicate_gradients_count_once() -> None:
    made = scaled(grads=["w_grad", "w_grad"])
    assert ([o.name for o in made.model.proto.graph.output].count("w_grad"), made.grads) == (1, ("w_grad",))
    made = scaled(loss_scale=DynamicLossScale(8, 1))
    bad = {**FEED, "x": np.full((2, 3), np.inf, np.float32)}
    found = run(made.model, {**bad, **state(made)})
    assert (bool(found["finite"]), found["new/loss_scale"]) == (False, 4.0)
    assert run(made.model, {**FEED, **state(made)})["new/loss_scale"] == 16.0


def test_half_precision_gradients_are_returned_in_float32() -> None:
    text = GRAPH.replace("float[3,1] w_grad)", "float16[3,1] w_grad)").replace(
        "w_grad = MatMul (xt, dy)", "g = MatMul (xt, dy) w_grad = Cast <to = 10> (g)"
    )
    made = scaled(text, loss_scale=16)
    found = run(made.model, FEED)

    assert found["w_grad"].dtype == np.float32
    assert found["w_grad"].tolist() == run(Model.load(graph()), FEED)["w_grad"].tolist()
    onnx.checker.check_model(made.model.to_proto(), full_check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "l"},
            "unknown or missing names: 'l'; loss and seed must be values of the main graph, and grads must",
        ),
        (
            {"seed": "s"},
            "unknown or missing names: 's'; loss and seed must be values of the main graph, and grads must",
        ),
        (
            {"grads": ["dy"]},
            "unknown or missing names: 'dy'; loss and seed must be values of the main graph, and grads must",
        ),
        (
            {"grads": []},
            "unknown or missing names: grads; loss and seed must be values of the main graph, and grads must",
        ),
        ({"seed": "total"}, "'total' is not the seed: all gradients must depend on the seed, and the loss must not"),
        ({"seed": "y"}, "'y' is not the seed: all gradients must depend on the seed, and the loss must not"),
        ({"loss_scale": None}, "loss_scale is None, so there is nothing to do; use 'dynamic', a number or a LossScale"),
    ],
)
def test_mismatched_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        scaled(**options)


BRANCHING = """
<ir_version: 10, opset_import: ["": 20]>
net (float[2] x, float[2] w, bool c, float loss_grad) => (float loss, float[2] w_grad) {
  y = Mul (x, w)
  loss = ReduceSum <keepdims = 0> (y)
  w_grad = If (c) <
    then_branch = yes () => (float[2] a) { a = Mul (x, loss_grad) },
    else_branch = no () => (float[2] b) {
      loss_grad2 = Neg (x)
      b = If (c) <
        then_branch = k () => (float[2] d) { d = Identity (x) },
        else_branch = l () => (float[2] e) { e = Mul (loss_grad2, loss_grad) }
      >
    }
  >
}
"""


@pytest.mark.parametrize("taken", [True, False])
def test_a_seed_read_in_bodies_is_scaled_there(taken: bool) -> None:
    made = scaled(BRANCHING, loss_scale=1024)
    feed = {
        "x": np.float32([1, 2]),
        "w": np.float32([3, 4]),
        "c": np.array(taken),
        "loss_grad": np.array(0.5, np.float32),
    }
    sign = 1 if taken else -1
    found = run(made.model, feed)
    assert (found["w_grad"].tolist(), bool(found["finite"])) == ([0.5 * sign, 1.0 * sign], True)
    probe = Model(made.model.to_proto())
    inner = next(n.output[0] for n in probe.proto.graph.node if n.op_type == "If")
    probe.proto.graph.output.append(onnx.helper.make_tensor_value_info(inner, 1, [2]))
    assert run(probe, feed)[inner].tolist() == [512 * sign, 1024 * sign]


# -- a step exported by PyTorch -----------------------------------------------------------------------

HERE = TESTS / "support" / "train"
GRADS = [f"{name}_grad" for name in foreign_step.NAMES]
FLOAT32 = 5e-6
"""Relative to the largest gradient: sums of about 100 products in another order, each rounded to 2**-24."""
FLOAT16 = 2.0**-8
"""Relative to the largest gradient: about a dozen float16 results on each path, rounded to 2**-11 each."""


def exported() -> onnx.ModelProto:
    return onnx.load(HERE / "foreign_step.onnx")


def expected() -> dict[str, Array]:
    """PyTorch's loss and gradients."""
    with np.load(HERE / "foreign_step.npz") as found:
        return {name: found[name] for name in ("loss", *GRADS)}


def fed(loss_grad: float = 1.0) -> dict[str, Array]:
    with np.load(HERE / "foreign_step.npz") as found:
        state = {name: found[name] for name in foreign_step.NAMES}
    return {**foreign_step.feed(), **state, "loss_grad": np.array(loss_grad, np.float32)}


def computed(model: Model, loss_grad: float = 1.0, **more: Array) -> dict[str, Any]:
    return dict(Runner.open(model, SessionOptions(threads=1)).run({**fed(loss_grad), **more}))


def off(found: dict[str, Any], reference: dict[str, Array]) -> float:
    """Return the largest difference of a gradient, relative to its largest element."""
    return max(float(np.abs(found[g] - reference[g]).max() / np.abs(reference[g]).max()) for g in GRADS)


def test_our_gradients_of_the_forward_pass_match_the_models_own() -> None:
    forward = onnx.utils.Extractor(exported()).extract_model(["tokens", "label", *foreign_step.NAMES], ["loss"])
    made = amp_rewrite.gradients(forward, "loss", list(foreign_step.NAMES))
    found = Runner.open(made, SessionOptions(threads=1)).run({n: a for n, a in fed().items() if n != "loss_grad"})
    assert off(found, expected()) < FLOAT32
    assert off(computed(Model(exported())), expected()) < FLOAT32


@pytest.mark.parametrize(("to", "bound"), [("float16", FLOAT16), ("bfloat16", 8 * FLOAT16)])
def test_a_model_with_a_backward_pass_converts_like_any_other(to: str, bound: float) -> None:
    converted = amp_rewrite.convert(exported(), to=to)
    totals = converted.report.totals
    products = [row for row in converted.report.rows if row.op in ("Gemm", "MatMul")]

    assert (totals.compute_lowered, totals.compute_ops) == (len(products), len(products))
    assert len(products) == 6  # two layers: one forward, two backward each
    assert 1e-5 < off(computed(emulate(converted.result)), expected()) < bound


def test_small_gradients_vanish_in_float16_without_the_scale_and_survive_with_it() -> None:
    small = 2.0**-24
    exact = {g: array * np.float32(small) for g, array in expected().items()}
    plain = computed(emulate(amp_rewrite.convert(exported()).result), small)
    made = scale_gradients(exported(), loss="loss", grads=GRADS, seed="loss_grad", loss_scale=2.0**24)
    scaled = computed(emulate(amp_rewrite.convert(made.model, keep=["amp.update/*"]).result), small)

    assert off(plain, exact) > 0.5
    assert not plain["up.weight_grad"].any()
    assert off(scaled, exact) < FLOAT16


@pytest.mark.torch
def test_the_stored_model_matches_pytorchs_current_export() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make extras")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: make extras")
    net = foreign_step.module()
    made = foreign_step.exported(net)
    reference = foreign_step.differentiated(net)

    assert off(computed(Model(made)), reference) < FLOAT32
    assert off({g: expected()[g] for g in GRADS}, reference) < FLOAT32
    assert amp_rewrite.convert(made).report.totals.compute_lowered == 6
