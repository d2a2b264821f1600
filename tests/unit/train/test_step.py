"""The whole step as one graph: results, unchanged state, and types."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto
from onnx.numpy_helper import from_array

from amp_rewrite import View
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError, TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train import Trainer
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.policy import Policy
from amp_rewrite.train.step.assembly import bind
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.update.optimizers import SGD, Adam
from support import stub
from support.paths import ROOT
from support.train.nets import CROSS_ENTROPY, F32, Run, batches, mlp, parsed, same


def test_one_graph_and_the_tensorflow_interface_agree_bit_by_bit() -> None:
    one = Run(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=Adam(), policy="float32", loss_scale="dynamic"))
    loss = ModelLoss.of(mlp(), CROSS_ENTROPY)
    opt = LossScaleOptimizer(Adam(0.1), "dynamic")
    for batch in batches(20):
        one(batch)
        opt.minimize(loss.on(batch), loss.variables)

    assert {v.name: v.numpy().tolist() for v in loss.variables} == {
        v.name: one.state[v.name].tolist() for v in loss.variables
    }


def test_in_float32_the_scale_changes_no_bit() -> None:
    def trained(scale: float | None) -> dict[str, Array]:
        return Run(training_step(mlp(), loss=CROSS_ENTROPY, policy="float32", loss_scale=scale)).all(10).state

    assert same(trained(None), trained(1.0))
    assert same(trained(None), trained(2.0**15))


def test_the_returned_loss_and_accuracy_are_unscaled() -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY)
    (batch,) = batches(1)
    results = Run(step)(batch).results
    forward: Any = Runner.open(Model.load(mlp())).run({"x": batch["x"]})["y"]
    shifted = forward - forward.max(1, keepdims=True)
    expected = -(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))[np.arange(16), batch["t"]].mean()

    assert results[step.loss] == pytest.approx(expected, abs=2.0**-9)  # float16 logits of order 1
    assert results["accuracy"] == pytest.approx((forward.argmax(1) == batch["t"]).mean(), abs=1e-6)
    assert list(results)[:4] == ["loss", "accuracy", "finite", "applied"]


def test_training_learns_under_every_policy_and_ends_near_float32() -> None:
    ends = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        run = Run(training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adam", policy=policy)).all(150, rate=0.02)
        ends[policy] = float(run.results["loss"])

    assert ends["float32"] < 0.25
    assert ends["mixed_float16"] == pytest.approx(ends["float32"], abs=0.01)
    assert ends["mixed_bfloat16"] == pytest.approx(ends["float32"], abs=0.03)


@pytest.mark.parametrize(("opset", "made"), [(12, 16), (16, 16), (18, 18), (23, 23)])
def test_a_step_has_the_opset_of_the_model_or_16(opset: int, made: int) -> None:
    step = training_step(mlp(opset=opset), loss=CROSS_ENTROPY, optimizer="adam,clipvalue=1", policy="float32")
    expected = training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adam,clipvalue=1", policy="float32")

    assert {o.domain: o.version for o in step.model.proto.opset_import}[""] == made
    assert same(Run(step).all(3).state, Run(expected).all(3).state)


@pytest.mark.parametrize(("policy", "bad"), [("float32", np.inf), ("mixed_float16", np.nan)])
def test_a_nonfinite_step_changes_only_the_scale(policy: str, bad: float) -> None:
    run = Run(training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adam", policy=policy, loss_scale="dynamic")).all(3)
    before = dict(run.state)
    (batch,) = batches(1)
    batch["x"][0, 0] = bad
    run(batch)

    assert (bool(run.results["finite"]), bool(run.results["applied"])) == (False, False)
    assert same(before, run.state, "loss_scale", "good_steps")
    assert (before["loss_scale"], run.state["loss_scale"], run.state["good_steps"]) == (2.0**15, 2.0**14, 0)
    run.all(1)
    assert not same(before, run.state)


def test_an_overflow_in_float16_halves_the_scale_until_gradients_fit() -> None:
    scale = DynamicLossScale(2.0**24, 1000)
    run = Run(training_step(mlp(), loss=CROSS_ENTROPY, loss_scale=scale)).all(30)

    assert 0 < int(run.state["step"]) < 30
    assert 2.0**10 < run.state["loss_scale"] < 2.0**24


def test_a_small_gradient_vanishes_in_float16_without_a_scale_and_survives_with_one() -> None:
    # d loss / d y is 1e-9 for each row: float16 flushes values below 2**-25, about 3e-8
    model = parsed(
        """net (float[4,8] x) => (float[4,8] y) <float tiny = {0.000000032}> {
          [first] h = MatMul (x, w)
          [second] y = MatMul (h, v)
          [small] s = Mul (y, tiny)
          loss = ReduceMean <keepdims = 0> (s)
        }"""
    )
    for name in "wv":
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, dtype=F32), name))

    def moved(scale: float | None) -> float:
        step = training_step(model, loss="loss", loss_scale=scale, keep=["name=small"])
        run = Run(step)({"x": np.ones((4, 8), F32)}, rate=1e6)
        return float(np.abs(run.state["w"] - np.eye(8)).max())

    exact = 1e6 * 4 * 3.2e-8 / 32
    assert moved(None) == 0.0
    assert moved(2.0**15) == pytest.approx(exact, rel=1e-2)


def test_a_loss_may_be_a_value_inside_the_model() -> None:
    model = parsed("net (float[3] x) => (float[3] y) <float[3] w = {1, 2, 3}> { y = Mul (x, w)  l = ReduceMean (y) }")
    run = Run(training_step(model, loss="l", policy="float32", optimizer=SGD()))
    run({"x": np.array([3, 6, 9], F32)}, rate=1.0)

    assert run.results["l"].shape == (1,)
    assert run.state["w"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_products_are_low_forward_and_backward_and_the_update_is_float32(policy: str) -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adamw", policy=policy)
    view = View.of(step.model)
    low = Policy(policy).compute
    products = {view.dtype(op.outputs[0]) for op in view.ops if op.op_type in ("MatMul", "Gemm")}  # type: ignore[arg-type]
    updates = [op for op in view.ops if op.name.startswith(("amp.update/", "amp.loss/"))]
    touched = {view.dtype(v) for op in updates for v in (*op.inputs, *op.outputs) if v is not None}
    assert low is not None
    assert products == {low}
    assert sum(op.op_type in ("MatMul", "Gemm") for op in view.ops) == 5  # two forward, three backward: x needs none
    assert len(updates) > 50 and low not in touched
    assert {str(s.initial.dtype) for s in step.state} == {"float32", "int64"}


def test_each_parameter_is_cast_once_per_step_and_frozen_ones_are_constants() -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY)
    view = View.of(step.model)
    casts = [view.value_name(op.inputs[0]) for op in view.ops if op.op_type == "Cast"]  # type: ignore[arg-type]

    assert {name: casts.count(name) for name in step.parameters} == {"w1": 1, "b1": 1, "w2": 1, "b2": 0}
    step = training_step(mlp(), loss=CROSS_ENTROPY, freeze=["*1"])
    kept = {t.name: DType(t.data_type) for t in step.model.proto.graph.initializer}

    assert step.parameters == ("w2", "b2")
    assert kept.keys() >= {"w1", "b1"} and kept["w1"] is DType.FLOAT16


def test_micro_batches_add_up_to_the_step_of_the_whole_batch() -> None:
    whole = Run(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=SGD(momentum=0.9), policy="float32"))
    parts = Run(
        training_step(mlp(), loss=CROSS_ENTROPY, optimizer=SGD(momentum=0.9), policy="float32", micro_batches=4)
    )
    applied = []
    for batch in batches(3):
        whole(batch)
        for i in range(4):
            parts({name: array[4 * i : 4 * i + 4] for name, array in batch.items()})
            applied.append(bool(parts.results["applied"]))

    assert applied == [False, False, False, True] * 3
    assert (whole.state["step"], parts.state["step"], parts.state["micro_batch"]) == (3, 3, 0)
    for name in ("w1", "b1", "w2", "b2", "w1/momentum"):
        # three steps; a sum of 16 products in another order
        np.testing.assert_allclose(parts.state[name], whole.state[name], rtol=0, atol=3 * 16 * 2.0**-24)


def test_one_bad_micro_batch_skips_the_step_and_halves_the_scale_once() -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY, micro_batches=3)
    run = Run(step)
    before = dict(run.state)
    scales = []
    for i, batch in enumerate(batches(3)):
        if i == 0:
            batch["x"][0, 0] = np.inf
        run(batch)
        scales.append(float(run.state["loss_scale"]))

    assert scales == [2.0**15, 2.0**15, 2.0**14]
    assert same(before, run.state, "loss_scale")
    run.all(3)
    assert (run.state["step"], run.state["good_steps"]) == (1, 1)


def test_masks_scalars_and_statistics_are_not_parameters() -> None:
    model = parsed(
        """net (float[2,4] x) => (float[2,4] y)
        <float[4,4] w = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}, float scale = {0.5}, float[4] mask = {0,0,0,-30000},
         float[1] bias = {1}> {
          h = MatMul (x, w)
          s = Mul (h, scale)
          m = Add (s, mask)
          y = Add (m, bias)
          loss = ReduceMean <keepdims = 0> (y)
        }"""
    )
    assert training_step(model, loss="loss").parameters == ("w",)
    assert training_step(model, loss="loss", parameters=["bias", "scale"]).parameters == ("scale", "bias")


def test_the_report_says_why_the_update_is_float32() -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY)
    assert step.report is not None
    rules = {(row.name.split("/")[0], row.rule) for row in step.report.rows if row.name.startswith("amp.")}

    assert {("amp.update", "update"), ("amp.update", "running_sum"), ("amp.loss", "loss")} <= rules
    assert "updates the state of a training step, in float32" in step.report.text()


def test_an_op_without_a_gradient_is_named_with_a_remedy() -> None:
    model = parsed(
        "net (float[3] x) => (float loss) <float[3] w = {1, 2, 3}>"
        " { p = Mul (x, w) [det] d = my.own.Odd (p) loss = ReduceMean <keepdims = 0> (d) }"
    )
    model.graph.node[1].domain, model.graph.node[1].op_type = "my.own", "Odd"
    model.opset_import.append(onnx.helper.make_opsetid("my.own", 1))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("d", onnx.TensorProto.FLOAT, [3]))
    with pytest.raises(GradientError) as error:
        training_step(model, loss="loss")
    assert "'det' (my.own::Odd)" in str(error.value) and "w → " in str(error.value)


EXAMPLES = ROOT / "examples" / "models"


def _renamed(old: str, new: str) -> ModelProto:
    """The small model with another name for one of its values."""
    model = mlp()
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for named in (*model.graph.initializer, *model.graph.output):
        named.name = new if named.name == old else named.name
    return model


@pytest.mark.parametrize("name", ["my logits", "f(x)", "y:0"])
def test_a_prediction_may_have_any_name(name: str) -> None:
    odd = training_step(_renamed("y", name), loss=f"cross_entropy({name}, t)", policy="float32")
    assert same(Run(odd).all(1).state, Run(training_step(mlp(), loss=CROSS_ENTROPY, policy="float32")).all(1).state)


@pytest.mark.parametrize("new", ["loss_scale", "learning_rate", "loss", "new/w2", 'ü "\n'])
def test_names_generated_by_a_step_may_be_taken_already(new: str) -> None:
    step = training_step(_renamed("w1", new), loss=CROSS_ENTROPY, optimizer="adam")
    expected = Run(training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adam")).all(2)
    run = Runner.open(emulate(step.model), SessionOptions(threads=1))
    state, out = step.initial_state(), dict[str, Any]()
    for batch in batches(2):
        out = dict(run.run({**batch, **state, step.learning_rate: np.array(0.1, F32)}))
        state = step.next_state(out)

    assert out[step.loss] == expected.results["loss"]
    assert [state[s.input].tolist() for s in step.state] == [
        expected.state[s.input].tolist() for s in expected.step.state
    ]


def _in_a_file(folder: Path) -> object:
    onnx.save(mlp(), folder / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    return folder / "net.onnx"


def _with_defaults(_: Path) -> object:
    model = mlp()
    shapes = {t.name: list(t.dims) for t in model.graph.initializer}
    model.graph.input.extend(onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items())
    return model


def _with_functions(_: Path) -> object:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20, "own": 1]> net (float[N,8] x) => (float[N,4] y) {
          h = own.linear (x, w1, b1)  a = Relu (h)  y = own.linear (a, w2, b2)
        }
        <domain: "own", opset_import: ["": 20]> linear (x, w, b) => (y) { p = MatMul (x, w)  y = Add (p, b) }"""
    )
    model.graph.initializer.extend(mlp().graph.initializer)
    return model


