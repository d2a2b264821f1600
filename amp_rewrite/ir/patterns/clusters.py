"""Clusters: a normalization, softmax or activation that the exporter wrote out op by op."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes
from amp_rewrite.ir.patterns import activations, norms
from amp_rewrite.ir.patterns.match import ENTRY, Match, Pattern, Search, is_closed, readers, with_entry_casts
from amp_rewrite.ir.view import Op, OpId, ValueId, View, once


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ops of one computation ("layer_normalization", "softmax" …), which must share one color.

    `entry` is the value that is normalized or activated, before any Cast at the start of the cluster.
    `tail` are the scale Mul and bias Add at the end of a normalization, Casts between them included; `ops` contains
    them. onnxruntime fuses a decomposed normalization into one node with the input `entry`, looking through the
    Casts, and then refuses the model unless scale and bias have the type of that input.
    `values` are the captured values of the pattern, by name.
    """

    kind: str
    ops: tuple[OpId, ...]
    entry: ValueId | None = None
    tail: tuple[OpId, ...] = ()
    values: Mapping[str, ValueId] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class _ClusterKind:
    """A kind of cluster, its pattern, and the optional ops after it, each a reader of the one before."""

    kind: str
    pattern: Pattern
    tail: tuple[Pattern, ...] = ()


_LENGTHS = "l2_normalization"
_TABLE = (
    (
        _ClusterKind("layer_normalization", norms.LAYER, (norms.SCALE, norms.BIAS)),
        _ClusterKind("rms_normalization", norms.RMS, (norms.SCALE,)),
        _ClusterKind(_LENGTHS, norms.L2),
    ),
    (_ClusterKind(_LENGTHS, norms.REDUCED_L2),),
    (_ClusterKind("softmax", activations.SOFTMAX),),
    (_ClusterKind("gelu_erf", activations.GELU_ERF), _ClusterKind("gelu_tanh", activations.GELU_TANH)),
)
"""The kinds of clusters in the order in which they take ops. Rows of one group are tried at each anchor in turn."""
_ANCHORS = tuple(frozenset(kind for row in rows for way in row.pattern.ways() for kind in way[0][0]) for rows in _TABLE)


@cache
def _search_for(rows: tuple[_ClusterKind, ...]) -> Search:
    """Return the search for a group, built for the first model that has an anchor of it."""
    return Search.of(*(row.pattern for row in rows))


@once
def clusters(view: View, dtypes: Collection[DType] = (DType.FLOAT,)) -> tuple[Cluster, ...]:
    """Return the clusters of a model that compute in these types, by their first ops; no op is in two of them.

    O(nodes): a search starts at each op of a rare kind and takes a bounded number of steps.
    """
    taken: set[OpId] = set()
    result = []
    for rows, anchors in zip(_TABLE, _ANCHORS, strict=True):
        for op in view.of_kinds(anchors):
            if op.id in taken or not computes(view, op, dtypes):
                continue
            cluster = next(_clusters_at(view, rows, _search_for(rows), op), None)
            if cluster is not None and taken.isdisjoint(cluster.ops):
                taken.update(cluster.ops)
                result.append(cluster)
    return tuple(sorted(result, key=lambda cluster: cluster.ops))


def _clusters_at(view: View, rows: Sequence[_ClusterKind], search: Search, anchor: Op) -> Iterator[Cluster]:
    for number, core, last in search.matches(view, anchor):
        row = rows[number]
        whole, last = _with_tail(view, row, core, last)
        match = with_entry_casts(view, whole)
        if is_closed(view, match, last):
            tail = tuple(sorted(whole.ops - core.ops))
            yield Cluster(row.kind, tuple(sorted(match.ops)), match.values[ENTRY], tail, match.values)


def _with_tail(view: View, row: _ClusterKind, match: Match, last: Op) -> tuple[Match, Op]:
    """Return the match with the tail, as far as each op is the only reader of the one before; and the last op."""
    for step in row.tail:
        result = last.outputs[0]
        following = readers(view, result)
        if result is None or len(following) != 1 or result in view.yielded:
            break
        reader = view.ops[following[0]]
        output, start = reader.outputs[0], Match(match.ops, {**match.values, "normalized": result})
        longer = None if output is None else next(step.at(view, output, start), None)
        if longer is None or reader.scope != last.scope:
            break
        match, last = longer, reader
    return match, last
