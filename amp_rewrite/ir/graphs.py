"""Walks over the nodes of a graph and its bodies, and the nodes that given results need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnx import GraphProto, NodeProto

from amp_rewrite.ir.build import bodies


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, each followed by the nodes of its bodies."""
    for node in nodes:
        yield node
        for _, body in bodies(node):
            yield from all_nodes(body.node)


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and the graphs inside it, in the order of a view's scopes."""
    yield graph
    for node in graph.node:
        for _, body in bodies(node):
            yield from all_graphs(body)


def names_read(nodes: Iterable[NodeProto]) -> Iterator[str]:
    """Yield the names that nodes and their bodies read, which may include a body's own."""
    for node in nodes:
        yield from filter(None, node.input)
        for _, body in bodies(node):
            yield from (formal.name for formal in body.output)
            yield from names_read(body.node)


def needed(nodes: Sequence[NodeProto], results: Iterable[str]) -> list[NodeProto]:
    """Return the nodes that these results depend on, in order."""
    read = set(results)
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if read.intersection(node.output):
            kept.append(node)
            read.update(names_read([node]))
    return kept[::-1]
