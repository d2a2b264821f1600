"""Inputs of a step: those that a runner reads, and the declarations of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto

from amp_rewrite.files.model import Model
from amp_rewrite.runtime.buffers import BufferedRunner
from amp_rewrite.settings.loss_scale import Array
from amp_rewrite.train.step.step import TrainingStep


def read_by(runner: BufferedRunner, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the feeds that a runner reads."""
    return {name: array for name, array in feeds.items() if name in runner.inputs}


def batch_model(step: TrainingStep) -> Model:
    """Return the step with only its batch inputs, to check batches against."""
    declared = {v.name: v for v in step.model.proto.graph.input}
    proto = ModelProto(ir_version=step.model.proto.ir_version, opset_import=step.model.proto.opset_import)
    proto.graph.input.extend(declared[name] for name in step.batch)
    return Model(proto)
