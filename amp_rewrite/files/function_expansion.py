"""The size of a model whose local functions are inlined, computed before anything inlines or infers through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import ModelProto, NodeProto

from amp_rewrite.errors import ModelError

_DEEPEST = 100
"""Functions that call each other; onnx's inliner refuses longer chains, too."""
_LARGEST, _GROWTH = 200_000, 20
"""Nodes, or KiB if nodes are larger: of any inlined model, and per node of the file."""

_Name = tuple[str, str, str]


def check_expansion(proto: ModelProto, name: str) -> None:
    """Raise ModelError if the local functions of a model call each other without end, or inlined exceed any use.

    Thirty functions that call the next one twice are 2 kB, and a billion nodes. O(nodes).
    """
    if not proto.functions:
        return
    local = {(f.domain, f.name, f.overload): f for f in proto.functions}
    known: dict[_Name, int] = {}

    def size(nodes: Iterable[NodeProto], depth: int) -> int:
        if depth > _DEEPEST:
            raise ModelError(
                f"{name}: its local functions call each other in a circle, or more than {_DEEPEST} deep; export it"
                " again"
            )
        total = 0
        for node in all_nodes(nodes):
            called = node.domain, node.op_type, node.overload
            if called in local and called not in known:
                known[called] = size(local[called].node, depth + 1)
            total += 1 + (node.ByteSize() >> 10) + known.get(called, 0)
        return total

    own = sum(1 + (node.ByteSize() >> 10) for f in (proto.graph, *proto.functions) for node in all_nodes(f.node))
    inlined = size(proto.graph.node, 0)
    if inlined > _LARGEST + _GROWTH * own:
        raise ModelError(
            f"{name}: its local functions, inlined, are {inlined:.3g} nodes, of {own} in the file, as in no exported"
            " model; export it again"
        )


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes and the nodes of their bodies."""
    for node in nodes:
        yield node
        for a in node.attribute:
            for graph in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                yield from all_nodes(graph.node)