def _bound(_: Path) -> object:
    """A model with weights bound from inputs."""
    model = mlp()
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    del model.graph.initializer[:]
    model.graph.input.extend(onnx.helper.make_tensor_value_info(n, 1, list(a.shape)) for n, a in weights.items())
    return bind(model, weights)


@pytest.mark.parametrize("make", [_in_a_file, _with_defaults, _with_functions, _bound])
def test_a_model_is_trained_however_it_stores_weights_and_ops(make: Any, tmp_path: Path) -> None:
    run = Run(training_step(make(tmp_path), loss=CROSS_ENTROPY)).all(2)

    assert same(run.state, Run(training_step(mlp(), loss=CROSS_ENTROPY)).all(2).state)


@pytest.mark.parametrize("loss", ["cross_entropy(y, t)", "mean_squared_error(y, t)"])
def test_the_loss_of_half_precision_logits_is_computed_in_float32(loss: str) -> None:
    model = parsed(
        """net (float[2,3] x) => (float16[2,3] y) <float[3,3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}> {
          h = MatMul (x, w)
          y = Cast <to = 10> (h)
        }"""
    )
    step = training_step(model, loss=loss, policy="float32")
    target = np.array([0, 1]) if loss.startswith("cross") else np.zeros((2, 3), F32)
    run = Run(step)({"x": np.full((2, 3), 300, F32), "t": target})

    assert run.results["loss"].dtype == F32
    assert np.isfinite(run.results["loss"])  # 300² overflows float16


