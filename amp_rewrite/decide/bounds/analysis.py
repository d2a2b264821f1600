"""Bounds of all float values of a model. O(nodes + weights); weights are streamed."""

from __future__ import annotations

from collections.abc import Mapping

from amp_rewrite.decide.bounds.bound import Bound, BoundClass, BoundOptions, classified
from amp_rewrite.decide.bounds.walk import Walk
from amp_rewrite.decide.bounds.weights import notable
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import MOVES
from amp_rewrite.ir.view import MAIN, ValueId, View


def bounds(view: View, options: BoundOptions) -> Mapping[ValueId, Bound]:
    """Return the bound of each floating value that an op computes or the model takes; constants have none."""
    above = Walk.of(view, options.to, options.inputs, exponent=options.exponent)
    least = (magnitudes_of_ones(view) or sure_magnitudes(view)) if options.below else {}
    values = (v.id for v in view.values if view.constant(v.id) is None and view.holds_floats(v.id))
    return {value: _bound(view, value, above, least.get(value, 0.0), options) for value in values}


def magnitudes_of_ones(view: View) -> dict[ValueId, float]:
    """Return the magnitudes that some element of each float value is proved to have in float32, for inputs of ones."""
    ones = _ones(view)
    return Walk.of(view, DType.FLOAT, ones, spatial=True).least if ones else {}


def sure_magnitudes(view: View) -> dict[ValueId, float]:
    """Return such magnitudes, as far as they follow without reading all weights; none if no weight is `notable`.

    Numbers that grow from layer to layer are not followed through convolutions with padding, nor past the first norm;
    large numbers in embeddings, gains and biases are. A model without float inputs reaches them on every input.
    """
    return Walk.of(view, DType.FLOAT, _ones(view), frugal=True).least if notable(view) else {}


def _ones(view: View) -> dict[str, tuple[float, float]]:
    return {view.value_name(v): (1.0, 1.0) for v in view.scopes[MAIN].inputs if view.holds_floats(v)}


def _bound(view: View, value: ValueId, walk: Walk, least: float, options: BoundOptions) -> Bound:
    state = walk.state(value)
    hull = state.hull()
    lo, hi = float(hull.lo), float(hull.hi)
    op = view.producer(value)
    read = op.operands if op is not None else ()
    rests = [v for v in read if view.constant(v) is None and view.holds_floats(v)]
    rests.sort(key=lambda v: -walk.state(v).absmax)
    kind = op.kind if op is not None else "input"
    because = f"{kind}: {hull.why or state.why}" if op is None or op.kind not in MOVES else f"{kind}: the same numbers"
    bound = Bound(lo, hi, BoundClass.UNKNOWN, because, tuple(dict.fromkeys(rests)), state.fills, least)
    return classified(bound, options.to, options.measured.get(value), options.headroom)
