"""States of bounds that hold many numbers are reduced: to hulls along first axes, and without their ball; open ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.decide.bounds import windows
from amp_rewrite.decide.bounds.state import Ball, State, box, small

LO, HI = -np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(3, 4) ** 2
ROW = np.ones((1, 4))


def test_a_large_state_is_the_hull_along_as_many_first_axes_as_need_be() -> None:
    state = State(LO, HI, why="kept")
    assert small(state, 12) is state
    rows = small(state, 11)
    assert (rows.lo.tolist(), rows.hi.tolist()) == ([[-8, -9, -10, -11]], [[64, 81, 100, 121]])
    both = small(State(LO, np.float64(5.0)), 3)
    assert (both.lo.tolist(), both.hi.tolist()) == ([[-11.0]], [[5.0]])
    assert rows.why == "kept"


@pytest.mark.parametrize("part", ["radius", "center", "scale"])
def test_a_ball_stays_only_if_all_its_parts_are_small(part: str) -> None:
    parts: dict[str, Any] = {"radius": np.ones((1, 1)), "center": ROW, "scale": ROW}
    state = State(LO, HI, Ball((-1,), (4,), **parts))
    assert small(state, 4).ball is state.ball
    large = State(LO, HI, Ball((-1,), (4,), **{**parts, part: np.ones((3, 4))}))
    assert small(large, 4).ball is None


def test_an_interval_is_open_where_an_end_is_not_a_number() -> None:
    nan, inf = np.nan, np.inf
    state = box(np.array([nan, 1.0]), np.array([2.0, 3.0]))
    assert (state.lo.tolist(), state.hi.tolist()) == ([-inf, 1.0], [2.0, 3.0])
    state = box(np.array([0.0, 1.0]), np.array([2.0, nan]))
    assert (state.lo.tolist(), state.hi.tolist()) == ([0.0, 1.0], [2.0, inf])


@pytest.mark.parametrize(
    ("shape", "rank", "places", "channels"),
    [
        ((), 2, False, False),
        ((1, 1), 2, False, False),
        ((4, 1), 2, True, True),
        ((1, 4), 2, True, True),
        ((3, 1, 1), 2, False, True),
        ((5, 1, 1, 1), 2, False, False),
        ((5, 3, 1, 1), 2, False, True),
        ((3, 1), 1, False, True),
        ((5, 1, 1), 1, False, False),
    ],
)
def test_bounds_differ_by_place_or_by_channel(shape: tuple[int, ...], rank: int, places: bool, channels: bool) -> None:
    for state in (box(np.zeros(shape), np.ones(())), box(np.zeros(()), np.ones(shape))):
        assert (windows._varies(state, rank), windows._varies(state, rank + 1)) == (places, channels)
