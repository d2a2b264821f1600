"""Proof that one Attention gives what the ops that it replaces give: both are run on small random operands.

Rows whose mask hides every key are among them wherever the mask may have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx.numpy_helper
from onnx import TensorProto

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.equivalence import Arrays, double, mismatch, run, runs_of

if TYPE_CHECKING:
    from amp_rewrite.rewrite.attention.build import Written
    from amp_rewrite.rewrite.attention.layout import Source
    from amp_rewrite.rewrite.attention.legality import Site

SPREADS = (1.0, 1e-3, 4.0)
QUERIES, KEYS = 3, 5
_BATCH, _HEADS, _WIDTH, _VALUES = 2, 2, 4, 6


Trial = tuple[Arrays, Arrays, Array]
"""Feeds of the ops, feeds of the nodes, and the magnitude of the result, in float64."""


def mismatch_of(site: Site, written: Written) -> str | None:
    """Return how the written nodes differ from the ops; None if both agree."""
    nodes = [*written.ahead, written.node, *written.behind]

    def split(array: Array) -> Array:
        return array if site.end is None else array.reshape(-1, site.heads, *array.shape[1:])

    def after(feeds: Sequence[Arrays]) -> list[Array] | str:
        return run(nodes, site.last.node.output[0], feeds, site.view.opsets)

    return compared(site, list(_trials(site, written)), split, after)


def compared(
    site: Site,
    trials: Sequence[Trial],
    laid: Callable[[Array], Array],
    after: Callable[[Sequence[Arrays]], list[Array] | str],
) -> str | None:
    """Return how results of nodes differ from those of the ops, laid out likewise; None if both agree."""
    form = site.form
    ops = sorted({*form.ops, *form.beside})
    before = runs_of(site.view, ops, form.last.node.output[0], [feed for feed, _, _ in trials])
    if not isinstance(before, str):
        before = [laid(array) for array in before]
    return mismatch(before, after([feed for _, feed, _ in trials]), [magnitude for _, _, magnitude in trials])


def magnitude_of(site: Site, queries: Array, keys: Array, values: Array) -> Array:
    """Return the magnitude of a result: that of values and scores together.

    The scale is rounded once to float32: an error of UNIT in a score s is one of |s| UNIT in its weight, at most twice
    that in the result, beside the largest value.
    """
    scores = float(np.abs(queries @ keys).max()) * site.form.scale
    return np.array(float(np.abs(values).max()) * max(1.0, scores))


def constants_of(weights: Iterable[TensorProto]) -> Arrays:
    """Return the numbers of new constants by name, floats in float64."""
    return {w.name: double(onnx.numpy_helper.to_array(w)) for w in weights}


def _trials(site: Site, written: Written) -> Iterator[Trial]:
    view, form, rng = site.view, site.form, np.random.default_rng(0)
    sources = site.queries, site.keys, site.values
    names = [view.value_name(source.value) for source in sources]
    constants = constants_of(written.weights)
    square = site.causal or len(set(names)) < len(names)
    length, depth = (KEYS, _WIDTH) if square else (QUERIES, _VALUES)
    heads = site.heads // site.keys.groups or _HEADS
    for spread in SPREADS:
        drawn = operands(rng, spread, (heads * site.keys.groups, heads), length, (_WIDTH, depth))
        read = {name: _lie(source, x) for name, source, x in zip(names, sources, drawn, strict=True)}
        q, k, v = (_stand(source, read[name]) for name, source in zip(names, sources, strict=True))
        wide = [np.repeat(x, site.keys.groups, axis=1) for x in (k, v)]
        turned = wide[0].swapaxes(-1, -2)
        weighed = wide[1].swapaxes(-1, -2) if form.turned else wide[1]
        fed = zip((form.queries, form.keys, form.values), (q, turned, weighed), strict=True)
        before = {view.value_name(value): merged(x) if site.heads else x for value, x in fed}
        scores = (*q.shape[:3], k.shape[2])
        masks, shown = masks_of(site, rng, scores)
        after = {**constants, **read, **masks, **({written.shown: shown} if written.shown is not None else {})}
        yield {**before, **masks, **_shapes(site, scores)}, after, magnitude_of(site, q, turned, v)


def operands(
    rng: np.random.Generator, spread: float, heads: tuple[int, int], length: int, widths: tuple[int, int]
) -> tuple[Array, Array, Array]:
    """Return random queries, keys and values; `heads` of queries and of keys, `widths` of keys and of values."""
    q = spread * rng.standard_normal((_BATCH, heads[0], length, widths[0]))
    k = rng.standard_normal((_BATCH, heads[1], KEYS, widths[0]))
    return q, k, rng.standard_normal((_BATCH, heads[1], KEYS, widths[1]))


def _lie(source: Source, x: Array) -> Array:
    """Return four axes of an operand as its source has them."""
    laid = x.transpose(np.argsort(source.perm))
    return merged(laid) if source.heads else laid


def _stand(source: Source, x: Array) -> Array:
    """Return the four axes of an operand that its source holds."""
    parted = x.reshape(-1, source.heads, *x.shape[1:]) if source.heads else x
    return parted.transpose(source.perm)


def merged(x: Array) -> Array:
    """Return four axes as three, batch and heads as one."""
    return x.reshape(-1, *x.shape[2:])


def _shapes(site: Site, scores: tuple[int, ...]) -> Arrays:
    """Return the shapes by which scores are split in batch and heads, and weights put together again."""
    ends = (site.form.parting, scores), (site.form.joining, (scores[0] * scores[1], *scores[2:]))
    return {op.node.input[1]: np.array(shape) for op, shape in ends if op is not None}


def masks_of(site: Site, rng: np.random.Generator, scores: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    """Return feeds of mask and biases by the model's names, and where keys are shown."""
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


def _random_mask(site: Site, rng: np.random.Generator, scores: tuple[int, ...]) -> Array:
    """Return a mask as narrow as the site's; with a row that shows nothing where there may be one."""
    whole = (None, None, *site.lengths)[-len(site.mask) :]
    sizes = zip(site.mask, whole, scores[-len(site.mask) :], strict=True)
    shape = [1 if d == 1 and full != 1 else size for d, full, size in sizes]
    shown = rng.random(shape) < 0.6
    shown[..., 0] = True
    if site.empty:
        shown[(0,) * (len(shape) - 1)] = False
    return shown
