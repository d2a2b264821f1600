"""Operators of onnxruntime that the standard lacks: a sum and its norm, a bias and its activation, a scaled product.

Each is found on the model in standard form, written out as its document says (`reference`), and proved: the ops
that go and that formula are run in float64. onnxruntime is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from onnx import ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.shapes.onnx_shapes import MADE_UP, Dims
from amp_rewrite.ir.view import MAIN, ScopeId, View
from amp_rewrite.rewrite.contrib.multi_head_attention import fuse_attentions
from amp_rewrite.rewrite.contrib.recognize import MATCHERS, Match, Site
from amp_rewrite.rewrite.contrib.reference import computed
from amp_rewrite.rewrite.equivalence import SPREADS, Arrays, gate_magnitude, mismatch, runs_of
from amp_rewrite.rewrite.passes.standard_ops import fuse_clusters
from amp_rewrite.rewrite.replacement import Context, Outcome, Refusal, Replacement, outside

_LATEST = 23
"""The opset from which the standard has all the operators that these are made of."""


def fuse_contrib(view: View, context: Context) -> Iterator[Outcome]:
    """Replace ops by an operator of onnxruntime that stands for several, or refuse it; the largest ones first.

    Ops of the standard count also where the model writes them out, at an opset that lacks them. O(nodes).
    """
    whole = [o for o in fuse_clusters(view, context, _LATEST) if isinstance(o, Replacement)]
    for outcome in fuse_attentions(view, context):
        yield _declaring(view, context.dims(view), outcome)
    site = Site.of(view, whole, lambda: context.dims(view))
    for matcher in MATCHERS:
        for match in matcher(site):
            yield match if isinstance(match, Refusal) else _proved(site, match)


def _proved(site: Site, match: Match) -> Outcome:
    fusion = match.replacement
    why = _mismatch(site.view, match)
    return Refusal(fusion.kind, fusion.last, why) if why is not None else _declaring(site.view, site.dims(), fusion)


def _declaring(view: View, dims: Mapping[tuple[ScopeId, str], Dims], outcome: Outcome) -> Outcome:
    """Return a fusion of the main graph with the types of its results, which onnx cannot infer."""
    if isinstance(outcome, Refusal) or view.ops[outcome.last].scope != MAIN:
        return outcome
    names = [name for node in (outcome.node, *outcome.behind) for name in node.output if (MAIN, name) in dims]
    return replace(outcome, declared=tuple(_declared(name, dims[MAIN, name]) for name in names))


def _declared(name: str, dims: Dims) -> ValueInfoProto:
    known = [d if isinstance(d, int | str) and not str(d).startswith(MADE_UP) else None for d in dims]
    return declared(name, DType.FLOAT, known)


# -- proof -----------------------------------------------------------------------------------------


def _mismatch(view: View, match: Match) -> str | None:
    """Return how the node differs from the ops; None if both agree on random inputs."""
    fusion, rng = match.replacement, np.random.default_rng(0)
    constants = {
        name: view.model.array(tensor).astype(np.float64)
        for value in outside(view, fusion.ops)
        if (tensor := view.constant(value)) is not None
        and value not in match.tried
        and (name := view.value_name(value)) in fusion.node.input
    }
    feeds: list[Arrays] = [
        {view.value_name(v): spread * (rng.standard_normal(shape) + 0.5) for v, shape in match.tried.items()}
        for spread in SPREADS
    ]
    whole = [{**constants, **feed} for feed in feeds]
    try:
        results = [computed(fusion.node, feed) for feed in whole]
    except (KeyError, ValueError) as cause:
        return f"its formula cannot be tried: {cause}"
    for name in filter(None, fusion.node.output):
        after = [arrays[name] for arrays in results]
        magnitudes = [_magnitude(match, feed, y) for feed, y in zip(whole, after, strict=True)]
        why = mismatch(runs_of(view, fusion.ops, name, feeds), after, magnitudes)
        if why is not None:
            return why
    return None


def _magnitude(match: Match, arrays: Arrays, y: Array) -> Array:
    """Return the magnitude of the result; for an activation that of each element, whose input is the sum it reads."""
    if not match.elementwise:
        return np.array(np.abs(y).max())
    return gate_magnitude(sum((arrays[name] for name in match.replacement.node.input if name), np.zeros(())), y)
