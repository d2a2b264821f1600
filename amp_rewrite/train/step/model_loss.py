"""The loss of an ONNX model with its gradients and state, for custom loops with the optimizers of `train.keras`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import MULTIPLIERS, PRIME, initial_random_state
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_works
from amp_rewrite.train import policy as policies
from amp_rewrite.train.arguments import AttributeHints, checked_arguments, to_array
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Loss, Variable
from amp_rewrite.train.loss_scale import Gradient
from amp_rewrite.train.objective.prediction import TargetInput
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.step.assembly import ModelOptions, Prepared, TrainingSource, batch_inputs, lowered, with_values
from amp_rewrite.train.step.batches import HoldsSession, Predictor, as_feed, batch_model, check_batch, converted_targets
from amp_rewrite.train.step.step import TrainingReport, model_name
from amp_rewrite.train.update.graph import StateVariable
from amp_rewrite.train.update.optimizer import initial_slots


@dataclass(frozen=True, eq=False)
class LossGraph:
    """The graph of a loss and its gradients, loaded in a session.

    `results`: names of loss and metrics. `seed`: the input that scales the gradients. `gradients`: outputs
    by parameter. `buffers`: outputs with the new running statistics, by input. `random`: the input with the random
    state. `declared`: the `batch_model` of the loss.
    """

    runner: Runner
    results: tuple[str, ...]
    target: TargetInput | None
    seed: str
    gradients: Mapping[str, str]
    buffers: Mapping[str, str]
    random: str | None
    declared: Model
    report: TrainingReport


def _default_options() -> SessionOptions:
    return SessionOptions(providers=(CUDA, CPU) if cuda_works() else (CPU,))


_BUFFER = "buffer/"
"""Prefix of the paths of running statistics in checkpoints."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a model, shared by its losses: variables by name, and other state by its path in checkpoints.

    `running`: "buffer/NAME" for running statistics, "random" for the random state.
    """

    source: TrainingSource
    variables: dict[str, Variable] = field(default_factory=dict)
    running: dict[str, Array] = field(default_factory=dict)

    def arrays(self) -> dict[str, Array]:
        """Return the current values of variables and running statistics by name, without copies."""
        buffers = {p.removeprefix(_BUFFER): a for p, a in self.running.items() if p.startswith(_BUFFER)}
        return {name: variable.array for name, variable in self.variables.items()} | buffers

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor.of(self.source.model, self.arrays().keys(), _default_options())

    def loss(self, text: str) -> ModelLoss:
        """Return a loss of the model with these weights, and add the weights that only the loss has.

        It runs on CUDA if available, otherwise emulated on the CPU. The errors are the same as for `training_step`.
        """
        source = self.source
        prepared = Prepared.of(source, text)
        b, objective = prepared.builder, prepared.objective
        seed = b.input("seed", DType.FLOAT, ())
        grads = {
            name: b.output(f"{name}_grad", DType.FLOAT, b.shape(name), source=gradient)
            for name, gradient in prepared.gradients(seed).items()
        }
        buffers = {
            name: b.output(f"{name}_next", DType.FLOAT, start.shape, source=new)
            for name, (new, start) in prepared.buffers.items()
        }
        whole = prepared.with_results((*grads.values(), *buffers.values()))
        declared = batch_model(whole, batch_inputs(whole, seed, *prepared.initial, *buffers, prepared.random))
        result, conversion = lowered(whole, source.policy, source.painting)
        options = _default_options()
        if conversion is not None and CUDA not in options.providers:
            result = emulate(result)
        runner = Runner.open(result, options)
        report = TrainingReport(model_name(source.model), text, prepared.rows, prepared.notes, conversion)
        for name, start in prepared.initial.items():
            self.variables.setdefault(name, Variable(start, name))
        for name, (_, start) in prepared.buffers.items():
            self.running.setdefault(f"{_BUFFER}{name}", start.copy())
        if prepared.random is not None:
            self.running.setdefault("random", initial_random_state(source.seed))
        results = (objective.loss, *objective.metrics)
        graph = LossGraph(runner, results, objective.target, seed, grads, buffers, prepared.random, declared, report)
        return ModelLoss(tuple(self.variables[name] for name in prepared.initial), self, graph)

    def checkpoint(self, optimizer: StatefulOptimizer | None) -> dict[str, Array]:
        """Return all state by path in checkpoints, including an optimizer's."""
        state = {f"parameter/{name}": variable.numpy() for name, variable in self.variables.items()}
        if optimizer is not None:
            fresh = initial_slots(optimizer.rule, {name: v.numpy() for name, v in self.variables.items()})
            slots = {name: {**arrays, **optimizer.slots().get(name, {})} for name, arrays in fresh.items()}
            state |= optimizer.checkpoint() | checkpoint.by_path(optimizer.iterations, slots)
        return state | self.running


