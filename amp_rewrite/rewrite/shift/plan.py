"""The exponent of each value: the smallest that gives the values of a class room in the low type.

A class is made of values that share one exponent. A constant operand takes any power of two, so a law with one does not
constrain the others. Of the laws about computed values, one of two terms with the same factor makes one class of both;
others are relations between classes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from networkx.utils import UnionFind

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array, Fit
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.shift.laws import Law, OpPort, laws_of
from amp_rewrite.settings.choices import LARGEST_SHIFT

_ROUNDS = 8
"""Times that all relations are gone through; laws that still do not hold get Muls."""

ClassId = int
"""A class of values that share one exponent: one of them."""


class Relation(NamedTuple):
    """A law between classes: `factor` times the exponent of `result` is the sum of factor times exponent of `terms`."""

    factor: int
    result: ClassId
    terms: tuple[tuple[int, ClassId], ...]


@dataclass(frozen=True)
class Equations:
    """The laws of each op, and the classes of its computed values.

    `joints` counts, for each class, the Muls that a shift of it needs: values made without one, and values that ops
    read at exponent 0. `heavy` counts the products that read or make its values.
    """

    view: View
    laws: Mapping[OpId, Sequence[Law]]
    classes: Mapping[ValueId, ClassId]
    relations: tuple[Relation, ...]
    joints: Counter[ClassId]
    heavy: Counter[ClassId]

    @classmethod
    def of(cls, view: View) -> Equations:
        """Return the equations of a view. O(nodes + uses)."""
        laws = {op.id: laws_of(view, op) for op in view.ops if op.kind != "Constant"}
        shiftable = [v for v in view.values if view.tensor_dtype(v.id) is DType.FLOAT and view.constant(v.id) is None]
        union = UnionFind(v.id for v in shiftable)
        pending: list[list[tuple[int, ValueId]]] = []
        ended = {v for scope in view.scopes for v in scope.outputs}
        started = {v.id for v in shiftable if v.producer is None}
        for op, law in ((view.ops[op_id], law) for op_id, known in laws.items() for law in known):
            terms = _computed(view, op, law)
            if len(law) == 1:
                (ended if law[0][1].side == "x" else started).update(value for _, value in terms)
            elif len(terms) == 2 and terms[0][0] == -terms[1][0]:
                union.union(*(value for _, value in terms if value in union.parents))
            elif len(terms) > 1:
                pending.append(terms)
        classes = {v.id: union[v.id] for v in shiftable}
        relations = dict.fromkeys(relation for terms in pending if (relation := _relation(classes, terms)) is not None)
        joints = Counter(classes[value] for end in (ended, started) for value in end if value in classes)
        heavy = Counter[ClassId]()
        for op in (view.ops[op_id] for op_id in laws):
            if op.kind in HEAVY:
                heavy.update({classes[v] for v in op.ports if v in classes})
        return cls(view, laws, classes, tuple(relations), joints, heavy)

    def members(self) -> Mapping[ClassId, Sequence[ValueId]]:
        """Return the values of each class."""
        members: dict[ClassId, list[ValueId]] = {}
        for value, root in self.classes.items():
            members.setdefault(root, []).append(value)
        return members


def value_at(op: Op, port: OpPort) -> ValueId | None:
    """Return the value at a port; None for an attribute."""
    if port.is_attribute:
        return None
    return (op.inputs if port.side == "x" else op.outputs)[port.slot]


def _computed(view: View, op: Op, law: Law) -> list[tuple[int, ValueId]]:
    """Return the terms of a law about computed values; none with a constant or an attribute."""
    values = ((factor, value_at(op, port)) for factor, port in law)
    terms = [(factor, value) for factor, value in values if value is not None and view.constant(value) is None]
    return terms if len(terms) == len(law) else []


def _relation(classes: Mapping[ValueId, ClassId], terms: Sequence[tuple[int, ValueId]]) -> Relation | None:
    """Return the relation of a law of three terms or of unequal factors; None if it does not constrain its result."""
    if any(value not in classes for _, value in terms):
        return None
    total: Counter[ClassId] = Counter()
    for factor, value in terms:
        total[classes[value]] -= factor
    result = classes[terms[0][1]]
    head = -total.pop(result)
    kept = tuple((factor, root) for root, factor in total.items() if factor)
    return Relation(head, result, kept) if kept and head > 0 else None


# -- classes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShiftRequest:
    """Requirements of a plan: the low type, the headroom, a fixed exponent or None, and True if subnormals flush."""

    to: DType
    headroom: float
    exponent: int | None = None
    flush: bool = False


class ShiftRegion(NamedTuple):
    """Values computed times 2⁻ᵉ, since `largest`, one of them, goes beyond the type."""

    exponent: int
    largest: ValueId
    absmax: float
    values: tuple[ValueId, ...]


@dataclass(frozen=True)
class ShiftPlan:
    """Exponents of values, without those of 0, with their regions.

    `refused`: values beyond the type that are left as they are, each with the reason, one clause.
    """

    exponents: Mapping[ValueId, int] = field(default_factory=dict)
    regions: tuple[ShiftRegion, ...] = ()
    refused: Mapping[ValueId, str] = field(default_factory=dict)


def needed_exponent(absmax: float, want: ShiftRequest) -> int:
    """Return the smallest exponent for the requested headroom of a value of this size."""
    exponent = max(0, math.ceil(math.log2(absmax * want.headroom / want.to.max)))
    while absmax * want.headroom > math.ldexp(want.to.max, exponent):
        exponent += 1
    return exponent


def plan_shift(
    equations: Equations, overflowing: Mapping[ValueId, Fit], fits: Mapping[ValueId, Fit], want: ShiftRequest
) -> ShiftPlan:
    """Return the exponents for values beyond the low type. O(values + relations).

    `fits`: how the values of the model round to the type, as far as that is known.
    """
    members = equations.members()
    demands: dict[ClassId, tuple[int, ValueId]] = {}
    refused: dict[ValueId, str] = {}
    for value, fit in overflowing.items():
        root = equations.classes.get(value)
        if root is None:
            continue
        exponent = needed_exponent(fit.absmax, want)
        if exponent > LARGEST_SHIFT or math.ldexp(fit.absmax, -exponent) < want.to.tiny * want.headroom:
            refused[value] = f"too much range for any shift: 2^-{exponent} would be needed"
        elif exponent > demands.get(root, (0, value))[0]:
            demands[root] = exponent, value
    for root in list(demands):
        if not equations.heavy[root] and equations.joints[root] >= len(members[root]):
            refused[demands.pop(root)[1]] = "no product computes with it, and the shift needs Muls"
    wanted = {root: want.exponent or exponent for root, (exponent, _) in demands.items()}
    solved = solve_classes(equations, wanted)
    exponents: dict[ValueId, int] = {}
    for value, exponent in ((value, exponent) for root, exponent in solved.items() for value in members[root]):
        fit = fits.get(value, Fit())
        fits_still = exponent >= 0 or math.ldexp(fit.absmax, -exponent) * want.headroom <= want.to.max
        if fits_still and value_keeps(fit, exponent, want.to, flush=want.flush):
            exponents[value] = exponent
    regions = tuple(
        ShiftRegion(solved[root], value, overflowing[value].absmax, tuple(members[root]))
        for root, (_, value) in sorted(demands.items(), key=lambda item: item[1][1])
    )
    return ShiftPlan(exponents, regions, refused)


# -- relations ---------------------------------------------------------------------------------------


def solve_classes(equations: Equations, wanted: Mapping[ClassId, int]) -> Mapping[ClassId, int]:
    """Return exponents of classes: the wanted ones, and others by their relations to them.

    A result follows the factors that it is computed from. A factor follows its result only where that is shifted more.
    """
    solved: Counter[ClassId] = Counter(wanted)
    for _ in range(_ROUNDS):
        before = dict(solved)
        for relation in equations.relations:  # in the order of the ops: what a result needs is known by then
            needed = sum(factor * solved[root] for factor, root in relation.terms)
            if needed < 0 and not solved[relation.result] and not equations.joints[relation.result]:
                solved[relation.result] = -(-needed // relation.factor)
            if relation.factor * solved[relation.result] < needed:
                _raise(equations, solved, relation.result, -(-needed // relation.factor))
            short = relation.factor * solved[relation.result] - needed
            factors = [(factor, root) for factor, root in relation.terms if factor > 0 and short > 0]
            for factor, root in sorted(factors, key=lambda term: (equations.joints[term[1]], -solved[term[1]])):
                if _raise(equations, solved, root, solved[root] + -(-short // factor)):
                    break
        if solved == before:
            break
    return {root: exponent for root, exponent in solved.items() if exponent}


def _raise(equations: Equations, solved: Counter[ClassId], root: ClassId, exponent: int) -> bool:
    """Raise the exponent of a class without a new Mul, or of one shifted anyway; True if it is raised."""
    if exponent > LARGEST_SHIFT or (equations.joints[root] and not solved[root]):
        return False
    solved[root] = exponent
    return True


# -- the ports of one op ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PortProblem:
    """The exponents at the ports of one op before laws are solved.

    `given`: exponents of its computed inputs; `wanted`: those of its results. `knobs`: constants and attributes, which
    take any exponent that is `allowed`. `order`: the computed inputs, those first that a Mul should stand before.
    `poor`: those of them that would lose digits if they were shifted further.
    """

    given: Mapping[OpPort, int]
    wanted: Mapping[OpPort, int]
    knobs: Sequence[OpPort]
    order: Sequence[OpPort]
    allowed: Callable[[OpPort, int], bool]
    poor: Container[OpPort] = ()


def solve_ports(laws: Sequence[Law], asked: PortProblem) -> Mapping[OpPort, int]:
    """Return exponents of all ports under every law.

    Where computed inputs and results do not agree, a result is made at another exponent, or a Mul stands before an
    input. All exponents are 0, which always holds, if no others are found.
    """
    found: dict[OpPort, int] = {**asked.given, **asked.wanted}
    changed: set[OpPort] = set()
    for law in laws:
        if not _settled(law, found, asked) and not _changed(law, found, changed, asked):
            break
    else:
        for knob in asked.knobs:
            found.setdefault(knob, 0)
        if not any(sum(factor * found[port] for factor, port in law) for law in laws):
            return found
    return dict.fromkeys((*(port for law in laws for _, port in law), *asked.given, *asked.wanted, *asked.knobs), 0)


def _settled(law: Law, found: dict[OpPort, int], asked: PortProblem) -> bool:
    """Settle the open constants and attributes of a law; True if it then holds."""
    for factor, port in [term for term in law if term[1] not in found]:
        rest = sum(f * found.get(other, 0) for f, other in law)
        exponent = -rest // factor
        fits = rest % factor == 0 and asked.allowed(port, exponent)
        found[port] = exponent if fits else 0
    return sum(factor * found[port] for factor, port in law) == 0


def _changed(law: Law, found: dict[OpPort, int], changed: set[OpPort], asked: PortProblem) -> bool:
    """Change a port of a law so that it holds; False if none can change, or once more."""
    rest = sum(factor * found[port] for factor, port in law)
    terms = {port: factor for factor, port in law}
    results = [port for port in terms if port in asked.wanted]
    inputs = [port for port in asked.order if port in terms]
    equal = len(terms) == 2 and not sum(terms.values()) and not any(port in asked.knobs for port in terms)
    sums = len(terms) > 1 and not equal
    late = bool(results) and (rest * terms[results[0]] < 0 if sums else not inputs)
    if sums:
        inputs.sort(key=lambda port: port in asked.poor)
    good = [port for port in inputs if not sums or port not in asked.poor]
    for port in (*results, *inputs) if late else (*good, *results, *inputs):
        if port not in changed and terms[port] and rest % terms[port] == 0:
            found[port] -= rest // terms[port]
            changed.add(port)
            return True
    return False


# -- rounding --------------------------------------------------------------------------------------


MAX_ADDED_ERROR = 1.1
"""Largest ratio of the rounding errors after and before a shift."""
_SAMPLE = 1 << 18
"""Elements of a constant whose rounding is compared: more do not change the root of their mean square."""


def is_exact(fit: Fit, chunks: Iterable[Array], exponent: int) -> bool:
    """True if float32 numbers times 2⁻ᵉ are float32 numbers. The chunks are read only if some may be subnormal."""
    if math.ldexp(fit.absmax, -exponent) > DType.FLOAT.max:
        return False
    if not fit.absmin or min(fit.absmin, math.ldexp(fit.absmin, -exponent)) >= DType.FLOAT.tiny:
        return True
    with np.errstate(all="ignore"):
        shifted = ((chunk, np.ldexp(chunk.astype(np.float32), -exponent)) for chunk in chunks)
        return all(np.array_equal(np.ldexp(values, exponent), chunk, equal_nan=True) for chunk, values in shifted)


def constant_keeps(chunks: Iterable[Array], fit: Fit, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if a constant times 2⁻ᵉ rounds to the low type with at most 10 % more error, and does not overflow."""
    if math.ldexp(fit.absmax, -exponent) > to.max >= fit.absmax:
        return False
    step = max(1, fit.count // _SAMPLE)
    exact = np.concatenate([np.zeros(0), *(chunk[::step] for chunk in chunks)])
    shifted = _error(np.ldexp(exact, -exponent), to, flush=flush)
    return math.ldexp(shifted, exponent) <= MAX_ADDED_ERROR * _error(exact, to, flush=False)


def _error(exact: Array, to: DType, *, flush: bool) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(np.float32).astype(to.numpy).astype(np.float64)
        if flush:
            rounded = np.where(np.abs(rounded) < to.tiny, 0.0, rounded)
        return float(np.linalg.norm(rounded - exact))


def value_keeps(fit: Fit, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if a measured value times 2⁻ᵉ still rounds with at most 10 % more error, as far as its counts tell.

    The counts give one point of the distribution: the share of elements below the smallest normal number. Sizes are
    taken to be spread evenly near zero, as those of most tensors are: the share below a bound grows with the bound.
    """
    if exponent <= 0 or not fit.count or not fit.absmax:
        return True
    if fit.absmin and math.ldexp(fit.absmin, -exponent) >= to.tiny:
        return True
    share = max(fit.subnormal + fit.flushed, 1) / fit.count
    median = min(to.tiny / (2 * share), fit.absmax)
    size = max(median**2 / 2, fit.absmax**2 / fit.count)
    usual = math.sqrt(size) * to.eps / math.sqrt(12) / 2
    below = min(1.0, math.ldexp(share, exponent))
    step = to.tiny / math.sqrt(3) if flush else to.smallest_subnormal / math.sqrt(12)
    added = math.ldexp(step * math.sqrt(below), exponent)
    return math.hypot(usual, added) <= MAX_ADDED_ERROR * usual