NORMALIZED = """net (float[N,3,4] x) => (float[N,3,4] y)
    <float[3] s = {1, 2, 3}, float[3] b = {0, 0, 0}, float[3] mean = {0.5, 0, 0}, float[3] var = {1, 2, 1}> {
      y = BatchNormalization <momentum = 0.75> (x, s, b, mean, var)
      z = Mul (y, y)
      loss = ReduceMean <keepdims = 0> (z)
    }"""


def _normalized_batch() -> dict[str, Array]:
    return {"x": np.array(np.random.default_rng(0).normal(size=(6, 3, 4)) * 3 + 1, F32)}


def test_in_training_mode_running_statistics_move_and_are_exported() -> None:
    step = training_step(parsed(NORMALIZED), loss="loss", training_mode=True, policy="float32", loss_scale="dynamic")
    batch = _normalized_batch()
    run = Run(step)(batch)
    x = batch["x"]

    assert step.parameters == ("s", "b")
    np.testing.assert_allclose(run.state["mean"], 0.75 * np.array([0.5, 0, 0]) + 0.25 * x.mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(run.state["var"], 0.75 * np.array([1, 2, 1]) + 0.25 * x.var((0, 2)), rtol=1e-6)
    exported = step.trained(run.state).to_proto()
    weights = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in exported.graph.initializer}
    assert weights == {name: run.state[name].tolist() for name in ("s", "b", "mean", "var")}
    assert list(exported.graph.node) == list(parsed(NORMALIZED).graph.node)


