"""Operators of onnxruntime that the standard lacks: a sum and its norm, a bias and its activation, a scaled product.

Each is found on the model in standard form, written out as its document says (`reference`), and proved: the ops
that go and that formula are run in float64. Nothing here needs onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import onnx.helper
from onnx import ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.shapes.onnx_shapes import MADE_UP, Dims
from amp_rewrite.ir.view import MAIN, ScopeId, View
from amp_rewrite.rewrite.contrib.attention import fuse_attentions
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
        for found in matcher(site):
            yield found if isinstance(found, Refusal) else _proved(site, found)


def _proved(site: Site, match: Match) -> Outcome:
    why = _mismatch(site.view, match)
    if why is not None:
        return Refusal(match.kind, match.last, why)
    fusion = Replacement(match.kind, match.ops, match.last, match.node, place=match.place)
    return _declaring(site.view, site.dims(), fusion)


def _declaring(view: View, dims: Mapping[tuple[ScopeId, str], Dims], outcome: Outcome) -> Outcome:
    """A fusion of the main graph with the types of its results, which onnx cannot infer."""
    if isinstance(outcome, Refusal) or view.ops[outcome.last].scope != MAIN:
        return outcome
    names = [name for node in (outcome.node, *outcome.behind) for name in node.output if (MAIN, name) in dims]
    return replace(outcome, declared=tuple(_declared(name, dims[MAIN, name]) for name in names))


def _declared(name: str, dims: Dims) -> ValueInfoProto:
    known = [d if isinstance(d, int | str) and not str(d).startswith(MADE_UP) else None for d in dims]
    return onnx.helper.make_tensor_value_info(name, DType.FLOAT.code, known)


# -- proof -----------------------------------------------------------------------------------------


def _mismatch(view: View, match: Match) -> str | None:
    """Return how the node differs from the ops; None if both agree on random inputs."""
    rng = np.random.default_rng(0)
    constants = _constants(view, match)
    feeds: list[Arrays] = [
        {view.value_name(v): spread * (rng.standard_normal(shape) + 0.5) for v, shape in match.tried.items()}
        for spread in SPREADS
    ]
    given = [{**constants, **feed} for feed in feeds]
    try:
        made = [computed(match.node, arrays) for arrays in given]
    except (KeyError, ValueError) as cause:
        return f"its formula cannot be tried: {cause}"
    for result in (name for name in match.node.output if name):
        after = [results[result] for results in made]
        pairs = zip(given, after, strict=True)
        magnitudes = [_magnitude(match, arrays, y) for arrays, y in pairs]
        why = mismatch(runs_of(view, match.ops, result, feeds), after, magnitudes)
        if why is not None:
            return why
    return None


def _magnitude(match: Match, arrays: Arrays, y: Array) -> Array:
    """The magnitude of the result; for an activation, that of each element, whose input is the sum of what is read."""
    if not match.elementwise:
        return np.array(np.abs(y).max())
    return gate_magnitude(sum((arrays[name] for name in match.node.input if name), np.zeros(())), y)


def _constants(view: View, match: Match) -> dict[str, Array]:
    """The constants that the node reads and that are not tried with other numbers, in float64."""
    found: dict[str, Array] = {}
    for value in outside(view, match.ops):
        tensor, name = view.constant(value), view.value_name(value)
        if tensor is not None and value not in match.tried and name in match.node.input:
            found[name] = view.model.array(tensor).astype(np.float64)
    return found
