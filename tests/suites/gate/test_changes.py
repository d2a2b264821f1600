"""The CI gate notices every change of precision, even one hidden in a real model, and accepts other rewrites."""

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.delta import Delta
from amp_rewrite.reports.diff import diff
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.sources import report_in
from suites.gate.harmless import REWRITES, edges, element_types, fresh, put_before
from suites.gate.sneaked import CLASSES, QUANTIZERS, X_TO_Y, Case, parsed, sound, typed
from support.paths import TESTS

LEAST = {
    "attributes": 500,
    "types of operands": 800,
    "types of constant operands": 800,
    "casts": 60,
    "constants": 20,
    "quantizers": 40,
    "functions": 50,
    "foreign operators": 20,
    "foreign operands": 40,
    "inputs and outputs": 100,
    "bodies": 19,
    "exchanged branches": 12,
}
"""The smallest number of cases of each class, so that no generator silently produces fewer."""


@cache
def cases(name: str) -> tuple[Case, ...]:
    """Return the valid cases of a class; some operators do not allow some element types."""
    return tuple(case for case in CLASSES[name]() if sound(case.before) and sound(case.after))


def compared(before: ModelProto, after: ModelProto) -> Delta:
    return diff(report_in(Model.load(before)), report_in(Model.load(after)))


def seen(case: Case, delta: Delta) -> bool:
    return delta.fails() and (not case.op or any(change.op == case.op for change in delta.changes))


@pytest.mark.parametrize("name", CLASSES)
def test_each_sneaked_change_of_precision_is_seen(name: str) -> None:
    assert [case.name for case in cases(name) if not seen(case, compared(case.before, case.after))] == []
    assert len(cases(name)) >= LEAST[name]


