"""Inputs of a step: those that a runner reads, and checks of a batch: sizes of named dimensions, ranges of targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from onnx import ModelProto

from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.buffers import BufferedRunner
from amp_rewrite.train.objective.prediction import CLASSES, LOGARITHMS, SHARES, YES_OR_NO, TargetInput

_RANGES = {
    SHARES: (0.0, math.inf, "at least 0; kl_divergence takes logarithms with log_target=True"),
    LOGARITHMS: (-math.inf, 0.0, "at most 0; leave log_target out for numbers that are no logarithms"),
    YES_OR_NO: (0.0, 1.0, "from 0 to 1; write no as 0 and yes as 1"),
}
"""The least and the largest number of targets of a kind, in words with the way out."""
_ROUNDING = 1e-5
"""How far rounding may carry a target outside its range."""


def read_by(runner: BufferedRunner, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the feeds that a runner reads."""
    return {name: array for name, array in feeds.items() if name in runner.inputs}


def batch_model(model: Model, batch: Iterable[str]) -> Model:
    """Return a model of these inputs alone, to check batches against."""
    declared = {v.name: v for v in model.proto.graph.input}
    proto = ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
    proto.graph.input.extend(declared[name] for name in batch)
    return Model(proto)


def batches(data: object, declared: Model, target: TargetInput | None) -> Feed:
    """Return data as batches of a step: they may change, have NaN, and class indices may keep the axis of the classes.

    `declared`: a model of the inputs of a batch.
    """
    axes = {}
    if target is not None and target.kind == CLASSES and target.axis is not None:
        axes = {target.name: target.axis}
    return Feed.of(data, declared, allow_nonfinite=True, allow_change=True, extra_axes=axes)


def whole_classes(name: str, values: Array) -> Array:
    """Return class indices as int64. TrainingError for numbers that are not whole, which would be truncated."""
    if values.dtype.kind == "f":
        strange = values[values % 1 != 0]
        if strange.size:
            raise TrainingError(
                f"the targets {name!r} have {strange.flat[0]:g}, but the loss takes class indices, which are whole;"
                " round them yourself, or use a loss of numbers such as mean_squared_error"
            )
        return values.astype(np.int64)
    return values.astype(np.int64) if values.dtype == bool else values


def check_batch(declared: Model, target: TargetInput | None, batch: Batch, number: int) -> None:
    """Raise FeedError if a named dimension has two sizes, TrainingError if a target is out of range.

    The backward pass assumes one size, and could be wrong. `declared`: a model of the inputs of a batch; `number`: the
    number of the batch, for messages.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for formal in declared.proto.graph.input:
        dims = formal.type.tensor_type.shape.dim
        for dim, size in zip(dims, batch[formal.name].shape, strict=False):
            before, where = sizes.setdefault(dim.dim_param, (size, formal.name)) if dim.dim_param else (size, "")
            if before != size:
                raise FeedError(
                    f"batch {number} has size {before} for {dim.dim_param!r} in {where!r}, but {size} in"
                    f" {formal.name!r}; use inputs of one size, or export the model with two dimension names"
                )
    if target is not None:
        _check_range(target, batch[target.name], number)


def _check_range(target: TargetInput, classes: Array, number: int) -> None:
    """Raise TrainingError if a class is out of range, and for a share of a class that is none."""
    if target.kind in _RANGES:
        least, most, told = _RANGES[target.kind]
        strange = classes[(classes < least - _ROUNDING) | (classes > most + _ROUNDING)]
        if strange.size:
            raise TrainingError(
                f"input {target.name!r} of batch {number} has {strange.flat[0]:g}, but its targets are {target.kind},"
                f" {told}"
            )
    if target.classes is None:
        return
    wrong = classes[((classes < 0) | (classes >= target.classes)) & (classes != target.ignored)]
    if wrong.size:
        raise TrainingError(
            f"input {target.name!r} of batch {number} has class {int(wrong.flat[0])}, but the model has classes 0"
            f" to {target.classes - 1}; correct the targets"
        )
