"""The opset of gradients: a model that looks up embeddings is moved to the first one whose ScatterND adds."""

from __future__ import annotations

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.graphs import all_graphs
from amp_rewrite.ir.versions import FIRST_SCATTER_ADD
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.opset import moved_to

_REPEATING = {"Gather", "GatherElements", "GatherND", "Pad", "GridSample", "MaxPool", "MaxUnpool"}
"""Ops that may read an element several times, so that its gradients are added."""


def for_gradients(model: Model) -> tuple[Model, tuple[str, ...]]:
    """Return the model at an opset that has the ops of its gradients, with a note if it was moved there.

    A model that cannot be moved stays; the error comes from the gradient that is not possible.
    """
    opset = next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), FIRST_SCATTER_ADD)
    if opset >= FIRST_SCATTER_ADD:
        return model, ()
    kinds = {node.op_type for graph in all_graphs(model.proto.graph) for node in graph.node if not node.domain}
    if not kinds & _REPEATING:
        return model, ()
    try:
        moved = moved_to(View.of(model), FIRST_SCATTER_ADD)
    except ModelError:
        return model, ()
    if isinstance(moved, str):
        return model, ()
    note = f"the step is at ai.onnx opset {FIRST_SCATTER_ADD}, whose ScatterND adds gradients; the model at {opset}"
    return moved.model, (note,)
