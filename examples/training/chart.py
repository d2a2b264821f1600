"""SVG charts of losses and loss scales, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP = 640, 240, 56, 28
COLORS = ("#2c5f9e", "#c0392b", "#3c8d40")


def loss_scale_chart(scales: Sequence[float], skipped: Sequence[int], title: str) -> str:
    """Draw the loss scale of each step on a base-2 logarithmic axis, with the steps in `skipped` marked."""
    powers = [math.log2(scale) for scale in scales]
    low, high = math.floor(min(powers)) - 1, math.ceil(max(powers)) + 1
    width, height = WIDTH - LEFT - 16, HEIGHT - TOP - 36

    def x(step: float) -> float:
        return round(LEFT + width * step / max(len(powers) - 1, 1), 1)

    def y(power: float) -> float:
        return round(TOP + height * (high - power) / (high - low), 1)

    line = " ".join(f"{x(step)},{y(power)}" for step, power in enumerate(powers))
    marks = "".join(f'<circle cx="{x(s)}" cy="{y(powers[s])}" r="3" fill="#c0392b"/>' for s in skipped)
    stride = max((high - low) // 6, 1)
    rules = "".join(
        f'<path d="M{LEFT} {y(p)}H{LEFT + width}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y(p) + 4}" text-anchor="end">2^{p}</text>'
        for p in range(low, high + 1, stride)
    )
    caption = f"step 0 to {len(powers) - 1}; red: {len(skipped)} skipped, because a float16 gradient was not finite"
    body = (
        f'{rules}<polyline points="{line}" fill="none" stroke="{COLORS[0]}" stroke-width="1.5"/>{marks}'
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{caption}</text>'
    )
    return _framed(body, title)


def loss_chart(curves: Mapping[str, Sequence[Sequence[float]]], title: str) -> str:
    """Draw the loss of each epoch on a logarithmic axis: each name's mean over seeds, and each seed as a thin line."""
    losses = [loss for runs in curves.values() for run in runs for loss in run]
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))
    epochs = max(len(run) for runs in curves.values() for run in runs)
    width, height = WIDTH - LEFT - 16, HEIGHT - TOP - 36

    def line(losses: Sequence[float], color: str, thickness: float, opacity: float) -> str:
        points = (
            f"{LEFT + width * i / max(epochs - 1, 1):.1f},{TOP + height * (high - math.log10(loss)) / (high - low):.1f}"
            for i, loss in enumerate(losses)
        )
        stroke = f'stroke="{color}" stroke-width="{thickness}" stroke-opacity="{opacity}"'
        return f'<polyline points="{" ".join(points)}" fill="none" {stroke}/>'

    parts = []
    for p in range(low, high + 1):
        y = TOP + height * (high - p) / (high - low)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + width}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**p:g}</text>')
    for number, (name, runs) in enumerate(curves.items()):
        color = COLORS[number]
        parts += [line(run, color, 0.5, 0.35) for run in runs]
        parts.append(line([sum(losses) / len(losses) for losses in zip(*runs, strict=True)], color, 1.5, 1))
        parts.append(f'<text x="{LEFT + 130 * number}" y="{HEIGHT - 10}" fill="{color}">{name}</text>')
    parts.append(f'<text x="{LEFT + width}" y="{HEIGHT - 10}" text-anchor="end">epoch 1 to {epochs}</text>')
    return _framed("".join(parts), title)


def _framed(body: str, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f'<text x="{LEFT}" y="18" font-size="13">{title}</text>{body}</svg>\n'
    )
