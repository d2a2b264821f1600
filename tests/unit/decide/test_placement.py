"""Placement by minimum cut: the fewest Casts, none without effect, and stable under a second conversion."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import onnx
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from onnx import ModelProto

from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.coloring.placement import Labelling, eliminate
from amp_rewrite.decide.coloring.problem import Problem, Spread
from amp_rewrite.decide.plan import plan_casts
from amp_rewrite.decide.reasons import Paint
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted, Draft
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.settings.request import Request
from support import cases, stub
from support.corpus import KINDS
from support.paths import TESTS
from support.random_graphs import Graph, graphs

MODELS = TESTS / "models"

bounded = settings(max_examples=15)


@given(
    arcs=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14), st.integers(1, 9)), max_size=40),
    pull=st.lists(st.integers(-9, 9), min_size=15, max_size=15),
    infinite=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=5),
)
@settings(bounded, max_examples=50)
def test_elimination_finds_a_cut_of_the_value_that_networkx_finds(
    arcs: list[tuple[int, int, int]], pull: list[int], infinite: list[tuple[int, int]]
) -> None:
    network: nx.DiGraph[Any] = nx.DiGraph()
    network.add_nodes_from(("s", "t"))
    for v, strength in enumerate(pull):
        network.add_edge(*(("s", v) if strength > 0 else (v, "t")), capacity=abs(strength))
    for u, v, cost in arcs:
        if u != v:
            network.add_edge(u, v, capacity=cost)
    for u, v in infinite:
        if u != v:
            network.add_edge(u, v, capacity=np.inf)
    low = eliminate(network, "s", "t")
    assert low is not None
    side = low | {"s"}
    crossing = [data["capacity"] for u, v, data in network.edges(data=True) if u in side and v not in side]
    assert sum(crossing) == nx.minimum_cut_value(network, "s", "t")


def net_casts(problem: Problem, labelling: Labelling, low: set[int]) -> int:
    """Count the Casts that a labelling adds, minus the model's removed ones."""
    low = set(low)
    labelling._follow(low)
    paints = {
        (vertex.op, name): Paint(problem.to if v in low else DType.FLOAT, "", None)
        for v, vertex in enumerate(problem.vertices)
        for name in vertex.variables
    }
    plan = plan_casts(problem.view, Coloring(problem.to, paints, (), {}, ()))
    return len(plan.casts) - len(plan.drop)


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16], ids=str)
@given(graph=graphs())
@settings(bounded, max_examples=30)
def test_no_labelling_takes_fewer_casts(to: DType, graph: Graph) -> None:
    note(graph.text())
    problem = Draft.of(graph.model(), Request.of(fuse="none", opset="keep", to=to)).problem()
    labelling = Labelling(problem, Spread(problem))
    found = labelling.solve()
    free = [v for v, end in enumerate(labelling.ends) if end == v and v not in labelling.follows][:9]
    # Weights beyond the number of Casts: pairs and groups with one kernel, and choices between low values.
    weighted = {arc.share for arc in labelling.arcs} - {1.0, np.inf}
    least = net_casts(problem, labelling, found)
    for choice in itertools.product((False, True), repeat=len(free)) if not weighted else ():
        other = (found - set(free)) | {v for v, low in zip(free, choice, strict=True) if low}
        if not any(arc.share == np.inf and arc.low in other and arc.high not in other for arc in labelling.arcs):
            assert least <= net_casts(problem, labelling, other), other


def placed(model: ModelProto | Path, **options: Any) -> Converted:
    return convert(model, **{"fuse": "basic", **options})


def lowered(result: Converted) -> set[str]:
    found = ((op, result.coloring.of(op.id)) for op in result.view.ops)
    return {op.name for op, paint in found if paint is not None and paint.dtype is result.coloring.to}


def test_readers_of_an_overflowing_constant_are_not_lowered_to_save_a_cast() -> None:
    """1e9 overflows float16: its product is pinned, and the result must not be cast."""
    text, large = "a=MatMul(x,w);m=Mul(a,c);t=Tanh(m);b=MatMul(t,w)", {"w": np.ones((2048, 2048)), "c": 1e9}
    model = cases.build(text, ("b",), shapes={"x": (512, 2048)}, constants=large)
    small = cases.build(text, ("b",), shapes={"x": (512, 2048)}, constants={**large, "c": 0.5})
    assert lowered(placed(model)) == {"a", "b"}
    assert lowered(placed(small)) == {"a", "m", "t", "b"}