@pytest.mark.parametrize("name", CLASSES)
def test_the_reverse_change_is_seen_and_an_identical_model_passes(name: str) -> None:
    sample = cases(name)[:: max(len(cases(name)) // 40, 1)]
    assert [case.name for case in sample if not seen(case, compared(case.after, case.before))] == []
    assert [case.name for case in sample if compared(case.after, case.after).differs] == []


def test_comparing_reports_finds_the_same_as_comparing_models() -> None:
    for name in CLASSES:
        for case in cases(name)[:: max(len(cases(name)) // 10, 1)]:
            reports = (report_in(Model.load(proto)) for proto in (case.before, case.after))
            before, after = (Report.from_json(report.to_json(), "r.json") for report in reports)
            assert seen(case, diff(before, after)), case.name


# -- changes hidden in shipped models ------------------------------------------------------------------------------

SHIPPED = ("bert_ts13", "cnn_dynamo18", "llama_dynamo21", "lstm_ts13")
Sneak = Callable[[ModelProto, random.Random], str]


def live(proto: ModelProto) -> list[NodeProto]:
    """Return the nodes that contribute to an output."""
    read = {formal.name for formal in proto.graph.output}
    found = []
    for node in reversed(proto.graph.node):
        if read & set(node.output):
            found.append(node)
            read |= set(node.input)
    return found[::-1]


def an_edge_is_rounded(proto: ModelProto, rng: random.Random) -> str:
    types, alive, name = element_types(proto), {node.output[0] for node in live(proto)}, fresh(proto, "sneaked")
    places = [
        (n, s) for n, s in edges(proto.graph) if n.output[0] in alive and types.get(n.input[s]) == TensorProto.FLOAT
    ]
    node, slot = rng.choice([(n, s) for n, s in places if n.op_type not in ("Cast", "Identity", "Shape")])
    low, back = name(), name()
    casts = (
        helper.make_node("Cast", [node.input[slot]], [low], to=TensorProto.FLOAT16),
        helper.make_node("Cast", [low], [back], to=TensorProto.FLOAT),
    )
    node.input[slot] = back
    put_before(proto.graph, node, *casts)
    return node.op_type


def an_op_runs_in_bfloat16(proto: ModelProto, rng: random.Random) -> str:
    types, name = element_types(proto), fresh(proto, "sneaked")
    public = {formal.name for formal in proto.graph.output}
    kinds = ("MatMul", "Gemm", "Add", "Mul", "Softmax", "Relu", "Tanh", "Sigmoid")
    node = rng.choice(
        [n for n in live(proto) if n.op_type in kinds and types.get(n.output[0]) == 1 and n.output[0] not in public]
    )
    casts = []
    for slot, read in enumerate(node.input):
        low = name()
        casts.append(helper.make_node("Cast", [read], [low], to=TensorProto.BFLOAT16))
        node.input[slot] = low
    put_before(proto.graph, node, *casts)
    low, result = name(), node.output[0]
    at = next(i for i, other in enumerate(proto.graph.node) if other.output[:] == [result])
    proto.graph.node[at].output[0] = low
    proto.graph.node.insert(at + 1, helper.make_node("Cast", [low], [result], to=TensorProto.FLOAT))
    return node.op_type


SNEAKS: dict[str, Sneak] = {function.__name__: function for function in (an_edge_is_rounded, an_op_runs_in_bfloat16)}
DISGUISES = ("", "nodes_lose_their_names", "all_is_renamed_and_reordered", "weights_become_constant_nodes")


@cache
def shipped(name: str) -> tuple[ModelProto, Report]:
    proto = onnx.load(TESTS / "models" / f"{name}.onnx")
    return proto, report_in(Model.load(proto))


def disguised(proto: ModelProto, name: str, rng: random.Random) -> ModelProto | None:
    return REWRITES[name](proto, rng) if name else proto


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("sneak", SNEAKS)
def test_a_change_hidden_in_a_shipped_model_is_seen(sneak: str, disguise: str) -> None:
    count = 0
    for name in SHIPPED:
        before, report = shipped(name)
        for seed in range(2):
            proto, rng = ModelProto(), random.Random(f"{name}{sneak}{disguise}{seed}")
            proto.CopyFrom(before)
            op = SNEAKS[sneak](proto, rng)
            after = disguised(proto, disguise, rng)
            if after is None:
                continue
            try:
                delta = diff(report, report_in(Model.load(after)))
            except ModelError:
                continue  # the schema of an old opset does not allow the type
            assert not op or delta.fails(), (name, seed, op)
            count += 1
    assert count >= 2


# -- rewrites that change no precision --------------------------------------------------------------------

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
    """Build a model with equal weights under two names."""
    proto = parsed("g (float[4, 4] x) => (float[4, 4] y) { a = MatMul (x, w) b = Relu (a) y = MatMul (b, v) }")
    numbers = np.eye(4, dtype=np.float32)
    proto.graph.initializer.extend(numpy_helper.from_array(numbers, name) for name in ("w", "v"))
    return proto


@cache
def models() -> dict[str, tuple[ModelProto, Report]]:
    """Return exported models, conversions of some, and small models of rare features."""
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
def test_a_rewrite_without_a_change_of_precision_passes(name: str) -> None:
    count = 0
    for model, (proto, report) in models().items():
        copy = clone(proto)
        rewritten = REWRITES[name](copy, random.Random(f"{name}{model}"))
        if rewritten is not None:
            after = report_in(Model.load(rewritten))
            assert diff(report, after).text(verbose=True) == "no difference\n", model
            assert diff(after, report).text(verbose=True) == "no difference\n", f"{model}, back"
            count += 1
    assert count


@pytest.mark.parametrize("opset", [18, 21, 22])
def test_an_attribute_that_became_an_input_is_not_a_difference(opset: int) -> None:
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
            array = np.array(helper.get_attribute_value(moved), np.float32 if moved.type == moved.FLOAT else np.int64)
            new.graph.initializer.append(numpy_helper.from_array(array, f"{name}_{number}"))
            node.input.append(f"{name}_{number}")
            node.attribute.remove(moved)
    del new.opset_import[:]
    new.opset_import.append(helper.make_opsetid("", opset))
    assert diff(report_in(Model.load(old)), report_in(Model.load(new))).text(verbose=True) == "no difference\n"