def test_a_normalization_uses_its_frozen_statistics() -> None:
    frozen = training_step(
        parsed(NORMALIZED), loss="loss", training_mode=True, policy="float32", freeze=["mean", "var"]
    )
    plain = training_step(parsed(NORMALIZED), loss="loss", policy="float32")
    assert [v.name for v in frozen.state] == ["parameter/s", "parameter/b", "step"]
    assert same(Run(frozen)(_normalized_batch()).state, Run(plain)(_normalized_batch()).state)
    loss = ModelLoss.of(parsed(NORMALIZED), "loss", training_mode=True, freeze="*ea*")
    before = loss.export().to_proto().SerializeToString()
    loss.on(_normalized_batch()).gradients(loss.variables, np.array(1, F32))
    assert loss.export().to_proto().SerializeToString() == before


def test_running_statistics_survive_nonfinite_steps_and_are_not_shared() -> None:
    step = training_step(parsed(NORMALIZED), loss="loss", training_mode=True)
    run = Run(step)
    before = dict(run.state)
    batch = _normalized_batch()
    batch["x"][0, 0, 0] = np.inf
    run(batch)

    assert same(before, run.state, "loss_scale") and {"mean", "var"} <= before.keys()
    model = parsed(NORMALIZED.replace("z = Mul (y, y)", "z = BatchNormalization (y, s, b, mean, var)"))
    with pytest.raises(TrainingError) as error:
        training_step(model, loss="loss", training_mode=True)
    assert str(error.value) == (
        "two BatchNormalizations update the statistics 'mean'; export the model with separate statistics"
    )


