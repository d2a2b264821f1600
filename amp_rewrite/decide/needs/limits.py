"""Limits of a low type, as facts and needs ask for them."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.dtypes import DType


@dataclass(frozen=True, slots=True)
class Limits:
    """What a low type can hold.

    Args:
        most: the largest number.
        tiny: the smallest normal number.
        least: half the smallest subnormal number; what is smaller becomes 0.
        integers: whole numbers up to here are exact.
        beside: the largest number beside which the result of a layer is not small: an eighth of `integers`.
        reach: the largest bias of a softmax whose spacing keeps the differences of scores.
        narrow: its range is smaller than that of float32.
    """

    most: float
    tiny: float
    least: float
    integers: float
    beside: float
    reach: float
    narrow: bool

    @classmethod
    def of(cls, to: DType) -> Limits:
        """Return the limits of float16 or bfloat16."""
        integers = 2.0**11 if to is DType.FLOAT16 else 2.0**8
        narrow = to.tiny > DType.FLOAT.tiny
        return cls(to.max, to.tiny, to.smallest_subnormal / 2, integers, integers / 8, integers / 32, narrow)
