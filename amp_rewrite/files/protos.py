"""Helpers for protobuf messages: copying, repeated fields, walks over graphs and their bodies, and renaming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, NodeProto

M = TypeVar("M")


def clone(message: M) -> M:
    copy = type(message)()
    cast(Message, copy).CopyFrom(message)
    return copy


def refill(message: Message, name: str, items: Iterable[Message]) -> None:
    """Replace the messages of a repeated field. `items` may come from the field itself."""
    messages = list(items)
    field = getattr(message, name)
    del field[:]
    field.extend(messages)


def bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """Yield the graphs in a node's attributes, each with the name of its attribute."""
    for a in node.attribute[:]:  # iterating over a slice is twice as fast
        if a.type == AttributeProto.GRAPH:
            yield a.name, a.g
        elif a.type == AttributeProto.GRAPHS:
            yield from ((a.name, graph) for graph in a.graphs)


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield the nodes, each followed by the nodes of its bodies."""
    for node in nodes:
        yield node
        for _, body in bodies(node):
            yield from all_nodes(body.node)


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and the graphs within it, in the order of a view's scopes."""
    yield graph
    for node in graph.node:
        for _, body in bodies(node):
            yield from all_graphs(body)


def names_read(nodes: Iterable[NodeProto]) -> Iterator[str]:
    """Yield the names read by nodes and their bodies, including names local to a body."""
    for node in nodes:
        yield from filter(None, node.input)
        for _, body in bodies(node):
            yield from (formal.name for formal in body.output)
            yield from names_read(body.node)


def needed(nodes: Sequence[NodeProto], results: Iterable[str]) -> list[NodeProto]:
    """Return the nodes needed to compute these results, in order."""
    names = set(results)
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if names.intersection(node.output):
            kept.append(node)
            names.update(names_read([node]))
    return kept[::-1]


def rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename the values of a graph and its bodies in place; values missing from `names` keep theirs."""
    sparse = (tensor.values for tensor in graph.sparse_initializer)
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer, *sparse):
        named.name = names.get(named.name, named.name)
    for node in graph.node:
        rename_node(node, names)


def rename_node(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """Rename the values of a node and its bodies in place, as `rename` does; return the node."""
    for listed in (node.input, node.output):
        listed[:] = [name and names.get(name, name) for name in listed]
    for _, body in bodies(node):
        rename(body, names)
    return node
