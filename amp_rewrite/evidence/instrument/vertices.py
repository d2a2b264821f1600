"""Vertices that may be low: the one that makes a value, and the ones that read it."""

from __future__ import annotations

from collections.abc import Container

from amp_rewrite.ir.dataflow import made_variable, read_variable
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.view import OpId, Use, ValueId, View

Vertex = tuple[OpId, str]
"""A type variable of an op."""


def maker_of(view: View, value: ValueId, may: Container[Vertex]) -> tuple[Vertex | None, bool]:
    """Return the vertex that may produce a value in the low type, and True if it is then exact."""
    vertex = made_variable(view, value)
    if vertex not in may:
        return None, False
    assert vertex is not None  # since `may` has vertices
    op = view.ops[vertex[0]]
    reads = [read_variable(op, i) == vertex for i, v in enumerate(op.inputs) if v is not None]
    return vertex, exact(op) and any(reads)


def reader_of(view: View, use: Use, may: Container[Vertex]) -> Vertex | None:
    """Return the vertex that may read an input in the low type, or None."""
    op = view.ops[use.op]
    vertex = read_variable(op, use.slot) if op.kind != "Cast" else None
    return vertex if vertex in may else None
