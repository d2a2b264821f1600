"""VJPs of elementwise operators: arithmetic, powers, selections and activations."""

from __future__ import annotations

import math
from collections.abc import Callable

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import multiples, origin
from amp_rewrite.ir.nodes import ValueId
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, GradientRule, Rows, Stop, row


def _identity(v: Call, slot: int) -> str:
    return v.sum_to(v.g, slot)


def _product(v: Call, slot: int) -> str:
    other = v.shape(1 - slot)
    g = v.unexpanded_g if other is not None and None not in other and other == v.out_shape else v.g
    return v.sum_to(v.do("Mul", g, v.x(1 - slot)), slot)


def _divisor(v: Call, slot: int) -> str:
    return v.do("Neg", v.sum_to(v.do("Mul", v.do("Div", v.g, v.x(1)), v.y()), slot))


def _modulus(v: Call, slot: int) -> str:
    """Append −g·trunc(a/b), from y = a − b·trunc(a/b): floating-point operands require fmod = 1."""
    quotient = v.do("Div", v.do("Sub", v.x(0), v.y()), v.x(1))  # an integer up to rounding
    return v.do("Neg", v.sum_to(v.do("Mul", v.g, v.do("Round", quotient)), 1))


def _base(v: Call, slot: int) -> str:
    """Append g·p·x^(p−1); for a square, avoid the slow Pow."""
    constant = v.constant(1)
    if constant is not None and constant.size == 1 and constant.item() == 2:
        return v.sum_to(v.do("Mul", v.g, v.do("Mul", v.x(0), 2.0)), 0)
    p = v.b.cast(v.x(1), v.dtype(0))
    slope = v.do("Mul", p, v.do("Pow", v.x(0), v.do("Sub", p, 1.0)))
    # x^0 is 1 everywhere, so its slope is 0; 0·x^(−1) is NaN at x = 0
    slope = v.do("Where", v.do("Equal", p, 0.0), 0.0, slope)
    return v.sum_to(v.do("Mul", v.g, slope), 0)


def _exponent(v: Call, slot: int) -> str:
    """Append g·y·ln x, and 0 at x = 0, because 0^p is 0 for every p > 0."""
    zero = v.do("Equal", v.x(0), 0.0)
    logarithm = v.do("Log", v.do("Where", zero, 1.0, v.x(0)))
    gradient = v.sum_to(v.do("Mul", v.g, v.do("Mul", v.y(), logarithm)), 1)
    return v.b.cast(gradient, v.dtype(1), of=v.dtype(0))


def _root(v: Call, slot: int) -> str:
    """Append g/(2y), but 0 for a zero sum of squares, as in torch.std and torch.linalg.vector_norm."""
    gradient = v.do("Div", v.do("Mul", v.g, 0.5), v.y())
    view, x = v.b.view, v.b.original(v.x(0))
    summed = None if x is None else view.producer(origin(view, x.id, multiples(view)))
    if summed is None or summed.kind not in ("ReduceSumSquare", "ReduceSum", "ReduceMean"):
        return gradient
    if summed.kind != "ReduceSumSquare" and not _is_square(v, summed.inputs[0]):
        return gradient
    return v.do("Where", v.do("Cast", v.y(), to=DType.BOOL.code), gradient, 0.0)


def _is_square(v: Call, value: ValueId | None) -> bool:
    op = None if value is None else v.b.view.producer(value)
    if op is None or op.kind not in ("Mul", "Pow"):
        return False
    power = None if op.kind == "Mul" else v.b.constant_of(op.node.input[1])
    return op.inputs[0] == op.inputs[1] if power is None else power.size == 1 and power.item() == 2


def _extreme(v: Call, slot: int) -> str:
    """Split the gradient equally among the inputs with the extreme value, as torch.maximum and torch.amax do.

    The bound of a clamp receives a gradient only where it differs from x.
    """
    if v.torch_op.startswith("clamp"):
        from_x = v.do("Equal", v.x(0), v.y())
        return v.sum_to(v.do("Where", from_x, v.g if slot == 0 else 0.0, 0.0 if slot == 0 else v.g), slot)
    ties = v.do("Sum", *[v.typed(v.do("Equal", v.x(i), v.y())) for i in range(len(v.op.inputs))])
    share = v.do("Div", v.g, ties)
    return v.sum_to(v.do("Where", v.do("Equal", v.x(slot), v.y()), share, 0.0), slot)


