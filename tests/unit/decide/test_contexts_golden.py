"""Decisions about each operator of ONNX in the contexts of safety rules, compared with stored ones.

`make golden` runs this file as a program, which writes the current ones.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from amp_rewrite import AmpRewriteError, DType
from amp_rewrite.decide.coloring.paint import paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.findings import refuse_unknown
from amp_rewrite.settings.choices import Target
from amp_rewrite.settings.request import Request
from support.one_op import Case, cases
from support.paths import TESTS

FILE = TESTS / "golden" / "contexts.json"
CONTEXTS: Mapping[str, tuple[str, str]] = {
    "between layers": ("a = MatMul (f, w) x = Relu (a)", "v = Reshape (y, row) z = MatMul (v, u)"),
    "as an average": ("x = Mul (f, f)", "m = Again (f) n = Mul (m, m) z = Sub (y, n)"),
    "of a deviation": ("m = ReduceMean (f) x = Sub (f, m)", "s = Mul (y, y) z = ReduceMean (s)"),
    "of whole numbers": ("i = Cast <to = 7> (f) x = Cast <to = 1> (i)", "z = Sin (y)"),
    "to whole numbers": ("x = Sigmoid (f)", "z = Cast <to = 7> (y)"),
    "of quantized": ("q = QuantizeLinear (f, k) x = DequantizeLinear (q, k)", "z = QuantizeLinear (y, k)"),
    "of masked": ("c = Greater (f, k) x = Where (c, f, fill)", "z = Softmax (y)"),
    "of exponentials": ("m = ReduceMax (f) d = Sub (f, m) x = Exp (d)", "s = ReduceSum (y) z = Div (y, s)"),
    "in a logarithm": ("x = Sqrt (f)", "z = Log (y)"),
    "in a sum in a logarithm": ("x = Sigmoid (f)", "e = Add (y, k) l = Log (e) z = Exp (l)"),
    "scaled down": ("x = Mul (f, f)", "z = Mul (y, k)"),
    "scaled up": ("x = Mul (f, k)", "z = Div (y, tiny)"),
    "ranked": ("x = Tanh (f)", "z = ArgMax (y)"),
}
"""Ops that compute the first input x of an operator from f, and readers of its first output y, if that is a float.

Again stands for the operator itself.
"""
SIZES = {"with tiny constants": 2.0**-30, "with large constants": 2.0**20}
USUAL = ("unpainted", "unlisted")
NUMBERS = {"k": 0.01, "fill": -1e9, "tiny": 1e-6}


@cache
def nodes(text: str) -> tuple[NodeProto, ...]:
    return tuple(onnx.parser.parse_graph(f"g () => () {{ {text} }}").node)


def smallest() -> dict[str, Case]:
    """Return each operator's smallest case with a float as first input."""
    found: dict[str, tuple[int, Case]] = {}
    for case in cases():
        size = sum(np.size(array) for array in case.feeds.values() if isinstance(array, np.ndarray))
        floats = [value.type.tensor_type.elem_type for value in case.model.graph.input[:1]] == [TensorProto.FLOAT]
        if floats and size < found.get(case.op_type, (sys.maxsize, case))[0]:
            found[case.op_type] = size, case
    return {op_type: case for op_type, (_, case) in sorted(found.items())}


def models(case: Case) -> Iterator[tuple[str, ModelProto]]:
    """Yield the operator in each context, with its other inputs as constants."""
    for context, (before, behind) in CONTEXTS.items():
        yield context, placed(case, nodes(before), nodes(behind))
    for size, factor in SIZES.items():
        yield size, placed(case, (), (), factor)


def placed(case: Case, before: Sequence[NodeProto], behind: Sequence[NodeProto], factor: float = 1.0) -> ModelProto:
    model = ModelProto.FromString(case.model.SerializeToString())
    graph, (op,) = model.graph, model.graph.node
    first, *others = graph.input
    width = next((dim.dim_value for dim in first.type.tensor_type.shape.dim[-1:]), 1)
    constants = {name: np.full((), number, np.float32) for name, number in NUMBERS.items()}
    constants |= {name: np.eye(size, 4, dtype=np.float32) for name, size in (("w", width), ("u", 1))}
    constants["row"] = np.array([-1, 1])
    names = {first.name: "x" if before else "f"}
    for value in others:
        if isinstance(array := case.feeds[value.name], np.ndarray):
            names[value.name] = f"own {value.name}"
            constants[names[value.name]] = array * np.float32(factor) if array.dtype == np.float32 else array
            graph.input.remove(value)
    op.input[:] = [names.get(name, name) for name in op.input]
    op.output[0], first.name = "y", "f"
    again = helper.make_node(op.op_type, ["f", *op.input[1:]], ["m"], domain=op.domain)
    again.attribute.extend(op.attribute)
    floats = graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    after = [again if node.op_type == "Again" else node for node in behind] if floats else []
    graph.ClearField("node")
    graph.node.extend([*before, op, *after])
    read = {name for node in graph.node for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in constants.items() if name in read)
    graph.output[0].CopyFrom(helper.make_tensor_value_info(graph.node[-1].output[0], TensorProto.FLOAT, None))
    return model


def decided(model: ModelProto) -> str:
    """Map results of ops to the rules of their types, except usual ones."""
    try:
        view = View.of(Model.load(model))
        refuse_unknown(view, Target.ONNX)
    except AmpRewriteError as error:
        return type(error).__name__
    needs = find_needs(view, DType.FLOAT16, target=Target.ONNX)
    coloring = paint(Problem(view, USUAL_OPTIONS, needs))
    found = ((op, coloring.of(op.id)) for op in view.ops)
    return " ".join(
        f"{op.node.output[0]}:{given.rule}" for op, given in found if given is not None and given.rule not in USUAL
    )


USUAL_OPTIONS = Request()
STORED: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {"onnx": ""}


def rows() -> dict[str, dict[str, str]]:
    return {
        op_type: {context: decided(model) for context, model in models(case)} for op_type, case in smallest().items()
    }


@pytest.mark.skipif(metadata.version("onnx") != STORED["onnx"], reason=f"decisions are those under {STORED['onnx']}")
def test_decisions_are_unchanged() -> None:
    assert rows() == STORED["decisions"]


if __name__ == "__main__":
    current = rows()
    FILE.write_text(json.dumps({"onnx": metadata.version("onnx"), "decisions": current}, indent=0) + "\n", "utf-8")
    sys.stdout.write(f"{FILE}: {sum(map(len, current.values()))} decisions\n")