@pytest.mark.parametrize(("rows", "low"), [((1 << 18) - 8, False), ((1 << 18) + 8, True)])
def test_low_copies_pay_for_a_cast_from_a_certain_size(rows: int, low: bool) -> None:
    """Low, the copies have one Cast more: 24 MiB and 12 bytes for each element of `e`. They save 24 bytes for each."""
    copies = "r0=Concat[axis=0](a,e);" + "".join(f"r{i}=Transpose(r{i - 1});" for i in range(1, 6))
    text = f"a=MatMul(x,w);c=MatMul(z,w);e=Relu(c);{copies}b=MatMul(w,r5);u=Exp(r0);v=Exp(r5)"
    model = cases.build(text, ("b", "u", "v"), shapes={"x": (rows, 8), "z": (rows, 8)}, constants={"w": np.eye(8)})
    found = lowered(placed(model, opset="keep", keep=["e"]))
    assert found == {"a", "b", "c", *(f"r{i}" for i in range(6) if low)}


@pytest.mark.parametrize(("op", "low"), [("Transpose", True), ("Relu", True), ("Tanh", False), ("Softplus", False)])
def test_an_exact_op_is_low_in_a_tie_and_one_that_rounds_is_not(op: str, low: bool) -> None:
    model = cases.build(f"a=MatMul(x,w);t={op}(a);y=Exp(t)", ("y",), shapes={"x": (8, 8)}, constants={"w": np.eye(8)})
    assert lowered(placed(model)) == ({"a", "t"} if low else {"a"})


def test_a_comparison_is_low_only_between_low_values() -> None:
    """Rounding would change the answer for a raw input, but a product's result is rounded already."""
    text = "a=MatMul(x,w);g=Greater({},k);h=Where(g,a,b);b=MatMul(x,v);y=MatMul(h,w)"
    given = {"w": np.ones((8, 8)), "v": np.ones((8, 8)), "k": 0.3}
    for of, low in (("x", False), ("a", True)):
        model = cases.build(
            text.format(of).replace("h=Where(g,a,b);b=MatMul(x,v)", "b=MatMul(x,v);h=Where(g,a,b)"),
            ("y",),
            constants=given,
        )
        assert ("g" in lowered(placed(model))) is low


RMS_NORM = "a={};c=Pow(a,two);m=ReduceMean[axes=-1](c);e=Add(m,eps);r=Sqrt(e);d=Div(a,r);n=Mul(d,g);y=MatMul(n,w){}"


@pytest.mark.parametrize(
    ("entry", "beside", "low"), [("MatMul(x,w)", "", True), ("Exp(x)", "", False), ("MatMul(x,w)", ";z=Exp(a)", False)]
)
def test_the_scale_of_a_norm_is_low_with_its_input_unless_a_float32_op_reads_it(
    entry: str, beside: str, low: bool
) -> None:
    constants = {"w": np.eye(8), "two": 2.0, "eps": 1e-5, "g": np.linspace(0.5, 1.5, 8)}
    text, ends = RMS_NORM.format(entry, beside), ("y", "z") if beside else ("y",)
    model = cases.build(text, ends, shapes={"x": (4, 8)}, constants=constants, opset=16)
    assert ("n" in lowered(convert(model, fuse="none", opset="keep"))) is low


def casts(draft: Draft, coloring: Coloring) -> int:
    """Count the Casts that a colouring adds, minus the model's removed ones."""
    plan = plan_casts(draft.view, coloring, draft.io, draft.needs.saturate)
    return len(plan.casts) - len(plan.drop)


WAYS: Mapping[str, Mapping[str, str]] = {
    "float16": {},
    "bfloat16": {"to": "bfloat16"},
    "tensorrt": {"target": "tensorrt"},
    "tensorflow": {"safety": "none", "target": "onnx", "lists": "tensorflow"},
}


def obeys(draft: Draft, coloring: Coloring) -> list[str]:
    """Return lowered ops that gate, pins, patterns or sequences forbid."""
    gate = Gate(draft.request.target, draft.request.to)
    wrong = []
    for op in draft.view.ops:
        if op.signature is None or op.bodies:
            continue
        low = [v.name for v in draft.view.variables[op.id] if coloring.dtype((op.id, v.name)) is coloring.to]
        lowerable = gate.lowerable_groups(draft.view, op)
        wrong += [f"gate: {op.name}" for name in low if name in lowerable.refusals]
        wrong += [f"group: {op.name}" for group in lowerable.groups if 0 < len(set(group) & set(low)) < len(set(group))]
        wrong += [f"keep: {op.name}" for _ in low if op.id in draft.keep]
    pinned = draft.needs.pins.keys() - draft.lower.keys()
    tails = {op for cluster in clusters(draft.view) for op in cluster.tail}
    for op_id in pinned - tails:
        paint = coloring.of(op_id)
        wrong += [f"pin: {draft.view.ops[op_id].name}"] if paint and paint.dtype is coloring.to else []
    return wrong


