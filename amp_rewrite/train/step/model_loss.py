"""The loss of an ONNX model with gradients, predictions and state, for custom loops with the optimizers of `keras`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from amp_rewrite.deploy import process
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import MULTIPLIERS, PRIME, initial_random_state
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.settings.loss_scale import Gradient
from amp_rewrite.settings.option import Painting
from amp_rewrite.settings.policy import Policy
from amp_rewrite.settings.request import PAINTING
from amp_rewrite.train.door import Named, door, stated
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Loss, Variable
from amp_rewrite.train.objective.module_parameters import ModuleParameters
from amp_rewrite.train.objective.parameters import ParameterGlobs
from amp_rewrite.train.objective.prediction import TargetInput
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.step.assembly import Prepared, lowered, policy_of, with_values
from amp_rewrite.train.step.batches import batch_model, batches, check_batch, fitted_targets
from amp_rewrite.train.step.checkpoint import by_path
from amp_rewrite.train.step.execution import HoldsSession
from amp_rewrite.train.step.prediction import predicted, predictor
from amp_rewrite.train.step.training_report import TrainingReport, model_name
from amp_rewrite.train.update.graph import Buffers, StateVariable
from amp_rewrite.train.update.optimizer import initial_slots


@dataclass(frozen=True, eq=False)
class LossGraph:
    """A runner with the names of its values.

    `gradients`: outputs by parameter. `buffers`: the running statistics by input, each with its output and its first
    value. `random`: the input of the random state. `source`: the model as it was given. `declared`: a model of the
    inputs of a batch. `target`: that of the loss.
    """

    runner: Runner
    providers: tuple[str, ...]
    initial: Mapping[str, Array]
    loss: str
    metrics: tuple[str, ...]
    seed: str
    gradients: Mapping[str, str]
    buffers: Buffers
    random: str | None
    source: Model
    declared: Model
    target: TargetInput | None
    fingerprint: str
    report: TrainingReport


def loss_graph(
    source: Model, loss: str, choice: ParameterGlobs, policy: Policy, training_mode: bool, painting: Painting
) -> LossGraph:
    """Build the graph of a loss of a model and open it, on CUDA if available, else emulated on the CPU.

    Errors are those of `training_step`.
    """
    ready = Prepared.of(source, loss, choice, training_mode)
    b, aim = ready.b, ready.aim
    seed = b.input("seed", DType.FLOAT, ())
    grads = {
        name: b.output(f"{name}_grad", DType.FLOAT, b.shape(name), source=gradient)
        for name, gradient in ready.gradients(seed).items()
    }
    buffers = {
        name: (b.output(f"{name}_next", DType.FLOAT, start.shape, source=new), start)
        for name, (new, start) in ready.buffers.items()
    }
    whole = ready.with_results((*grads.values(), *(new for new, _ in buffers.values())))
    taken = {seed, *ready.initial, *buffers, ready.random, *(tensor.name for tensor in whole.proto.graph.initializer)}
    batch = [v.name for v in whole.proto.graph.input if v.name not in taken]
    result, conversion = lowered(whole, policy, painting)
    providers = (CUDA, CPU) if cuda_opens() else (CPU,)
    if conversion is not None and CUDA not in providers:
        result = emulate(result)
    report = TrainingReport(model_name(source), loss, ready.selection.rows, ready.notes, conversion)
    return LossGraph(
        runner=Runner.open(result, SessionOptions(providers=providers)),
        providers=providers,
        initial=ready.initial,
        loss=aim.loss,
        metrics=aim.metrics,
        seed=seed,
        gradients=grads,
        buffers=buffers,
        random=ready.random,
        source=source,
        declared=batch_model(whole, batch),
        target=aim.target,
        fingerprint=fingerprint(source).graph,
        report=report,
    )


_BUFFER = "buffer/"
"""Prefix of paths of running statistics in checkpoints."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of a model that its losses share: variables by name, and running state by path in checkpoints.

    `running`: "buffer/NAME" for running statistics, "random" for the random state.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    running: dict[str, Array] = field(default_factory=dict)

    def held(self) -> dict[str, Array]:
        """Return variables and running statistics by name as they are now."""
        buffers = {p.removeprefix(_BUFFER): a for p, a in self.running.items() if p.startswith(_BUFFER)}
        return {name: variable.held for name, variable in self.variables.items()} | buffers

    def with_graph(self, graph: LossGraph, seed: int) -> None:
        """Add what a graph has in addition."""
        for name, start in graph.initial.items():
            self.variables.setdefault(name, Variable(start, name))
        for name, (_, start) in graph.buffers.items():
            self.running.setdefault(f"{_BUFFER}{name}", start.copy())
        if graph.random is not None:
            self.running.setdefault("random", initial_random_state(seed))

    def save(self, path: str | Path, optimizer: StatefulOptimizer | None, fingerprint: str) -> None:
        """Write a checkpoint of the model with this fingerprint."""
        checkpoint.save(path, self._checkpoint(optimizer), fingerprint)

    def load(self, path: str | Path, optimizer: StatefulOptimizer | None, fingerprint: str) -> None:
        """Continue from a checkpoint."""
        wanted = [StateVariable(name, name, "", array) for name, array in self._checkpoint(optimizer).items()]
        left_out = () if optimizer is not None else ("slot/", "step")
        saved = checkpoint.load(path, wanted, fingerprint, left_out=left_out)
        for name, variable in self.variables.items():
            variable.assign(saved[f"parameter/{name}"])
        self.running.update({path: saved[path] for path in self.running})
        if optimizer is not None:
            optimizer.restore(saved)

    def _checkpoint(self, optimizer: StatefulOptimizer | None) -> dict[str, Array]:
        state = {f"parameter/{name}": variable.numpy() for name, variable in self.variables.items()}
        if optimizer is not None:
            fresh = initial_slots(optimizer.rule, {name: v.numpy() for name, v in self.variables.items()})
            slots = {name: {**own, **optimizer.slots().get(name, {})} for name, own in fresh.items()}
            scale = optimizer.loss_scale if isinstance(optimizer, LossScaleOptimizer) else None
            state |= by_path(optimizer.iterations, slots, scale)
        return state | self.running