@checked_arguments()
class WithWeights(AttributeHints, HoldsSession):
    """Base class of objects with weights: export and checkpoints."""

    _weights: Weights

    def export(self) -> Model:
        """Return the model with its current parameters and running statistics as float32 initializers."""
        return with_values(self._weights.source.model, self._weights.arrays())

    def save(self, path: str | Path, optimizer: StatefulOptimizer | None = None) -> None:
        """Write a checkpoint of the model and its optimizer in the format of `Trainer.save`."""
        weights = self._weights
        checkpoint.save(path, weights.checkpoint(optimizer), fingerprint(weights.source.model).graph)

    def load(self, path: str | Path, optimizer: StatefulOptimizer | None = None) -> None:
        """Continue from a checkpoint written by `save` or `Trainer.save`.

        Args:
            path: the file.
            optimizer: the optimizer whose step count, slots and loss scale are restored; None ignores them.

        Raises:
            TrainingError: the checkpoint belongs to another model, optimizer or set of parameters.
        """
        weights = self._weights
        expected = [StateVariable(name, name, "", array) for name, array in weights.checkpoint(optimizer).items()]
        omitted = () if optimizer is not None else ("slot/", "step")
        saved = checkpoint.load(path, expected, fingerprint(weights.source.model).graph, omitted=omitted)
        for name, variable in weights.variables.items():
            variable.assign(saved[f"parameter/{name}"])
        weights.running.update({path: saved[path] for path in weights.running})
        if optimizer is not None:
            optimizer.restore(saved)


@checked_arguments()
@dataclass(frozen=True, eq=False)
class ModelLoss(WithWeights, Loss):
    """The `Differentiable` loss of a model: calls compute its value, `gradients` its gradients.

    In training mode, `gradients` also updates running statistics and the random state; a call immediately before
    `gradients` uses the same random numbers. Multiples of a loss are losses, as in `loss.on(batch) / 4`.

    Attributes:
        variables: the model's parameters; assigned values apply from the next call on.
        results: loss and metrics of the last computation for this batch, by name.
    """

    variables: tuple[Variable, ...]
    _weights: Weights = field(repr=False)
    _graph: LossGraph = field(repr=False)
    _batch: Mapping[str, Array] = field(default_factory=dict, repr=False)
    _fixed_weights: Mapping[str, Array] | None = field(default=None, repr=False)
    results: dict[str, float] = field(default_factory=dict, repr=False)

    @classmethod
    @checked_arguments(options=ModelOptions)
    def of(cls, model: object, loss: str, **options: Unpack[ModelOptions]) -> ModelLoss:
        """Return the loss of a model. It runs on CUDA if available, otherwise on the CPU, with low types emulated.

        Arguments and errors are the same as for `training_step`. The default policy is mixed_float16 while the graph
        rewrite is enabled, otherwise the policy of the process.
        """
        require("ModelLoss")
        return Weights(TrainingSource.of(model, options, policies.policy_of_sessions)).loss(loss)

    @property
    def report(self) -> TrainingReport:
        """Report: the parameters with their roles, notes about the loss, and the type of each op."""
        return self._graph.report

    def on(self, batch: Mapping[str, Array], weights: Mapping[str, Array] | None = None) -> ModelLoss:
        """Return the loss of this batch.

        Args:
            batch: arrays by input name.
            weights: arrays by parameter name to compute the loss with; None uses the variables' current values.
        """
        target, arrays = self._graph.target, dict(batch)
        if target is not None and target.name in arrays:
            values = to_array(arrays[target.name], f"the target {target.name!r}")
            arrays[target.name] = converted_targets(target, values)
        return replace(self, _batch=arrays, _fixed_weights=weights, results={})

    def __call__(self) -> Array:
        """Compute the loss: a float32 scalar, shape ()."""
        self._run((), np.array(1, np.float32))
        return np.array(self.results["loss"], np.float32)

    def __float__(self) -> float:
        """Return the loss of the last computation for this batch, or compute it."""
        return self.results["loss"] if self.results else float(self())

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        """Return the float32 gradients of `seed` times the loss; None for variables of another loss.

        One forward pass computes both the gradients and `results`.
        """
        graph, running = self._graph, self._weights.running
        relevant = [v for v in variables if any(v is other for other in self.variables)]
        if not relevant:
            return [None for _ in variables]
        outputs = (*(graph.gradients[v.name] for v in relevant), *graph.buffers.values())
        results = self._run(outputs, np.asarray(seed, np.float32))
        running.update({f"{_BUFFER}{name}": np.array(results[new]) for name, new in graph.buffers.items()})
        if graph.random is not None:
            running["random"] = running["random"] * np.array(MULTIPLIERS, np.int64) % PRIME
        return [results[graph.gradients[v.name]] if any(v is other for other in relevant) else None for v in variables]

    def predict(self, batch: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the outputs of the model by name, in float32 and evaluation mode (running statistics, no dropout).

        Args:
            batch: arrays by input name, with or without targets; by default the batch of this loss.
        """
        feed = self._batch if batch is None else batch
        return self._weights.predictor(feed, self._fixed_weights or self._weights.arrays())

    def _run(self, outputs: Sequence[str], seed: Array) -> dict[str, Any]:
        graph, running = self._graph, self._weights.running
        missing = sorted({v.name for v in graph.declared.proto.graph.input} - self._batch.keys())
        if missing:
            raise TrainingError(f"the batch is missing the inputs {missing}; pass a complete batch with loss.on(batch)")
        (batch,) = as_feed([self._batch], graph.declared, graph.target)
        check_batch(graph.declared, graph.target, batch, 0)
        feeds = {**(self._fixed_weights or self._weights.arrays()), **batch, graph.seed: seed}
        feeds |= {name: running[f"{_BUFFER}{name}"] for name in graph.buffers}
        if graph.random is not None:
            feeds[graph.random] = running["random"]
        ports = {port.name for port in graph.runner.inputs}
        inputs = {name: array for name, array in feeds.items() if name in ports}
        results = graph.runner.run(inputs, (*graph.results, *outputs))
        numbers = [float(np.asarray(results[name]).reshape(())) for name in graph.results]
        self.results.clear()
        self.results.update(zip(("loss", *graph.results[1:]), numbers, strict=True))
        return results
