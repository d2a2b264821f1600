"""Walks over the nodes of a graph and its bodies, new names for their values, and the nodes that results need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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


def rename(graph: GraphProto, new: Callable[[str], str]) -> None:
    """Rename the values in a graph and its bodies, in place. `new` gives each name that is not empty its new name."""
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        named.name = new(named.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = new(sparse.values.name)
    for node in graph.node:
        rename_node(node, new)


def rename_node(node: NodeProto, new: Callable[[str], str]) -> None:
    """Rename the values that a node and its bodies read and make, in place, as `rename` does."""
    for names in (node.input, node.output):
        names[:] = [name and new(name) for name in names]
    for _, body in bodies(node):
        rename(body, new)
