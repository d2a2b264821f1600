"""Computations written out op by op: patterns of nested ops with captures, their search, and the patterns of clusters.

A pattern describes the computation of a value: `op("Div", X, op("Sqrt", X))` is x divided by its square root. Operands
of commutative ops match in any order, operands beyond those in the pattern are ignored, and a name used twice must
capture the same value. Patterns look through Identities and Casts between floating-point types; those before an op
belong to the match. A match is closed if all its ops are in one graph and only the result of its last op is read
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import casts_floats, computes, confined, trail
from amp_rewrite.ir.op_classes import CARRIERS, COMMUTATIVE
from amp_rewrite.ir.view import Op, OpId, Role, ValueId, View

ENTRY = "x"
"""The name of the input of a matched computation."""
_MAX_READERS = 4
"""Maximum number of readers of a value within a match."""
_MAX_STEPS = 8
"""Maximum number of ops from the anchor of a match to its last op."""
_MAX_OPS = 8
"""Maximum number of ops in an expression of `made_of`."""


@dataclass(frozen=True, slots=True)
class Match:
    """The ops of a match, and its captured values by name. `direct`: do not look through Casts and Identities."""

    ops: frozenset[OpId] = frozenset()
    values: Mapping[str, ValueId] = field(default_factory=dict)
    direct: bool = False

    def bare(self, view: View, value: ValueId) -> tuple[ValueId, list[OpId]]:
        return (value, []) if self.direct else before_casts(view, value)

    def bind(self, name: str, value: ValueId) -> Match | None:
        """Capture a value; return None if its name has already captured another."""
        if not name or self.values.get(name) == value:
            return self
        return None if name in self.values else replace(self, values={**self.values, name: value})

    def take(self, *ops: OpId) -> Match:
        return replace(self, ops=self.ops.union(ops)) if ops else self


Pattern = Callable[[View, ValueId, Match], Iterator[Match]]
"""A function that extends a match by the ops that compute a value, in all possible ways."""
Predicate = Callable[[View, ValueId], bool]


def op(kinds: str, *operands: Pattern, name: str = "", casts: bool = True) -> Pattern:
    """Return a pattern for an op with one of the `kinds`, separated by "|", and first operands that match `operands`.

    `casts`: include Casts of the result in the match.
    """
    allowed = frozenset(kinds.split("|"))

    def match(view: View, value: ValueId, so_far: Match) -> Iterator[Match]:
        bare, passed = so_far.bare(view, value)
        producer = view.producer(bare)
        if producer is None or producer.kind not in allowed or len(producer.inputs) < len(operands):
            return
        bound = so_far.bind(name, bare)
        if bound is None:
            return
        extended = bound.take(producer.id, *(passed if casts else ()))
        swaps = producer.kind in COMMUTATIVE and len(producer.inputs) > 1
        orders = dict.fromkeys(permutations(producer.inputs, len(operands))) if swaps else (producer.inputs,)
        for order in orders:
            yield from _all(view, order, operands, extended)

    return match


def _all(view: View, values: Sequence[ValueId | None], patterns: Sequence[Pattern], match: Match) -> Iterator[Match]:
    if not patterns:
        yield match
    elif values[0] is not None:
        for extended in patterns[0](view, values[0], match):
            yield from _all(view, values[1:], patterns[1:], extended)


def anything(
    name: str = "",
    test: Predicate | None = None,
    *,
    unless: Pattern | None = None,
    keep_casts: bool = False,
    casts: bool = False,
) -> Pattern:
    """Return a pattern for any value that passes `test` and does not match `unless`.

    `keep_casts`: capture the value itself, not the value before its Casts. `casts`: include these Casts in the match.
    """

    def match(view: View, value: ValueId, so_far: Match) -> Iterator[Match]:
        bare, passed = (value, []) if keep_casts else so_far.bare(view, value)
        bound = so_far.bind(name, bare)
        if bound is None or (test is not None and not test(view, bare)):
            return
        if unless is None or next(unless(view, bare, Match(direct=so_far.direct)), None) is None:
            yield bound.take(*passed) if casts else bound

    return match


def either(*alternatives: Pattern) -> Pattern:
    """Return a pattern for any of these alternatives, tried in order."""

    def match(view: View, value: ValueId, so_far: Match) -> Iterator[Match]:
        for pattern in alternatives:
            yield from pattern(view, value, so_far)

    return match


def through(kinds: str, pattern: Pattern, max_ops: int = _MAX_OPS) -> Pattern:
    """Return the pattern followed by up to `max_ops` ops of these kinds."""
    return either(pattern, op(kinds, through(kinds, pattern, max_ops - 1))) if max_ops else pattern


def made_of(kinds: str) -> Pattern:
    """Return a pattern for an expression of a few ops of these kinds on the captured entry and weights."""
    allowed = frozenset(kinds.split("|"))

    def match(view: View, value: ValueId, so_far: Match) -> Iterator[Match]:
        pending: list[ValueId | None] = [value]
        count = 0
        while pending:
            operand = pending.pop()
            if operand is None:
                return
            bare, passed = so_far.bare(view, operand)
            if bare == so_far.values[ENTRY] or is_weight(view, bare):
                continue
            producer = view.producer(bare)
            if producer is None or producer.kind not in allowed:
                return
            count += producer.id not in so_far.ops
            if count > _MAX_OPS:
                return
            so_far = so_far.take(producer.id, *passed)
            pending.extend(producer.inputs)
        yield so_far

    return match


X = anything(ENTRY)


def is_constant(view: View, value: ValueId) -> bool:
    return view.constant(before_casts(view, value)[0]) is not None


def is_weight(view: View, value: ValueId) -> bool:
    """True for an initializer, a Constant, or the result of one op on these."""
    bare, _ = before_casts(view, value)
    producer = view.producer(bare)
    sources = (bare,) if producer is None or producer.kind == "Constant" else producer.inputs
    return bool(sources) and all(v is not None and view.values[v].tensor is not None for v in sources)


# -- the search for a pattern ----------------------------------------------------------------------------------------


def matches(view: View, anchor: Op, pattern: Pattern, *, direct: bool = False) -> Iterator[tuple[Match, Op]]:
    """Yield the matches of a pattern that contain the anchor, closed or not, each with its last op.

    O(steps from the anchor).
    """
    for last in _ends(view, anchor):
        value = last.outputs[0]
        for match in pattern(view, value, Match(direct=direct)) if value is not None else ():
            if anchor.id in match.ops:
                yield match, last


def direct_match(view: View, anchor: Op, pattern: Pattern) -> Match | None:
    """Return the first closed match that contains the anchor, without looking through Casts and Identities."""
    found = matches(view, anchor, pattern, direct=True)
    return next((match for match, last in found if is_closed(view, match, last)), None)


def _ends(view: View, anchor: Op) -> list[Op]:
    seen = level = {anchor.id}
    for _ in range(_MAX_STEPS):
        following = [readers(view, view.ops[op].outputs[0]) for op in level]
        next_ops = {op for ops in following if len(ops) <= _MAX_READERS for op in ops}
        level = {op for op in next_ops - seen if view.ops[op].kind in CARRIERS}
        seen = seen | level
    return [view.ops[op] for op in sorted(seen)]


def with_entry_casts(view: View, match: Match) -> Match:
    """Add the Casts of a match's entry if only the match reads their results.

    A Cast of the entry with other readers is left outside, and its result becomes the entry.
    """
    ops, entry = set(match.ops), match.values[ENTRY]
    for reader in view.readers(entry):
        read_inside = all(use.op in ops for value in reader.results for use in view.uses[value])
        if is_transparent(view, reader) and read_inside and _encloses(view, ops, reader):
            ops.add(reader.id)
    for op_id in sorted(ops):
        cast = view.ops[op_id]
        if cast.inputs[:1] == (entry,) and is_transparent(view, cast) and not _encloses(view, ops, cast):
            ops.discard(op_id)
            entry = cast.outputs[0] or entry
    return Match(frozenset(ops), {**match.values, ENTRY: entry})


def is_closed(view: View, match: Match, last: Op) -> bool:
    """True if all ops are in one graph and only the results of the last one are read outside."""
    inner = (view.ops[op_id] for op_id in match.ops if op_id != last.id)
    return all(op.scope == last.scope and _encloses(view, match.ops, op) for op in inner)


def readers(view: View, value: ValueId | None) -> list[OpId]:
    """Return the distinct readers of a value, looking through Casts and Identities."""
    ops: dict[OpId, None] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        for use in view.uses[value] if value is not None else ():
            if is_transparent(view, view.ops[use.op]):
                pending.append(view.ops[use.op].outputs[0])
            else:
                ops[use.op] = None
    return list(ops)


def is_transparent(view: View, op: Op) -> bool:
    return op.kind == "Identity" or casts_floats(view, op)


def before_casts(view: View, value: ValueId) -> tuple[ValueId, list[OpId]]:
    """Return the value upstream of any Casts, and the Casts themselves."""
    passed, bare = trail(view, value, lambda op: op.inputs[0] if is_transparent(view, op) else None)
    return bare if bare is not None else value, [op.id for op in passed]


def _encloses(view: View, ops: Container[OpId], op: Op) -> bool:
    return all(confined(view, value, ops) for value in op.results)


# -- normalizations: by deviation, by root mean square and by length ---------------------------------


def _negative(view: View, value: ValueId) -> bool:
    array = view.array(value)
    return array is not None and bool((array < 0).all())


def _per_feature(view: View, value: ValueId) -> bool:
    """True for a weight, or an input with one axis, such as a scale or bias that the caller feeds."""
    source = view.values[before_casts(view, value)[0]]
    if source.role is not Role.INPUT:
        return is_weight(view, value)
    inputs = view.scopes[source.scope].graph.input
    return any(info.name == source.name and len(info.type.tensor_type.shape.dim) == 1 for info in inputs)


def _normalized(value: Pattern, squared: Pattern, reductions: str, between: str) -> Pattern:
    """Return the pattern of a value over the root of a mean or sum of squares, perhaps with an epsilon or a bound."""
    # An exponent computed at run time is assumed to be 2, as onnxruntime does.
    two = anything(test=lambda view, value: (array := view.array(value)) is None or bool((array == 2).all()))
    square = either(op("Pow", squared, two), op("Mul", squared, squared))
    total = op(reductions, square)
    size = either(op("Add", total, anything("guard", keep_casts=True)), op("Max|Clip", total), total)
    power = anything(test=lambda view, value: not _negative(view, value), keep_casts=True)
    divisor = through(between, either(op("Sqrt", size), op("Pow", size, power)))
    inverse_root = op("Pow", size, anything(test=_negative, keep_casts=True))
    inverse = either(inverse_root, op("Reciprocal", divisor), op("Div", anything(test=is_weight), divisor))
    return either(op("Div", value, divisor), op("Mul", value, inverse))


_MEAN = op("ReduceMean", X)
_CENTERED = op("Sub", X, _MEAN)
_UNCENTERED = anything(ENTRY, unless=_CENTERED, casts=True)
_TOTALS = "ReduceSum|GlobalAveragePool"
_LENGTH = op("ReduceL2", X)

LAYER = _normalized(_CENTERED, op("Sub", X, _MEAN, name="d", casts=False), f"ReduceMean|{_TOTALS}", "Expand")
RMS = _normalized(_UNCENTERED, X, "ReduceMean", "Expand")
L2 = either(
    _normalized(_UNCENTERED, X, _TOTALS, "Expand|Clip|Max"),
    op("Div", X, through("Expand", either(op("Clip|Max|Add", _LENGTH), _LENGTH))),
)

SCALE = op("Mul", anything("normalized", casts=True), anything("scale", _per_feature, keep_casts=True))
BIAS = op("Add", anything("normalized", casts=True), anything("bias", _per_feature, keep_casts=True))


# -- softmax and activations: GELU (erf and tanh), quick GELU, snake -----------------------------------

_WEIGHT = anything(test=is_weight)

_EXP = op("Exp", op("Sub", X, op("ReduceMax", X)), name="exp")
SOFTMAX = op("Div", _EXP, op("ReduceSum", _EXP))


def _gated(sigmoid: Pattern) -> Pattern:
    """Return the pattern of x · ½ · (1 + sigmoid), with the products in any order and any constants."""
    x, one = anything(ENTRY, lambda view, value: not is_weight(view, value)), op("Add", sigmoid, _WEIGHT)
    return either(
        op("Mul|Div", op("Mul", x, one), _WEIGHT),
        op("Mul", x, op("Mul", one, _WEIGHT)),
        op("Mul", op("Mul|Div", x, _WEIGHT), one),
    )


GELU_ERF = _gated(op("Erf", made_of("Div|Mul")))
GELU_TANH = _gated(op("Tanh", made_of("Add|Mul|Pow")))
QUICK_GELU = op("Mul", X, op("Sigmoid", either(X, op("Mul|Div", X, anything(test=is_constant), name="scaled"))))


_SINE = op("Sin", op("Mul", X, anything("slope", is_constant)))
SNAKE = op(
    "Add", X, op("Mul", either(op("Mul", _SINE, _SINE), op("Pow", _SINE, anything("power"))), anything("factor"))
)
_MAX_SLOPE = 16.0
"""Largest slope a; a·x does not overflow float16 for |x| ≤ 4094."""
_MAX_GAIN = 4.0
"""Largest product of the slope a and the factor of sin²."""


def is_snake(view: View, sine: Op) -> bool:
    """True for the sine in a snake activation x + sin²(a·x)/a with constant a, as opposed to the sine of a position.

    The slope of sin² is at most 1, so an error of a·x·ε in the argument changes sin²/a by at most x·ε, which is the
    rounding error of adding x. With a large a, a·x would overflow before x does.
    """
    match = direct_match(view, sine, SNAKE)
    if match is None:
        return False
    a, b, power = (view.array(match.values.get(name)) for name in ("slope", "factor", "power"))
    if a is None or b is None or ("power" in match.values and (power is None or (power != 2).any())):
        return False
    return abs(a).max() <= _MAX_SLOPE and a.size == b.size and bool(abs(a.ravel() * b.ravel()).max() <= _MAX_GAIN)


# -- the search for clusters -----------------------------------------------------------------------------------


_CLUSTERS: Sequence[tuple[str, tuple[str, ...], Pattern, tuple[Pattern, ...]]] = (
    ("layer_normalization", ("Sqrt", "Pow"), LAYER, (SCALE, BIAS)),
    ("rms_normalization", ("Sqrt", "Pow"), RMS, (SCALE,)),
    ("l2_normalization", ("Sqrt", "Pow", "ReduceL2"), L2, ()),
    ("softmax", ("ReduceMax",), SOFTMAX, ()),
    ("gelu_erf", ("Erf",), GELU_ERF, ()),
    ("gelu_tanh", ("Tanh",), GELU_TANH, ()),
)
"""The kinds of clusters, each with its rarest ops, its pattern, and the optional ops that may follow it, in order.
Earlier kinds take precedence."""


Cluster = tuple[str, tuple[OpId, ...], ValueId, tuple[OpId, ...], Mapping[str, ValueId]]
"""The kind, ops, entry, tail and captured values of a `clusters.Cluster`."""


def find_clusters(view: View, dtypes: Collection[DType]) -> Iterator[Cluster]:
    """Yield the clusters of a model that compute in one of these types; no op belongs to two clusters.

    O(nodes): a search starts at each op of a rare kind and takes a bounded number of steps.
    """
    taken: set[OpId] = set()
    for kind, anchors, pattern, tail in _CLUSTERS:
        for anchor in view.of_kinds(anchors):
            if anchor.id in taken or not computes(view, anchor, dtypes):
                continue
            for core, end in matches(view, anchor, pattern):
                whole, last = _with_tail(view, tail, core, end)
                match = with_entry_casts(view, whole)
                if is_closed(view, match, last):
                    if taken.isdisjoint(match.ops):
                        taken |= match.ops
                        tail_ops = tuple(sorted(whole.ops - core.ops))
                        yield kind, tuple(sorted(match.ops)), match.values[ENTRY], tail_ops, match.values
                    break


def _with_tail(view: View, tail: Iterable[Pattern], match: Match, last: Op) -> tuple[Match, Op]:
    """Extend a match by the tail while each op is the only reader of the previous one; return it and its last op."""
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
