"""Training steps in .onnx files: the initial state as default values of inputs, what a loop needs in the metadata.

Any runtime can run such a file: inputs that are not fed take their defaults, and each output `new/<name>` is the
next input `<name>`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx.numpy_helper import from_array

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.files.store import Progress
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.settings.loss_scale import serialize
from amp_rewrite.train.step.step import TrainingStep

KEY = "amp_rewrite.training_step"
VERSION = 1
_LEFT_OUT = ("model", "forward", "report", "owner")
"""Fields of a step that the metadata lack, or spell in another way."""


def save_step(
    step: TrainingStep,
    path: str | Path,
    *,
    overwrite: bool = False,
    external_data: bool | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a step with its initial state, atomically; see `Model.save`.

    Args:
        step: the step.
        path: the file to write.
        overwrite: replace an existing file.
        external_data: as `Model.save` takes it.
        progress: called as `progress(done, total)` with bytes.

    Raises:
        TrainingError: the model has an IR version below 4, which has no default values.

    Example:
        >>> from amp_rewrite.train import save_step, training_step
        >>> save_step(training_step("model.onnx", loss="cross_entropy(probability, label)"), "step.onnx")
    """
    if step.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        raise TrainingError(
            f"the model has IR version {step.model.proto.ir_version}, in which inputs cannot have default values; raise"
            f" it to {FIRST_IR_WITH_FREE_INITIALIZERS}"
        )
    proto = clone(step.model.proto)
    rate = np.array(step.optimizer.rate_at(next(int(v.initial) for v in step.state if v.name == "step")), np.float32)
    defaults = {**step.initial_state(), step.learning_rate: rate}
    proto.graph.initializer.extend(from_array(array, name) for name, array in defaults.items())
    # the model may have been a step itself
    refill(proto, "metadata_props", [p for p in proto.metadata_props if p.key != KEY])
    proto.metadata_props.add(key=KEY, value=json.dumps(_described(step)))
    replace(step.model, proto=proto).save(path, overwrite=overwrite, external_data=external_data, progress=progress)


def _described(step: TrainingStep) -> dict[str, Any]:
    described = {name: value for name, value in vars(step).items() if name not in _LEFT_OUT}
    return {
        "version": VERSION,
        **described,
        "state": [[s.name, s.input, s.output] for s in step.state],
        "target": None if step.target is None else asdict(step.target),
        "optimizer": serialize(step.optimizer),
        "loss_scale": None if step.loss_scale is None else serialize(step.loss_scale),
        "policy": step.policy.name,
    }