@pytest.mark.parametrize("way", WAYS)
@given(graph=graphs())
@bounded
def test_random_graphs_obey_every_rule_cost_no_more_and_are_stable(way: str, graph: Graph) -> None:
    note(graph.text())
    model = graph.model()
    draft = Draft.of(model, Request.of(**WAYS[way]))
    cut = draft.paint()
    assert obeys(draft, cut) == []
    uncut = replace(draft, request=replace(draft.request, placement="propagate"))
    assert casts(draft, cut) <= casts(uncut, uncut.paint())
    once = placed(model, **WAYS[way])
    assert placed(once.model, **WAYS[way]).plan.casts == ()


FUSED = re.compile("Norm|Gelu|Bias|Fused|Attention|Skip|Gemm|Conv")


def fused(row: Mapping[str, Any]) -> Counter[str]:
    return Counter({kind: n for kind, n in row["ops"].items() if FUSED.search(kind)})


@pytest.mark.slow
@pytest.mark.stub
@pytest.mark.parametrize("name", KINDS)
def test_a_placed_model_loses_no_fusion(name: str, tmp_path: Path, cuda_stub: Path) -> None:
    """Of the runtime's float32 fusions."""
    source = MODELS / f"{name}.onnx"
    convert(source, fuse="basic").save(tmp_path / "placed.onnx")
    float32, cut = stub.placements([source, tmp_path / "placed.onnx"])
    assert "error" not in cut, cut
    # Adds of value biases that move after attention are Gemms only in float32.
    assert fused(float32) - fused(cut) == Counter(Gemm=4 if name == "whisper_step_dynamo20" else 0)


def casts_of(model: ModelProto | Path) -> Counter[str]:
    """Count the Casts of a model, including bodies, by their effect."""
    view = View.of(Model.load(model))
    ends = (
        (view.dtype(v) for v in (op.inputs[0], op.outputs[0]) if v is not None) for op in view.ops if op.kind == "Cast"
    )
    return Counter(" → ".join(dtype.spelling if dtype else "?" for dtype in pair) for pair in ends)


def folded(result: Converted) -> list[tuple[str, str, str]]:
    return [(c.value, c.from_, c.to) for c in result.report.casts if c.origin == "folded"]


COPYING = (
    '<ir_version: 10, opset_import: ["" : 21]> g (float[8,8] x, int64[2] i, bool[8,8] m, float[8,8] w)'
    " => (float[8,8] y, int64[2] j, float[2,8] z) {"
    " xc = Cast <to = 1> (x) a = MatMul (x, w)"
    " i1 = Cast <to = 7> (i) i2 = Cast <to = 7> (i1) z = Gather (x, i2) j = Cast <to = 7> (i2)"
    " mc = Cast <to = 9> (m) y = Where (mc, a, xc) }"
)


def test_casts_without_effect_are_left_out_and_reported() -> None:
    result = convert(onnx.parser.parse_model(COPYING))
    assert not any(source == target for source, target in (what.split(" → ") for what in casts_of(result.model)))
    assert folded(result) == [
        ("x", "float32", "float32"),
        ("i", "int64", "int64"),
        ("i1", "int64", "int64"),
        ("i2", "int64", "int64"),
        ("m", "bool", "bool"),
    ]
    reads = {node.output[0]: (node.op_type, list(node.input)) for node in result.model.graph.node}
    assert reads["z"] == ("Gather", ["x", "i"])
    assert reads["j"] == ("Identity", ["i"])  # an output keeps its name
    assert reads["y"] == ("Where", ["m", "a_float32", "x"])


def test_a_cast_of_another_source_type_stays() -> None:
    """Casts that truncate, that count, or of an unknown type."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21, "own" : 1]> g (float[8,8] x, float[8,8] w)'
        " => (float[8,8] y, int64[8,8] n)"
        "{ a = MatMul (x, w) t = Cast <to = 6> (x) n = Cast <to = 7> (t) f = Cast <to = 1> (t)"
        " u = own.F (x) v = Cast <to = 1> (u) s = Add (f, v) y = Add (s, a) }"
    )
    model = onnx.parser.parse_model(text)
    before, after = casts_of(model), casts_of(convert(model).model)
    assert before - after == Counter()


ATTENTION = (
    '<ir_version: 10, opset_import: ["" : 21]> g (float[8,8] x, float[8,8] w) => ({OUTPUTS})'
    "{{ a = MatMul (x, w) s = Softmax (a) {CASTS} y = MatMul (q, w) {MORE} }}"
)


@pytest.mark.parametrize("chain", ["p = Cast <to = 1> (s) q = Cast <to = 1> (p)", "{0} r = Cast <to = 1> (p) {1} (r)"])
def test_casts_that_widen_and_narrow_again_are_removed(chain: str) -> None:
    """PyTorch writes two Casts around every attention's dropout: float32 to float32, then float16 and back."""
    text = chain.format("p = Cast <to = 1> (s)", "q = Cast <to = 1>")
    result = convert(onnx.parser.parse_model(ATTENTION.format(OUTPUTS="float[8,8] y", CASTS=text, MORE="")))
    assert casts_of(result.model) == {"float32 → float16": 2, "float16 → float32": 1}
    reads = {node.output[0]: list(node.input) for node in result.model.graph.node}
    assert reads["y_float16"] == ["s", "w_float16"]
    assert len(folded(result)) == text.count("Cast")


