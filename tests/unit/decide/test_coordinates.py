"""Sums of what layers give and a grid of positions, and their near twins."""

from __future__ import annotations

import numpy as np
import pytest

import amp_rewrite
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

GRID = np.stack(np.meshgrid(np.arange(80) + 0.5, np.arange(80) + 0.5), -1).reshape(-1, 2)
LEVELS = np.concatenate([np.repeat(np.arange(640 // s) * s + s // 2, 2) for s in (8, 16, 32)])
SHAPES = {"x": (6400, 8), "w": (8, 2), "v": (6400, 2)}


def kept(text: str, **constants: object) -> set[str]:
    return set(held(View.of(Model.load(cases.build(text, ("y",), shapes=SHAPES, constants=constants)))))


@pytest.mark.parametrize("step", [1.0, 8.0, 1 / 79])
def test_a_sum_with_a_grid_of_positions_is_held_up_to_the_output(step: float) -> None:
    assert kept("s=MatMul(x,w);low=Sub(grid,s);y=Mul(low,stride)", grid=GRID * step, stride=8.0) == {"low", "y"}


def test_several_levels_whole_numbers_and_what_range_counts_are_grids_too() -> None:
    assert kept("s=MatMul(x,u);y=Add(s,grid)", grid=LEVELS * 1.0, u=np.ones((8, LEVELS.size))) == {"y"}
    assert kept("s=MatMul(x,w);f=Cast[to=1](grid);y=Add(s,f)", grid=np.arange(12800).reshape(6400, 2)) == {"y"}
    text = "r=Range(zero,n,one);c=Unsqueeze(r,last);s=MatMul(x,w);y=Add(s,c)"
    assert kept(text, zero=0.0, n=6400.0, one=1.0, last=np.array([1])) == {"r", "y"}


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("s=MatMul(x,w);y=Sub(grid,s)", np.random.default_rng(0).normal(size=(6400, 2))),  # a learned table
        ("s=MatMul(x,w);y=Sub(grid,s)", np.arange(2) * 8.0),  # two places
        ("s=MatMul(x,w);y=Add(grid,s)", np.sin(np.arange(6400)[:, None] * [0.0, 1.0]) * 1.0),  # begins with zeros
        ("s=MatMul(x,w);y=Add(grid,s)", np.where(GRID > 40, -1e4, 0.0)),  # a mask
        ("s=MatMul(x,w);y=Add(s,grid)", np.random.default_rng(0).choice(10**4, (6400, 2)) * 1.0),  # whole numbers
        ("a=Add(v,grid);y=Concat[axis=1](a,a)", GRID),  # no layer says anything
        ("s=MatMul(x,w);y=Mul(s,grid)", GRID),  # a factor
        ("s=MatMul(x,w);a=Sub(s,grid);y=Softmax(a)", GRID / 2),  # what is far weighs nothing
    ],
)
def test_no_other_sum_is(text: str, grid: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    assert kept(text, grid=grid) == set()


def test_boxes_in_pixels_are_float32_and_so_exact() -> None:
    """Both corners, their middle and extent: where they meet would otherwise be lowered, too."""
    text = "s=MatMul(x,w);low=Sub(grid,s);high=Add(grid,s);y=Concat[axis=1](low,high);z=Mul(y,stride)"
    proto = cases.build(text, ["z"], shapes=SHAPES, constants={"grid": GRID, "stride": 8.0})
    rows = {row.name: row.dtype for row in amp_rewrite.convert(proto).report.rows}
    assert rows == {"s": "float16", **dict.fromkeys(("low", "high", "y", "z"), "float32")}
