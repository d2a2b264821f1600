"""Weights of other types than the graph wants, left in their files: the runtime maps them and casts them itself."""

from __future__ import annotations

import os
from dataclasses import replace

from onnx import NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.files.tensors import is_stub, make_stub, source, without_values
from amp_rewrite.ir.builder import new_cast
from amp_rewrite.ir.names import claimed


def casting_in_graph(model: Model) -> Model:
    """The model with pending casts of its weights as Cast nodes, where those give the same numbers.

    A pending cast would have to be done, and its result held in memory or written to a file, before the model can be
    opened; a node does it when the weight is needed. A Cast gives infinity where a pending cast saturates: weights
    in which that happens are left as they are. O(bytes of weights that are to be rounded), streamed.
    """
    proto = clone(model.proto)
    names = {v.name for v in proto.graph.input} | {t.name for t in proto.graph.initializer}
    names |= {name for node in proto.graph.node for name in node.output}
    casts: list[NodeProto] = []
    for tensor in proto.graph.initializer:
        stored = _stored(model, tensor)
        if stored is not None and not any(v.name == tensor.name for v in proto.graph.input):
            result = tensor.name
            stored.name = claimed(stored.name, names)
            casts.append(new_cast(stored.name, result, DType(tensor.data_type), name=f"{result}/cast"))
            tensor.CopyFrom(stored)
    refill(proto.graph, "node", [*casts, *proto.graph.node])
    return replace(model, proto=proto)


def opening(model: Model) -> Model:
    """The same model in the form that opens with least work.

    Pending casts become Cast nodes, which onnxruntime folds: their results are then held in memory, where otherwise
    the whole model is written to a temporary folder. Only for a model of less than a quarter of this machine's memory,
    for there may be two; a larger one is better in a file, out of which the system can give pages back.
    """
    return casting_in_graph(model) if model.nbytes <= _memory() // 4 else model


def _memory() -> int:
    """The bytes of memory that this machine has; 0 where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 0


def _stored(model: Model, tensor: TensorProto) -> TensorProto | None:
    """The weight as it lies in its file, if it has a pending cast that a Cast node can stand for."""
    if not is_stub(tensor):
        return None
    place, wanted = source(tensor), DType.of(tensor.data_type)
    if wanted is None or place.dtype is wanted or not (wanted.floating and place.dtype.floating):
        return None
    stored = without_values(tensor)
    make_stub(stored, place)
    stored.name, stored.data_type = f"{tensor.name}/stored", place.dtype.code
    if wanted.low and model.fit(stored, wanted).overflow:
        return None
    return stored
