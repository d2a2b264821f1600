"""The loss of an ONNX model as something that knows its gradients, for optimizers in TensorFlow's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, cuda_opens
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train.assembly import declared_scalar, lowered, policy_of, with_inputs, with_outputs
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.gradients import backward
from amp_rewrite.train.keras.optimizer import Variable
from amp_rewrite.train.loss_scale import Array, Gradient
from amp_rewrite.train.losses import objective
from amp_rewrite.train.parameters import trained


@dataclass(frozen=True, eq=False)
class ModelLoss:
    """A `Differentiable` loss: calling it gives its value, and its gradients are computed from any seed.

    `variables` hold the model's parameters; a change of one counts from the next call on. `on` gives the same
    loss of another batch.
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
        """The loss of a model; arguments and errors are those of `training_step`.

        Runs on CUDA where it opens, else on the CPU, where a low policy is emulated.
        """
        chosen = policy_of(policy)
        source = Model.load(model, folder=folder)
        aim = objective(source, loss)
        names = trained(View.of(aim.model), aim.loss, parameters, freeze)
        ready, initial, _ = with_inputs(aim.model, aim.loss, names)
        b = Builder.of(ready)
        seed = b.input("seed", DType.FLOAT, ())
        found = backward(b, {aim.loss: seed}, names)
        grads = {name: b.output(f"{name}_grad", DType.FLOAT, b.shape(name), source=found[name]) for name in names}
        whole = with_outputs(b.model(), [declared_scalar(aim.loss, aim.shape)], tuple(grads.values()))
        made, report = lowered(whole, chosen, {})
        on_cuda = cuda_opens()
        runner = Runner.open(
            emulate(made) if report is not None and not on_cuda else made, providers=(CUDA, CPU) if on_cuda else (CPU,)
        )
        return cls(tuple(Variable(initial[name], name) for name in names), runner, aim.loss, seed, grads)

    def on(self, batch: Mapping[str, Array]) -> ModelLoss:
        """The loss of this batch; the variables are the same."""
        return replace(self, _batch=dict(batch))

    def __call__(self) -> Array:
        """The loss: float32, of no dimensions."""
        return np.asarray(self._run([self._loss], np.array(1, np.float32))[self._loss]).reshape(())

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        """The gradients of `seed` times the loss, float32; None for variables of something else."""
        own = [v for v in variables if any(v is mine for mine in self.variables)]
        found = self._run([self._grads[v.name] for v in own], np.asarray(seed, np.float32)) if own else {}
        return [found.get(self._grads.get(v.name, "")) if v in own else None for v in variables]

    def _run(self, outputs: Sequence[str], seed: Array) -> dict[str, Any]:
        known = {port.name for port in self._runner.inputs}
        values = {v.name: v.numpy() for v in self.variables}
        if not known - values.keys() - {self._seed} <= self._batch.keys():
            missing = sorted(known - values.keys() - {self._seed} - self._batch.keys())
            raise TrainingError(f"the loss has no batch for {missing}; use loss.on(batch)")
        return self._runner.run({**values, **self._batch, self._seed: seed}, outputs)
