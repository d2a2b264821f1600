"""The trainer: it runs a step over data, evaluates, writes checkpoints, and exports the trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Unpack

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.names import as_names
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.buffers import BufferedRunner, Side
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.train.door import Named, door, floats, whole_number
from amp_rewrite.train.step import batches, checkpoint
from amp_rewrite.train.step.assembly import with_outputs
from amp_rewrite.train.step.batches import HoldsSession, Predictions, Scores
from amp_rewrite.train.step.fitting import FitOptions, Fitting, History, Progress, Rate
from amp_rewrite.train.step.step import TrainingStep


@dataclass(frozen=True, slots=True)
class _Position:
    """Progress of training: the side of the buffer with the state, and the counts.

    One object, so that an interrupt leaves all of it as before a step or as after it.
    """

    side: Side = 0
    steps: int = 0
    micro_batch: int = 0
    skipped: int = 0
    nonfinite: int = 0


@door()
class Trainer(Named, HoldsSession):
    """A training step with its state.

    Steps are deterministic on a CPU: a resumed run gives the same bits, also with Dropout, whose random numbers are
    part of the state.

    The CPU provider computes most float16 ops in float32. So there a lowered step runs as its float32 twin with
    explicit rounding (`emulate`), and `emulated` is True. The state stays on the device, in two sets: a step reads one
    and writes the other. So a step that fails or is interrupted leaves the state of the step before it.

    Args:
        step: the step.
        providers: those of onnxruntime; by default CUDA if available, else the CPU.
        emulated: False runs the step itself on a CPU; None: as above.
        threads: for one op; 0: one per core.
        provider_options: options by provider; without any, the model decides whether CUDA computes in TF32.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import Trainer, training_step
        >>> trainer = Trainer(training_step("model.onnx", loss="cross_entropy(probability, label)", policy="float32"))
        >>> batch = {"image": np.ones((4, 1, 8, 8), np.float32), "label": np.arange(4)}
        >>> history = trainer.fit([batch], epochs=3)
        >>> trainer.steps, history.losses[2] < history.losses[0]
        (3, True)
        >>> trainer.export().save("trained.onnx")
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        providers: Sequence[str] | None = None,
        emulated: bool | None = None,
        threads: int = 0,
        provider_options: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        require("Trainer")
        if not isinstance(step, TrainingStep):
            raise TrainingError(f"{type(step).__name__} is not a training step; pass training_step(model, loss=…)")
        self.step = step
        providers = (CUDA, CPU) if providers is None else as_names(providers)
        if providers[:2] == (CUDA, CPU) and not cuda_opens():
            providers = providers[1:]
        self.emulated = step.lowered and providers[0] == CPU if emulated is None else emulated
        self._model = emulate(step.model, io="same") if self.emulated else step.model
        # a memory pool would hold the memory of a step twice; planned reuse would give colder memory, and more of it
        self._options = SessionOptions(
            providers=providers,
            threads=whole_number("threads", threads, 0),
            pooled=False,
            planned=False,
            provider_options=provider_options,
        )
        self._declared = batches.batch_model(step.model, step.batch)
        runner = Runner.open(self._model, self._options)
        buffer = runner.double_buffer({v.input: v.initial for v in step.state})
        outputs = (step.loss, *step.metrics, step.finite, step.applied)
        self._stepper = runner.buffered(buffer, {v.input: v.output for v in step.state}, outputs)
        self.last_rate = 0.0
        self._now = _Position()
        self._take_from_owner()

    @property
    def where(self) -> str:
        """Text for people: the provider of the steps, and how it computes low types."""
        low, provider = self.step.policy.lowers, self._stepper.provider
        if low is None or not self.step.lowered:
            return provider
        how = "emulated: float32 kernels, rounded" if self.emulated else "as the provider computes it"
        return f"{provider}, {low.spelling} {how}"

    @property
    def state(self) -> dict[str, Array]:
        """Copies of the state by input name: the feeds of the next step besides batch and learning rate."""
        return self._stepper.buffer.arrays(self._now.side)

    @property
    def steps(self) -> int:
        """Number of applied steps."""
        return self._now.steps

    @property
    def skipped(self) -> int:
        """Number of skipped steps, including those before a checkpoint."""
        return self._now.skipped

    @property
    def nonfinite(self) -> int:
        """Number of steps with a nonfinite gradient, applied or not, including those before a checkpoint."""
        return self._now.nonfinite

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the next step."""
        if self.step.loss_scale is None:
            return None
        name = next((v.input for v in self.step.state if v.name == "loss_scale"), None)
        return float(self.step.loss_scale() if name is None else self._views()[name])

    def diagnosis(self, batch: Batch, *, before: bool) -> str:
        """Return the first nonfinite gradient of a batch on the way back from the loss, in words; "" without one.

        Args:
            batch: arrays by name.
            before: with the state before the last step.
        """
        step, side = self.step, self._now.side if not before else self._other_side
        feeds = {**self._stepper.buffer.arrays(side), **batch, step.learning_rate: np.zeros((), np.float32)}
        shapes = {v.input: v.initial.shape for v in step.state}
        outputs = [declared(value, DType.FLOAT, shapes[name]) for name, value in step.gradients.items()]
        runner = Runner.open(with_outputs(self._model, outputs, ()), self._options)
        ports = {port.name for port in runner.inputs}
        found = runner.run({name: array for name, array in feeds.items() if name in ports}, [*step.gradients.values()])
        for name, value in reversed([*step.gradients.items()]):
            array = np.asarray(found[value])
            if not np.isfinite(array).all():
                return f"{name!r} (shape {list(array.shape)}) with {'NaN' if np.isnan(array).any() else 'infinity'}"
        return ""

    @property
    def _other_side(self) -> Side:
        return 1 if self._now.side == 0 else 0

    def _views(self) -> dict[str, Array]:
        """State by input name, without a copy on the host; valid until the next step."""
        buffer, side = self._stepper.buffer, self._now.side
        return {v.input: buffer.view(side, v.input) for v in self.step.state}

    @door(options=FitOptions)
    def fit(
        self,
        x: object = None,
        y: object = None,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        learning_rate: Rate | None = None,
        progress: Progress | None = None,
        **options: Unpack[FitOptions],
    ) -> History:
        """Train on all batches, `epochs` times, and return losses, metrics and counts.

        Arrays are cut into batches of `batch_size` rows, in a new order in each epoch. Other data are batches, which
        may change from epoch to epoch. If no step was applied, or weights are NaN in the end, a warning names the first
        bad gradient. `FitOptions` describes the options.

        Args:
            x: all rows: the inputs, as an array, a tuple, or a mapping from names to arrays, with the targets or
                without; or batches as `Feed.of` takes them.
            y: the targets of all rows; None: they are in `x`.
            batch_size: rows of a batch cut from arrays; 32 by default. The last batch may have fewer.
            epochs: passes over the batches.
            learning_rate: a number ≥ 0, a `Schedule`, or a function of the step; None: the optimizer's.
            progress: called as `progress(done, total)` with runs; `amp_rewrite.progress_bar` draws it.
            **options: those of `FitOptions`, such as validation_data, seed and callbacks.

        Raises:
            TrainingError: a target is out of range, an option is invalid, or a learning rate is not a number ≥ 0.
            FeedError: the data do not fit.
        """
        data = batches.with_targets(x, y, self.step.batch)
        epochs = whole_number("epochs", epochs, 0)
        first = whole_number("first_epoch", options.get("first_epoch", 0), 0)
        fitting = Fitting.of(self, data, batch_size, options)
        self._take_from_owner()
        try:
            return fitting.run(range(first, first + epochs), learning_rate, progress)
        finally:
            self._give_to_owner()

    def take(self, batch: Batch, number: int, learning_rate: Rate | None) -> dict[str, Array]:
        """Run one step, or one micro-batch of a step; a nonfinite step is counted in its last run. Return its results.

        Args:
            batch: arrays by name.
            number: the number of the batch, for messages.
            learning_rate: as `fit` takes it.

        Raises:
            TrainingError: a target is out of range, or the learning rate is not a finite number ≥ 0.
        """
        batches.check_batch(self._declared, self.step.target, batch, number)
        now, owner = self._now, self.step.owner
        rule = self.step.optimizer if owner is None else owner.rule
        rate = rule.learning_rate if learning_rate is None else learning_rate
        value = rate(now.steps) if callable(rate) else rate
        real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not (real and 0 <= value <= DType.FLOAT.max):  # a larger one is infinity in float32
            raise TrainingError(f"the learning rate of step {now.steps + 1} is {value!r}; use a finite number ≥ 0")
        self.last_rate = float(np.float32(value))
        results = self._stepper.run(now.side, {**batch, self.step.learning_rate: np.array(value, np.float32)})
        applied = bool(results[self.step.applied])
        micro_batch = (now.micro_batch + 1) % self.step.micro_batches
        nonfinite = micro_batch == 0 and not results[self.step.finite]
        self._now = _Position(
            side=self._other_side,
            steps=now.steps + applied,
            micro_batch=micro_batch,
            skipped=now.skipped + (nonfinite and not applied),
            nonfinite=now.nonfinite + nonfinite,
        )
        return results

    def _take_from_owner(self) -> None:
        """Continue from step count, slots and loss scale of the optimizer object."""
        owner = self.step.owner
        if owner is None:
            return
        saved = self._of_owner(owner.checkpoint())
        own = {v.input: (v, saved[v.name]) for v in self.step.state if v.name in saved}
        for variable, array in own.values():
            if array.shape != variable.initial.shape:
                raise TrainingError(
                    f"the optimizer's {variable.name!r} has shape {list(array.shape)}, but the step needs"
                    f" {list(variable.initial.shape)}; pass an optimizer that trained this model, or a new one"
                )
        for part in fields(self.step.optimizer):
            now, then = getattr(owner.rule, part.name), getattr(self.step.optimizer, part.name)
            if now != then and part.name != "learning_rate":
                raise TrainingError(
                    f"{part.name} of the optimizer was set to {now!r} after the step was made with {then!r}, which is a"
                    " constant of the step; make the step again"
                )
        self._stepper.buffer.put(self._now.side, {name: array for name, (_, array) in own.items()})
        self._now = replace(self._now, steps=int(saved["step"]))

    def _give_to_owner(self) -> None:
        if self.step.owner is not None:
            self.step.owner.restore(self._of_owner(self.saved()))

    def _of_owner(self, saved: Mapping[str, Array]) -> dict[str, Array]:
        """Parts of a state that step and optimizer object share: all, but for a loss scale of the step alone."""
        shared = vars(self.step.owner or self).get("loss_scale") is self.step.loss_scale
        return {name: a for name, a in saved.items() if shared or name not in ("loss_scale", "good_steps")}

    def feed(self, data: object) -> Feed:
        """Return data as batches of the step."""
        return batches.feed_of(data, self._declared, self.step.target)

    def evaluate(
        self,
        x: object = None,
        y: object = None,
        batch_size: int | None = None,
        verbose: object = None,
    ) -> Scores:
        """Return loss and metrics over data with the current state; see `TrainingStep.evaluation` for training mode.

        Args:
            x: as `fit` takes it.
            y: as `fit` takes it.
            batch_size: as `fit` takes it.
            verbose: accepted as in Keras.

        Raises:
            FeedError: the data do not fit.
            TrainingError: a target is out of range.
        """
        given = batches.with_targets(x, y, self.step.batch)
        rows_of = batches.Rows.of(given, self.step.batch, batch_size, False, target=self.step.target)
        data = given if rows_of is None else lambda: rows_of.batches(0)
        runner, loss, metrics = self._evaluator
        sums = batches.BatchMeans(loss, metrics, self.step.target)
        for number, batch in enumerate(self.feed(data)):
            batches.check_batch(self._declared, self.step.target, batch, number)
            feeds = {**batch, self.step.learning_rate: np.zeros((), np.float32)}
            read = {name: array for name, array in feeds.items() if name in runner.inputs}
            sums.add(batch, runner.run(self._now.side, read))
        return sums.scores(self.step.metrics)

    @cached_property
    def _evaluator(self) -> tuple[BufferedRunner, str, tuple[str, ...]]:
        """The evaluation model, opened on the same state, with the names of loss and metrics."""
        model, loss, metrics = self.step.evaluation()
        model, outputs = self._model if model is self.step.model else model, (loss, *metrics)
        runner = Runner.open(model, replace(self._options, outputs_only=outputs))
        return runner.buffered(self._stepper.buffer, {}, outputs), loss, metrics

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: parameters, slots, step count, loss scale, good steps; see `checkpoint.save`."""
        checkpoint.save(path, self.saved(), self.step.fingerprint)

    def saved(self) -> dict[str, Array]:
        """Return the state by path in checkpoints; valid until the next step."""
        views = self._views()
        counts = {"count/skipped": self.skipped, "count/nonfinite": self.nonfinite}
        return {v.name: views[v.input] for v in self.step.state} | {n: np.array(c, np.int64) for n, c in counts.items()}

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint, saved with or without a loss scale; see `checkpoint.load` for the errors."""
        step = self.step
        saved = checkpoint.load(path, step.state, step.fingerprint, micro_batches=step.micro_batches)
        skipped, nonfinite = (int(saved.get(f"count/{name}", 0)) for name in ("skipped", "nonfinite"))
        self._put(saved, _Position(skipped=skipped, nonfinite=nonfinite))

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Continue from a state."""
        missing = next((v.input for v in self.step.state if v.input not in state), None)
        if missing is not None:
            raise TrainingError(f"the state lacks {missing!r}; pass what `state` of this step's trainer gives")
        self._put({v.name: state[v.input] for v in self.step.state}, self._now)

    def _put(self, saved: Mapping[str, Array], now: _Position) -> None:
        """Continue from a state by path, with the counts of a position."""
        other = self._other_side
        self._stepper.buffer.put(other, {v.input: saved[v.name] for v in self.step.state})
        steps, micro_batch = int(saved["step"]), int(saved.get("micro_batch", 0))
        self._now = replace(now, side=other, steps=steps, micro_batch=micro_batch)
        self._give_to_owner()

    def get_weights(self) -> dict[str, Array]:
        """Return copies of parameters and running statistics by name."""
        kept = [v for v in self.step.state if v.name.startswith(("parameter/", "buffer/"))]
        return {v.input: np.array(self._stepper.buffer.view(self._now.side, v.input)) for v in kept}

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Set parameters and running statistics; slots and counts stay.

        Raises:
            TrainingError: a name is unknown, or a shape is another.
        """
        own = self.get_weights()
        for name, array in weights.items():
            if name not in own or np.shape(array) != own[name].shape:
                has = f"has shape {own[name].shape}, not {np.shape(array)}" if name in own else "is not trained"
                raise TrainingError(f"weight {name!r} of the step {has}; pass what get_weights gives")
        self._stepper.buffer.put(self._now.side, {name: floats(a, f"weight {name!r}") for name, a in weights.items()})

    def predict(self, x: object, batch_size: int | None = None, verbose: object = None) -> Predictions:
        """Return the outputs of the model for all rows, in float32: an array of the first, and [NAME] gives another.

        Args:
            x: inputs, as `fit` takes them; labels are left out.
            batch_size: rows of a batch cut from arrays.
            verbose: accepted as in Keras.

        Raises:
            FeedError: the data do not fit.
        """
        return batches.Predictor.of(self.export(), (), self._options).rows(x, batch_size, {})

    def export(self) -> Model:
        """Return the model with its trained parameters as float32 initializers, ready for `convert`."""
        return self.step.trained(self._views())
