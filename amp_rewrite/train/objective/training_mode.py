"""Training mode: batch statistics and dropout, which an export for inference turns off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from onnx import GraphProto, NodeProto
from onnx.helper import make_attribute
from onnx.numpy_helper import from_array

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.versions import FIRST_TRAINING_MODE
from amp_rewrite.ir.view import View

_STATISTICS = {1: 3, 2: 4}
"""Outputs of a BatchNormalization in training mode, each with the input that it updates."""


def in_training(model: Model, frozen: Callable[[str], bool]) -> Model:
    """Return the model with each BatchNormalization and Dropout of its main graph in training mode.

    A BatchNormalization then also outputs its new running statistics; one whose statistics are `frozen`, by name, stays
    as it is. TrainingError for an opset whose operators have no training mode.
    """
    proto = clone(model.proto)
    view = View.of(model)
    taken = set(view.names)
    for node in proto.graph.node:
        held = node.op_type == "BatchNormalization" and any(frozen(node.input[slot]) for slot in _STATISTICS.values())
        if node.domain in ("", "ai.onnx") and node.op_type in FIRST_TRAINING_MODE and not held:
            opset = view.opsets[""]
            if opset < FIRST_TRAINING_MODE[node.op_type]:
                raise TrainingError(
                    f"the model imports ai.onnx opset {opset}, where {node.op_type} has no training mode; raise it to"
                    f" {FIRST_TRAINING_MODE[node.op_type]} or later with onnx.version_converter"
                )
            if node.op_type == "Dropout":
                _dropout(node, proto.graph, taken)
            else:
                _batch_normalization(node, taken)
    return replace(model, proto=proto)


def _batch_normalization(node: NodeProto, taken: set[str]) -> None:
    kept = [a for a in node.attribute if a.name != "training_mode"]
    refill(node, "attribute", [*kept, make_attribute("training_mode", 1)])
    del node.output[3:]  # opsets before 14 have more outputs, unused at inference
    for slot, source in _STATISTICS.items():
        if slot == len(node.output):
            node.output.append(claimed(f"{node.input[source]}/next", taken))


def _dropout(node: NodeProto, graph: GraphProto, taken: set[str]) -> None:
    on = claimed("training", taken)
    graph.initializer.append(from_array(np.array(True), on))
    node.input.extend([""] * (3 - len(node.input)))
    node.input[2] = on


def statistics(nodes: Iterable[NodeProto], initializers: Iterable[str]) -> dict[str, str]:
    """Return the running statistics updated in training: names of new values by initializer.

    TrainingError for an initializer that two BatchNormalizations update.
    """
    known = set(initializers)
    updated: dict[str, str] = {}
    for node in nodes:
        if node.op_type != "BatchNormalization" or len(node.output) < 2:
            continue
        for slot, source in _STATISTICS.items():
            name = node.input[source]
            if name in updated:
                raise TrainingError(
                    f"two BatchNormalizations update the statistics {name!r}; export the model with separate ones"
                )
            if name in known and slot < len(node.output) and node.output[slot]:
                updated[name] = node.output[slot]
    return updated


def statistics_of(model: Model) -> list[str]:
    """Return the initializers that hold running statistics."""
    known = {tensor.name for tensor in model.proto.graph.initializer}
    norms = [node for node in model.proto.graph.node if node.op_type == "BatchNormalization"]
    return [name for node in norms for slot in _STATISTICS.values() if (name := node.input[slot]) in known]