def test_in_training_mode_dropout_drops() -> None:
    model = parsed(
        """net (float[1,64] x) => (float[1,64] y) <float[64,64] w, float ratio = {0.5}> {
          h = MatMul (x, w)
          y = Dropout <seed = 1> (h, ratio)
          loss = ReduceMean <keepdims = 0> (y)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(64, dtype=F32), "w"))
    moved = {}
    for mode in (False, True):
        run = Run(training_step(model, loss="loss", policy="float32", training_mode=mode, optimizer=SGD()))
        moved[mode] = -(run({"x": np.ones((1, 64), F32)}, rate=64.0).state["w"] - np.eye(64, dtype=F32))[0]

    assert set(moved[False].tolist()) == {1.0}
    assert set(moved[True].tolist()) == {0.0, 2.0}


@pytest.mark.stub
@pytest.mark.parametrize(
    ("name", "policy"), [("mlp", "float32"), ("digits_cnn", "mixed_bfloat16"), ("digits_vit", "mixed_float16")]
)
def test_on_cuda_only_the_free_batch_size_is_computed_on_the_host(
    name: str, policy: str, tmp_path: Path, cuda_stub: Path
) -> None:
    model: Any = mlp() if name == "mlp" else EXAMPLES / f"{name}.onnx"
    loss = CROSS_ENTROPY if name == "mlp" else "cross_entropy(probability, t)"
    step = training_step(model, loss=loss, optimizer="adamw", policy=policy, training_mode=True)
    step.model.save(tmp_path / "step.onnx")
    (row,) = stub.placements([tmp_path / "step.onnx"])

    assert "error" not in row
    # the mean over the batch divides by a Size, which onnxruntime keeps on the host: one number crosses over
    assert {op.split()[0] for op in row["cpu_float"]} <= {"Cast", "Div"}
    assert row["memcpy"] <= 2
    assert row["cuda"] > 100


GATES = {"LSTM": 4, "GRU": 3}
LOSS = "cross_entropy(logits, label)"


def network(cell: str) -> ModelProto:
    """A model of three classes for sequences of 5 steps with 4 numbers each."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[5,batch,4] x) => (float[batch,3] logits)
          <int64[1] first = {{0}}> {{
          seen, last = {cell} <hidden_size = 8> (x, w, r, b)
          state = Squeeze (last, first)
          logits = MatMul (state, out)
        }}"""
    )
    rng, wide = np.random.default_rng(0), 8 * GATES[cell]
    for name, shape in {"w": (1, wide, 4), "r": (1, wide, 8), "b": (1, 2 * wide), "out": (8, 3)}.items():
        model.graph.initializer.append(from_array(rng.uniform(-0.5, 0.5, shape).astype(np.float32), name))
    return model


def batch() -> dict[str, np.ndarray]:
    """Sequences with the sign of their first numbers as the class."""
    x = np.random.default_rng(1).normal(size=(5, 24, 4)).astype(np.float32)
    return {"x": x, "label": np.sign(x[0, :, 0]).astype(np.int64) + 1}


@pytest.mark.parametrize("cell", ["LSTM"])
def test_a_model_learns_equally_well_under_each_policy(cell: str) -> None:
    curves = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        trainer = Trainer(training_step(network(cell), loss=LOSS, optimizer="adam,lr=0.02", policy=policy))
        curves[policy] = list(trainer.fit([batch()] * 60).losses)
    assert curves["float32"][-1] < 0.2 * curves["float32"][0]
    for policy, bound in (("mixed_float16", 2**-7), ("mixed_bfloat16", 2**-4)):  # 16 times half a unit at 1
        np.testing.assert_allclose(curves[policy], curves["float32"], rtol=0, atol=bound)


def test_a_recurrent_step_multiplies_in_float16_and_sums_gradients_in_float32() -> None:
    view = View.of(training_step(network("LSTM"), loss=LOSS, optimizer="sgd").model)
    inside = [op for op in view.ops if op.scope != 0]
    products = {view.dtype(out) for op in inside if op.op_type == "MatMul" for out in op.outputs if out is not None}
    back = next(op for op in reversed(view.ops) if op.op_type == "Scan")
    begun = [view.value_name(v) for v in back.inputs[:3] if v is not None]

    assert products == {DType.FLOAT16}
    assert {view.dtype(v) for v in back.outputs[:3] if v is not None} == {DType.FLOAT}, begun


@pytest.mark.parametrize("cell", GATES)
def test_trained_weights_are_exported_with_their_own_operator(cell: str) -> None:
    trainer = Trainer(training_step(network(cell), loss=LOSS, optimizer="sgd", policy="float32"))
    trainer.fit([batch()] * 3)
    exported = trainer.export()
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in exported.to_proto().graph.initializer}

    assert [n.op_type for n in exported.to_proto().graph.node] == [cell, "Squeeze", "MatMul"]
    np.testing.assert_array_equal(weights["r"], trainer.state["r"])
    found = Runner.open(exported, SessionOptions(providers=("CPUExecutionProvider",))).run({"x": batch()["x"]})
    assert np.isfinite(found["logits"]).all()


def test_initial_states_are_weights_only_if_named() -> None:
    model = network("LSTM")
    model.graph.node[0].input.extend(["", "zeros", "zeros"])
    model.graph.initializer.append(from_array(np.zeros((1, 24, 8), np.float32), "zeros"))

    assert training_step(model, loss=LOSS, optimizer="sgd").parameters == ("w", "r", "b", "out")
    assert training_step(model, loss=LOSS, optimizer="sgd", parameters=["zeros", "w"]).parameters == ("w", "zeros")


@pytest.mark.stub
@pytest.mark.parametrize(("cell", "policy"), [("LSTM", "mixed_float16"), ("GRU", "float32")])
def test_a_recurrent_step_on_cuda_computes_only_sizes_on_the_host(
    cell: str, policy: str, tmp_path: Path, cuda_stub: Path
) -> None:
    training_step(network(cell), loss=LOSS, optimizer="adamw", policy=policy).model.save(tmp_path / "step.onnx")
    row: dict[str, Any] = stub.placements([tmp_path / "step.onnx"])[0]

    assert "error" not in row
    assert {op.split()[0] for op in row["cpu_float"]} <= {"Cast", "Div"}
