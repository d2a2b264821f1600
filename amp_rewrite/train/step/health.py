"""The end of a training that did not train: all steps skipped, a scale at its least, or weights of NaN."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.builder import declared
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.settings.loss_scale import MINIMUM, DynamicLossScale
from amp_rewrite.train.step.assembly import with_outputs
from amp_rewrite.train.step.step import TrainingStep


@dataclass
class Health:
    """What a call of `fit` has to warn of. `applied`: the first bad gradient of a nonfinite step that was applied."""

    trainer: Any
    applied: str = ""

    def __post_init__(self) -> None:
        self._batch: Batch | None = None
        self._start = self._before = (self.trainer.steps, self.trainer.skipped, self.trainer.nonfinite)
        self._last_skipped = False

    def see(self, batch: Batch) -> None:
        """Look at the trainer after a run."""
        trainer, (_, skipped, nonfinite) = self.trainer, self._before
        self._last_skipped = trainer.skipped > skipped
        if trainer.nonfinite > nonfinite and not self._last_skipped and not self.applied:
            self.applied = trainer.diagnosis(batch, before=True) or "none that is left"
        self._batch, self._before = batch, (trainer.steps, trainer.skipped, trainer.nonfinite)

    def warn(self, skipped: int) -> None:
        """Warn once if nothing was learned; a single skipped step only looks for a scale."""
        trainer = self.trainer
        if self._batch is None:
            return
        if self.applied and any(np.isnan(array).any() for array in trainer.get_weights().values()):
            text = (
                f"weights are NaN, since steps with nonfinite gradients were applied: first that of {self.applied}; use"
                " a dynamic loss scale, which skips such steps, or a smaller learning rate, and look for NaN in data"
            )
        elif skipped > 1 and (trainer.steps == self._start[0] or (self._last_skipped and self._at_least)):
            bad = trainer.diagnosis(self._batch, before=False) or "one that the last batch does not show"
            what = "all steps" if trainer.steps == self._start[0] else f"{skipped} steps, and the last one,"
            text = (
                f"{what} were skipped, because gradients are not finite: first that of {bad}; the loss scale is"
                f" {trainer.loss_scale:g}. {self._way_out}"
            )
        else:
            return
        warnings.warn(text, UserWarning, stacklevel=4)

    @property
    def _at_least(self) -> bool:
        scale = self.trainer.step.loss_scale
        return isinstance(scale, DynamicLossScale) and self.trainer.loss_scale <= np.float32(scale.minimum)

    @property
    def _way_out(self) -> str:
        scale = self.trainer.step.loss_scale
        nan = "look for NaN in data, weights and loss (0 / 0, log 0) with policy='float32'"
        if not self._at_least:
            return f"Train for more steps, until the scale fits, or {nan}"
        if isinstance(scale, DynamicLossScale) and scale.minimum == MINIMUM:
            return f"Let it fall below 1 with loss_scale=DynamicLossScale(minimum=2**-14), or {nan}"
        return f"Scale the loss or its targets down, or {nan}"


def first_bad_gradient(step: TrainingStep, model: Model, options: SessionOptions, feeds: Mapping[str, Array]) -> str:
    """Return the first gradient, on the way back from the loss, that is not finite, in words; "" if all are.

    `model`: that of the step as it runs.
    """
    gradients = _gradients(step, model)
    shapes = {s.input: s.initial.shape for s in step.state}
    outputs = [declared(value, DType.FLOAT, shapes[name]) for name, value in gradients.items()]
    runner = Runner.open(with_outputs(model, outputs, ()), options)
    ports = {port.name for port in runner.inputs}
    found = runner.run({name: array for name, array in feeds.items() if name in ports}, tuple(gradients.values()))
    for name, value in gradients.items():
        array = np.asarray(found[value])
        if not np.isfinite(array).all():
            return f"{name!r} (shape {list(array.shape)}) with {'NaN' if np.isnan(array).any() else 'infinity'}"
    return ""


def _gradients(step: TrainingStep, model: Model) -> dict[str, str]:
    """Return the tested gradients by parameter, the last parameter first, as on the way back.

    The test of a step adds up g - g over all gradients.
    """
    nodes = model.proto.graph.node
    producers = {name: place for place, node in enumerate(nodes) for name in node.output}

    def before(name: str, op_type: str) -> str:
        while nodes[producers[name]].op_type != op_type:
            name = nodes[producers[name]].input[0]
        return name

    test = nodes[producers[before(step.finite, "Equal")]].input[0]
    sums = nodes[producers[test]].input if nodes[producers[test]].op_type == "Sum" else [test]
    tested = [nodes[producers[before(one, "Sub")]].input[0] for one in sums]
    return dict(reversed(list(zip(step.parameters, tested, strict=True))))
