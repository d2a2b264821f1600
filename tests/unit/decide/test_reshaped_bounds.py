"""Bounds of reshaped elements: those of each element where the order is known, else of all that may be there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from amp_rewrite.decide.bounds import reshape
from amp_rewrite.decide.bounds.reshape import reshaped
from amp_rewrite.decide.bounds.state import box
from amp_rewrite.ir.shapes.symbolic import Dim

SIZES = {"n": 2, "m": 3}


@pytest.mark.parametrize(
    ("before", "after", "held", "left"),
    [
        ((2, 3), (6,), (2, 3), (6,)),
        ((2, 3), (6,), (1, 3), (6,)),
        ((2, 3), (6,), (3,), (6,)),
        ((2, 3), (6,), (1, 1), (1,)),
        ((6,), (3, 2), (6,), (3, 2)),
        ((2, 6), (2, 3, 2), (1, 6), (1, 3, 2)),
        ((2, 6), (2, 3, 2), (2, 1), (2, 1, 1)),
        ((2, 1, 3), (2, 3), (2, 1, 3), (2, 3)),
        (("n", 6), ("n", 2, 3), (1, 6), (1, 2, 3)),
        (("n", 6), ("n", 2, 3), (1, 1), (1, 1, 1)),
        (("n", 4, "m"), ("n", 2, 2, "m"), (1, 4, 1), (1, 2, 2, 1)),
        (("n", "m"), ("m", "n"), (1, 1), (1, 1)),
        ((2, "m"), ("m", 2), (2, 1), (1, 1)),  # in which order is not known: all of them
        (("n", 3, 2), (None, 2), (1, 3, 2), (1, 2)),
        (("n", 3, 2), (None, 2), (1, 3, 1), (1, 1)),
        (("n", 3), None, (1, 3), ()),
    ],
)
def test_bounds_hold_for_each_element_and_are_those_of_the_axes_left(
    before: Sequence[Dim], after: Sequence[Dim] | None, held: tuple[int, ...], left: tuple[int, ...]
) -> None:
    low = np.random.default_rng(0).permutation(np.prod(held, dtype=int)).reshape(held).astype(float)
    state = reshaped(box(low, low + 100.0), before, after)
    assert (state.lo.shape, state.hi.shape) == (left, left)
    full = np.broadcast_to(low, [SIZES.get(d, d) if isinstance(d, str) else d for d in before])
    shape = (
        [full.size] if after is None else [-1 if d is None else SIZES[d] if isinstance(d, str) else d for d in after]
    )
    values = full.reshape(shape)
    if np.prod(left) == low.size:  # nothing is reduced
        np.testing.assert_array_equal(np.broadcast_to(state.lo, values.shape), values)
    assert (state.lo <= values).all() and (state.hi >= values + 100.0).all()
    assert state.lo.min() == low.min() and state.hi.max() == low.max() + 100.0


def test_many_elements_are_reduced_unless_an_axis_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshape, "MOST", 5)
    low = np.arange(6.0)
    assert reshaped(box(low, low), (6,), (3, 2)).lo.tolist() == [[0.0]]
    assert reshaped(box(low, low), (6,), (6,)).lo.tolist() == low.tolist()
    assert reshaped(box(low[:5, None], low[:5, None]), (5, 1), (5,)).hi.tolist() == low[:5].tolist()
