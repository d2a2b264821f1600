"""Protobuf messages: copies, repeated fields, and the nodes of graphs and their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, NodeProto

M = TypeVar("M")


def clone(message: M) -> M:
    """Return a copy of a message."""
    copy = type(message)()
    cast(Message, copy).CopyFrom(message)
    return copy


def refill(message: Message, name: str, items: Iterable[Message]) -> None:
    """Replace the messages of a repeated field. `items` may be messages of the field itself."""
    kept = list(items)
    field = getattr(message, name)
    del field[:]
    field.extend(kept)


def bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """Yield the graphs in a node's attributes, each with the attribute's name."""
    return graphs_in(node.attribute[:])


def graphs_in(stated: Iterable[AttributeProto]) -> Iterator[tuple[str, GraphProto]]:
    """Yield the graphs in attributes, each with the attribute's name."""
    for a in stated:
        if a.type == AttributeProto.GRAPH:
            yield a.name, a.g
        elif a.type == AttributeProto.GRAPHS:
            yield from ((a.name, graph) for graph in a.graphs)


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, each followed by the nodes of its bodies."""
    for node in nodes:
        yield node
        for _, body in bodies(node):
            yield from all_nodes(body.node)
