"""Operators of onnxruntime that the standard lacks: a sum and its norm, a bias and its activation, a scaled product.

Each is found on the model in standard form, written out as its document says (`reference`), and proved: the ops
that go and that formula are run in float64. onnxruntime is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.shapes.inference import MADE_UP
from amp_rewrite.ir.shapes.onnx_shapes import Dims
from amp_rewrite.ir.view import MAIN, ScopeId, View
from amp_rewrite.rewrite.contrib.multi_head_attention import fuse_attentions
from amp_rewrite.rewrite.contrib.recognize import MATCHERS, Match, Site
from amp_rewrite.rewrite.equivalence import node_mismatch
from amp_rewrite.rewrite.passes.standard_ops import fuse_clusters
from amp_rewrite.rewrite.replacement import Context, Outcome, Refusal, Replacement

_LATEST = 23
"""The opset from which the standard has all the operators that these are made of."""


def fuse_contrib(view: View, context: Context) -> Iterator[Outcome]:
    """Replace ops by an operator of onnxruntime that stands for several, or refuse it; the largest ones first.

    Ops of the standard count also where the model writes them out, at an opset that lacks them. O(nodes).
    """
    whole = [o for o in fuse_clusters(view, context, _LATEST) if isinstance(o, Replacement)]
    for outcome in fuse_attentions(view, context):
        yield _declaring(view, context.dims(view), outcome)
    site = Site.of(view, whole, context)
    for matcher in MATCHERS:
        for match in matcher(site):
            yield match if isinstance(match, Refusal) else _proved(site, match)


def _proved(site: Site, match: Match) -> Outcome:
    fusion = match.replacement
    why = node_mismatch(site.view, fusion.ops, fusion.node, match.tried, match.magnitude, site.view.opsets)
    if why is not None:
        return Refusal(fusion.kind, fusion.last, why)
    return _declaring(site.view, site.context.dims(site.view), fusion)


def _declaring(view: View, dims: Mapping[tuple[ScopeId, str], Dims], outcome: Outcome) -> Outcome:
    """Return a fusion of the main graph with the types of its results, which onnx cannot infer."""
    if isinstance(outcome, Refusal) or view.ops[outcome.last].scope != MAIN:
        return outcome
    results = []
    for name in (name for node in (outcome.node, *outcome.behind) for name in node.output if (MAIN, name) in dims):
        known = [d if isinstance(d, int | str) and not str(d).startswith(MADE_UP) else None for d in dims[MAIN, name]]
        results.append(declared(name, DType.FLOAT, known))
    return replace(outcome, declared=tuple(results))
