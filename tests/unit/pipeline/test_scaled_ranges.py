"""Ranges of values times powers of two."""

from __future__ import annotations

from amp_rewrite.evidence.ranges import Range
from amp_rewrite.pipeline.shift import _scaled


def test_a_range_times_a_power_of_two_overflows_only_where_its_largest_number_does() -> None:
    known = Range(count=100, absmax=2.0**17, absmin=1.0, overflow=3, flushed=2, subnormal=20)
    assert _scaled(known, 1).overflow == 3
    small = _scaled(known, 3)
    assert (small.absmax, small.absmin, small.overflow) == (2.0**14, 0.125, 0)
    assert (small.flushed, small.subnormal) == (16, 100)
