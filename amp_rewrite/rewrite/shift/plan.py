"""Shift plans: for each class of values, the smallest exponent to bring the class into the range of the low type.

The values of a class share one exponent. A constant operand can be scaled by any power of two, so a law with a constant
does not constrain its other terms. A law between two computed values with the same factor puts both into one class.
Other laws become relations between classes.
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
from amp_rewrite.settings.choices import MAX_SHIFT

_MAX_ROUNDS = 8
"""Maximum number of passes over all relations; laws still violated after that need Muls."""

ClassId = int
"""The representative of a class: one of the values with the same exponent."""


class Relation(NamedTuple):
    """A law between classes.

    `factor` times the exponent of `result` equals the weighted sum of the exponents of `terms`.
    """

    factor: int
    result: ClassId
    terms: tuple[tuple[int, ClassId], ...]


@dataclass(frozen=True)
class Equations:
    """The laws of each op, and the classes of its computed values.

    `joints` counts the Muls needed to shift each class, one for each value that is computed or read at exponent 0.
    `heavy` counts the products that read or compute values of each class.
    """

    view: View
    laws: Mapping[OpId, Sequence[Law]]
    classes: Mapping[ValueId, ClassId]
    relations: tuple[Relation, ...]
    joints: Counter[ClassId]
    heavy: Counter[ClassId]

    @classmethod
    def of(cls, view: View) -> Equations:
        """Collect the equations of a view. O(nodes + uses)."""
        laws = {op.id: laws_of(view, op) for op in view.ops if op.kind != "Constant"}
        shiftable = [v for v in view.values if view.tensor_dtype(v.id) is DType.FLOAT and view.constant(v.id) is None]
        union = UnionFind(v.id for v in shiftable)
        pending: list[list[tuple[int, ValueId]]] = []
        ends = {v for scope in view.scopes for v in scope.outputs}
        starts = {v.id for v in shiftable if v.producer is None}
        for op, law in ((view.ops[op_id], law) for op_id, op_laws in laws.items() for law in op_laws):
            terms = _computed_terms(view, op, law)
            if len(law) == 1:
                (ends if law[0][1].side == "x" else starts).update(value for _, value in terms)
            elif len(terms) == 2 and terms[0][0] == -terms[1][0]:
                union.union(*(value for _, value in terms if value in union.parents))
            elif len(terms) > 1:
                pending.append(terms)
        classes = {v.id: union[v.id] for v in shiftable}
        relations = dict.fromkeys(relation for terms in pending if (relation := _relation(classes, terms)) is not None)
        joints = Counter(classes[value] for end in (ends, starts) for value in end if value in classes)
        heavy = Counter[ClassId]()
        for op in (view.ops[op_id] for op_id in laws):
            if op.kind in HEAVY:
                heavy.update({classes[v] for v in op.ports if v in classes})
        return cls(view, laws, classes, tuple(relations), joints, heavy)

    def members(self) -> Mapping[ClassId, Sequence[ValueId]]:
        members: dict[ClassId, list[ValueId]] = {}
        for value, root in self.classes.items():
            members.setdefault(root, []).append(value)
        return members


def value_at(op: Op, port: OpPort) -> ValueId | None:
    if port.is_attribute:
        return None
    return (op.inputs if port.side == "x" else op.outputs)[port.slot]


def _computed_terms(view: View, op: Op, law: Law) -> list[tuple[int, ValueId]]:
    """Return the terms of a law if all its values are computed; none if one is a constant or an attribute."""
    values = ((factor, value_at(op, port)) for factor, port in law)
    terms = [(factor, value) for factor, value in values if value is not None and view.constant(value) is None]
    return terms if len(terms) == len(law) else []


def _relation(classes: Mapping[ValueId, ClassId], terms: Sequence[tuple[int, ValueId]]) -> Relation | None:
    """Return a law with three or more terms, or with unequal factors, as a relation.

    None if the law does not constrain its result.
    """
    if any(value not in classes for _, value in terms):
        return None
    total: Counter[ClassId] = Counter()
    for factor, value in terms:
        total[classes[value]] -= factor
    result = classes[terms[0][1]]
    result_factor = -total.pop(result)
    others = tuple((factor, root) for root, factor in total.items() if factor)
    return Relation(result_factor, result, others) if others and result_factor > 0 else None


# -- classes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShiftRequest:
    """A request for a plan: low type, headroom, optional fixed exponent, and whether subnormals become 0 (`flush`)."""

    to: DType
    headroom: float
    exponent: int | None = None
    flush: bool = False


class ShiftRegion(NamedTuple):
    """Values multiplied by 2⁻ᵉ because one of them, `largest`, exceeds the range of the type."""

    exponent: int
    largest: ValueId
    absmax: float
    values: tuple[ValueId, ...]


@dataclass(frozen=True)
class ShiftPlan:
    """The nonzero exponents of values, and their regions.

    `refused`: values that exceed the range but are not shifted, each with a reason of one clause.
    """

    exponents: Mapping[ValueId, int] = field(default_factory=dict)
    regions: tuple[ShiftRegion, ...] = ()
    refused: Mapping[ValueId, str] = field(default_factory=dict)


def needed_exponent(absmax: float, request: ShiftRequest) -> int:
    """Return the smallest exponent to give a value of this magnitude the requested headroom."""
    exponent = max(0, math.ceil(math.log2(absmax * request.headroom / request.to.max)))
    while absmax * request.headroom > math.ldexp(request.to.max, exponent):
        exponent += 1
    return exponent


def plan_shift(
    equations: Equations, overflowing: Mapping[ValueId, Fit], fits: Mapping[ValueId, Fit], request: ShiftRequest
) -> ShiftPlan:
    """Plan exponents for values beyond the range of the low type. O(values + relations).

    `fits`: how the model's measured values round to the low type.
    """
    members = equations.members()
    demands: dict[ClassId, tuple[int, ValueId]] = {}
    refused: dict[ValueId, str] = {}
    for value, fit in overflowing.items():
        root = equations.classes.get(value)
        if root is None:
            continue
        exponent = needed_exponent(fit.absmax, request)
        if exponent > MAX_SHIFT or math.ldexp(fit.absmax, -exponent) < request.to.tiny * request.headroom:
            refused[value] = f"its range is too wide for any shift: it would need a factor of 2^-{exponent}"
        elif exponent > demands.get(root, (0, value))[0]:
            demands[root] = exponent, value
    for root in list(demands):
        if not equations.heavy[root] and equations.joints[root] >= len(members[root]):
            refused[demands.pop(root)[1]] = "no product uses it, and the shift would need Muls"
    demanded = {root: request.exponent or exponent for root, (exponent, _) in demands.items()}
    solved = solve_classes(equations, demanded)
    exponents: dict[ValueId, int] = {}
    for value, exponent in ((value, exponent) for root, exponent in solved.items() for value in members[root]):
        fit = fits.get(value, Fit())
        in_range = exponent >= 0 or math.ldexp(fit.absmax, -exponent) * request.headroom <= request.to.max
        if in_range and value_fits(fit, exponent, request.to, flush=request.flush):
            exponents[value] = exponent
    regions = tuple(
        ShiftRegion(solved[root], value, overflowing[value].absmax, tuple(members[root]))
        for root, (_, value) in sorted(demands.items(), key=lambda item: item[1][1])
    )
    return ShiftPlan(exponents, regions, refused)


# -- relations ---------------------------------------------------------------------------------------


def solve_classes(equations: Equations, demanded: Mapping[ClassId, int]) -> Mapping[ClassId, int]:
    """Return the demanded exponents of classes, and the implied exponents of other classes.

    A result follows its factors. A factor follows its result only if the result is shifted further.
    """
    solved: Counter[ClassId] = Counter(demanded)
    for _ in range(_MAX_ROUNDS):
        previous = dict(solved)
        for relation in equations.relations:  # in the order of the ops, so that factors come before results
            needed = sum(factor * solved[root] for factor, root in relation.terms)
            if needed < 0 and not solved[relation.result] and not equations.joints[relation.result]:
                solved[relation.result] = -(-needed // relation.factor)
            if relation.factor * solved[relation.result] < needed:
                _try_raise(equations, solved, relation.result, -(-needed // relation.factor))
            missing = relation.factor * solved[relation.result] - needed
            factors = [(factor, root) for factor, root in relation.terms if factor > 0 and missing > 0]
            for factor, root in sorted(factors, key=lambda term: (equations.joints[term[1]], -solved[term[1]])):
                if _try_raise(equations, solved, root, solved[root] + -(-missing // factor)):
                    break
        if solved == previous:
            break
    return {root: exponent for root, exponent in solved.items() if exponent}


def _try_raise(equations: Equations, solved: Counter[ClassId], root: ClassId, exponent: int) -> bool:
    """Raise the exponent of a class if no Mul is needed or the class is already shifted; True on success."""
    if exponent > MAX_SHIFT or (equations.joints[root] and not solved[root]):
        return False
    solved[root] = exponent
    return True


# -- the ports of one op ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PortProblem:
    """The exponents at the ports of one op before its laws are solved.

    `inputs`: the exponents of its computed inputs. `results`: the planned exponents of its results. `free`: constants
    and attributes, which can have any `allowed` exponent. `order`: the computed inputs, in the order in which they
    should get a Mul. `lossy`: inputs that would lose precision if shifted further.
    """

    inputs: Mapping[OpPort, int]
    results: Mapping[OpPort, int]
    free: Sequence[OpPort]
    order: Sequence[OpPort]
    allowed: Callable[[OpPort, int], bool]
    lossy: Container[OpPort] = ()


def solve_ports(laws: Sequence[Law], problem: PortProblem) -> Mapping[OpPort, int]:
    """Solve the laws for the exponents of all ports.

    If inputs and results conflict, a result is computed at another exponent, or an input gets a Mul. If there is no
    other solution, all exponents are 0.
    """
    exponents: dict[OpPort, int] = {**problem.inputs, **problem.results}
    changed: set[OpPort] = set()
    for law in laws:
        if not _complete(law, exponents, problem) and not _adjust(law, exponents, changed, problem):
            break
    else:
        for port in problem.free:
            exponents.setdefault(port, 0)
        if not any(sum(factor * exponents[port] for factor, port in law) for law in laws):
            return exponents
    ports = (port for law in laws for _, port in law)
    return dict.fromkeys((*ports, *problem.inputs, *problem.results, *problem.free), 0)


def _complete(law: Law, exponents: dict[OpPort, int], problem: PortProblem) -> bool:
    """Set the missing exponents of constants and attributes in a law; True if the law then holds."""
    for factor, port in [term for term in law if term[1] not in exponents]:
        residual = sum(f * exponents.get(other, 0) for f, other in law)
        exponent = -residual // factor
        fits = residual % factor == 0 and problem.allowed(port, exponent)
        exponents[port] = exponent if fits else 0
    return sum(factor * exponents[port] for factor, port in law) == 0


def _adjust(law: Law, exponents: dict[OpPort, int], changed: set[OpPort], problem: PortProblem) -> bool:
    """Change the exponent of one port to satisfy a law; False if no unchanged port can."""
    residual = sum(factor * exponents[port] for factor, port in law)
    terms = {port: factor for factor, port in law}
    results = [port for port in terms if port in problem.results]
    inputs = [port for port in problem.order if port in terms]
    equal = len(terms) == 2 and not sum(terms.values()) and not any(port in problem.free for port in terms)
    is_relation = len(terms) > 1 and not equal
    results_first = bool(results) and (residual * terms[results[0]] < 0 if is_relation else not inputs)
    if is_relation:
        inputs.sort(key=lambda port: port in problem.lossy)
    robust = [port for port in inputs if not is_relation or port not in problem.lossy]
    for port in (*results, *inputs) if results_first else (*robust, *results, *inputs):
        if port not in changed and terms[port] and residual % terms[port] == 0:
            exponents[port] -= residual // terms[port]
            changed.add(port)
            return True
    return False


# -- rounding --------------------------------------------------------------------------------------


MAX_ADDED_ERROR = 1.1
"""Largest allowed ratio of the rounding error after a shift to the error before it."""
_SAMPLE_SIZE = 1 << 18
"""Number of elements sampled from a constant; enough for a stable root mean square of rounding errors."""


def is_exact(fit: Fit, chunks: Iterable[Array], exponent: int) -> bool:
    """True if scaling by 2⁻ᵉ is exact in float32. Reads the chunks only if some numbers may be subnormal."""
    if math.ldexp(fit.absmax, -exponent) > DType.FLOAT.max:
        return False
    if not fit.absmin or min(fit.absmin, math.ldexp(fit.absmin, -exponent)) >= DType.FLOAT.tiny:
        return True
    with np.errstate(all="ignore"):
        shifted = ((chunk, np.ldexp(chunk.astype(np.float32), -exponent)) for chunk in chunks)
        return all(np.array_equal(np.ldexp(values, exponent), chunk, equal_nan=True) for chunk, values in shifted)


def constant_fits(chunks: Iterable[Array], fit: Fit, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if a constant times 2⁻ᵉ does not overflow, and rounds with at most 10% more error than unshifted."""
    if math.ldexp(fit.absmax, -exponent) > to.max >= fit.absmax:
        return False
    step = max(1, fit.count // _SAMPLE_SIZE)
    exact = np.concatenate([np.zeros(0), *(chunk[::step] for chunk in chunks)])
    shifted = _error(np.ldexp(exact, -exponent), to, flush=flush)
    return math.ldexp(shifted, exponent) <= MAX_ADDED_ERROR * _error(exact, to, flush=False)


def _error(exact: Array, to: DType, *, flush: bool) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(np.float32).astype(to.numpy).astype(np.float64)
        if flush:
            rounded = np.where(np.abs(rounded) < to.tiny, 0.0, rounded)
        return float(np.linalg.norm(rounded - exact))


def value_fits(fit: Fit, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if, judging by its counts, a measured value times 2⁻ᵉ rounds with at most 10% more error than unshifted.

    The counts give one point of the distribution: the share of elements below the smallest normal number. Magnitudes
    near zero are assumed to be uniformly distributed, as in most tensors, so the share below a bound is proportional to
    the bound.
    """
    if exponent <= 0 or not fit.count or not fit.absmax:
        return True
    if fit.absmin and math.ldexp(fit.absmin, -exponent) >= to.tiny:
        return True
    share = max(fit.subnormal + fit.flushed, 1) / fit.count
    median = min(to.tiny / (2 * share), fit.absmax)
    size = max(median**2 / 2, fit.absmax**2 / fit.count)
    typical_error = math.sqrt(size) * to.eps / math.sqrt(12) / 2
    flushed_share = min(1.0, math.ldexp(share, exponent))
    step = to.tiny / math.sqrt(3) if flush else to.smallest_subnormal / math.sqrt(12)
    added = math.ldexp(step * math.sqrt(flushed_share), exponent)
    return math.hypot(typical_error, added) <= MAX_ADDED_ERROR * typical_error