def _branch(v: Call, slot: int) -> str:
    zero = v.b.scalar(0.0, v.dtype(slot))  # of the branches' type, since input 0 is bool
    branches = (v.g, zero) if slot == 1 else (zero, v.g)
    return v.sum_to(v.b.op("Where", v.x(0), *branches), slot)


def _clip_x(v: Call, slot: int) -> str:
    """Pass the gradient within the bounds. They are included, as in torch.clamp, except for relu6 and hardtanh."""
    equal = "" if v.torch_op.startswith(("relu6", "hardtanh")) else "OrEqual"
    inside = [v.do(f"{op}{equal}", v.x(0), v.x(bound)) for op, bound in (("Greater", 1), ("Less", 2)) if v.has(bound)]
    if not inside:
        return v.g
    mask = inside[0] if len(inside) == 1 else v.do("And", *inside)
    return v.do("Where", mask, v.g, 0.0)


def _clip_bound(v: Call, slot: int) -> str:
    """Pass the gradient to a bound wherever the result is the bound and x is not."""
    differs = v.do("Not", v.do("Equal", v.x(0), v.x(slot)))
    clipped = v.do("And", v.do("Equal", v.y(), v.x(slot)), differs)
    return v.sum_to(v.do("Where", clipped, v.g, 0.0), slot)


def _times_derivative(derivative: Callable[[Call], str]) -> GradientRule:
    """Return a row for y = f(x): multiply the gradient by f'(x)."""
    return row(lambda v, slot: v.do("Mul", v.unexpanded_g, derivative(v)))


def _over_inverse_slope(inverse_slope: Callable[[Call], str]) -> GradientRule:
    """Return a row for y = f(x): divide the gradient by 1/f'(x)."""
    return row(lambda v, slot: v.do("Div", v.unexpanded_g, inverse_slope(v)))


def _where_positive(v: Call, otherwise: str) -> str:
    """Append the gradient where x > 0, and `otherwise` elsewhere."""
    return v.do("Where", v.do("Greater", v.x(0), 0.0), v.g, otherwise)


def _square(v: Call, x: str) -> str:
    return v.do("Mul", x, x)


def _gauss(v: Call, x: str, factor: float) -> str:
    """Append factor·exp(−x²)."""
    return v.do("Mul", v.do("Exp", v.do("Neg", _square(v, x))), factor)


_CUBIC = 0.044715  # Hendrycks & Gimpel, Gaussian Error Linear Units, 2016


def _gelu(v: Call) -> str:
    """Append Φ(x) + x·φ(x); for the approximation y = x·s(w), w = √(8/π)·(x + c·x³), append s + x·s·(1 − s)·w'."""
    if v.attr("approximate", "none") != "tanh":
        scaled = v.do("Mul", v.x(0), math.sqrt(0.5))
        cumulative = v.do("Mul", v.do("Add", v.do("Erf", scaled), 1.0), 0.5)
        return v.do("Add", cumulative, v.do("Mul", v.x(0), _gauss(v, scaled, 1 / math.sqrt(2 * math.pi))))
    square, root = _square(v, v.x(0)), math.sqrt(8 / math.pi)
    s = v.do("Sigmoid", v.do("Mul", v.x(0), v.do("Add", v.do("Mul", square, root * _CUBIC), root)))
    slope = v.do("Add", v.do("Mul", square, 3 * root * _CUBIC), root)
    correction = v.do("Mul", v.do("Mul", v.x(0), slope), v.do("Mul", s, v.do("Sub", 1.0, s)))
    return v.do("Add", s, correction)


def _hard_sigmoid(v: Call, slot: int) -> str:
    inside = v.do("And", v.do("Greater", v.y(), 0.0), v.do("Less", v.y(), 1.0))
    return v.do("Where", inside, v.do("Mul", v.g, v.attr("alpha", 0.2)), 0.0)


def _square_plus(v: Call, shift: float) -> str:
    return v.do("Add", _square(v, v.x(0)), shift)


def _one_minus_square(v: Call, x: str) -> str:
    return v.do("Sub", 1.0, _square(v, x))


