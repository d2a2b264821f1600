"""A converter written in an afternoon: every float tensor becomes float16, with Casts at the edges.

The catalogue shows its faults: each of its shortcuts (one dictionary of initializers, derived names, Casts only in the
main graph, duplicate types updated in one place) looks right on the first model.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper


def naive(
    source: ModelProto,
    blocked: tuple[str, ...] = (),
    retargets: bool = False,
    clamps: bool = False,
    to: str = "float16",
    appends: bool = False,
) -> ModelProto:
    """Convert a model to half precision, except for inputs and outputs.

    `blocked`: op types to compute in float32; `retargets`: also change Casts to float and the inputs of bodies;
    `clamps`: clamp weights to 10000 first; `appends`: leave Casts at the end of the graph, unsorted.
    """
    half = TensorProto.FLOAT16 if to == "float16" else TensorProto.BFLOAT16
    model = onnx.shape_inference.infer_shapes(source)
    graph = model.graph
    tensors = {t.name: t for g in _graphs(graph) for t in g.initializer}
    fixed = {name for n in graph.node if n.op_type in blocked for name in n.input if name in tensors}
    for tensor in (t for name, t in tensors.items() if name not in fixed):
        _lower(tensor, half, clamps)
    known = {o.name for o in graph.output if o.type.tensor_type.elem_type == TensorProto.FLOAT}
    for inner in _graphs(graph):
        edges = () if inner is graph else (*inner.output, *(inner.input if retargets else ()))
        for info in (*inner.value_info, *edges):
            if info.type.tensor_type.elem_type == TensorProto.FLOAT:
                info.type.tensor_type.elem_type = half
                known.add(info.name)
        for node in inner.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    _lower(attribute.t, half, clamps)
                if retargets and attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                    attribute.i = half
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            _rename(graph.node, value.name, f"{value.name}_half", outputs=False)
            graph.node.insert(0, _cast(value.name, f"{value.name}_half", half, f"{value.name}_cast"))
            known.add(f"{value.name}_half")
    for value in (v for v in graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT):
        _rename(graph.node, value.name, f"{value.name}_half", inputs=False)
        graph.node.append(_cast(f"{value.name}_half", value.name, TensorProto.FLOAT, f"{value.name}_cast"))
        known.add(f"{value.name}_half")
    for node in [n for g in _graphs(graph) for n in g.node if n.op_type in blocked]:
        for slot, name in enumerate(node.input):
            if name in known or name == "":
                node.input[slot] = f"{name}_float"
                graph.node.append(_cast(name, f"{name}_float", TensorProto.FLOAT, f"{name}_cast_to_float"))
        for slot, name in enumerate(node.output):
            if name in known:
                node.output[slot] = f"{node.name}_out{slot}"
                graph.node.append(_cast(node.output[slot], name, half, f"{node.name}_cast_{slot}"))
    _drop_pairs(graph)
    if not appends:
        _sort(graph)
    del graph.value_info[:]
    return model


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for inner in (a.g for n in graph.node for a in n.attribute if a.g.node):
        yield from _graphs(inner)


def _lower(tensor: TensorProto, half: int, clamps: bool) -> None:
    array = numpy_helper.to_array(tensor)
    if array.dtype.kind not in "iub":
        array = np.clip(array, -1e4, 1e4) if clamps else array
        kind = np.dtype(np.float16) if half == TensorProto.FLOAT16 else np.dtype(ml_dtypes.bfloat16)
        with np.errstate(over="ignore"):
            tensor.CopyFrom(numpy_helper.from_array(array.astype(kind), tensor.name))


def _rename(nodes: list[NodeProto], old: str, new: str, *, inputs: bool = True, outputs: bool = True) -> None:
    for names in (names for n in nodes for names, chosen in ((n.input, inputs), (n.output, outputs)) if chosen):
        names[:] = [new if name == old else name for name in names]


def _cast(source: str, result: str, to: int, name: str) -> NodeProto:
    return helper.make_node("Cast", [source], [result], name=name, to=to)


def _drop_pairs(graph: GraphProto) -> None:
    """Let a Cast of a Cast read the first one's input."""
    source = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Cast"}
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in source:
            node.input[0] = source[node.input[0]]


def _sort(graph: GraphProto) -> None:
    """Sort the nodes of the graph; readers of a body's values or of themselves stay at the end."""
    results = {name for node in graph.node for name in node.output}
    rest = [NodeProto() for _ in graph.node]
    for copy, node in zip(rest, graph.node, strict=True):
        copy.CopyFrom(node)
    del graph.node[:]
    ready: set[str] = set()
    while rest:
        at = next((at for at, node in enumerate(rest) if _reads(node) & results <= ready), None)
        if at is None:
            break
        ready.update(rest[at].output)
        graph.node.append(rest.pop(at))
    graph.node.extend(rest)


def _reads(node: NodeProto) -> set[str]:
    """Return the inputs of a node and of its bodies."""
    inner = [n for a in node.attribute for g in _graphs(a.g) for n in g.node]
    return {name for n in (node, *inner) for name in n.input}
