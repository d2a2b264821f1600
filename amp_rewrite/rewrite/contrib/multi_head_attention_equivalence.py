"""Proof that one MultiHeadAttention gives what the ops that it replaces give: both run on small random operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.attention.build import Written
from amp_rewrite.rewrite.attention.equivalence import (
    KEYS,
    QUERIES,
    SPREADS,
    Trial,
    compared,
    constants_of,
    magnitude_of,
    masks_of,
    operands,
)
from amp_rewrite.rewrite.attention.legality import Site
from amp_rewrite.rewrite.contrib.reference import computed
from amp_rewrite.rewrite.equivalence import Arrays, run


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
    trials = list(_trials(site, written, bases, sizes))
    laid = _LAYOUTS["packed" if packed else "heads"]
    return compared(site, trials, laid, lambda feeds: _after(site, written, feeds))


def _after(site: Site, written: Written, feeds: Sequence[Arrays]) -> list[Array] | str:
    """Run the nodes."""
    node, opsets = written.node, site.view.opsets
    read: list[dict[str, Array]] = [dict(feed) for feed in feeds]
    for name in dict.fromkeys(name for user in (node, *written.behind) for name in user.input):
        if any(name in maker.output for maker in written.ahead):
            arrays = run(written.ahead, name, feeds, opsets)
            if isinstance(arrays, str):
                return arrays
            for feed, array in zip(read, arrays, strict=True):
                feed[name] = array
    try:
        results = [computed(node, feed)[node.output[0]] for feed in read]
    except (KeyError, ValueError) as cause:
        return f"its formula cannot be tried: {cause}"
    if not written.behind:
        return results
    feeds = [{**feed, node.output[0]: array} for feed, array in zip(read, results, strict=True)]
    return run(written.behind, written.behind[-1].output[0], feeds, opsets)


def _trials(site: Site, written: Written, bases: Mapping[str, Base], sizes: tuple[int, int, int]) -> Iterator[Trial]:
    form, rng = site.form, np.random.default_rng(0)
    names = [site.view.value_name(v) for v in (form.queries, form.keys, form.values)]
    length = KEYS if site.causal else QUERIES
    constants = constants_of(written.weights)
    for spread in SPREADS:
        q, k, v = operands(rng, spread, (sizes[0], sizes[0]), length, sizes[1:])
        turned = k.swapaxes(-1, -2)
        masks, _ = masks_of(site, rng, (*q.shape[:3], k.shape[2]))
        before = dict(zip(names, (q, turned, v), strict=True))
        drawn = {"queries": q, "keys": k, "values": v}
        after = {name: _LAYOUTS[base.layout](drawn[base.what]) for name, base in bases.items()}
        yield {**before, **masks}, {**constants, **masks, **after}, magnitude_of(site, q, turned, v)


def _packed(array: Array) -> Array:
    batch, heads, tokens, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, tokens, heads * width)


_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "packed": _packed,
    "heads": lambda array: array,
    "turned": lambda array: array.swapaxes(-1, -2),
}