@dataclass(frozen=True, eq=False)
class ModelLoss(Named, HoldsSession, Loss):
    """A `Differentiable` loss of a model: call it for its value, or compute its gradients from a seed.

    In training mode gradients also move running statistics and draw the next random numbers; calls for the value see
    the same numbers as the gradients after them. Multiples are losses again, as in `loss.on(batch) / 4`.

    Attributes:
        variables: the model's parameters; an assigned value is used from the next call on.
        results: loss and metrics of the last computation for this batch, by name.
    """

    variables: tuple[Variable, ...]
    _graph: LossGraph = field(repr=False)
    _weights: Weights = field(repr=False)
    _batch: Mapping[str, Array] = field(default_factory=dict, repr=False)
    _held: Mapping[str, Array] | None = field(default=None, repr=False)
    results: dict[str, float] = field(default_factory=dict, repr=False)

    @classmethod
    @door(options=PAINTING)
    def of(
        cls,
        model: object,
        loss: str,
        *,
        parameters: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] = (),
        policy: str | Policy | None = None,
        training_mode: bool = False,
        seed: int = 0,
        folder: str | Path | None = None,
        **painting: Unpack[Painting],
    ) -> ModelLoss:
        """Return the loss of a model. It runs on CUDA if available, else on the CPU, where a low policy is emulated.

        Arguments and errors are those of `training_step`; the policy is by default mixed_float16 while the rewrite is
        enabled, else that of `set_policy`, else float32.
        """
        require("ModelLoss")
        chosen = policy_of(process.policy_of_sessions() if policy is None else policy)
        source = Model.load(model, folder=folder)
        choice = ParameterGlobs(parameters, freeze, ModuleParameters.of(source))
        return cls.of_graph(loss_graph(source, loss, choice, chosen, training_mode, painting), Weights(), seed)

    @classmethod
    def of_graph(cls, graph: LossGraph, weights: Weights, seed: int) -> ModelLoss:
        """Return the loss of a graph, with weights that others share. `seed`: of the random state, if it is new."""
        weights.with_graph(graph, seed)
        return cls(tuple(weights.variables[name] for name in graph.initial), graph, weights)

    @property
    def report(self) -> TrainingReport:
        """The parameters with their roles, the values that the loss reads, and the type of each op."""
        return self._graph.report

    def on(self, batch: Mapping[str, Array], held: Mapping[str, Array] | None = None) -> ModelLoss:
        """Return the loss of this batch.

        Args:
            batch: arrays by input name.
            held: weights by name for which it is computed; None: those of the variables at the time of a computation.
        """
        if not isinstance(batch, Mapping):
            raise TrainingError(f"the batch is {stated(batch)}; pass a mapping from names of inputs to arrays")
        target, given = self._graph.target, dict(batch)
        if target is not None and target.name in given:
            given[target.name] = fitted_targets(target, np.asarray(given[target.name]))
        return replace(self, _batch=given, _held=held, results={})

    def __call__(self) -> Array:
        """Return the loss: a float32 scalar, shape ()."""
        self._run((), np.array(1, np.float32))
        return np.array(self.results["loss"], np.float32)

    def __float__(self) -> float:
        """Return the loss of the last computation for this batch; compute it if there was none."""
        return self.results["loss"] if self.results else float(self())

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        """Return the float32 gradients of `seed` times the loss; None for variables of another loss.

        One forward pass gives the gradients and the `results`.
        """
        graph, running = self._graph, self._weights.running
        own = [v for v in variables if any(v is mine for mine in self.variables)]
        if not own:
            return [None for _ in variables]
        moved = {name: new for name, (new, _) in graph.buffers.items()}
        found = self._run((*(graph.gradients[v.name] for v in own), *moved.values()), np.asarray(seed, np.float32))
        running.update({f"{_BUFFER}{name}": np.array(found[new]) for name, new in moved.items()})
        if graph.random is not None:
            running["random"] = running["random"] * np.array(MULTIPLIERS, np.int64) % PRIME
        return [found[graph.gradients[v.name]] if any(v is mine for mine in own) else None for v in variables]

    def predict(self, batch: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the outputs of the model for a batch by name: in float32, without dropout, with running statistics.

        Args:
            batch: arrays by input name; targets are not needed. By default the batch of this loss.
        """
        given = self._batch if batch is None else batch
        return predicted(self._predictor, self._graph.source, given, self._held or self._weights.held())

    @cached_property
    def _predictor(self) -> Runner:
        return predictor(self._graph.source, self._weights.held(), self._graph.providers)

    def export(self) -> Model:
        """Return the model with the current parameters and running statistics, float32, ready for `convert`."""
        return with_values(self._graph.source, self._weights.held())

    def save(self, path: str | Path, optimizer: StatefulOptimizer | None = None) -> None:
        """Write a checkpoint of the model and its optimizer, in the format of `Trainer.save`, which reads it too."""
        self._weights.save(path, optimizer, self._graph.fingerprint)

    def load(self, path: str | Path, optimizer: StatefulOptimizer | None = None) -> None:
        """Continue from a checkpoint of `save` or of `Trainer.save`.

        Args:
            path: the file.
            optimizer: the optimizer, which gets its step count, slots and loss scale back; None leaves those out.

        Raises:
            TrainingError: the checkpoint is of another model, optimizer or set of parameters.
        """
        self._weights.load(path, optimizer, self._graph.fingerprint)

    def _run(self, outputs: Sequence[str], seed: Array) -> dict[str, Any]:
        graph, running = self._graph, self._weights.running
        missing = sorted({v.name for v in graph.declared.proto.graph.input} - self._batch.keys())
        if missing:
            raise TrainingError(f"the batch lacks the inputs {missing}; pass a batch with loss.on(batch)")
        (batch,) = batches([self._batch], graph.declared, graph.target)
        check_batch(graph.declared, graph.target, batch, 0)
        feeds = {**(self._held or self._weights.held()), **batch, graph.seed: seed}
        feeds |= {name: running[f"{_BUFFER}{name}"] for name in graph.buffers}
        if graph.random is not None:
            feeds[graph.random] = running["random"]
        inputs = {port.name for port in graph.runner.inputs}
        read = {name: array for name, array in feeds.items() if name in inputs}
        found = graph.runner.run(read, (graph.loss, *graph.metrics, *outputs))
        self.results.clear()
        self.results["loss"] = float(np.asarray(found[graph.loss]).reshape(()))
        self.results.update({name: float(np.asarray(found[name])) for name in graph.metrics})
        return found
