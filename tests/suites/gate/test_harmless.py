"""The CI gate is quiet about rewrites that change no precision."""

import random
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.diff import diff
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.sources import report_in
from suites.gate.harmless import REWRITES
from suites.gate.sneaked import QUANTIZERS, X_TO_Y, parsed, typed
from support.paths import TESTS

FUNCTIONS = """g (float[4, 4] x) => (float[4, 4] y) {
    a = local.f <t = 10> (x)
    b = local.f <t = 16> (a)
    y = local.twice (b)
}
<domain: "local", opset_import: ["": 21]> f <t> (a) => (b) { z = Cast <to: int = @t> (a) b = Cast <to = 1> (z) }
<domain: "local", opset_import: ["": 21, "local": 1]> twice (a) => (b) { z = local.f <t = 10> (a) b = Add (z, z) }"""
DEAD = """g (float[4, 4] x) => (float[4, 4] y) {
    h = Cast <to = 10> (x) unread = Exp (h) deader = Neg (unread)
    w1 = Constant <value_float = 0.5> () w2 = Constant <value_float = 0.5> ()
    a = Mul (x, w1) y = Mul (a, w2)
}"""

DEQUANTIZED = """g (float[4, 4] x) => (float[4, 4] y) <float[{0}] s, double[{0}] zero, double[4, 4] w> {{
    f = DequantizeLinear <{1}> (w, s, zero) y = MatMul (x, f)
}}"""


def twin_weights() -> ModelProto:
    """A model with equal weights under two names."""
    proto = parsed("g (float[4, 4] x) => (float[4, 4] y) { a = MatMul (x, w) b = Relu (a) y = MatMul (b, v) }")
    numbers = np.eye(4, dtype=np.float32)
    proto.graph.initializer.extend(numpy_helper.from_array(numbers, name) for name in ("w", "v"))
    return proto


@cache
def models() -> dict[str, tuple[ModelProto, Report]]:
    """Shipped models, what conversions made of some, and small ones for rare places."""
    folder = TESTS / "models"
    names = ("bert_ts13", "cnn_dynamo18", "if_ts13", "llama_dynamo21", "loop_dynamo21", "lstm_ts13")
    protos = {name: onnx.load(folder / f"{name}.onnx") for name in names}
    protos |= {f"{name} in float16": convert(protos[name]).model for name in ("bert_ts13", "cnn_dynamo18", "if_ts13")}
    protos |= {"functions": parsed(FUNCTIONS), "dead code": parsed(DEAD), "equal weights": twin_weights()}
    protos |= {
        "per axis": typed(DEQUANTIZED.format("4", "axis = 1"), DType.INT8),
        "blocks": typed(DEQUANTIZED.format("2, 4", "axis = 0, block_size = 2"), DType.INT4),
        "activations": typed(f"{X_TO_Y} {QUANTIZERS['values']}", DType.UINT8),
    }
    return {name: (proto, report_in(Model.load(proto))) for name, proto in protos.items()}


@pytest.mark.parametrize("name", REWRITES)
def test_a_rewrite_that_changes_no_precision_is_no_difference(name: str) -> None:
    ran = 0
    for model, (proto, report) in models().items():
        copy = clone(proto)
        rewritten = REWRITES[name](copy, random.Random(f"{name}{model}"))
        if rewritten is not None:
            after = report_in(Model.load(rewritten))
            assert diff(report, after).text(verbose=True) == "no difference\n", model
            assert diff(after, report).text(verbose=True) == "no difference\n", f"{model}, back"
            ran += 1
    assert ran


@pytest.mark.parametrize("opset", [18, 21, 22])
def test_an_attribute_that_became_an_input_is_no_difference(opset: int) -> None:
    old = parsed(
        """g (float[2, 8, 4] x) => (float[?, ?] y) {
            a = ReduceMean <axes = [-1], keepdims = 1> (x) b = Squeeze <axes = [2]> (a) c = Unsqueeze <axes = [0]> (b)
            d = Squeeze <axes = [0]> (c) e, f = Split <axis = 1, split = [4, 4]> (d) z = Add (e, f)
            i = Clip <min = 0.0, max = 6.0> (z) j = Dropout <ratio = 0.5> (i) y = Pad <pads = [0, 0, 0, 0]> (j)
        }""",
        opset=10,
    )
    new = clone(old)
    texts = {"ReduceMean": ("axes",), "Squeeze": ("axes",), "Unsqueeze": ("axes",), "Split": ("split",)}
    texts |= {"Clip": ("min", "max"), "Dropout": ("ratio",), "Pad": ("pads",)}
    for number, node in enumerate(new.graph.node):
        for name in texts.get(node.op_type, ()):
            moved = next(a for a in node.attribute if a.name == name)
            held = np.array(helper.get_attribute_value(moved), np.float32 if moved.type == moved.FLOAT else np.int64)
            new.graph.initializer.append(numpy_helper.from_array(held, f"{name}_{number}"))
            node.input.append(f"{name}_{number}")
            node.attribute.remove(moved)
    del new.opset_import[:]
    new.opset_import.append(helper.make_opsetid("", opset))
    assert diff(report_in(Model.load(old)), report_in(Model.load(new))).text(verbose=True) == "no difference\n"