def test_a_widening_cast_read_only_by_a_folded_cast_is_removed() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float16[8,8] x, float16[8,8] w, float[8,8] v)'
        " => (float16[8,8] y, float[8,8] z) { a = MatMul (x, w) p = Cast <to = 1> (a) q = Cast <to = 10> (p)"
        " y = MatMul (q, w) z = MatMul (v, v) }"
    )
    result = convert(onnx.parser.parse_model(text))
    assert casts_of(result.model) == {"float32 → float16": 1, "float16 → float32": 1}
    assert folded(result) == [("a", "float16", "float32"), ("p", "float32", "float16")]


def test_readers_of_a_removed_cast_read_the_new_cast_in_its_place() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[8,8] x, float[8,8] w) => (float[8,8] y, float[8,8] z)'
        "{ y = MatMul (x, w) h = Cast <to = 10> (x) f = Cast <to = 1> (h) z = MatMul (f, w) }"
    )
    reads = {node.output[0]: node.input[0] for node in convert(onnx.parser.parse_model(text)).model.graph.node}
    assert (reads["y_float16"], reads["z_float16"]) == ("x_float16", "x_float16")


def test_a_cast_through_a_narrower_type_rounds_and_stays() -> None:
    """bfloat16 has fewer digits than float16, and integers have no fractions."""
    for code in (16, 7):
        text = ATTENTION.format(
            OUTPUTS="float[8,8] y", CASTS=f"p = Cast <to = {code}> (s) q = Cast <to = 1> (p)", MORE=""
        )
        model = onnx.parser.parse_model(text)
        assert casts_of(convert(model).model).total() == 5
        assert folded(convert(model)) == []


SCALED = (
    '<ir_version: 10, opset_import: ["" : 21]> g (float[4,8] x, float[2] fed) => (float[4,2] y)'
    " <float[8,2] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[2,2] v = {1,2,3,4}, float[2] scale = {0.5,0.25}>"
    " { a = MatMul (x, w) b = MatMul (a, v) s = SCALE y = Sum (a, b, s) }"
)


@pytest.mark.parametrize(("scale", "more"), [("Identity (scale)", 0), ("Identity (fed)", 1)])
def test_a_copied_weight_counts_as_a_weight(scale: str, more: int) -> None:
    """TorchScript passes a shared weight to the second layer through an Identity; an input gets a Cast."""
    result = convert(onnx.parser.parse_model(SCALED.replace("SCALE", scale)))
    assert casts_of(result.model) == {"float32 → float16": 1 + more, "float16 → float32": 1}
    assert {row.dtype for row in result.report.rows if row.op != "Identity"} == {"float16"}


GROUP_NORM = (
    '<ir_version: 10, opset_import: ["" : OPSET]> g (float[1,4,6,6] x) => (float[1,4,6,6] y)'
    " <float[4,4,1,1] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}>"
    " { s = Constant <value = float[4] {1,1,1,1}> () b = Constant <value = float[4] {0,0,0,0}> ()"
    " c = Conv (x, w) n = GroupNormalization <num_groups = 2STASH> (c, s, b) y = Conv (n, w) }"
)


def normed(opset: int, stash: int | None = None) -> ModelProto:
    attribute = "" if stash is None else f", stash_type = {stash}"
    model = onnx.parser.parse_model(GROUP_NORM.replace("OPSET", str(opset)).replace("STASH", attribute))
    for node in model.graph.node:
        node.name = node.output[0]  # the stub answers by name
    return model


@pytest.mark.parametrize(("stash", "low"), [(None, True), (1, True), (10, False), (16, False)])
def test_a_group_norm_that_casts_inside_its_body_needs_no_casts(stash: int | None, low: bool) -> None:
    result = convert(normed(21, stash))
    assert casts_of(result.model) == {"float32 → float16": 1 + (not low), "float16 → float32": 1 + (not low)}
