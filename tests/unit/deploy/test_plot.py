"""Calls of matplotlib by which a plot of a benchmark is drawn."""

from __future__ import annotations

from typing import Any

from amp_rewrite.deploy.bench.plot import _draw, _height
from amp_rewrite.reports.page.chart_data import Bar, Bars, Chart, Curves, Move, Moves

CHART: dict[str, Any] = {"name": "n", "title": "t", "lead": "l", "head": (), "cells": (), "data": {}}
LOW, HIGH = "#0a6e9e", "#b4530a"


class Axis:
    """Records its calls: the name, the positional arguments, and the keywords that matter."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_xlim(self) -> tuple[float, float]:
        return 0.0, 9.0

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **given: Any) -> None:
            kept = {key: value for key, value in given.items() if key not in ("capsize", "fontsize", "linewidth")}
            self.calls.append((name, *(list(word) if isinstance(word, range) else word for word in words), kept))

        return call


def calls(chart: Chart) -> list[tuple[Any, ...]]:
    axis = Axis()
    _draw(chart, axis)
    return axis.calls


def test_bars_have_whiskers_marks_and_an_end() -> None:
    bars = (Bar("a$", 2.0, "2 ms", spread=(0.5, 3.0), mark=4.0), Bar("b", 1.0, "1 ms", mark=5.0), Bar("c", 3.0, "3 ms"))
    chart = Bars(**CHART, unit="ms", bars=bars, mark="predicted", longest=4.0)
    hollow = {"markerfacecolor": "none", "color": HIGH}
    assert calls(chart) == [
        ("barh", [0, 1, 2], [2.0, 1.0, 3.0], {"color": LOW}),
        ("errorbar", [2.0], [0], {"xerr": [[1.5], [1.0]], "color": "black"}),
        ("plot", [4.0], [0], "o", {**hollow, "label": "predicted"}),
        ("plot", [5.0], [1], "o", {**hollow, "label": ""}),
        ("set_yticks", [0, 1, 2], ["a\\$\n2 ms", "b\n1 ms", "c\n3 ms"], {}),
        ("invert_yaxis", {}),
        ("set", {"xlabel": "ms"}),
        ("set_xlim", {"right": 4.2}),
        ("legend", {}),
    ]
    assert _height(chart) == 1.4 + 0.35 * 3
    free = Bars(**CHART, unit="ms", bars=bars[2:])
    assert [name for name, *_ in calls(free)] == ["barh", "set_yticks", "invert_yaxis", "set"]


def test_moves_are_colored_by_their_direction_and_start_at_nothing() -> None:
    chart = Moves(
        **CHART, unit="us", words=("more", "less"), moves=(Move("a", 1.0, 2.0, "+"), Move("b", None, 0.0, ""))
    )
    line = {"color": "0.7", "zorder": 1}
    assert calls(chart) == [
        ("plot", [1.0, 2.0], [0, 0], line),
        ("plot", [1.0], [0], "o", {"markerfacecolor": "white", "color": HIGH}),
        ("plot", [2.0], [0], "o", {"markerfacecolor": HIGH, "color": HIGH}),
        ("plot", [0.0, 0.0], [1, 1], line),
        ("plot", [0.0], [1], "o", {"markerfacecolor": LOW, "color": LOW}),
        ("set_yticks", [0, 1], ["a  +", "b  "], {}),
        ("invert_yaxis", {}),
        ("set", {"xlabel": "us; hollow: before, filled: after"}),
    ]
    assert _height(chart) == 1.4 + 0.35 * 2


def test_curves_have_logarithmic_axes_and_a_legend() -> None:
    chart = Curves(**CHART, across="batch", upward="items/s", curves={"a": [(1.0, 10.0), (8.0, 40.0)]})
    assert calls(chart) == [
        ("plot", [1.0, 8.0], [10.0, 40.0], {"marker": "o", "label": "a"}),
        ("set", {"xscale": "log", "yscale": "log", "xlabel": "batch", "ylabel": "items/s"}),
        ("legend", {}),
    ]
    assert _height(chart) == 1.4 + 0.35 * 8