ROWS: Rows = {
    "Add": row(_identity, _identity),
    "Sub": row(_identity, lambda v, slot: v.do("Neg", v.sum_to(v.g, slot))),
    "Mul": row(_product, _product),
    "Div": row(lambda v, slot: v.sum_to(v.do("Div", v.g, v.x(1)), slot), _divisor),
    "Sum": row(_identity),
    "Mean": row(lambda v, slot: v.sum_to(v.do("Div", v.g, float(len(v.op.inputs))), slot)),
    "Mod": row(_identity, _modulus),
    "Pow": row(_base, _exponent),
    "Neg": row(lambda v, slot: v.do("Neg", v.g)),
    "Identity": row(lambda v, slot: v.g),
    "Cast": row(lambda v, slot: v.typed(v.g)),
    "CastLike": row(lambda v, slot: v.typed(v.g), Stop("only its type is read")),
    "Max": row(_extreme),
    "Min": row(_extreme),
    "Where": row(Stop("a condition"), _branch, _branch),
    "Clip": row(_clip_x, _clip_bound, _clip_bound),
    **dict.fromkeys(("Floor", "Ceil", "Round", "Sign"), row(Stop("piecewise constant"))),
    "Abs": _times_derivative(lambda v: v.do("Sign", v.x(0))),
    "Exp": _times_derivative(lambda v: v.y()),
    "Log": _over_inverse_slope(lambda v: v.x(0)),
    "Sqrt": row(_root),
    "Reciprocal": row(lambda v, slot: v.do("Neg", v.do("Mul", v.g, _square(v, v.y())))),
    "Sin": _times_derivative(lambda v: v.do("Cos", v.x(0))),
    "Cos": row(lambda v, slot: v.do("Neg", v.do("Mul", v.g, v.do("Sin", v.x(0))))),
    "Tan": _times_derivative(lambda v: v.do("Add", _square(v, v.y()), 1.0)),
    "Sinh": _times_derivative(lambda v: v.do("Cosh", v.x(0))),
    "Cosh": _times_derivative(lambda v: v.do("Sinh", v.x(0))),
    "Asin": _over_inverse_slope(lambda v: v.do("Sqrt", _one_minus_square(v, v.x(0)))),
    "Acos": row(lambda v, slot: v.do("Neg", v.do("Div", v.g, v.do("Sqrt", _one_minus_square(v, v.x(0)))))),
    "Atan": _over_inverse_slope(lambda v: _square_plus(v, 1.0)),
    "Asinh": _over_inverse_slope(lambda v: v.do("Sqrt", _square_plus(v, 1.0))),
    "Acosh": _over_inverse_slope(lambda v: v.do("Sqrt", _square_plus(v, -1.0))),
    "Atanh": _over_inverse_slope(lambda v: _one_minus_square(v, v.x(0))),
    "Erf": _times_derivative(lambda v: _gauss(v, v.x(0), 2 / math.sqrt(math.pi))),
    "Sigmoid": _times_derivative(lambda v: v.do("Mul", v.y(), v.do("Sub", 1.0, v.y()))),
    "Tanh": _times_derivative(lambda v: _one_minus_square(v, v.y())),
    "Softplus": _times_derivative(lambda v: v.do("Sigmoid", v.x(0))),
    "Softsign": _over_inverse_slope(lambda v: _square(v, v.do("Add", v.do("Abs", v.x(0)), 1.0))),
    # the mask is y cast to bool: unlike a comparison, this Cast has kernels for every type
    "Relu": row(lambda v, slot: v.do("Where", v.do("Cast", v.y(), to=DType.BOOL.code), v.unexpanded_g, 0.0)),
    "LeakyRelu": row(lambda v, slot: _where_positive(v, v.do("Mul", v.g, v.attr("alpha", 0.01)))),
    "PRelu": row(
        lambda v, slot: _where_positive(v, v.do("Mul", v.g, v.x(1))),
        lambda v, slot: v.sum_to(v.do("Mul", v.g, v.do("Min", v.x(0), 0.0)), slot),
    ),
    # α·exp(x) = y + α below zero
    "Elu": row(lambda v, slot: _where_positive(v, v.do("Mul", v.g, v.do("Add", v.y(), v.attr("alpha", 1.0))))),
    "ThresholdedRelu": row(lambda v, slot: v.do("Where", v.do("Greater", v.x(0), v.attr("alpha", 1.0)), v.g, 0.0)),
    "Gelu": _times_derivative(_gelu),
    "HardSigmoid": row(_hard_sigmoid),
}
