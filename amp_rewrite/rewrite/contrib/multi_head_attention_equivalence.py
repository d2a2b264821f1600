"""Proof that one MultiHeadAttention gives what the ops that it replaces give: both run on small random operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.attention.build import Written
from amp_rewrite.rewrite.attention.equivalence import KEYS, QUERIES, Feeds, Sizes, compared
from amp_rewrite.rewrite.attention.legality import Site


class Base(NamedTuple):
    """The layout of one of "queries", "keys" and "values" where it is read.

    "packed": tokens by features; "heads": heads, tokens, width; "turned": heads, width, tokens.
    """

    what: str
    layout: str


def mismatch_of(
    site: Site, written: Written, bases: Mapping[str, Base], sizes: tuple[int, int, int], *, packed: bool
) -> str | None:
    """Return how the nodes differ from the ops; None if both agree, in units of values and scores.

    `sizes` are heads, width and the values' width. `packed`: the result is laid out as tokens by features, else as the
    ops gave it.
    """
    heads, width, depth = sizes

    def feeds(q: Array, k: Array, v: Array) -> Feeds:
        drawn, turned = {"queries": q, "keys": k, "values": v}, k.swapaxes(-1, -2)
        read = {name: _LAYOUTS[base.layout](drawn[base.what]) for name, base in bases.items()}
        return (q, turned, v), read, (q, turned, v)

    drawn = Sizes((heads, heads), KEYS if site.causal else QUERIES, width, depth)
    return compared(site, written, drawn, feeds, _LAYOUTS["packed" if packed else "heads"])


def _packed(array: Array) -> Array:
    batch, heads, tokens, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, tokens, heads * width)


_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "packed": _packed,
    "heads": lambda array: array,
    "turned": lambda array: array.swapaxes(-1, -2),
}
