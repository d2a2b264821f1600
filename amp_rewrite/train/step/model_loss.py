"""The loss of an ONNX model with its gradients, for the optimizers of `keras`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.gradients import backward
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.objective.losses import objective
from amp_rewrite.train.objective.module_parameters import ModuleParameters
from amp_rewrite.train.objective.parameters import Choice, trained
from amp_rewrite.train.objective.repeated_rows import with_one_row
from amp_rewrite.train.step.assembly import lowered, policy_of, with_inputs, with_outputs
from amp_rewrite.train.update.loss_scale import Array, Gradient


@dataclass(frozen=True, eq=False)
class ModelLoss:
    """A `Differentiable` loss of a model: call it for its value, or compute its gradients from a seed.

    Attributes:
        variables: the model's parameters; an assigned value is used from the next call on.
    """

    variables: tuple[Variable, ...]
    _runner: Runner = field(repr=False)
    _loss: str
    _seed: str
    _grads: Mapping[str, str]
    _batch: Mapping[str, Array] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        model: object,
        loss: str,
        *,
        parameters: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] = (),
        policy: str | Policy | None = "float32",
        folder: str | Path | None = None,
    ) -> ModelLoss:
        """Return the loss of a model. It runs on CUDA if available, else on the CPU, where a low policy is emulated.

        Args:
            model: as `training_step` takes it.
            loss: as `training_step` takes it.
            parameters: as `training_step` takes them.
            freeze: as `training_step` takes it.
            policy: as `training_step` takes it.
            folder: where the external data of a ModelProto lies.

        Raises:
            AmpRewriteError: as `training_step` raises it.
        """
        require("ModelLoss")
        policy = policy_of(policy)
        source = Model.load(model, folder=folder)
        aim = objective(source, loss)
        choice = Choice(parameters, freeze, ModuleParameters.of(model, source))
        selection = trained(View.of(aim.model), aim.loss, choice)
        names = selection.names
        ready, initial, _ = with_inputs(with_one_row(aim.model, selection.one_row), aim.loss, names)
        b = Builder.of(ready)
        seed = b.input("seed", DType.FLOAT, ())
        computed = backward(b, {aim.loss: seed}, names)
        grads = {name: b.output(f"{name}_grad", DType.FLOAT, b.shape(name), source=computed[name]) for name in names}
        whole = with_outputs(b.model(), [declared(aim.loss, DType.FLOAT, aim.shape)], tuple(grads.values()))
        result, report = lowered(whole, policy, {})
        on_cuda = cuda_opens()
        if report is not None and not on_cuda:
            result = emulate(result)
        runner = Runner.open(result, SessionOptions(providers=(CUDA, CPU) if on_cuda else (CPU,)))
        return cls(tuple(Variable(initial[name], name) for name in names), runner, aim.loss, seed, grads)

    def on(self, batch: Mapping[str, Array]) -> ModelLoss:
        """Return the loss of this batch, with the same variables.

        Args:
            batch: arrays by input name.
        """
        return replace(self, _batch=dict(batch))

    def __call__(self) -> Array:
        """Return the loss: a float32 scalar, shape ()."""
        return np.asarray(self._run([self._loss], np.array(1, np.float32))[self._loss]).reshape(())

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        """Return the float32 gradients of `seed` times the loss; None for variables of another loss.

        Args:
            variables: those to differentiate by.
            seed: gradient of the result with respect to the loss.
        """
        own = [v for v in variables if any(v is mine for mine in self.variables)]
        grads = self._run([self._grads[v.name] for v in own], np.asarray(seed, np.float32)) if own else {}
        return [grads.get(self._grads.get(v.name, "")) if v in own else None for v in variables]

    def _run(self, outputs: Sequence[str], seed: Array) -> dict[str, Any]:
        values = {v.name: v.numpy() for v in self.variables}
        inputs = {port.name for port in self._runner.inputs}
        missing = sorted(inputs - values.keys() - {self._seed} - self._batch.keys())
        if missing:
            raise TrainingError(f"the batch lacks the inputs {missing}; pass a batch with loss.on(batch)")
        return self._runner.run({**values, **self._batch, self._seed: seed}, outputs)
