"""Bounds of all float values of a model. O(nodes + weights); weights are streamed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from amp_rewrite.decide.bounds.bound import Bound, BoundOptions, Klass
from amp_rewrite.decide.bounds.walk import Walk
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import MOVES
from amp_rewrite.ir.view import MAIN, ValueId, View


def bounds(view: View, options: BoundOptions) -> Mapping[ValueId, Bound]:
    """Return the bound of each floating value that an op computes or the model takes; constants have none."""
    above = Walk.of(view, options.to, options.inputs)
    least = magnitudes_of_ones(view) if options.below else {}
    return {value: _bound(view, value, above, least.get(value, 0.0), options) for value in _values(view)}


def magnitudes_of_ones(view: View) -> dict[ValueId, float]:
    """Return the magnitudes that some element of each float value is proved to have in float32, for inputs of ones."""
    ones = {view.value_name(v): (1.0, 1.0) for v in view.scopes[MAIN].inputs if _floating(view, v)}
    if not ones:
        return {}
    return Walk.of(view, DType.FLOAT, ones, spatial=True).least


def _values(view: View) -> Iterator[ValueId]:
    for value in view.values:
        if view.constant(value.id) is None and _floating(view, value.id):
            yield value.id


def _floating(view: View, value: ValueId) -> bool:
    dtype = view.tensor_dtype(value)
    return dtype is not None and dtype.floating


def _bound(view: View, value: ValueId, walk: Walk, least: float, options: BoundOptions) -> Bound:
    state = walk.state(value)
    hull = state.hull()
    lo, hi = float(hull.lo), float(hull.hi)
    op = view.producer(value)
    read = op.operands if op is not None else ()
    rests = sorted((v for v in read if view.constant(v) is None and _floating(view, v)), key=lambda v: -_size(walk, v))
    klass = Klass.UNKNOWN
    measured = options.measured.get(value)
    if max(-lo, hi) <= options.to.max:
        klass = Klass.FITS
    elif least > options.to.max:
        klass = Klass.OVERFLOWS
    elif measured is not None and measured * options.headroom <= options.to.max:
        klass = Klass.MEASURED
    kind = op.kind if op is not None else "input"
    because = f"{kind}: {hull.why or state.why}" if op is None or op.kind not in MOVES else f"{kind}: the same numbers"
    return Bound(lo, hi, klass, because, tuple(dict.fromkeys(rests)), state.fills, least)


def _size(walk: Walk, value: ValueId) -> float:
    size = walk.state(value).absmax
    return size if not math.isnan(size) else math.inf
