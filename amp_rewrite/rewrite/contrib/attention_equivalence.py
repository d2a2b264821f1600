"""Proof that one MultiHeadAttention gives what the ops that it replaces give: both run on small random operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx.numpy_helper
from onnx import NodeProto, TensorProto

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.attention.equivalence import masks_of
from amp_rewrite.rewrite.attention.legality import Site
from amp_rewrite.rewrite.contrib.reference import computed
from amp_rewrite.rewrite.equivalence import Arrays, double, mismatch, run, runs_of

_SPREADS = (1.0, 1e-3, 4.0)
_BATCH, _QUERIES, _KEYS = 2, 3, 5


@dataclass(frozen=True, slots=True)
class Base:
    """The layout of one of "queries", "keys" and "values" where it is read.

    "packed": tokens by features; "heads": heads, tokens, width; "turned": heads, width, tokens.
    """

    what: str
    layout: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A site and the nodes ahead, in its place and behind; `sizes` are heads, width and the values' width.

    `packed`: the result is laid out as tokens by features, else as the ops gave it.
    """

    site: Site
    nodes: tuple[tuple[NodeProto, ...], NodeProto, tuple[NodeProto, ...]]
    weights: tuple[TensorProto, ...]
    bases: Mapping[str, Base]
    sizes: tuple[int, int, int]
    packed: bool


def mismatch_of(trial: Trial, made: str) -> str | None:
    """Return how the nodes differ from the ops in `made`; None if both agree, in units of values and scores."""
    view, form = trial.site.view, trial.site.form
    trials = list(_feeds(trial))
    before = runs_of(
        view, sorted({*form.ops, *form.beside}), form.last.node.output[0], [before for before, _, _ in trials]
    )
    after = _after(trial, made, [after for _, after, _ in trials])
    if trial.packed and not isinstance(before, str):
        before = [_packed(array) for array in before]
    return mismatch(before, after, [np.array(magnitude) for _, _, magnitude in trials])


def _after(trial: Trial, made: str, feeds: Sequence[Arrays]) -> list[Array] | str:
    """Run the nodes."""
    ahead, node, behind = trial.nodes
    opsets = trial.site.view.opsets
    read: list[dict[str, Array]] = [dict(feed) for feed in feeds]
    for name in dict.fromkeys(name for user in (node, *behind) for name in user.input):
        if any(name in maker.output for maker in ahead):
            found = run(ahead, name, feeds, opsets)
            if isinstance(found, str):
                return found
            for feed, array in zip(read, found, strict=True):
                feed[name] = array
    try:
        results = [computed(node, feed)[node.output[0]] for feed in read]
    except (KeyError, ValueError) as cause:
        return f"its formula cannot be tried: {cause}"
    if not behind:
        return results
    given = [{**feed, node.output[0]: array} for feed, array in zip(read, results, strict=True)]
    return run(behind, made, given, opsets)


def _feeds(trial: Trial) -> Iterator[tuple[Arrays, Arrays, float]]:
    """Yield feeds of the ops, feeds of the nodes, and the magnitude of the result, in float64."""
    site, form, rng = trial.site, trial.site.form, np.random.default_rng(0)
    names = [site.view.value_name(v) for v in (form.queries, form.keys, form.values)]
    heads, width, depth = trial.sizes
    length = _KEYS if site.causal else _QUERIES
    constants = {w.name: double(onnx.numpy_helper.to_array(w)) for w in trial.weights}
    for spread in _SPREADS:
        drawn = {
            "queries": spread * rng.standard_normal((_BATCH, heads, length, width)),
            "keys": rng.standard_normal((_BATCH, heads, _KEYS, width)),
            "values": rng.standard_normal((_BATCH, heads, _KEYS, depth)),
        }
        masks, _ = masks_of(site, rng, (_BATCH, heads, length, _KEYS))
        turned = drawn["keys"].swapaxes(-1, -2)
        before = {**dict(zip(names, (drawn["queries"], turned, drawn["values"]), strict=True)), **masks}
        after = {name: _LAYOUTS[base.layout](drawn[base.what]) for name, base in trial.bases.items()}
        most = float(np.abs(drawn["queries"] @ turned).max()) * form.scale
        yield before, {**constants, **masks, **after}, float(np.abs(drawn["values"]).max()) * max(1.0, most)


def _packed(array: Array) -> Array:
    batch, heads, tokens, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, tokens, heads * width)


def _heads(array: Array) -> Array:
    return array


def _turned(array: Array) -> Array:
    return array.swapaxes(-1, -2)


_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {"packed": _packed, "heads": _heads, "turned": _turned}
