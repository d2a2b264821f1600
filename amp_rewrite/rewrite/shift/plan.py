"""The exponent of each value: the smallest that gives the values of a class room in the low type."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array, Fit
from amp_rewrite.ir.view import ValueId
from amp_rewrite.rewrite.shift.equations import ClassId, Equations
from amp_rewrite.rewrite.shift.laws import Law, OpPort
from amp_rewrite.settings.choices import LARGEST_SHIFT

_ROUNDS = 8
"""Times that all relations are gone through; laws that still do not hold get Muls."""


@dataclass(frozen=True, slots=True)
class ShiftRequest:
    """Requirements of a plan: the low type, the headroom, a fixed exponent or None, and True if subnormals flush."""

    to: DType
    headroom: float
    exponent: int | None = None
    flush: bool = False


@dataclass(frozen=True, slots=True)
class ShiftRegion:
    """Values computed times 2⁻ᵉ, since `largest`, one of them, goes beyond the type."""

    exponent: int
    largest: ValueId
    absmax: float
    values: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A value beyond the type, left as it is; `why` is one clause."""

    value: ValueId
    absmax: float
    why: str


@dataclass(frozen=True)
class ShiftPlan:
    """Exponents of values, without those of 0, with their regions and the values left alone."""

    exponents: Mapping[ValueId, int] = field(default_factory=dict)
    regions: tuple[ShiftRegion, ...] = ()
    refused: tuple[Refused, ...] = ()


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
    refused: list[Refused] = []
    for value, fit in overflowing.items():
        root = equations.classes.get(value)
        if root is None:
            continue
        exponent = needed_exponent(fit.absmax, want)
        if exponent > LARGEST_SHIFT or math.ldexp(fit.absmax, -exponent) < want.to.tiny * want.headroom:
            refused.append(Refused(value, fit.absmax, f"too much range for any shift: 2^-{exponent} would be needed"))
        elif exponent > demands.get(root, (0, value))[0]:
            demands[root] = exponent, value
    for root in [root for root in demands if not _pays(equations, members[root], root)]:
        value = demands.pop(root)[1]
        refused.append(
            Refused(value, overflowing[value].absmax, "no product computes with it, and the shift needs Muls")
        )
    wanted = {root: want.exponent or exponent for root, (exponent, _) in demands.items()}
    solved = solve_classes(equations, wanted)
    exponents = {
        value: exponent
        for root, exponent in solved.items()
        for value in members[root]
        if exponent
        and value_fits(fits.get(value, Fit()), exponent, want)
        and value_keeps(fits.get(value, Fit()), exponent, want.to, flush=want.flush)
    }
    regions = tuple(
        ShiftRegion(solved[root], value, overflowing[value].absmax, tuple(members[root]))
        for root, (_, value) in sorted(demands.items(), key=lambda item: item[1][1])
    )
    return ShiftPlan(exponents, regions, tuple(refused))


def _pays(equations: Equations, values: Sequence[ValueId], root: ClassId) -> bool:
    """True if a shift of the class gains more than it costs: products become low, or no Mul is needed."""
    return equations.heavy[root] > 0 or equations.joints[root] < len(values)


def value_fits(fit: Fit, exponent: int, want: ShiftRequest) -> bool:
    """True unless a negative exponent takes a value beyond the type."""
    return exponent >= 0 or math.ldexp(fit.absmax, -exponent) * want.headroom <= want.to.max


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


Allowed = Callable[[OpPort, int], bool]
"""True if a constant or an attribute may be stored times 2⁻ᵉ."""


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
    allowed: Allowed
    poor: Container[OpPort] = ()


def solve_ports(laws: Sequence[Law], asked: PortProblem) -> Mapping[OpPort, int]:
    """Return exponents of all ports by which every law holds.

    Where computed inputs and results do not agree, a result is made at another exponent, or a Mul stands before an
    input. All exponents are 0, which always holds, if no others are found.
    """
    found: dict[OpPort, int] = {**asked.given, **asked.wanted}
    changed: set[OpPort] = set()
    for law in laws:
        if not _settled(law, found, asked) and not _changed(law, found, changed, asked):
            return _neutral(laws, asked)
    for knob in asked.knobs:
        found.setdefault(knob, 0)
    if any(sum(factor * found[port] for factor, port in law) for law in laws):
        return _neutral(laws, asked)
    return found


def _neutral(laws: Sequence[Law], asked: PortProblem) -> Mapping[OpPort, int]:
    ports = {port: 0 for law in laws for _, port in law}
    return {**ports, **dict.fromkeys((*asked.given, *asked.wanted, *asked.knobs), 0)}


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


MOST_ADDED_ERROR = 1.1
"""Largest ratio of the rounding errors after and before a shift."""
_SAMPLE = 1 << 18
"""Elements of a constant whose rounding is compared: more do not change the root of their mean square."""


def is_exact(fit: Fit, chunks: Iterable[Array], exponent: int) -> bool:
    """True if float32 numbers times 2⁻ᵉ are float32 numbers. The chunks are read only if some may be subnormal."""
    if math.ldexp(fit.absmax, -exponent) > DType.FLOAT.max:
        return False
    if not fit.absmin or min(fit.absmin, math.ldexp(fit.absmin, -exponent)) >= DType.FLOAT.tiny:
        return True
    return all(_is_exact(chunk, exponent) for chunk in chunks)


def _is_exact(values: Array, exponent: int) -> bool:
    with np.errstate(all="ignore"):
        shifted = np.ldexp(values.astype(np.float32), -exponent)
        return np.array_equal(np.ldexp(shifted, exponent), values, equal_nan=True)


def constant_keeps(chunks: Iterable[Array], fit: Fit, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if a constant times 2⁻ᵉ rounds to the low type with at most 10 % more error, and does not overflow."""
    if math.ldexp(fit.absmax, -exponent) > to.max >= fit.absmax:
        return False
    step = max(1, fit.count // _SAMPLE)
    exact = np.concatenate([np.zeros(0), *(chunk[::step] for chunk in chunks)])
    shifted = _error(np.ldexp(exact, -exponent), to, flush=flush)
    return math.ldexp(shifted, exponent) <= MOST_ADDED_ERROR * _error(exact, to, flush=False)


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
    return math.hypot(usual, added) <= MOST_ADDED_ERROR * usual
