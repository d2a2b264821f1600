"""onnx's shape inference, in parts where a graph holds many ops with bodies.

onnx copies all types around a body once for each body, so its time grows with their square. Source: 4 000 If nodes take
39 s at once and 2 s in parts, onnx 1.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx.shape_inference
from onnx import ModelProto, NodeProto, ValueInfoProto

from amp_rewrite.files.protos import clone
from amp_rewrite.ir.graphs import all_graphs, names_read

MADE_UP = "unk__"
"""The prefix of names that inference invents: the size of such a name may have another name at the next run."""
_OWNERS = ("If", "Loop", "Scan", "SequenceMap")
_MOST = 64
"""Ops with bodies in one part."""


def infer_shapes(model: ModelProto, serialized: bytes | None = None, **options: Any) -> ModelProto:
    """Return a copy of a model with the shapes that onnx infers; `options` and errors are onnx's.

    `serialized`: the bytes of the model, if the caller has them. Values of tensors are not propagated from one part to
    the next.
    """
    if sum(node.op_type in _OWNERS for node in model.graph.node) <= _MOST:
        return onnx.shape_inference.infer_shapes(serialized or model, **options)
    result = clone(model)
    graph = result.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    known = {port.name: port for port in (*graph.value_info, *graph.output, *graph.input)}
    inferred: dict[str, ValueInfoProto] = {}
    del graph.node[:]
    for number, nodes in enumerate(_parts(model.graph.node)):
        part = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
        part.graph.name = graph.name
        part.graph.node.extend(nodes)
        made = {name for node in nodes for name in node.output}
        read = set(names_read(nodes)) - made
        part.graph.initializer.extend(tensors[name] for name in sorted(read & tensors.keys()))
        part.graph.input.extend(known[name] for name in sorted(read & known.keys()))
        part.graph.value_info.extend(known[name] for name in sorted(made & known.keys()))
        done = onnx.shape_inference.infer_shapes(part, **options)
        _rename_made_up(done, f"{MADE_UP}{number}_")
        graph.node.extend(done.graph.node)
        inferred.update((port.name, port) for port in done.graph.value_info)
        known.update(inferred)
    outputs = {port.name: port for port in graph.output}
    del graph.value_info[:]
    graph.value_info.extend(port for name, port in inferred.items() if name not in outputs)
    for name in outputs.keys() & inferred.keys():
        outputs[name].type.CopyFrom(inferred[name].type)
    return result


def _parts(nodes: Sequence[NodeProto]) -> Iterator[list[NodeProto]]:
    """Yield nodes in order, with a limited number of ops with bodies in each part."""
    part: list[NodeProto] = []
    owners = 0
    for node in nodes:
        part.append(node)
        owners += node.op_type in _OWNERS
        if owners == _MOST:
            yield part
            part, owners = [], 0
    if part:
        yield part


def _rename_made_up(model: ModelProto, prefix: str) -> None:
    """Give names that inference invented another prefix: each part counts from zero."""
    for graph in all_graphs(model.graph):
        for port in (*graph.input, *graph.value_info, *graph.output):
            for dim in port.type.tensor_type.shape.dim:
                if dim.dim_param.startswith(MADE_UP) and not dim.dim_param[len(MADE_UP) :].count("_"):
                    dim.dim_param = prefix + dim.dim_param[len(MADE_UP) :]
