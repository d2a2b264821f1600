"""Walks over the nodes of a graph and its bodies, new names for their values, and the nodes behind results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import networkx as nx
from onnx import GraphProto, ModelProto, NodeProto

from amp_rewrite.files.protos import all_nodes as all_nodes
from amp_rewrite.files.protos import bodies as bodies
from amp_rewrite.files.protos import clone, refill


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and the graphs inside it, in the order of a view's scopes."""
    yield graph
    for node in graph.node:
        for _, body in bodies(node):
            yield from all_graphs(body)


def names_read(nodes: Iterable[NodeProto]) -> Iterator[str]:
    """Yield the names read by nodes and their bodies, perhaps a body's own among them."""
    for node in nodes:
        yield from filter(None, node.input)
        for _, body in bodies(node):
            yield from (formal.name for formal in body.output)
            yield from names_read(body.node)


def in_order(proto: ModelProto) -> ModelProto | None:
    """Return a copy of a model with its nodes in topological order; None if there is none.

    Nodes keep their order as far as possible. O(nodes · log nodes).
    """
    ordered = clone(proto)
    holders = [*all_graphs(ordered.graph), *ordered.functions]
    holders += [body for f in ordered.functions for node in f.node for _, g in bodies(node) for body in all_graphs(g)]
    for holder in reversed(holders):  # a node with bodies depends on what those read
        nodes = _sorted(holder.node)
        if nodes is None:
            return None
        refill(holder, "node", nodes)
    return ordered


def _sorted(nodes: Sequence[NodeProto]) -> list[NodeProto] | None:
    """Return nodes in topological order, the first of several possible ones first; None for a cycle."""
    makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for at, node in enumerate(nodes):
        graph.add_edges_from((makers[name], at) for name in _names_needed(node) if name in makers)
    try:
        return [nodes[at] for at in nx.lexicographical_topological_sort(graph)]
    except nx.NetworkXUnfeasible:
        return None


def _names_needed(node: NodeProto) -> set[str]:
    """Return the names read by a node, and by its bodies from outside."""
    read = set(filter(None, node.input))
    for _, body in bodies(node):
        inside = {formal.name for formal in body.output}.union(*map(_names_needed, body.node))
        own = {held.name for held in (*body.input, *body.initializer)}
        own.update(sparse.values.name for sparse in body.sparse_initializer)
        read |= inside - own.union(*(step.output for step in body.node))
    return read


def needed(nodes: Sequence[NodeProto], results: Iterable[str]) -> list[NodeProto]:
    """Return the nodes behind these results, in order."""
    read = set(results)
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if read.intersection(node.output):
            kept.append(node)
            read.update(names_read([node]))
    return kept[::-1]


def rename(graph: GraphProto, new: Callable[[str], str]) -> None:
    """Rename the values in a graph and its bodies, in place. `new` gives each name but "" its new name."""
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        named.name = new(named.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = new(sparse.values.name)
    for node in graph.node:
        rename_node(node, new)


def renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """Return a copy of a node with new names for those of its inputs and outputs in `names`."""
    copy = clone(node)
    for own in (copy.input, copy.output):
        own[:] = [names.get(name, name) for name in own]
    return copy


def rename_node(node: NodeProto, new: Callable[[str], str]) -> None:
    """Rename the values of a node and its bodies, in place, as `rename` does."""
    for names in (node.input, node.output):
        names[:] = [name and new(name) for name in names]
    for _, body in bodies(node):
        rename(body, new)
