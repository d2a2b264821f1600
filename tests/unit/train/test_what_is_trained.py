"""Trained and frozen parameters with their reasons, and models with weights merged or folded by an exporter."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto
from onnx.numpy_helper import from_array

import amp_rewrite
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.interchange.torch_module import from_torch
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import CROSS_ENTROPY, F32, PLACE, mlp, parsed

RNG = np.random.default_rng(0)
POSITIONS = np.arange(12)[:, None]
WAVES = 10000 ** (-np.arange(4) / 4)[None]
SINUSOIDS = np.concatenate((np.sin(POSITIONS * WAVES), np.cos(POSITIONS * WAVES)), axis=1)
INTERLEAVED = np.stack((np.sin(POSITIONS * WAVES), np.cos(POSITIONS * WAVES)), axis=2).reshape(12, 8)


def _with(model: ModelProto, **arrays: Array) -> ModelProto:
    model.graph.initializer.extend(from_array(np.asarray(a, F32), name) for name, a in arrays.items())
    return model


def _step(model: object, **options: Any) -> TrainingStep:
    return training_step(model, **{"loss": "loss", "policy": "float32", "optimizer": "sgd", **options})


def _why(step: TrainingStep) -> dict[str, tuple[str, str]]:
    assert step.report is not None
    return {row.name: (row.role, row.why) for row in step.report.parameters}


def _positions(table: Array, name: str = "table") -> ModelProto:
    model = parsed(
        f"""net (float[N,12,8] x) => (float loss) {{
          p = Add (x, "{name}")  h = MatMul (p, w)  s = Mul (h, h)  loss = ReduceMean <keepdims = 0> (s)
        }}"""
    )
    return _with(model, **{name: table, "w": RNG.normal(size=(8, 8))})


# -- buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table", [SINUSOIDS * 0.02, INTERLEAVED[None], np.concatenate((np.zeros((1, 8)), SINUSOIDS[:11]))]
)
def test_a_table_of_sinusoids_is_not_trained(table: Array) -> None:
    assert _why(_step(_positions(table))) == {"table": ("frozen", "a table of sinusoids"), "w": ("trained", "")}


@pytest.mark.parametrize(
    "table",
    [np.zeros((12, 8)), np.ones((12, 8)), RNG.uniform(-1, 1, (12, 8)), np.arange(96.0).reshape(12, 8) / 96],
    ids=["zeros", "ones", "uniform", "line"],
)
def test_a_learned_table_is_trained_even_if_its_numbers_are_equal(table: Array) -> None:
    assert _step(_positions(table)).parameters == ("table", "w")


def test_zeros_and_ones_that_multiply_are_a_mask() -> None:
    model = parsed(
        """net (float[N,4] x) => (float loss) {
          m = Mul (w, mask)  h = MatMul (x, m)  s = Mul (h, h)  loss = ReduceMean <keepdims = 0> (s)
        }"""
    )
    step = _step(_with(model, w=RNG.normal(size=(4, 4)), mask=np.tril(np.ones((4, 4)))))
    assert _why(step) == {"w": ("trained", ""), "mask": ("frozen", "a mask of zeros and ones")}


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "layers.0.cos_cached"])
def test_a_buffer_is_recognized_by_its_name(name: str) -> None:
    assert _why(_step(_positions(RNG.normal(size=(12, 8)), name)))[name] == ("frozen", "named like a buffer")


def test_an_initial_state_is_not_trained_through_an_expand() -> None:
    model = parsed(
        """net (float[3,N,4] x) => (float loss) <int64[1] one = {1}, int64[1] five = {5}, int64[1] zero = {0}> {
          all = Shape (x)  n = Slice (all, one, two, zero)  shape = Concat <axis = 0> (one, n, five)
          h = Expand (start, shape)
          y, last = RNN <hidden_size = 5> (x, w, r, "", "", h)
          s = Mul (last, last)  loss = ReduceMean <keepdims = 0> (s)
        }"""
    )
    model.graph.initializer.append(from_array(np.array([2]), "two"))
    model = _with(model, start=RNG.normal(size=(1, 1, 5)), w=RNG.normal(size=(1, 5, 4)), r=RNG.normal(size=(1, 5, 5)))
    step = _step(model)
    assert step.parameters == ("w", "r")
    assert _why(step)["start"] == ("frozen", "the initial state of a recurrence")


@pytest.mark.parametrize(
    "loop",
    [
        """last, all = Loop (n, "", start)
           <body = b (int64 i, bool c, float[3,4] h) => (bool d, float[3,4] g, float[3,4] o) {
           d = Identity (c)  m = MatMul (h, w)  g = Add (m, x)  o = Identity (g) }>""",
        """last, all = Scan (start, xs)
           <num_scan_inputs = 1, body = b (float[3,4] h, float[3,4] e) => (float[3,4] g, float[3,4] o) {
           m = MatMul (h, w)  g = Add (m, e)  o = Identity (g) }>""",
    ],
)
def test_a_state_carried_by_a_body_is_not_trained(loop: str) -> None:
    model = parsed(
        f"""net (float[3,4] x, float[2,3,4] xs) => (float loss) <int64 n = {{2}}> {{
          {loop}  s = Mul (last, last)  loss = ReduceMean <keepdims = 0> (s)
        }}"""
    )
    step = _step(_with(model, start=RNG.normal(size=(3, 4)), w=RNG.normal(size=(4, 4))))
    assert step.parameters == ("w",)
    assert _why(step)["start"] == ("frozen", "the initial state of a recurrence")


def test_a_name_overrides_the_rules_and_a_glob_does_not() -> None:
    model = _positions(RNG.normal(size=(12, 8)), "net.inv_freq")
    assert _step(model, parameters=["*"]).parameters == ("w",)
    named = _step(model, parameters=["*", "net.inv_freq"])
    assert named.parameters == ("net.inv_freq", "w")
    assert _why(named)["net.inv_freq"][1] == "named in parameters, overriding: named like a buffer"


def test_the_report_of_a_lowered_step_has_both_tables() -> None:
    report = training_step(mlp(), loss=CROSS_ENTROPY).report
    assert report is not None and report.conversion is not None
    assert report.rows == tuple(report.conversion.rows)
    assert "trained: 4 (212 elements)" in report.text() and "→ float16" in report.text()
    assert report.to_dict()["conversion"] == report.conversion.to_dict()
    assert report.to_dict()["parameters"][0] == {"name": "w1", "role": "trained", "shape": [8, 16], "why": ""}


def test_weights_read_only_in_a_body_are_also_trained() -> None:
    model = parsed(
        "net (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}, float[2,2] v = {1, 2, 3, 4}>"
        " { y = If (c) <then_branch = a () => (float[N,2] p) { p = MatMul (x, w) },"
        " else_branch = b () => (float[N,2] q) { q = MatMul (x, v) }> }"
    )
    step = training_step(model, loss="mean_squared_error(y, t)", policy="float32")
    made = Trainer(step, **PLACE)
    ones = np.ones((3, 2), np.float32)
    before = made.step.initial_state()
    made.fit([{"x": ones, "t": ones, "c": np.array(True)}])

    assert step.parameters == ("w", "v")
    assert [np.array_equal(before[name], made.state[name]) for name in ("w", "v")] == [False, True]


def test_a_converted_model_is_trained_after_widening_and_tied_weights_are_named() -> None:
    half = amp_rewrite.convert(mlp(), safety="none").model
    assert training_step(half, loss=CROSS_ENTROPY, parameters=["b2"]).parameters == ("b2",)
    widened = amp_rewrite.convert(half, keep=["*"]).model
    assert training_step(widened, loss=CROSS_ENTROPY).parameters == ("w1", "b1", "w2", "b2")
    model = _with(parsed(_TWO_NORMS), scale=RNG.normal(size=4), w=RNG.normal(size=(4, 4)))
    assert _why(_step(model))["scale"] == ("trained", "read by 2 ops")


_TWO_NORMS = """net (float[N,4] x) => (float loss) {
  a = LayerNormalization (x, scale)  h = MatMul (a, w)  b = LayerNormalization (h, scale)
  s = Mul (b, x)  loss = ReduceMean <keepdims = 0> (s)
}"""


def test_weights_merged_by_an_exporter_are_an_error_with_a_remedy() -> None:
    model = _with(parsed(_TWO_NORMS), scale=np.ones(4), w=RNG.normal(size=(4, 4)))
    with pytest.raises(TrainingError) as error:
        _step(model)
    assert str(error.value) == (
        "the initializer 'scale' stands for several weights: 2 ops read it and all its elements are equal, so an"
        " exporter merged equal weights. Training would keep them equal. Export with"
        " amp_rewrite.train.from_torch(module, example), which keeps weights separate, or name the initializer in"
        " `parameters` to train it as one weight, or in `freeze` to leave it unchanged"
    )
    assert _step(model, parameters=["scale", "w"]).parameters == ("scale", "w")
    assert _step(model, freeze="scale").parameters == ("w",)


@pytest.mark.parametrize("opset", [12, 15])
def test_an_embedding_below_opset_16_is_moved_and_reported(opset: int) -> None:
    model = parsed("net (int64[N] ids) => (float[N,4] y) { e = Gather (table, ids)  y = MatMul (e, w) }", opset)
    model = _with(model, table=RNG.normal(size=(5, 8)), w=RNG.normal(size=(8, 4)))
    step = training_step(model, loss=CROSS_ENTROPY, policy="float32", optimizer="sgd,lr=1.0")
    trainer = Trainer(step, **PLACE)
    history = trainer.fit([{"ids": np.array([0, 1, 1]), "t": np.array([0, 1, 1])}], epochs=10)

    assert history.losses[-1] < 0.5 * history.losses[0]
    assert step.report is not None
    assert step.report.notes == (
        f"the step uses ai.onnx opset 16 to add gradients with ScatterND; the model has {opset}",
    )
    assert trainer.export().proto.opset_import[0].version == opset


@pytest.mark.torch
def test_from_torch_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", ModuleType("onnxscript"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TrainingError, match="from_torch needs PyTorch and onnxscript, but torch is not installed"):
        from_torch(object(), np.ones(3))  # type: ignore[arg-type]
