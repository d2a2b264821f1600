"""Patterns of computations written out op by op: normalizations, softmaxes and activations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes
from amp_rewrite.ir.patterns.match import (
    ENTRY,
    Match,
    Pattern,
    X,
    anything,
    behind_casts,
    constant,
    direct_match,
    either,
    is_closed,
    made_of,
    matches,
    op,
    readers,
    through,
    weight,
    with_entry_casts,
)
from amp_rewrite.ir.view import Op, OpId, Role, ValueId, View

# -- normalizations: by deviation, by root mean square and by length ---------------------------------


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


def _normalized(value: Pattern, squared: Pattern, reductions: str, between: str) -> Pattern:
    """Return the pattern of a value over the root of a mean or sum of squares, perhaps with an epsilon or a bound."""
    # An exponent that is computed at run time passes for 2: onnxruntime does not check it.
    two = anything(test=lambda view, value: (array := view.array(value)) is None or bool((array == 2).all()))
    square = either(op("Pow", squared, two), op("Mul", squared, squared))
    total = op(reductions, square)
    size = either(op("Add", total, anything("guard", read=True)), op("Max|Clip", total), total)
    power = anything(test=lambda view, value: not _negative(view, value), read=True)
    divisor = through(between, either(op("Sqrt", size), op("Pow", size, power)))
    inverse_root = op("Pow", size, anything(test=_negative, read=True))
    inverse = either(inverse_root, op("Reciprocal", divisor), op("Div", anything(test=weight), divisor))
    return either(op("Div", value, divisor), op("Mul", value, inverse))


_MEAN = op("ReduceMean", X)
_CENTERED = op("Sub", X, _MEAN)
_UNCENTERED = anything(ENTRY, unless=_CENTERED, casts=True)
_SUMS = "ReduceSum|GlobalAveragePool"
_LENGTH = op("ReduceL2", X)

LAYER = _normalized(_CENTERED, op("Sub", X, _MEAN, name="d", casts=False), f"ReduceMean|{_SUMS}", "Expand")
RMS = _normalized(_UNCENTERED, X, "ReduceMean", "Expand")
L2 = either(
    _normalized(_UNCENTERED, X, _SUMS, "Expand|Clip|Max"),
    op("Div", X, through("Expand", either(op("Clip|Max|Add", _LENGTH), _LENGTH))),
)

SCALE = op("Mul", anything("normalized", casts=True), anything("scale", _per_feature, read=True))
BIAS = op("Add", anything("normalized", casts=True), anything("bias", _per_feature, read=True))


# -- softmax and activations: GELU in both forms and its cube, quick GELU, snake ----------------------

_WEIGHT = anything(test=weight)

_EXP = op("Exp", op("Sub", X, op("ReduceMax", X)), name="exp")
SOFTMAX = op("Div", _EXP, op("ReduceSum", _EXP))


def _gated(bell: Pattern) -> Pattern:
    """Return the pattern of x · ½ · (1 + bell), the products in any order, with any numbers."""
    x, one = anything(ENTRY, lambda view, value: not weight(view, value)), op("Add", bell, _WEIGHT)
    return either(
        op("Mul|Div", op("Mul", x, one), _WEIGHT),
        op("Mul", x, op("Mul", one, _WEIGHT)),
        op("Mul", op("Mul|Div", x, _WEIGHT), one),
    )


GELU_ERF = _gated(op("Erf", made_of("Div|Mul")))
GELU_TANH = _gated(op("Tanh", made_of("Add|Mul|Pow")))
QUICK_GELU = op("Mul", X, op("Sigmoid", either(X, op("Mul|Div", X, anything(test=constant), name="scaled"))))


_SINE = op("Sin", op("Mul", X, anything("slope", constant)))
SNAKE = op(
    "Add", X, op("Mul", either(op("Mul", _SINE, _SINE), op("Pow", _SINE, anything("power"))), anything("factor"))
)
_MOST_SLOPE, _MOST_GAIN = 16.0, 4.0
"""Largest a: for x up to 4094 the argument a·x fits float16. Largest product of a and the factor behind the square."""


def is_snake(view: View, sine: Op) -> bool:
    """True for the sine of a snake x + sin²(a·x)/a with constants: it is not that of a position.

    The slope of sin² is at most 1, so an argument off by a·x·ε moves sin²/a by x·ε, which is the rounding error of the
    sum with x. With a large a, a·x would overflow before x does.
    """
    match = direct_match(view, sine, SNAKE)
    if match is None:
        return False
    a, b, power = (view.array(match.values.get(name)) for name in ("slope", "factor", "power"))
    if a is None or b is None or ("power" in match.values and (power is None or (power != 2).any())):
        return False
    moderate = abs(a).max() <= _MOST_SLOPE and a.size == b.size and (abs(a.ravel() * b.ravel())).max() <= _MOST_GAIN
    return bool(moderate)


# -- the search -----------------------------------------------------------------------------------


_KINDS: Sequence[tuple[str, tuple[str, ...], Pattern, tuple[Pattern, ...]]] = (
    ("layer_normalization", ("Sqrt", "Pow"), LAYER, (SCALE, BIAS)),
    ("rms_normalization", ("Sqrt", "Pow"), RMS, (SCALE,)),
    ("l2_normalization", ("Sqrt", "Pow", "ReduceL2"), L2, ()),
    ("softmax", ("ReduceMax",), SOFTMAX, ()),
    ("gelu_erf", ("Erf",), GELU_ERF, ()),
    ("gelu_tanh", ("Tanh",), GELU_TANH, ()),
)
"""The kinds of clusters, each with its rarest ops, its pattern, and the optional ops after it, each a reader of the one
before; in the order in which they take ops."""


Found = tuple[str, tuple[OpId, ...], ValueId, tuple[OpId, ...], Mapping[str, ValueId]]
"""Kind, ops, entry, tail and values of a computation."""


def written_out(view: View, dtypes: Collection[DType]) -> Iterator[Found]:
    """Yield the computations of a model in these types; no op is in two of them.

    O(nodes): a search starts at each op of a rare kind and takes a bounded number of steps.
    """
    taken: set[OpId] = set()
    for kind, anchors, pattern, tail in _KINDS:
        for anchor in view.of_kinds(anchors):
            if anchor.id in taken or not computes(view, anchor, dtypes):
                continue
            for core, end in matches(view, anchor, pattern):
                whole, last = _with_tail(view, tail, core, end)
                match = with_entry_casts(view, whole)
                if is_closed(view, match, last):
                    if taken.isdisjoint(match.ops):
                        taken |= match.ops
                        behind = tuple(sorted(whole.ops - core.ops))
                        yield kind, tuple(sorted(match.ops)), match.values[ENTRY], behind, match.values
                    break


def _with_tail(view: View, tail: Iterable[Pattern], match: Match, last: Op) -> tuple[Match, Op]:
    """Return the match with the tail, as far as each op is the only reader of the one before; and the last op."""
    for step in tail:
        result = last.outputs[0]
        following = readers(view, result)
        if result is None or len(following) != 1 or result in view.yielded:
            break
        reader = view.ops[following[0]]
        output, start = reader.outputs[0], Match(match.ops, {**match.values, "normalized": result})
        longer = None if output is None else next(step(view, output, start), None)
        if longer is None or reader.scope != last.scope:
            break
        match, last = longer, reader
    return match, last
