"""Needs of odd and of long models: no crash, no warning, and steps that grow with the number of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.decide.needs.backward import Backward
from amp_rewrite.decide.needs.facts import MOST_NAMED
from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import Op, ValueId, View
from support import cases

F16 = DType.FLOAT16
EYE = np.eye(8, dtype=np.float32)


def view_of(statements: Sequence[str], out: str, **constants: np.ndarray) -> View:
    proto = cases.build(";".join(statements), [out], shapes={"x": (1, 8)}, constants=constants, opset=20)
    return View.of(Model.load(proto))


@pytest.mark.filterwarnings("error")
def test_weights_with_infinities_of_both_signs_are_read_without_a_warning() -> None:
    weights = np.array([[np.inf, 1], [-np.inf, 2]], np.float32).repeat(4, axis=0)
    assert find_needs(view_of(["y=MatMul(x,w)"], "y", w=weights), F16).pins == {}


def behind_copies(count: int) -> list[str]:
    """Return a layer, copies, and Acos, which needs digits of them all."""
    return ["c0=MatMul(x,w)", *(f"c{i + 1}=Identity(c{i})" for i in range(count)), f"y=Acos(c{count})"]


def sums_of_copies(count: int) -> list[str]:
    """Return a layer, copies, and the sum of each and a bias."""
    adds = [f"a{i}=Add(c{i},b)" for i in range(count)]
    return [*behind_copies(count)[:-1], *adds, f"y=Sum({','.join(f'a{i}' for i in range(count))})"]


@pytest.mark.parametrize("nodes", [behind_copies, sums_of_copies])
def test_no_op_walks_along_all_copies(nodes: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(nodes(500), "y", w=EYE, b=np.ones(8, np.float32))
    steps, step = 0, View.producer

    def counted(self: View, value: ValueId | None, *kinds: str) -> Op | None:
        nonlocal steps
        steps += 1
        return step(self, value, *kinds)

    monkeypatch.setattr(View, "producer", counted)
    Backward.of(find_facts(view, F16))
    assert 0 < steps < 20 * len(view.ops)


def test_a_need_passes_many_iterations_in_few_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 200
    shifted = " ".join(f"z{i} = Neg (s{i + 1})" for i in range(count - 1))
    into = ", ".join(f"float[1,8] s{i}" for i in range(count))
    out = ", ".join(f"float[1,8] z{i}" for i in range(count))
    view = parsed_view(f"""g (float[1,8] x, float[8,8] w, int64 n) => (float[1,8] y) {{
        y{"".join(f", y{i}" for i in range(1, count))} = Loop (n{", " + ", x" * count}) <
            body = b (int64 i, bool c, {into}) => (bool d, {out}) {{
                d = Identity (c) {shifted} a = Acos (s0) z{count - 1} = MatMul (a, w) }}> }}""")
    visits, visit = 0, Backward._visit

    def counted(self: Backward, op: Op) -> None:
        nonlocal visits
        visits += 1
        visit(self, op)

    monkeypatch.setattr(Backward, "_visit", counted)
    held = Backward.of(find_facts(view, F16)).pinned
    assert {op.id for op in view.ops if op.kind == "Neg"} <= held.keys()
    assert len(view.ops) <= visits < 4 * len(view.ops)


def test_a_sum_of_many_values_names_few_and_its_own_state_among_them() -> None:
    names = [f"s{i}" for i in range(3 * MOST_NAMED)]
    sums = [f"a{i + 1}=Add(a{i},{name})" for i, name in enumerate(names)]
    view = view_of(["a0=Identity(x)", *sums], f"a{len(names)}")
    fact = find_facts(view, F16)[view.scopes[0].outputs[0]]
    assert len(fact.sources) == len(fact.levels) == len(fact.states) == MOST_NAMED
    assert names[-1] in {view.value_name(state) for state, _ in fact.states}


def parsed_view(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{text}')))
