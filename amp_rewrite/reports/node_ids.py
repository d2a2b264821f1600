"""Node ids of Model Explorer: those that its ONNX adapter (`model-explorer-onnx`) gives to the nodes of a file.

The adapter names what has no name, renames doubles, puts the branches of an If beside it, and shows the bodies of other
ops of the main graph, and local functions, as graphs of their own. It shows no body inside such a body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from amp_rewrite.files.protos import bodies
from amp_rewrite.ir.schema import normal_domain

_NAMELESS = "node"
_NO_GRAPH_NAME = "<main>"


class Place(NamedTuple):
    """A node of a file and where Model Explorer shows it: the ids of its graph and of its node there."""

    node: NodeProto
    graph: str
    id: str


class _Named(NamedTuple):
    """A node, its name, and its bodies by attribute."""

    node: NodeProto
    name: str
    bodies: Sequence[tuple[str, Sequence[_Named]]]


def places(proto: ModelProto) -> Iterator[Place]:
    """Yield the nodes that Model Explorer shows, in the order of the file, those of local functions last. O(nodes)."""
    main = proto.graph.name if proto.graph.HasField("name") else _NO_GRAPH_NAME
    yield from _shown(_named(proto.graph, Counter()), main)
    for function in proto.functions:
        graph = function_graph(function.domain, function.name, function.overload)
        yield from (Place(node, graph, name) for node, name, _ in _named(function, Counter()))


def function_graph(domain: str, name: str, overload: str = "") -> str:
    """Return the id of the graph that shows a local function."""
    return f"[function]{normal_domain(domain)}::{name}" + (f"::{overload}" if overload else "")


def _named(graph: GraphProto | FunctionProto, counter: Counter[str]) -> Sequence[_Named]:
    """Return the nodes of a graph with names that are unique in it; the graph and its bodies share a counter."""
    used: set[str] = set()
    named: list[_Named] = []
    for node in graph.node:
        name = wished = node.name or _NAMELESS
        while name in used:
            counter[wished] += 1
            name = f"{wished}_{counter[wished]}"
        used.add(name)
        named.append(_Named(node, name, [(attribute, _named(body, counter)) for attribute, body in bodies(node)]))
    return named


def _shown(nodes: Sequence[_Named], graph: str, before: str = "", *, main: bool = True) -> Iterator[Place]:
    """Yield the nodes of a graph, each with those of its branches and bodies; `before`: the path of their branch."""
    for node, name, inside in nodes:
        own = before + name
        yield Place(node, graph, own)
        branches = node.op_type == "If" and not normal_domain(node.domain)
        for attribute, body in inside:
            if branches:
                yield from _shown(body, graph, f"{own}/{attribute}/", main=main)
            elif main:
                yield from _shown(body, f"{own}/{attribute}", main=False)
