"""A chart of a loss scale over steps as SVG, written by hand: no plotting library is needed to look at one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, TOP = 640, 240, 56, 28


def loss_scale_chart(scales: Sequence[float], skipped: Sequence[int], title: str) -> str:
    """The scale that each step used, on a binary log axis; the steps in `skipped` are marked."""
    powers = [math.log2(scale) for scale in scales]
    low, high = math.floor(min(powers)) - 1, math.ceil(max(powers)) + 1
    wide, tall = WIDTH - LEFT - 16, HEIGHT - TOP - 36

    def x(step: float) -> float:
        return round(LEFT + wide * step / max(len(powers) - 1, 1), 1)

    def y(power: float) -> float:
        return round(TOP + tall * (high - power) / (high - low), 1)

    line = " ".join(f"{x(step)},{y(power)}" for step, power in enumerate(powers))
    marks = "".join(f'<circle cx="{x(s)}" cy="{y(powers[s])}" r="3" fill="#c0392b"/>' for s in skipped)
    every = max((high - low) // 6, 1)
    rules = "".join(
        f'<path d="M{LEFT} {y(p)}H{LEFT + wide}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y(p) + 4}" text-anchor="end">2^{p}</text>'
        for p in range(low, high + 1, every)
    )
    foot = f"step 0 to {len(powers) - 1}; red: {len(skipped)} skipped, because a float16 gradient was not finite"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f'<text x="{LEFT}" y="18" font-size="13">{title}</text>{rules}'
        f'<polyline points="{line}" fill="none" stroke="#2c5f9e" stroke-width="1.5"/>{marks}'
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{foot}</text></svg>\n'
    )
