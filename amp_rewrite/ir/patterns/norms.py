"""Normalizations, written out: by deviation, by root mean square and by length."""

from __future__ import annotations

from amp_rewrite.ir.patterns.match import (
    ANCHOR,
    ENTRY,
    AnyValue,
    Either,
    Pattern,
    Through,
    X,
    behind_casts,
    either,
    op,
    weight,
)
from amp_rewrite.ir.view import Role, ValueId, View


def _two(view: View, value: ValueId) -> bool:
    """True for 2, and for an exponent that is not constant, which onnxruntime does not check."""
    array = view.array(value)
    return array is None or bool((array == 2).all())


def _negative(view: View, value: ValueId) -> bool:
    array = view.array(value)
    return array is not None and bool((array < 0).all())


def _per_feature(view: View, value: ValueId) -> bool:
    """True for a weight, and for an input of one dimension: a scale or bias fed by the caller."""
    held = view.values[behind_casts(view, value)[0]]
    if held.role is not Role.INPUT:
        return weight(view, value)
    formals = view.scopes[held.scope].graph.input
    return any(formal.name == held.name and len(formal.type.tensor_type.shape.dim) == 1 for formal in formals)


def _normalized(value: Pattern, squared: Pattern, reductions: str, between: tuple[str, ...]) -> Either:
    """Return the pattern of a value over the root of a mean or sum of squares, perhaps with an epsilon or a bound."""
    square = either(op("Pow", squared, AnyValue(test=_two)), op("Mul", squared, squared))
    total = op(reductions, square)
    size = either(op("Add", total, AnyValue("guard", read=True)), op("Max|Clip", total), total)
    power = AnyValue(test=lambda view, value: not _negative(view, value), read=True)
    root = either(op("Sqrt", size, name=ANCHOR), op("Pow", size, power, name=ANCHOR))
    divisor = Through(between, root)
    inverse_root = op("Pow", size, AnyValue(test=_negative, read=True), name=ANCHOR)
    inverse = either(inverse_root, op("Reciprocal", divisor), op("Div", AnyValue(test=weight), divisor))
    return either(op("Div", value, divisor), op("Mul", value, inverse))


_MEAN = op("ReduceMean", X)
_CENTERED = op("Sub", X, _MEAN)
_UNCENTERED = AnyValue(ENTRY, unless=_CENTERED, casts=True)
_SUMS = "ReduceSum|GlobalAveragePool"
_LENGTH = op("ReduceL2", X, name=ANCHOR)

LAYER = _normalized(_CENTERED, op("Sub", X, _MEAN, name="d", casts=False), f"ReduceMean|{_SUMS}", ("Expand",))
RMS = _normalized(_UNCENTERED, X, "ReduceMean", ("Expand",))
L2 = _normalized(_UNCENTERED, X, _SUMS, ("Expand", "Clip", "Max"))
REDUCED_L2 = op("Div", X, Through(("Expand",), either(op("Clip|Max|Add", _LENGTH), _LENGTH)))

SCALE = op("Mul", AnyValue("normalized", casts=True), AnyValue("scale", _per_feature, read=True))
BIAS = op("Add", AnyValue("normalized", casts=True), AnyValue("bias", _per_feature, read=True))
