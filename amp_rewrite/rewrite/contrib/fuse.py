"""Operators of onnxruntime that the standard lacks: a sum and its norm, a bias and its activation, a scaled product.

Each is found on the model in standard form, written out as its document says (`contrib_formula`), and proved: the ops
that go and that formula are run in float64. Nothing here needs onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import onnx.helper
from onnx import ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.shapes.infer import in_numbers, known_dims
from amp_rewrite.ir.shapes.onnx_shapes import MADE_UP, Dims, Shapes
from amp_rewrite.ir.view import MAIN, ScopeId, View
from amp_rewrite.rewrite.contrib.attention import fuse_attentions
from amp_rewrite.rewrite.contrib.recognize import MATCHERS, Match, Site
from amp_rewrite.rewrite.contrib.reference import computed
from amp_rewrite.rewrite.equivalence import Arrays, doubt, runs_of
from amp_rewrite.rewrite.passes.standard_ops import fuse_clusters
from amp_rewrite.rewrite.replacement import Fusion, Outcome, Refusal, outside

_LATEST = 23
"""The opset from which the standard has all the operators that these are made of."""


def fuse_contrib(view: View, to: DType) -> Iterator[Outcome]:
    """Each place where an operator of onnxruntime stands for several, fused, or why not; the largest ones first.

    Ops of the standard count also where the model writes them out, at an opset that lacks them. O(nodes).
    """

    @cache
    def dims() -> Mapping[tuple[ScopeId, str], Dims]:
        return known_dims(view)

    @cache
    def shapes() -> Shapes:
        return in_numbers(dims())

    whole = [o for o in fuse_clusters(view, clusters(view), shapes, _LATEST) if isinstance(o, Fusion)]
    for outcome in fuse_attentions(view, to, dims):
        yield _declaring(view, dims(), outcome)
    site = Site.of(view, whole, dims)
    for matcher in MATCHERS:
        for found in matcher(site):
            yield found if isinstance(found, Refusal) else _proved(site, found)


def _proved(site: Site, match: Match) -> Outcome:
    why = _doubt(site.view, match)
    if why is not None:
        return Refusal(match.kind, match.last, why)
    fusion = Fusion(match.kind, match.ops, match.last, match.node, place=match.place)
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

_SPREADS = (1.0, 1e-3, 30.0)
"""Of the inputs that both are tried on: usual ones, ones so small that an epsilon decides, and ones far out."""


def _doubt(view: View, match: Match) -> str | None:
    """Why the node may not compute what the ops compute; None where both agree on random inputs."""
    rng = np.random.default_rng(0)
    constants = _constants(view, match)
    feeds: list[Arrays] = [
        {view.value_name(v): spread * (rng.standard_normal(shape) + 0.5) for v, shape in match.tried.items()}
        for spread in _SPREADS
    ]
    given = [{**constants, **feed} for feed in feeds]
    try:
        made = [computed(match.node, arrays) for arrays in given]
    except (KeyError, ValueError) as cause:
        return f"its formula cannot be tried: {cause}"
    for result in (name for name in match.node.output if name):
        after = [results[result] for results in made]
        pairs = zip(given, after, strict=True)
        magnitudes = [_of_input(match, arrays, y) if match.elementwise else np.abs(y).max() for arrays, y in pairs]
        why = doubt(runs_of(view, match.ops, result, feeds), after, magnitudes)
        if why is not None:
            return why
    return None


def _of_input(match: Match, arrays: Arrays, y: Array) -> Array:
    """|x|, or |y| where that is more: an error of the gate, which is at most 1, is an error of x times as much."""
    x = sum((arrays[name] for name in match.node.input if name), np.zeros(()))
    magnitude: Array = np.maximum(np.abs(x), np.abs(y))
    return magnitude


def _constants(view: View, match: Match) -> dict[str, Array]:
    """The constants that the node reads and that are not tried with other numbers, in float64."""
    found: dict[str, Array] = {}
    for value in outside(view, match.ops):
        tensor, name = view.constant(value), view.value_name(value)
        if tensor is not None and value not in match.tried and name in match.node.input:
            found[name] = view.model.array(tensor).astype(np.float64)
    return found
