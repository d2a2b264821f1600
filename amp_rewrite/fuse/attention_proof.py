"""Whether one Attention gives what the ops that it replaces give: both are run on small random operands.

Rows whose mask hides every key are among them wherever the mask may have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import onnx.numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.tensors import Array
from amp_rewrite.fuse.proof import Arrays, doubt, run, runs_of

if TYPE_CHECKING:
    from amp_rewrite.fuse.attention import Site
    from amp_rewrite.fuse.attention_nodes import Written

_SPREADS = (1.0, 1e-3, 4.0)
_BATCH, _HEADS, _QUERIES, _KEYS, _WIDTH, _VALUES = 2, 2, 3, 5, 4, 6


def doubt_of(site: Site, written: Written) -> str | None:
    """Why the written nodes may not compute what the ops compute; None where both agree.

    The scale is rounded once to float32: an error of UNIT in a score s is one of |s| UNIT in its weight, at most twice
    that in the result, beside the largest value. So the magnitude is that of values and scores together.
    """
    view, form = site.view, site.form
    trials = list(_trials(site, written))
    result = form.last.node.output[0]
    before = runs_of(view, sorted({*form.ops, *form.beside}), result, [before for before, _, _ in trials])
    nodes = [*written.ahead, written.node, *written.behind]
    after = run(nodes, result, [after for _, after, _ in trials], view.opsets)
    return doubt(before, after, [np.array(magnitude) for _, _, magnitude in trials])


def _trials(site: Site, written: Written) -> Iterator[tuple[Arrays, Arrays, float]]:
    """What the ops read, what the nodes read, and the magnitude of the result, in float64."""
    view, form, rng = site.view, site.form, np.random.default_rng(0)
    names = [view.value_name(v) for v in (form.queries, site.keys.value, site.values.value)]
    constants = {w.name: double(onnx.numpy_helper.to_array(w)) for w in written.weights}
    for spread in _SPREADS:
        q, k, v = _operands(site, rng, spread, square=site.causal or len(set(names)) < len(names))
        read = dict(zip(names, (q, k.transpose(np.argsort(site.keys.perm)), v), strict=True))
        q, v = read[names[0]], read[names[2]]
        k = read[names[1]].transpose(site.keys.perm)
        wide = [np.repeat(x, site.keys.groups, axis=1) for x in (k, v)]
        turned = wide[0].swapaxes(-1, -2)
        before = {names[0]: q, view.value_name(form.keys): turned, view.value_name(form.values): wide[1]}
        masks, shown = masks_of(site, rng, (*q.shape[:3], k.shape[2]))
        after = {**constants, **read, **masks}
        if written.shown is not None:
            after[written.shown] = shown
        most = float(np.abs(q @ turned).max()) * form.scale
        yield {**before, **masks}, after, float(np.abs(v).max()) * max(1.0, most)


def _operands(site: Site, rng: np.random.Generator, spread: float, *, square: bool) -> tuple[Array, Array, Array]:
    length, width = (_KEYS, _WIDTH) if square else (_QUERIES, _VALUES)
    heads = _HEADS * site.keys.groups
    q = spread * rng.standard_normal((_BATCH, heads, length, _WIDTH))
    k = rng.standard_normal((_BATCH, _HEADS, _KEYS, _WIDTH))
    return q, k, rng.standard_normal((_BATCH, _HEADS, _KEYS, width))


def masks_of(site: Site, rng: np.random.Generator, scores: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    """What is fed for mask and bias by the model's names, and where keys are shown."""
    view, form = site.view, site.form
    shown = np.ones(scores[-2:], bool)
    fed: dict[str, Array] = {}
    if form.hiding is not None:
        if site.causal:
            shown = np.tri(*scores[-2:], dtype=bool)
        elif site.hides:
            shown = _random_mask(site, rng, scores)
        hiding, boolean = form.hiding, view.dtype(form.hiding.value) is DType.BOOL
        fed[view.value_name(hiding.value)] = shown == hiding.shows if boolean else np.where(shown, 0.0, hiding.fill)
    if form.bias is not None:
        fed[view.value_name(form.bias)] = rng.standard_normal(scores[-2:])
    return fed, shown


def _random_mask(site: Site, rng: np.random.Generator, scores: tuple[int, ...]) -> Array:
    """A mask that is as narrow as the site's; with a row that shows nothing where there may be one."""
    whole = (None, None, *site.lengths)[-len(site.mask) :]
    sizes = zip(site.mask, whole, scores[-len(site.mask) :], strict=True)
    shape = [1 if d == 1 and full != 1 else size for d, full, size in sizes]
    shown = rng.random(shape) < 0.6
    shown[..., 0] = True
    if site.empty:
        shown[(0,) * (len(shape) - 1)] = False
    return shown


def double(array: Array) -> Array:
    """The same numbers, floats in float64."""
    return array.astype(np.float64) if array.dtype.kind == "f" else array
