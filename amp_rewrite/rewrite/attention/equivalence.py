"""Proof that one Attention gives what the ops that it replaces give: both are run on small random operands.

They include rows whose mask hides every key, wherever the mask may have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from onnx.numpy_helper import to_array

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.equivalence import double, mismatch, once_proved, plain_nodes, runs_of
from amp_rewrite.rewrite.reference import Arrays, run
from amp_rewrite.rewrite.replacement import outside

if TYPE_CHECKING:
    from amp_rewrite.rewrite.attention.layout import OperandSource
    from amp_rewrite.rewrite.attention.legality import FusibleAttention, WrittenAttention

SPREADS = (1.0, 1e-3, 4.0)
QUERIES, KEYS = 3, 5
_BATCH, _HEADS, _WIDTH, _VALUES = 2, 2, 4, 6


Trial = tuple[Arrays, Arrays, Array]
"""Feeds of the ops, feeds of the nodes, and the magnitude of the result, in float64."""


def mismatch_of(site: FusibleAttention, written: WrittenAttention) -> str | None:
    """Return how the written nodes differ from the ops; None if both agree."""

    sources = site.queries, site.keys, site.values
    names = [site.view.value_name(source.value) for source in sources]
    square = site.causal or len(set(names)) < len(names)
    sizes = AttentionSizes(
        (_HEADS * site.keys.groups, _HEADS), KEYS if square else QUERIES, _WIDTH, _WIDTH if square else _VALUES
    )

    def feeds(*drawn: Array) -> Feeds:
        read = {name: _lie(source, x) for name, source, x in zip(names, sources, drawn, strict=True)}
        q, k, v = (_stand(source, read[name]) for name, source in zip(names, sources, strict=True))
        turned, weighed = (np.repeat(x, site.keys.groups, axis=1) for x in (k.swapaxes(-1, -2), v))
        return (q, turned, weighed), read, (q, turned, v)

    return compared(site, written, sizes, feeds, lambda array: array)


class AttentionSizes(NamedTuple):
    """The heads of queries and of keys, the number of queries, and the width of keys and of values."""

    heads: tuple[int, int]
    length: int
    width: int
    depth: int


Feeds = tuple[Sequence[Array], Arrays, tuple[Array, Array, Array]]
"""Queries, transposed keys and values for the ops; feeds of the nodes; and the same three with four axes."""


def compared(
    site: FusibleAttention,
    written: WrittenAttention,
    sizes: AttentionSizes,
    feeds: Callable[[Array, Array, Array], Feeds],
    laid: Callable[[Array], Array],
) -> str | None:
    """Return how the nodes differ from the ops on random operands; None if both agree.

    `feeds` lays operands of four axes out for both, `laid` the result of the ops as the nodes have it.
    """
    view, form, nodes = site.view, site.form, written.nodes
    ops, result = sorted({*form.ops, *form.beside}), form.last.node.output[0]
    fed, read, magnitudes = zip(*_trials(site, written, sizes, feeds), strict=True)

    def tested() -> str | None:
        before = runs_of(view, ops, result, fed)
        if not isinstance(before, str):
            before = [laid(array) for array in before]
        return mismatch(before, run(nodes, nodes[-1].output[0], read, view.opsets), magnitudes)

    held = [(view.value_name(v), array) for v in outside(view, ops) if (array := view.array(v)) is not None]
    given = [*held, *(pair for feed in (*fed, *read) for pair in feed.items()), (result, "result")]
    settings = (sizes, tuple(sorted(view.opsets.items())), [float(each) for each in magnitudes])
    return once_proved([*plain_nodes(view, ops), *nodes], given, settings, tested)


def _magnitude(site: FusibleAttention, queries: Array, keys: Array, values: Array) -> Array:
    """Return the magnitude of a result, from values and scores together.

    The scale is rounded once to float32: an error of UNIT in a score s is one of |s| UNIT in its weight, at most twice
    that in the result, beside the largest value.
    """
    scores = float(np.abs(queries @ keys).max()) * site.form.scale
    return np.array(float(np.abs(values).max()) * max(1.0, scores))


def _trials(
    site: FusibleAttention,
    written: WrittenAttention,
    sizes: AttentionSizes,
    feeds: Callable[[Array, Array, Array], Feeds],
) -> Iterator[Trial]:
    view, form, rng = site.view, site.form, np.random.default_rng(0)
    constants = {w.name: double(to_array(w)) for w in written.weights}
    names = [view.value_name(value) for value in (form.queries, form.keys, form.values)]
    for spread in SPREADS:
        q = spread * rng.standard_normal((_BATCH, sizes.heads[0], sizes.length, sizes.width))
        k = rng.standard_normal((_BATCH, sizes.heads[1], KEYS, sizes.width))
        v = rng.standard_normal((_BATCH, sizes.heads[1], KEYS, sizes.depth))
        fed, read, standing = feeds(q, k, v)
        scores = (*standing[0].shape[:3], standing[1].shape[3])
        masks, shown = _masks(site, rng, scores)
        after = {**constants, **read, **masks, **({written.shown: shown} if written.shown is not None else {})}
        before = {**dict(zip(names, fed, strict=True)), **masks}
        yield before, after, _magnitude(site, *standing)


def _lie(source: OperandSource, x: Array) -> Array:
    return x.transpose(np.argsort(source.perm))


def _stand(source: OperandSource, x: Array) -> Array:
    return x.transpose(source.perm)


def _masks(site: FusibleAttention, rng: np.random.Generator, scores: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    view, form = site.view, site.form
    shown = np.ones(scores[-2:], bool)
    fed: dict[str, Array] = {}
    if form.hiding is not None:
        if site.causal:
            shown = np.tri(*scores[-2:], dtype=bool)
        elif site.hides:
            shown = _random_mask(site, rng, scores)
        hiding = form.hiding
        if hiding.nothing is not None:
            fed[view.value_name(hiding.nothing)] = np.zeros(())
        seen = rng.standard_normal(shown.shape) if hiding.counts else 0.0
        fed[view.value_name(hiding.value)] = (
            shown == hiding.shows if site.boolean else np.where(shown, seen, hiding.fill)
        )
    for bias in form.biases:
        if form.hiding is not None and bias == form.hiding.value:
            continue
        fed[view.value_name(bias)] = rng.standard_normal(scores[-2:])
    return fed, shown


def _random_mask(site: FusibleAttention, rng: np.random.Generator, scores: tuple[int, ...]) -> Array:
    whole = (None, None, *site.lengths)[-len(site.mask) :]
    sizes = zip(site.mask, whole, scores[-len(site.mask) :], strict=True)
    shape = [1 if d == 1 and full != 1 else size for d, full, size in sizes]
    shown = rng.random(shape) < 0.6
    shown[..., 0] = True
    if site.empty:
        shown[(0,) * (len(shape) - 1)] = False
    return shown
