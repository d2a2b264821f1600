"""Proof that one Attention gives what the ops that it replaces give: both are run on small random operands.

They include rows whose mask hides every key, wherever the mask may have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from onnx.numpy_helper import to_array

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.equivalence import Arrays, double, mismatch, once_proved, plain_nodes, run, runs_of
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

    def split(array: Array) -> Array:
        return array if site.end is None else array.reshape(-1, site.heads, *array.shape[1:])

    sources = site.queries, site.keys, site.values
    names = [site.view.value_name(source.value) for source in sources]
    square = site.causal or len(set(names)) < len(names)
    heads = site.heads // site.keys.groups or _HEADS
    sizes = AttentionSizes(
        (heads * site.keys.groups, heads), KEYS if square else QUERIES, _WIDTH, _WIDTH if square else _VALUES
    )

    def feeds(*drawn: Array) -> Feeds:
        read = {name: _lie(source, x) for name, source, x in zip(names, sources, drawn, strict=True)}
        q, k, v = (_stand(source, read[name]) for name, source in zip(names, sources, strict=True))
        turned, weighed = (np.repeat(x, site.keys.groups, axis=1) for x in (k.swapaxes(-1, -2), v))
        weighed = weighed.swapaxes(-1, -2) if site.form.turned else weighed
        fed = [merged(x) if site.heads else x for x in (q, turned, weighed)]
        return fed, read, (q, turned, v)

    return compared(site, written, sizes, feeds, split)


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
    """Return the magnitude of a result: that of values and scores together.

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
        before = {**dict(zip(names, fed, strict=True)), **masks, **_shapes(site, scores)}
        yield before, after, _magnitude(site, *standing)


def _lie(source: OperandSource, x: Array) -> Array:
    laid = x.transpose(np.argsort(source.perm))
    return merged(laid) if source.heads else laid


def _stand(source: OperandSource, x: Array) -> Array:
    parted = x.reshape(-1, source.heads, *x.shape[1:]) if source.heads else x
    return parted.transpose(source.perm)


def merged(x: Array) -> Array:
    """Return four axes as three, batch and heads as one."""
    return x.reshape(-1, *x.shape[2:])


def _shapes(site: FusibleAttention, scores: tuple[int, ...]) -> Arrays:
    ends = (site.form.parting, scores), (site.form.joining, (scores[0] * scores[1], *scores[2:]))
    return {op.node.input[1]: np.array(shape) for op, shape in ends if op is not None}


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
        whole = merged(np.broadcast_to(shown, scores)) if hiding.value in site.split else shown
        if hiding.nothing is not None:
            fed[view.value_name(hiding.nothing)] = np.zeros(())
        seen = rng.standard_normal(whole.shape) if hiding.counts else 0.0
        fed[view.value_name(hiding.value)] = (
            whole == hiding.shows if site.boolean else np.where(whole, seen, hiding.fill)
        )
    for bias in form.biases:
        if form.hiding is not None and bias == form.hiding.value:
            continue
        drawn = rng.standard_normal(scores if bias in site.split else scores[-2:])
        fed[view.value_name(bias)] = merged(drawn) if bias in site.split else drawn
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
