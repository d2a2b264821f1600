"""Needs of odd and of long models: no crash, no warning, and steps that grow with the number of ops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx.parser
import pytest
from onnx import NodeProto, TensorProto
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx.numpy_helper import from_array

from amp_rewrite.decide.needs.backward import Backward
from amp_rewrite.decide.needs.facts import MOST_NAMED
from amp_rewrite.decide.needs.find import Needs, find_needs
from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import Op, ValueId, View
from support.held import held

F16 = DType.FLOAT16


def view_of(nodes: list[NodeProto], out: str, *inputs: str, **constants: np.ndarray) -> View:
    formals = [make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in inputs]
    outs = [make_tensor_value_info(out, TensorProto.FLOAT, None)]
    stored = [from_array(array, name) for name, array in constants.items()]
    opsets = [make_opsetid("", 20), make_opsetid("ai.onnx.ml", 4)]
    return View.of(Model.load(make_model(make_graph(nodes, "g", formals, outs, stored), opset_imports=opsets)))


def needs_of(view: View) -> Needs:
    return find_needs(view, F16)


@pytest.mark.filterwarnings("error")
def test_weights_with_infinities_of_both_signs_are_read_without_a_warning() -> None:
    weights = np.array([[np.inf, 1], [-np.inf, 2]], np.float32).repeat(4, axis=0)
    assert needs_of(view_of([make_node("MatMul", ["x", "w"], ["y"])], "y", "x", w=weights)).pins == ()


def copies(count: int) -> list[NodeProto]:
    copied = [make_node("Identity", [f"c{i}"], [f"c{i + 1}"]) for i in range(count)]
    return [make_node("MatMul", ["x", "w"], ["c0"]), *copied]


def behind_copies(count: int) -> list[NodeProto]:
    """Return a layer, copies, and Acos, which needs digits of them all."""
    return [*copies(count), make_node("Acos", [f"c{count}"], ["y"])]


def sums_of_copies(count: int) -> list[NodeProto]:
    """Return a layer, copies, and the sum of each and a bias."""
    adds = [make_node("Add", [f"c{i}", "b"], [f"a{i}"]) for i in range(count)]
    return [*copies(count), *adds, make_node("Sum", [f"a{i}" for i in range(count)], ["y"])]


@pytest.mark.parametrize("nodes", [behind_copies, sums_of_copies])
def test_no_op_walks_along_all_copies(nodes: Callable[[int], list[NodeProto]], monkeypatch: pytest.MonkeyPatch) -> None:
    w, b = np.eye(8, dtype=np.float32), np.ones(8, np.float32)
    view = view_of(nodes(500), "y", "x", w=w, b=b)
    steps, step = 0, View.producer

    def counted(self: View, value: ValueId | None, *kinds: str) -> Op | None:
        nonlocal steps
        steps += 1
        return step(self, value, *kinds)

    monkeypatch.setattr(View, "producer", counted)
    Backward.of(Facts.of(view, F16))
    assert 0 < steps < 20 * len(view.ops)


def test_a_need_passes_many_iterations_in_few_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 200
    states, nexts = [f"s{i}" for i in range(count)], [f"z{i}" for i in range(count)]
    shifted = [make_node("Neg", [states[i + 1]], [nexts[i]]) for i in range(count - 1)]
    last = [make_node("Acos", ["s0"], ["a"]), make_node("MatMul", ["a", "w"], [nexts[-1]])]
    formals = [make_tensor_value_info("i", TensorProto.INT64, []), make_tensor_value_info("c", TensorProto.BOOL, [])]
    formals += [make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in states]
    outs = [make_tensor_value_info("d", TensorProto.BOOL, [])]
    outs += [make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in nexts]
    body = make_graph([make_node("Identity", ["c"], ["d"]), *shifted, *last], "body", formals, outs)
    loop = make_node("Loop", ["n", "", *["x"] * count], ["y", *[f"y{i}" for i in range(1, count)]], body=body)
    view = view_of([loop], "y", "x", n=np.array(3), w=np.eye(8, dtype=np.float32))
    visits, visit = 0, Backward._visit

    def counted(self: Backward, op: Op) -> None:
        nonlocal visits
        visits += 1
        visit(self, op)

    monkeypatch.setattr(Backward, "_visit", counted)
    held = Backward.of(Facts.of(view, F16)).pinned
    assert {op.id for op in view.ops if op.kind == "Neg"} <= held.keys()
    assert len(view.ops) <= visits < 4 * len(view.ops)


def test_a_sum_of_many_values_names_few_and_its_own_state_among_them() -> None:
    names = [f"s{i}" for i in range(3 * MOST_NAMED)]
    sums = [make_node("Add", [f"a{i}", name], [f"a{i + 1}"]) for i, name in enumerate(names)]
    view = view_of([make_node("Identity", ["x"], ["a0"]), *sums], f"a{len(names)}", "x", *names)
    fact = Facts.of(view, F16)[view.scopes[0].outputs[0]]
    assert len(fact.sources) == len(fact.levels) == len(fact.states) == MOST_NAMED
    assert names[-1] in {view.value_name(state) for state, _ in fact.states}


def parsed_view(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{text}')))


def test_an_op_with_several_needs_has_one_pin() -> None:
    text = """g (int64[1] n, float[N] x) => (float[K] y, bool[1] z) <float seven = {7}> {
        f = Cast <to = 1> (n)
        d = Div (f, seven)
        r = Floor (d)
        i = Cast <to = 7> (r)
        y = Expand (x, i)
        z = Equal (f, seven)
    }"""
    view = parsed_view(text)
    assert held(view) == dict.fromkeys("fdriz", "whole_number")
    assert len(find_needs(view, DType.FLOAT16).pins) == 5
