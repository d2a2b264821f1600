"""Training over data: epochs, skipped steps, learning rates, interrupts, and the trained model."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_rewrite
from amp_rewrite.errors import ModelError
from amp_rewrite.runtime.buffers import BufferedRunner
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from support import stub
from support.train.nets import F32, PLACE, batches, parsed, same, step, trainer

DATA = list(batches(12))


def test_loss_falls_and_accuracy_rises_over_epochs() -> None:
    made = trainer()
    before = made.evaluate(DATA)
    history = made.fit(DATA, epochs=20)
    after = made.evaluate(DATA)

    assert (len(history.losses), len(history.epochs), made.steps) == (240, 20, 240)
    assert (history.skipped, history.nonfinite) == (0, 0)
    assert before.rows == after.rows == 12 * 16
    assert after.loss < 0.3 < 1.2 < before.loss
    assert before.metrics["accuracy"] < 0.5 < 0.9 < after.metrics["accuracy"]


def test_the_state_is_a_copy_and_a_low_step_on_the_cpu_is_emulated_and_says_so() -> None:
    assert trainer().where == "CPUExecutionProvider, float16 emulated: float32 kernels, rounded"
    assert trainer(policy="float32").where == "CPUExecutionProvider"
    as_it_is = Trainer(step(), **PLACE, emulated=False)
    assert as_it_is.where == "CPUExecutionProvider, float16 as the provider computes it"
    made = trainer()
    before = made.state
    made.state["w1"][:] = 7
    made.fit(DATA[:1])
    after = made.state
    made.fit(DATA[1:3])

    assert same(before, trainer().state)
    assert not same(before, after) and not same(after, made.state)


def test_nan_in_the_data_skips_that_step_and_is_counted() -> None:
    spoiled = [{name: array.copy() for name, array in batch.items()} for batch in DATA]
    spoiled[4]["x"][3, 3] = np.nan
    made = trainer()
    history = made.fit(spoiled, epochs=2)

    assert (history.skipped, history.nonfinite, made.steps, made.loss_scale) == (2, 2, 22, 2.0**13)
    assert np.isnan(history.losses[4]) and np.isfinite(made.state["w1"]).all()
    without = trainer(loss_scale=DynamicLossScale(2.0**15))
    without.fit([*spoiled[:4], *spoiled[5:]])
    again = trainer()
    again.fit(spoiled)
    assert np.array_equal(without.state["w1"], again.state["w1"])  # powers of two scale exactly


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_is_drawn_on_a_terminal_alone(monkeypatch: Any) -> None:
    plain, drawn = io.StringIO(), _Terminal()
    for stream in (plain, drawn):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with amp_rewrite.progress_bar("digits") as bar:
            trainer().fit(DATA[:3], epochs=2, progress=bar)

    assert plain.getvalue() == ""
    assert "digits" in drawn.getvalue() and "100%" in drawn.getvalue()


# -- interrupts --------------------------------------------------------------------------------------


def test_an_interrupt_within_a_step_leaves_the_state_of_the_step_before(monkeypatch: Any) -> None:
    made = Trainer(step(micro_batches=2), **PLACE)
    made.fit(DATA[:3])
    before = (made.state, made.steps, made.skipped)
    real = BufferedRunner.run

    def interrupted(self: BufferedRunner, side: Any, feeds: Any) -> Any:
        told = real(self, side, feeds)
        if "applied" in told:  # all new state is written by now
            raise KeyboardInterrupt
        return told

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BufferedRunner, "run", interrupted)
        made.fit(DATA[3:4])
    assert same(made.state, before[0]) and (made.steps, made.skipped) == before[1:]

    made.fit(DATA[3:])
    straight = Trainer(step(micro_batches=2), **PLACE)
    straight.fit(DATA)
    assert same(straight.state, made.state)


def test_a_run_that_fails_changes_nothing() -> None:
    model = parsed(
        "net (int64[N] x) => (float[N,2] y) <float[3,2] table = {1, 2, 3, 4, 5, 6}> { y = Gather (table, x) }"
    )
    made = Trainer(training_step(model, loss="mean_squared_error(y, t)", policy="float32"), **PLACE)
    batch = {"x": np.array([0, 2]), "t": np.zeros((2, 2), F32)}
    made.fit([batch])
    before = made.state
    with pytest.raises(ModelError, match=r"^onnxruntime cannot run the model: .* idx=9 must be within"):
        made.fit([{**batch, "x": np.array([0, 9])}])

    assert same(before, made.state) and made.steps == 1


# -- the trained model -------------------------------------------------------------------------------


def test_the_exported_model_computes_what_was_learned_and_converts() -> None:
    made = trainer()
    made.fit(DATA, epochs=5)
    learned = made.export()
    x = DATA[0]["x"]
    y: Any = Runner.open(learned).run({"x": x})["y"]

    assert (y.argmax(1) == DATA[0]["t"]).mean() > 0.8
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in learned.to_proto().graph.initializer}
    assert all(np.array_equal(weights[name], made.state[name]) for name in ("w1", "b1", "w2", "b2"))
    assert amp_rewrite.convert(learned).report.text()


# -- on CUDA -----------------------------------------------------------------------------------------

ON_CUDA = """
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import batches, step

made = Trainer(step(policy="float32"))
buffer = made._stepper.buffer
held = [value for side in buffer.sides for value in side.values()]
places = {(value.data_ptr(), value.device_name()) for value in held}
print(made.where, len(made.fit(list(batches(4))).losses), made.evaluate(list(batches(2))).rows)
after = {(value.data_ptr(), value.device_name()) for value in held}
print(len(places) == len(held), {name for _, name in places}, places == after)
print({name: array.shape for name, array in made.state.items() if "/" not in name})
"""


@pytest.mark.stub
def test_on_cuda_the_state_stays_where_it_is(cuda_stub: Path) -> None:
    done = stub.on_cuda(cuda_stub, ON_CUDA)
    each = [
        "CUDAExecutionProvider 4 32",
        "True {'cuda'} True",
        "{'w1': (8, 16), 'b1': (16,), 'w2': (16, 4), 'b2': (4,), 'step': ()}",
    ]
    assert done.stdout.splitlines() == each, done.stderr
