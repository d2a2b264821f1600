"""The trainer of a step: training, evaluation, prediction, checkpoints, and export of the trained model."""

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
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_works
from amp_rewrite.train.arguments import AttributeHints, checked_arguments, float_array, whole_number
from amp_rewrite.train.step import batches, checkpoint
from amp_rewrite.train.step.assembly import with_outputs
from amp_rewrite.train.step.batches import HoldsSession, Predictions, Scores
from amp_rewrite.train.step.fitting import FitOptions, Fitting, History, Progress, Rate
from amp_rewrite.train.step.step import TrainingStep


@dataclass(frozen=True, slots=True)
class _Position:
    """Progress of training: the side of the buffer with the current state, and the counts.

    It is replaced as a whole, so an interrupt leaves the progress either before or after a step.
    """

    side: Side = 0
    steps: int = 0
    micro_batch: int = 0
    skipped: int = 0
    nonfinite: int = 0


@checked_arguments()
class Trainer(AttributeHints, HoldsSession):
    """A training step and its state.

    Steps are deterministic on a CPU: a resumed run computes the same bits, even with Dropout, since the state includes
    the random state.

    onnxruntime's CPU provider computes most float16 ops in float32. Therefore, a lowered step runs on the CPU as its
    float32 twin with explicit rounding (`emulate`), and `emulated` is True. The state stays on the device, in two
    buffers: a step reads one and writes the other, so a failed or interrupted step leaves the previous state intact.

    Args:
        step: the step.
        providers: onnxruntime's execution providers; by default CUDA if available, otherwise the CPU.
        emulated: False runs the lowered step itself on a CPU; None chooses as described above.
        threads: threads per op; 0 means one per core.
        provider_options: options by provider; by default, the model decides whether CUDA computes in TF32.

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
        if providers[:2] == (CUDA, CPU) and not cuda_works():
            providers = providers[1:]
        self.emulated = step.lowered and providers[0] == CPU if emulated is None else emulated
        self._model = emulate(step.model, io="same") if self.emulated else step.model
        # a memory pool would allocate a step's memory twice; planned reuse takes more memory and misses the cache
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
        self._position = _Position()
        self._load_from_owner()

    @property
    def where(self) -> str:
        """The execution provider of the steps, and its computation of low types, as text."""
        low, provider = self.step.policy.lowers, self._stepper.provider
        if low is None or not self.step.lowered:
            return provider
        how = "emulated: float32 kernels, rounded" if self.emulated else "as the provider computes it"
        return f"{provider}, {low.spelling} {how}"

    @property
    def state(self) -> dict[str, Array]:
        """Copies of the state by input name, to feed with the next batch and a learning rate."""
        return self._stepper.buffer.arrays(self._position.side)

    @property
    def steps(self) -> int:
        """Number of applied steps."""
        return self._position.steps

    @property
    def skipped(self) -> int:
        """Number of skipped steps, including those before a loaded checkpoint."""
        return self._position.skipped

    @property
    def nonfinite(self) -> int:
        """Number of steps with nonfinite gradients, applied or not, including those before a loaded checkpoint."""
        return self._position.nonfinite

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the next step; None without one."""
        if self.step.loss_scale is None:
            return None
        name = next((v.input for v in self.step.state if v.name == "loss_scale"), None)
        return float(self.step.loss_scale() if name is None else self._views()[name])

    def diagnosis(self, batch: Batch, *, before: bool) -> str:
        """Describe the first nonfinite gradient of a batch, in the order of the backward pass; "" if there is none.

        Args:
            batch: arrays by input name.
            before: True uses the state before the last step.
        """
        step, side = self.step, self._position.side if not before else self._other_side
        feeds = {**self._stepper.buffer.arrays(side), **batch, step.learning_rate: np.zeros((), np.float32)}
        shapes = {v.input: v.initial.shape for v in step.state}
        outputs = [declared(value, DType.FLOAT, shapes[name]) for name, value in step.gradients.items()]
        runner = Runner.open(with_outputs(self._model, outputs, ()), self._options)
        ports = {port.name for port in runner.inputs}
        values = runner.run({name: array for name, array in feeds.items() if name in ports}, [*step.gradients.values()])
        for name, value in reversed([*step.gradients.items()]):
            array = np.asarray(values[value])
            if not np.isfinite(array).all():
                return f"{name!r} (shape {list(array.shape)}) with {'NaN' if np.isnan(array).any() else 'infinity'}"
        return ""

    @property
    def _other_side(self) -> Side:
        return 1 if self._position.side == 0 else 0

    def _views(self) -> dict[str, Array]:
        """Return views of the state by input name, without copies if it is on the host; valid until the next step."""
        buffer, side = self._stepper.buffer, self._position.side
        return {v.input: buffer.view(side, v.input) for v in self.step.state}

    @checked_arguments(options=FitOptions)
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
        """Train for a number of epochs, and return losses, metrics and counts.

        Arrays are split into batches of `batch_size` rows, shuffled in each epoch. Other data are already batches, and
        may differ from epoch to epoch. If no step was applied, or weights are NaN at the end, a warning names the first
        nonfinite gradient.

        Args:
            x: the inputs of all rows, as an array, a tuple, or a mapping from names to arrays, with or without the
                targets; or batches, as for `Feed.of`.
            y: the targets of all rows; None if they are in `x`.
            batch_size: rows per batch of arrays, 32 by default; the last batch may have fewer.
            epochs: number of passes over the data.
            learning_rate: a number ≥ 0, a `Schedule`, or a function of the step count; None uses the optimizer's.
            progress: called as `progress(done, total)` with counts of runs, for example `amp_rewrite.progress_bar`.
            **options: `FitOptions`, such as validation_data, seed and callbacks.

        Returns:
            The history, with the losses of all runs and the numbers of each epoch.

        Raises:
            TrainingError: a target is out of range, an option is invalid, or a learning rate is not a number ≥ 0.
            FeedError: the data does not match the model's inputs.
        """
        data = batches.with_targets(x, y, self.step.batch)
        epochs = whole_number("epochs", epochs, 0)
        first = whole_number("first_epoch", options.get("first_epoch", 0), 0)
        fitting = Fitting.of(self, data, batch_size, options)
        self._load_from_owner()
        try:
            return fitting.run(range(first, first + epochs), learning_rate, progress)
        finally:
            self._store_in_owner()

    def take(self, batch: Batch, number: int, learning_rate: Rate | None) -> dict[str, Array]:
        """Run one step, or one micro-batch of a step, and return its results by output name.

        Args:
            batch: arrays by input name.
            number: the number of the batch, for messages.
            learning_rate: as for `fit`.

        Raises:
            TrainingError: a target is out of range, or the learning rate is not a finite number ≥ 0.
        """
        batches.check_batch(self._declared, self.step.target, batch, number)
        position, owner = self._position, self.step.owner
        rule = self.step.optimizer if owner is None else owner.rule
        rate = rule.learning_rate if learning_rate is None else learning_rate
        value = rate(position.steps) if callable(rate) else rate
        real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not (real and 0 <= value <= DType.FLOAT.max):  # a larger one becomes infinity in float32
            raise TrainingError(f"the learning rate of step {position.steps + 1} must be finite and ≥ 0, not {value!r}")
        self.last_rate = float(np.float32(value))
        results = self._stepper.run(position.side, {**batch, self.step.learning_rate: np.array(value, np.float32)})
        applied = bool(results[self.step.applied])
        micro_batch = (position.micro_batch + 1) % self.step.micro_batches
        nonfinite = micro_batch == 0 and not results[self.step.finite]
        self._position = _Position(
            side=self._other_side,
            steps=position.steps + applied,
            micro_batch=micro_batch,
            skipped=position.skipped + (nonfinite and not applied),
            nonfinite=position.nonfinite + nonfinite,
        )
        return results

    def _load_from_owner(self) -> None:
        """Load step count, slots and loss scale from the `StatefulOptimizer` of the step."""
        owner = self.step.owner
        if owner is None:
            return
        saved = self._shared_with_owner(owner.checkpoint())
        shared = {v.input: (v, saved[v.name]) for v in self.step.state if v.name in saved}
        for variable, array in shared.values():
            if array.shape != variable.initial.shape:
                raise TrainingError(
                    f"the optimizer's {variable.name!r} has shape {list(array.shape)}, but the step needs"
                    f" {list(variable.initial.shape)}; pass an optimizer that trained this model, or a new one"
                )
        for part in fields(self.step.optimizer):
            current, constant = getattr(owner.rule, part.name), getattr(self.step.optimizer, part.name)
            if current != constant and part.name != "learning_rate":
                raise TrainingError(
                    f"{part.name} of the optimizer is {current!r}, but the step was created with the constant"
                    f" {constant!r}; create the step again"
                )
        self._stepper.buffer.put(self._position.side, {name: array for name, (_, array) in shared.items()})
        self._position = replace(self._position, steps=int(saved["step"]))

    def _store_in_owner(self) -> None:
        if self.step.owner is not None:
            self.step.owner.restore(self._shared_with_owner(self.saved()))

    def _shared_with_owner(self, saved: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state shared by the step and its optimizer; a loss scale only if it is the optimizer's."""
        shared = vars(self.step.owner or self).get("loss_scale") is self.step.loss_scale
        return {name: a for name, a in saved.items() if shared or name not in ("loss_scale", "good_steps")}

    def feed(self, data: object) -> Feed:
        """Return data as batches of the step; see `Feed.of`."""
        return batches.as_feed(data, self._declared, self.step.target)

    def evaluate(
        self,
        x: object = None,
        y: object = None,
        batch_size: int | None = None,
        verbose: object = None,
    ) -> Scores:
        """Return loss and metrics over data with the current state, without dropout and with running statistics.

        Args:
            x: as for `fit`.
            y: as for `fit`.
            batch_size: as for `fit`.
            verbose: accepted as in Keras, and ignored.

        Raises:
            FeedError: the data does not match the model's inputs.
            TrainingError: a target is out of range.
        """
        combined = batches.with_targets(x, y, self.step.batch)
        rows_of = batches.Rows.of(combined, self.step.batch, batch_size, False, target=self.step.target)
        data = combined if rows_of is None else lambda: rows_of.batches(0)
        runner, loss, metrics = self._evaluator
        sums = batches.BatchMeans(loss, metrics, self.step.target)
        for number, batch in enumerate(self.feed(data)):
            batches.check_batch(self._declared, self.step.target, batch, number)
            feeds = {**batch, self.step.learning_rate: np.zeros((), np.float32)}
            inputs = {name: array for name, array in feeds.items() if name in runner.inputs}
            sums.add(batch, runner.run(self._position.side, inputs))
        return sums.scores(self.step.metrics)

    @cached_property
    def _evaluator(self) -> tuple[BufferedRunner, str, tuple[str, ...]]:
        """The evaluation model, loaded with the same state, and the names of loss and metrics."""
        model, loss, metrics = self.step.evaluation()
        model, outputs = self._model if model is self.step.model else model, (loss, *metrics)
        runner = Runner.open(model, replace(self._options, outputs=outputs))
        return runner.buffered(self._stepper.buffer, {}, outputs), loss, metrics

    def save(self, path: str | Path) -> None:
        """Write a checkpoint with parameters, slots, step count and loss scale; see `checkpoint.save`."""
        checkpoint.save(path, self.saved(), self.step.fingerprint)

    def saved(self) -> dict[str, Array]:
        """Return views of the state by path in checkpoints, valid until the next step."""
        views = self._views()
        counts = {"count/skipped": self.skipped, "count/nonfinite": self.nonfinite}
        return {v.name: views[v.input] for v in self.step.state} | {n: np.array(c, np.int64) for n, c in counts.items()}

    def load(self, path: str | Path) -> None:
        """Load a checkpoint, with or without a loss scale; see `checkpoint.load` for the errors."""
        step = self.step
        saved = checkpoint.load(path, step.state, step.fingerprint, micro_batches=step.micro_batches)
        skipped, nonfinite = (int(saved.get(f"count/{name}", 0)) for name in ("skipped", "nonfinite"))
        self._put(saved, _Position(skipped=skipped, nonfinite=nonfinite))

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Set the state, as returned by `state`."""
        missing = next((v.input for v in self.step.state if v.input not in state), None)
        if missing is not None:
            raise TrainingError(f"the state is missing {missing!r}; pass the `state` of a trainer of this step")
        self._put({v.name: state[v.input] for v in self.step.state}, self._position)

    def _put(self, saved: Mapping[str, Array], position: _Position) -> None:
        """Set the state by path in checkpoints, with the counts of `position`."""
        other = self._other_side
        self._stepper.buffer.put(other, {v.input: saved[v.name] for v in self.step.state})
        steps, micro_batch = int(saved["step"]), int(saved.get("micro_batch", 0))
        self._position = replace(position, side=other, steps=steps, micro_batch=micro_batch)
        self._store_in_owner()

    def get_weights(self) -> dict[str, Array]:
        """Return copies of parameters and running statistics by name."""
        variables = [v for v in self.step.state if v.name.startswith(("parameter/", "buffer/"))]
        return {v.input: np.array(self._stepper.buffer.view(self._position.side, v.input)) for v in variables}

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Set parameters and running statistics; slots and counts do not change.

        Raises:
            TrainingError: a name is unknown, or a shape differs.
        """
        current = self.get_weights()
        for name, array in weights.items():
            if name not in current or np.shape(array) != (shape := current[name].shape):
                problem = f"has shape {shape}, not {np.shape(array)}" if name in current else "is not trained"
                raise TrainingError(f"weight {name!r} of the step {problem}; pass the result of get_weights()")
        arrays = {name: float_array(array, f"weight {name!r}") for name, array in weights.items()}
        self._stepper.buffer.put(self._position.side, arrays)

    def predict(self, x: object, batch_size: int | None = None, verbose: object = None) -> Predictions:
        """Return the outputs of the model for all rows, in float32; index the result by name for other outputs.

        Args:
            x: inputs, as for `fit`; targets are ignored.
            batch_size: rows per batch of arrays.
            verbose: accepted as in Keras, and ignored.

        Raises:
            FeedError: the data does not match the model's inputs.
        """
        return batches.Predictor.of(self.export(), (), self._options).rows(x, batch_size, {})

    def export(self) -> Model:
        """Return the model with its trained parameters as float32 initializers."""
        return self.step.trained(self._views())
