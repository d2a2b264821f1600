"""The bound of a value: an interval, the class that follows from it, and the step of the proof."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import ValueId


class BoundClass(Enum):
    """Classes of values by proof: a value fits a low type, overflows it, or neither is known."""

    FITS = "proved to fit"
    MEASURED = "measured to fit"
    OVERFLOWS = "proved to overflow"
    UNKNOWN = "unknown"


class Bound(NamedTuple):
    """An interval that holds all numbers of a value in each finite run, and what follows from it.

    `lo`, `hi`: the interval; infinite where it is open. `klass`: the class for the type of the options. `because`: the
    step of the proof, or why it is missing. `rests_on`: the values whose bounds the step uses, the largest first.
    `fills`: the value also carries the fill of a mask, which the interval leaves out. `least`: the largest magnitude
    that an input of ones is proved to reach; 0 where nothing is proved from below.
    """

    lo: float = -math.inf
    hi: float = math.inf
    klass: BoundClass = BoundClass.UNKNOWN
    because: str = ""
    rests_on: tuple[ValueId, ...] = ()
    fills: bool = False
    least: float = 0.0

    @property
    def absmax(self) -> float:
        """The largest magnitude that the interval allows."""
        return max(-self.lo, self.hi)


def classified(bound: Bound, to: DType, measured: float | None = None, headroom: float = 1.0) -> Bound:
    """Return a bound with the class that follows from it, and from the largest magnitude that was measured."""
    if bound.absmax <= to.max:
        klass = BoundClass.FITS
    elif bound.least > to.max:
        klass = BoundClass.OVERFLOWS
    else:
        fits = measured is not None and measured * headroom <= to.max
        klass = BoundClass.MEASURED if fits else BoundClass.UNKNOWN
    return bound if klass is bound.klass else bound._replace(klass=klass)


def scaled(bound: Bound, exponent: int, to: DType) -> Bound:
    """Return the bound of a value times 2⁻ᵉ."""
    if not exponent:
        return bound
    lo, hi, least = (math.ldexp(size, -exponent) for size in (bound.lo, bound.hi, bound.least))
    return classified(bound._replace(lo=lo, hi=hi, least=least), to)


def counted(bounds: Iterable[Bound]) -> dict[str, int]:
    """Return the number of bounds by class, in the order of the classes."""
    counts = Counter(bound.klass for bound in bounds)
    return {klass.value: counts[klass] for klass in BoundClass}


@dataclass(frozen=True, slots=True)
class BoundOptions:
    """Settings of a proof of bounds.

    Attributes:
        to: the low type that values should fit, and whose roundings the bounds include.
        inputs: ranges of inputs of the model by name; other floating inputs are unknown.
        measured: the largest magnitudes that were measured, by value.
        headroom: the factor that a measured magnitude needs to spare.
        below: prove overflow, too, for inputs that are ones.
        exponent: values may be computed times 2⁻ᵉ with an e up to this one: small numbers are rounded more coarsely.
    """

    to: DType = DType.FLOAT16
    inputs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    measured: Mapping[ValueId, float] = field(default_factory=dict)
    headroom: float = 1.0
    below: bool = True
    exponent: int = 0
