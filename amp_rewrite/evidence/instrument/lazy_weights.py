"""Weights stored in another type than the graph needs: they stay in their files, and the runtime casts them."""

from __future__ import annotations

from dataclasses import replace

from onnx import NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.files.tensors import is_stub, make_stub, source, without_values
from amp_rewrite.ir.builder import new_cast
from amp_rewrite.ir.names import claimed
from amp_rewrite.runtime.gpu import main_memory


def casting_in_graph(model: Model) -> Model:
    """Return the model with pending casts of weights as Cast nodes, if these give the same numbers.

    A pending cast must finish, with its result in memory or in a file, before the model opens; a node casts the weight
    when it is needed. A Cast gives infinity where a pending cast saturates, so weights that saturate keep their pending
    cast. O(bytes of weights to round), streamed.
    """
    proto = clone(model.proto)
    inputs = {v.name for v in proto.graph.input}
    names = inputs.union((t.name for t in proto.graph.initializer), *(node.output for node in proto.graph.node))
    casts: list[NodeProto] = []
    for tensor in proto.graph.initializer:
        stored = _stored(model, tensor) if tensor.name not in inputs else None
        if stored is not None:
            stored.name = claimed(stored.name, names)
            casts.append(new_cast(stored.name, tensor.name, DType(tensor.data_type), name=f"{tensor.name}/cast"))
            tensor.CopyFrom(stored)
    refill(proto.graph, "node", [*casts, *proto.graph.node])
    return replace(model, proto=proto)


def opening(model: Model) -> Model:
    """Return the model in the form that opens with the least work.

    Pending casts become Cast nodes, which onnxruntime folds: their results are held in memory, while otherwise the
    whole model is written to a temporary folder. This applies to models below a quarter of the machine's memory, since
    two may be open; a larger one is better in a file, whose pages the system can release.
    """
    return casting_in_graph(model) if model.nbytes <= main_memory() // 4 else model


def _stored(model: Model, tensor: TensorProto) -> TensorProto | None:
    """Return the weight as stored in its file if a Cast node can replace its pending cast, else None."""
    if not is_stub(tensor):
        return None
    place, to = source(tensor), DType.of(tensor.data_type)
    if to is None or place.dtype is to or place.exponent or not (to.floating and place.dtype.floating):
        return None
    stored = without_values(tensor)
    make_stub(stored, place)
    stored.name, stored.data_type = f"{tensor.name}/stored", place.dtype.code
    return None if to.low and model.fit(stored, to).overflow else stored
