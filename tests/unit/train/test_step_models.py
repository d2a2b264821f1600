"""Steps of models of all kinds: names, files, functions, modes of training, and where they would run."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.step.assembly import bind
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.update.optimizers import SGD
from support import stub
from support.paths import ROOT
from support.train.nets import CROSS_ENTROPY, F32, Run, batches, mlp, parsed, same

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
def test_a_prediction_of_any_name_can_be_compared(name: str) -> None:
    odd = training_step(_renamed("y", name), loss=f"cross_entropy({name}, t)", policy="float32")
    assert same(Run(odd).all(1).state, Run(training_step(mlp(), loss=CROSS_ENTROPY, policy="float32")).all(1).state)


@pytest.mark.parametrize("new", ["loss_scale", "learning_rate", "loss", "new/w2", 'ü "\n'])
def test_names_that_a_step_gives_itself_may_be_taken_already(new: str) -> None:
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
    """A model whose weights were inputs."""
    model = mlp()
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    del model.graph.initializer[:]
    model.graph.input.extend(onnx.helper.make_tensor_value_info(n, 1, list(a.shape)) for n, a in weights.items())
    return bind(model, weights)


@pytest.mark.parametrize("make", [_in_a_file, _with_defaults, _with_functions, _bound])
def test_a_model_is_trained_however_it_keeps_weights_and_ops(make: Any, tmp_path: Path) -> None:
    run = Run(training_step(make(tmp_path), loss=CROSS_ENTROPY)).all(2)

    assert same(run.state, Run(training_step(mlp(), loss=CROSS_ENTROPY)).all(2).state)


@pytest.mark.parametrize("loss", ["cross_entropy(y, t)", "mean_squared_error(y, t)"])
def test_of_half_logits_the_loss_is_computed_in_float32(loss: str) -> None:
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
    assert np.isfinite(run.results["loss"])  # 300² is not, in float16


# -- training mode -----------------------------------------------------------------------------------

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


def test_a_normalization_whose_statistics_are_frozen_uses_them() -> None:
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


def test_running_statistics_stay_where_a_step_is_not_finite_and_are_not_shared() -> None:
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
        "two BatchNormalizations update the statistics 'mean'; export the model with separate ones"
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


# -- where it would run --------------------------------------------------------------------------------


@pytest.mark.stub
@pytest.mark.parametrize(
    ("name", "policy"), [("mlp", "float32"), ("digits_cnn", "mixed_bfloat16"), ("digits_vit", "mixed_float16")]
)
def test_on_cuda_only_the_size_of_a_free_batch_is_worked_out_on_the_host(
    name: str, policy: str, tmp_path: Path, cuda_stub: Path
) -> None:
    model: Any = mlp() if name == "mlp" else EXAMPLES / f"{name}.onnx"
    loss = CROSS_ENTROPY if name == "mlp" else "cross_entropy(probability, t)"
    step = training_step(model, loss=loss, optimizer="adamw", policy=policy, training_mode=True)
    step.model.save(tmp_path / "step.onnx")
    (row,) = stub.placements([tmp_path / "step.onnx"])

    assert "error" not in row
    # the mean over the batch divides by a Size, which onnxruntime keeps on the host: one number goes over
    assert {op.split()[0] for op in row["cpu_float"]} <= {"Cast", "Div"}
    assert row["memcpy"] <= 2
    assert row["cuda"] > 100
