"""Ops by kind, and analyses that run once for each view."""

from __future__ import annotations

from copy import deepcopy

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View, once
from support import cases


def view() -> View:
    return View.of(Model.load(cases.build("a=Relu(x);b=Tanh(a);c=Neg(b);d=Relu(c)", ("d",))))


def test_an_analysis_runs_once_for_each_view_and_its_arguments() -> None:
    asked: list[tuple[int, int]] = []

    @once
    def analysis(of: View, number: int) -> int:
        asked.append((id(of), number))
        return number

    first, second = view(), view()
    assert [analysis(first, 1), analysis(first, 1), analysis(first, 2), analysis(second, 1)] == [1, 1, 2, 1]
    assert asked == [(id(first), 1), (id(first), 2), (id(second), 1)]
    assert analysis(deepcopy(first), 3) == 3
    assert analysis(first, 3) == 3
    assert len(asked) == 5
    first.forget()
    assert analysis(first, 1) == 1
    assert asked[5:] == [(id(first), 1)]
