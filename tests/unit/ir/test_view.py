"""Queries of a view: only readers, numbers, factors and exact ops; and analyses that run once."""

from copy import deepcopy

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import exact, multiples, number, only_reader, origin
from amp_rewrite.ir.view import ValueId, View, once
from support import cases

CONSTANTS = {"two": 2.0, "row": np.array([3.0]), "block": np.full((1, 1, 1), 4.0), "pair": np.array([1.0, 2.0])}
SHAPES = {"x": (2, 2), "y": (2, 2)}


class Graph:
    """Build a view and map its values by name."""

    def __init__(self, text: str, outputs: str = "v") -> None:
        self.view = View.of(Model.load(cases.build(text, outputs.split(), shapes=SHAPES, constants=CONSTANTS)))

    def value(self, name: str) -> ValueId:
        return next(value.id for value in self.view.values if value.name == name)

    def name(self, value: ValueId | None) -> str | None:
        return self.view.value_name(value) if value is not None else None

    def reader(self, name: str, *kinds: str, **how: bool) -> str | None:
        op = only_reader(self.view, self.value(name), *kinds, **how)
        return op.node.output[0] if op is not None else None


def test_a_value_read_twice_or_exposed_has_no_only_reader() -> None:
    graph = Graph("a=Exp(x);b=Neg(a);c=Mul(b,b);d=Neg(c);e=Abs(c);v=Add(d,e)")
    assert graph.reader("a") == "b"
    assert graph.reader("a", "Neg", "Abs") == "b"
    assert graph.reader("a", "Abs") is None
    assert graph.reader("b") is None
    assert graph.reader("v") is None
    assert only_reader(graph.view, None) is None


@pytest.mark.parametrize(
    ("name", "axes", "expected"),
    [("two", None, 2.0), ("two", 0, 2.0), ("row", 1, 3.0), ("row", 0, None), ("block", None, 4.0), ("block", 1, None)],
)
def test_the_number_of_a_constant(name: str, axes: int | None, expected: float | None) -> None:
    graph = Graph("a=Add(x,two);b=Add(a,row);c=Add(b,block);v=Add(c,pair)")
    assert number(graph.view, graph.value(name), axes) == expected
    assert number(graph.view, graph.value("pair")) is None
    assert number(graph.view, graph.value("a")) is None
    assert number(graph.view, None) is None


@pytest.mark.parametrize(
    ("op", "plain", "signed"),
    [
        ("Mul(two,a)", "a", "a"),
        ("Div(a,two)", "a", "a"),
        ("Div(two,a)", "v", "a"),
        ("Neg(a)", "v", "a"),
        ("Mul(a,x)", "v", "v"),
        ("Add(a,two)", "v", "v"),
        ("Transpose(a)", "a", "a"),
        ("Concat[axis=0](a)", "v", "v"),
    ],
)
def test_known_factors_of_a_value(op: str, plain: str, signed: str) -> None:
    graph = Graph(f"a=Exp(x);v={op}")
    found = [origin(graph.view, graph.value("v"), multiples(graph.view, signs=signs)) for signs in (False, True)]
    assert [graph.name(value) for value in found] == [plain, signed]


NUMBER = "n = Constant <value_float = 1.0> ()"


@pytest.mark.parametrize(
    ("body", "opset", "expected"),
    [
        ("y = Relu (x)", 18, True),
        ("y = Add (x, x)", 18, False),
        ('y = ScatterElements <reduction = "none"> (x, i, x)', 18, True),
        ('y = ScatterElements <reduction = "max"> (x, i, x)', 18, True),
        ('y = ScatterElements <reduction = "add"> (x, i, x)', 18, False),
        (f"{NUMBER} y = Clip (x, n, n)", 18, True),
        (f"{NUMBER} y = Clip (x, n)", 18, False),
        ("y = Clip <min = 0.1> (x)", 10, False),
        (f"p = Constant <value_ints = [0, 0, 0, 0]> () {NUMBER} y = Pad (x, p, n)", 18, True),
        ("y = Pad <pads = [0, 0, 0, 0], value = 0.1> (x)", 10, False),
    ],
)
def test_an_op_is_exact_if_it_creates_no_new_number(body: str, opset: int, expected: bool) -> None:
    text = f"g (float[2,3] x, int64[2,3] i) => (float[2,3] y) {{ {body} }}"
    view = View.of(Model(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')))
    assert exact(view.ops[-1]) is expected


def of_four() -> View:
    return View.of(Model.load(cases.build("a=Relu(x);b=Tanh(a);c=Neg(b);d=Relu(c)", ("d",))))


def test_an_analysis_runs_once_per_view_and_arguments() -> None:
    calls: list[tuple[int, int]] = []

    @once
    def analysis(of: View, number: int) -> int:
        calls.append((id(of), number))
        return number

    first, second = of_four(), of_four()
    assert [analysis(first, 1), analysis(first, 1), analysis(first, 2), analysis(second, 1)] == [1, 1, 2, 1]
    assert calls == [(id(first), 1), (id(first), 2), (id(second), 1)]
    assert analysis(deepcopy(first), 3) == 3
    assert analysis(first, 3) == 3
    assert len(calls) == 5
    first.forget()
    assert analysis(first, 1) == 1
    assert calls[5:] == [(id(first), 1)]
