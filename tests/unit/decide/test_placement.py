"""Placing by minimum cut: optimal, as safe as what it starts from, never dearer, and the same when done twice."""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import onnx
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper

import amp_rewrite
from amp_rewrite.decide.cast_plan import plan_casts
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.placement import cost_model as work_module
from amp_rewrite.decide.placement.cost_model import ATTOSECONDS, UNKNOWN_DIMENSION, UNKNOWN_SIZE, CostModel
from amp_rewrite.decide.placement.labelling import HIGH, LOW, Conversion, Labelling, Pair
from amp_rewrite.decide.placement.min_cut import FIXED, FlowNetwork
from amp_rewrite.decide.placement.place import PlacementRule
from amp_rewrite.errors import PolicyError
from amp_rewrite.ir.shapes.onnx_shapes import shape_of
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import Converted, convert
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.runtime.roofline import ROOFS, START
from amp_rewrite.settings.choices import AUTO, PROPAGATE, Placement
from amp_rewrite.settings.request import Request
from support import cases, corpus, stub
from support.paths import TESTS
from support.random_graphs import Graph, graphs

MODELS = TESTS / "models"
FIXTURES = sorted(path.stem for path in MODELS.glob("*.onnx"))
ROOF = ROOFS["A100"]

bounded = settings(max_examples=30)
every_fixture = pytest.mark.parametrize("name", FIXTURES)

# -- the cut ---------------------------------------------------------------------------------------------


@st.composite
def labellings(draw: st.DrawFn) -> Labelling:
    """Questions about up to seven vertices, small enough to try every answer."""
    size = draw(st.integers(1, 7))
    vertex = st.integers(0, size - 1)
    end = st.one_of(vertex, st.sampled_from((LOW, HIGH)))
    conversions = st.builds(Conversion, end, st.lists(end, max_size=4).map(tuple), st.integers(0, 6))
    return Labelling(
        tuple(draw(st.lists(st.integers(-2, 6), min_size=size, max_size=size))),
        tuple(draw(st.lists(conversions, max_size=10))),
        tuple(draw(st.lists(st.builds(Pair, vertex, vertex, st.integers(0, 5)), max_size=4))),
        draw(st.dictionaries(vertex, st.booleans(), max_size=2)),
        tuple(draw(st.lists(st.lists(vertex, max_size=3).map(tuple), max_size=2))),
    )


def allows(question: Labelling, low: Sequence[bool]) -> bool:
    """True if labels agree with the fixed and the tied vertices."""
    fixed = all(low[v] is label for v, label in (question.fixed or {}).items())
    return fixed and all(len({low[v] for v in group}) == 1 for group in question.tied)


@given(question=labellings())
@settings(bounded, max_examples=150)
def test_no_labelling_is_cheaper_and_of_the_cheapest_none_has_fewer_low_vertices(question: Labelling) -> None:
    every = itertools.product((False, True), repeat=len(question.loss))
    allowed = [low for low in every if allows(question, low)]
    assume(allowed)
    least = min(map(question.cost, allowed))
    fewest = min(sum(low) for low in allowed if question.cost(low) == least)
    best = question.best()
    assert allows(question, best)
    assert (question.cost(best), sum(best)) == (least, fewest)


@given(
    arcs=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29), st.integers(1, 9)), max_size=90),
    pull=st.lists(st.integers(-9, 9), min_size=30, max_size=30),
)
@bounded
def test_a_cut_has_the_value_that_networkx_finds(arcs: list[tuple[int, int, int]], pull: list[int]) -> None:
    network = FlowNetwork()
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_nodes_from(("s", "t"))
    for strength in pull:
        v = network.node()
        network.pull[v] = strength
        graph.add_edge(*(("s", v) if strength > 0 else (v, "t")), capacity=abs(strength))
    for u, v, cost in arcs:
        network.arc(u, v, cost)
        if u != v:
            graph.add_edge(u, v, capacity=network.out[u][v])
    low = network.lowest()
    paid = sum(abs(p) for v, p in enumerate(pull) if (p > 0) is not low[v] and p)
    paid += sum(cost for u, out in enumerate(network.out) for v, cost in out.items() if low[u] and not low[v])
    assert paid == nx.minimum_cut_value(graph, "s", "t")


def test_a_long_chain_between_float32_ends_is_low_as_a_whole_for_two_casts() -> None:
    count = 3000
    ends = (Conversion(HIGH, (0,), 6), Conversion(count - 1, (HIGH,), 6))
    inside = tuple(Conversion(v, (v + 1,), 6) for v in range(count - 1))
    assert Labelling((4,) * count, (*ends, *inside)).best() == [True] * count
    assert Labelling((4,) * 3, (ends[0], *inside[:2], Conversion(2, (HIGH,), 6))).best() == [False] * 3


def test_one_cast_serves_all_that_read_a_value() -> None:
    # Three readers that gain 2 each: worth one Cast of 5, not three.
    shared = Labelling((2, 2, 2), (Conversion(HIGH, (0, 1, 2), 5),))
    assert (shared.best(), shared.cost([True] * 3), shared.cost([True, False, True])) == ([True] * 3, 5, 7)
    apart = Labelling((2, 2, 2), tuple(Conversion(HIGH, (v,), 5) for v in range(3)))
    assert (apart.best(), apart.cost([True] * 3)) == ([False] * 3, 15)


def test_what_is_tied_but_fixed_both_ways_is_high() -> None:
    question = Labelling((5, 5), fixed={0: True, 1: False}, tied=((0, 1),))
    assert (question.best(), allows(question, [False, False])) == ([False, False], False)


def test_a_pull_at_a_fixed_node_outweighs_all_arcs() -> None:
    network = FlowNetwork()
    node, other = network.node(), network.node()
    network.pull[:] = [FIXED, -FIXED]
    network.arc(node, other, 10**18)
    assert network.lowest() == [True, False]


# -- what things cost --------------------------------------------------------------------------------------


def work(text: str, output: str, **given: Any) -> CostModel:
    view = View.of(amp_rewrite.Model.load(cases.build(text, (output,), **given)))
    return CostModel(view, ROOF, amp_rewrite.DType.FLOAT16)


def value(found: CostModel, name: str) -> Any:
    return next(v.id for v in found.view.values if v.name == name)


def test_a_cast_starts_reads_four_bytes_of_an_element_and_writes_two() -> None:
    found = work("r=Relu(x)", "r", shapes={"x": (1000, 100)})
    assert found.cast(value(found, "x")) == pytest.approx((START + 6e5 / ROOF.bandwidth) * ATTOSECONDS)


def test_a_lost_fusion_starts_another_kernel_and_moves_a_float32_value_twice() -> None:
    found = work("r=Relu(x)", "r", shapes={"x": (1000, 100)})
    assert found.trip(value(found, "x")) == pytest.approx((START + 8e5 / ROOF.bandwidth) * ATTOSECONDS)


def test_shapes_are_inferred_only_where_the_model_does_not_state_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.build("a=Relu(x);b=Relu(a)", ("b",), shapes={"x": (3, 5)})
    stated = onnx.shape_inference.infer_shapes(model)
    inferred = []
    monkeypatch.setattr(work_module, "shape_of", lambda view, v: inferred.append(v) or shape_of(view, v))
    for told, calls in ((stated, 0), (model, 1)):
        found = CostModel(View.of(amp_rewrite.Model.load(told)), ROOF, amp_rewrite.DType.FLOAT16)
        assert [found.size(v.id) for v in found.view.values] == [15] * 3
        assert len(inferred) == calls


def test_an_elementwise_op_loses_two_bytes_of_every_element_that_it_reads_and_writes() -> None:
    found = work("r=Relu(x)", "r", shapes={"x": (1000, 100)})
    op = found.view.ops[0]
    assert found.loss(op, [value(found, "x"), value(found, "r")], main=True) == pytest.approx(
        4e5 / ROOF.bandwidth * ATTOSECONDS
    )


@pytest.mark.parametrize(
    ("text", "shapes", "flops"),
    [
        ("y=MatMul(x,w)", {"x": (2, 3, 5), "w": (5, 7)}, 2 * 2 * 3 * 7 * 5),
        ("y=Gemm(x,w)", {"x": (3, 5), "w": (5, 7)}, 2 * 3 * 7 * 5),
        ("y=Gemm[transA=1](x,w)", {"x": (5, 3), "w": (5, 7)}, 2 * 3 * 7 * 5),
        ("y=Conv(x,w)", {"x": (1, 4, 8, 8), "w": (6, 4, 3, 3)}, 2 * 6 * 6 * 6 * 4 * 3 * 3),
        ("y=Relu(x)", {"x": (2, 3)}, 0),
    ],
)
def test_products_count_two_operations_for_each_product(
    text: str, shapes: Mapping[str, tuple[int, ...]], flops: int
) -> None:
    found = work(text, "y", shapes=shapes)
    assert found.flops(found.view.ops[0]) == flops


def test_what_is_not_known_counts_as_stated() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "own" : 1]> g (float[n, 3] x) => (float y)'
        "{ a = Relu (x) b = own.F (a) c = own.G () y = own.H (b, c) }"
    )
    found = CostModel(View.of(amp_rewrite.Model.load(model)), ROOF, amp_rewrite.DType.FLOAT16)
    sizes = {v.name: found.size(v.id) for v in found.view.values}
    assert sizes == {
        "x": 3 * UNKNOWN_DIMENSION,
        "a": 3 * UNKNOWN_DIMENSION,
        "b": 3 * UNKNOWN_DIMENSION,
        "c": UNKNOWN_SIZE,
        "y": 1,
    }


# -- what is placed ------------------------------------------------------------------------------------------


def placed(model: ModelProto | Path, **options: Any) -> Converted:
    return convert(model, **{"placement": "mincut", "fuse": "basic", **options})


def lowered(result: Converted) -> set[str]:
    found = ((op, result.coloring.of(op.id)) for op in result.view.ops)
    return {op.name for op, paint in found if paint is not None and paint.dtype is result.coloring.to}


def rules(result: Converted) -> dict[str, str]:
    found = ((op, result.coloring.of(op.id)) for op in result.view.ops)
    return {op.name: paint.rule for op, paint in found if paint is not None}


def test_a_small_product_alone_is_not_worth_its_casts() -> None:
    model = cases.build("g=Gemm(x,w)", ("g",), constants={"w": np.ones((8, 8))})
    assert (lowered(convert(model)), lowered(placed(model))) == ({"g"}, set())
    assert rules(placed(model)) == {"g": "min_cut"}


def test_a_large_product_is_worth_its_casts() -> None:
    wide = {"w": np.ones((2048, 2048))}
    model = cases.build("g=Gemm(x,w)", ("g",), shapes={"x": (512, 2048)}, constants=wide)
    assert lowered(placed(model)) == {"g"}


def test_a_lone_relu_between_float32_products_stays_float32() -> None:
    model = cases.build("a=MatMul(x,x);r=Relu(a);b=MatMul(r,r)", ("b",), shapes={"x": (1024, 1024)})
    for way in ("auto", "mincut"):
        assert lowered(placed(model, keep=["op=MatMul"], placement=way)) == set()
        assert lowered(placed(model, placement=way)) == {"a", "r", "b"}


def test_what_the_user_lowers_is_low_at_any_price() -> None:
    model = cases.build("g=Gemm(x,w)", ("g",), constants={"w": np.ones((8, 8))})
    assert rules(placed(model, lower=["g"])) == {"g": "lower"}


def test_a_gray_op_between_input_and_product_is_lowered_if_the_cast_gets_smaller() -> None:
    # The input has 512 × 1 elements, what Add makes of it 512 × 2048: the Cast belongs before the Add.
    text, given = "a=Add(x,b);m=MatMul(a,w)", {"b": np.ones((1, 2048)), "w": np.ones((2048, 2048))}
    model = cases.build(text, ("m",), shapes={"x": (512, 1)}, constants=given)
    assert (lowered(convert(model)), lowered(placed(model))) == ({"m"}, {"a", "m"})
    assert [model.graph.input[0].name] == [c.value for c in placed(model).report.casts if c.to == "float16"]


def test_what_stands_behind_a_pinned_op_is_not_lowered_for_a_smaller_cast() -> None:
    # 1e9 is no float16: what multiplies by it is pinned, and so large a number must not be cast behind it.
    text, large = "a=MatMul(x,w);m=Mul(a,c);t=Tanh(m);b=MatMul(t,w)", {"w": np.ones((2048, 2048)), "c": 1e9}
    model = cases.build(text, ("b",), shapes={"x": (512, 2048)}, constants=large)
    small = cases.build(text, ("b",), shapes={"x": (512, 2048)}, constants={**large, "c": 0.5})
    for way in ("auto", "mincut"):
        assert lowered(placed(model, placement=way)) == {"a", "b"}
        assert lowered(placed(small, placement=way)) == {"a", "m", "t", "b"}


def test_what_feeds_a_kept_op_is_not_lowered_to_save_a_fusion() -> None:
    # MatMul and a bias Add run as one node; the sum of a residual stream that is kept should not be rounded before it.
    large = {"w": np.ones((2048, 2048)), "b": np.ones(2048)}
    model = cases.build("m=MatMul(x,w);a=Add(m,b);s=Sub(a,b)", ("s",), shapes={"x": (512, 2048)}, constants=large)
    assert lowered(placed(model, keep=["op=Sub"])) == {"m", "a"}
    assert lowered(placed(model, keep=["op=Sub"], placement="auto")) == {"m"}


def test_an_added_bias_is_not_parted_from_its_norm() -> None:
    question = Labelling((0, 3), (Conversion(LOW, (0,), 1), Conversion(0, (1,), 1), Conversion(1, (HIGH,), 1)))
    assert question.best() == [True, True]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[64,64] x, float[64,64] z, float[64] s) => (float[64,64] y)'
        "{ a = MatMul (x, z) c = Add (a, z) n = LayerNormalization (c, s) y = Identity (n) }"
    )
    draft = Draft.of(model, Request.of(placement="mincut", fuse="basic"))
    draft.paint()
    assert draft.placing is not None
    pairs = draft.placing.labelling.pairs
    named = {i: draft.view.ops[op].name for i, (op, _) in enumerate(draft.placing.vertices)}
    kinds = {op.name: op.kind for op in draft.view.ops}
    assert [(kinds[named[p.first]], kinds[named[p.second]]) for p in pairs] == [("Add", "LayerNormalization")]


def both(draft: Draft) -> tuple[PlacementRule, Coloring, Coloring]:
    """What places, the colouring by spreading and the one by cutting."""
    assert draft.placing is not None
    spreading = Request({**vars(draft.request), "placement": PROPAGATE})
    return draft.placing, replace(draft, request=spreading).paint(), draft.paint()


def casts(draft: Draft, coloring: Coloring) -> int:
    """The Casts that a colouring takes."""
    return len(plan_casts(draft.view, coloring, draft.io, draft.hazards.saturate).casts)


def test_clusters_and_sequences_are_tied() -> None:
    text = (
        "a=MatMul(x,w);d=Div(a,k);e=Erf(d);p=Add(e,one);m=Mul(a,p);h=Mul(m,half);"
        "s=SequenceConstruct(h,h);r=SequenceAt(s,i);b=MatMul(r,w)"
    )
    given = {"w": np.ones((8, 8)), "k": 1.4142135, "one": 1.0, "half": 0.5}
    model = cases.build(text, ("b",), constants=given, types={"i": "int"}, shapes={"i": ()})
    draft = Draft.of(model, Request.of(placement="mincut", target="onnx"))
    draft.paint()
    assert draft.placing is not None
    names = [draft.view.ops[op].name for op, _ in draft.placing.vertices]
    groups = [sorted({names[v] for v in group}) for group in draft.placing.labelling.tied]
    assert sorted(groups) == [["d", "e", "h", "m", "p"], ["r", "s"]]


WAYS: Mapping[str, Mapping[str, str]] = {
    "float16": {},
    "bfloat16": {"to": "bfloat16"},
    "tensorrt": {"target": "tensorrt"},
    "tensorflow": {"safety": "none", "target": "onnx", "lists": "tensorflow"},
}


def obeys(draft: Draft, coloring: Coloring) -> list[str]:
    """What a colouring lowers that gate, pins, patterns, sequences or clusters forbid."""
    gate = Gate(draft.request.target, draft.request.to)
    wrong = []
    for op in draft.view.ops:
        if op.signature is None or op.bodies:
            continue
        low = [v.name for v in draft.view.variables[op.id] if coloring.lowered(op.id, v.name)]
        lowerable = gate.lowerable_groups(draft.view, op)
        wrong += [f"gate: {op.name}" for name in low if name in lowerable.refusals]
        wrong += [f"group: {op.name}" for group in lowerable.groups if 0 < len(set(group) & set(low)) < len(set(group))]
        wrong += [f"keep: {op.name}" for _ in low if op.id in draft.keep]
    pinned = {pin.op for pin in draft.hazards.pins} - set(draft.lower)
    tails = {op for cluster in draft.clusters for op in cluster.tail}
    for op_id in pinned - tails:
        paint = coloring.of(op_id)
        wrong += [f"pin: {draft.view.ops[op_id].name}"] if paint and paint.dtype is coloring.to else []
    for cluster in draft.hazards.clusters:
        members = [op for op in cluster.ops if op not in tails and draft.view.ops[op].kind != "Cast"]
        labels = {coloring.of(op).dtype for op in members if coloring.of(op) is not None}  # type: ignore[union-attr]
        wrong += [f"cluster: {cluster.kind}"] if len(labels) > 1 else []
    return wrong


both_placements = pytest.mark.parametrize("placement", ["auto", "mincut"])


@both_placements
@pytest.mark.parametrize("way", WAYS)
@given(graph=graphs())
@bounded
def test_random_graphs_obey_every_rule_cost_no_more_and_stay_when_converted_again(
    way: str, placement: str, graph: Graph
) -> None:
    note(graph.text())
    model = graph.model()
    draft = Draft.of(model, Request.of(placement=placement, **WAYS[way]))
    placing, spread, cut = both(draft)
    assert obeys(draft, cut) == []
    assert placing.seconds(cut) <= placing.seconds(spread)
    assert casts(draft, cut) <= casts(draft, spread)
    once = placed(model, placement=placement, **WAYS[way])
    assert placed(once.model, placement=placement, **WAYS[way]).plan.casts == ()


def test_a_coloring_that_breaks_gate_and_pins_is_noticed() -> None:
    """A must-fail twin: a colouring of everything breaks gate and pins."""
    text, given = "a=MatMul(x,w);t=Asinh(a);m=Mul(t,c)", {"w": np.ones((8, 8)), "c": 1e9}
    model = cases.build(text, ("m",), constants=given)
    forced = Draft.of(model, Request.of(placement="mincut", level="unsafe-force-all", target="onnx", safety="none"))
    real = Draft.of(model, Request.of(placement="mincut"))
    assert {text.split(":")[0] for text in obeys(real, forced.paint())} == {"gate", "pin"}


@functools.cache
def drafted(name: str, placement: str) -> Draft:
    return Draft.of(MODELS / f"{name}.onnx", Request.of(placement=placement, fuse="basic"))


@both_placements
@every_fixture
def test_exported_models_take_no_more_casts_and_no_more_time_than_by_spreading(name: str, placement: str) -> None:
    draft = drafted(name, placement)
    placing, spread, cut = both(draft)
    assert obeys(draft, cut) == []
    assert placing.seconds(cut) <= placing.seconds(spread)
    assert casts(draft, cut) <= casts(draft, spread)


@pytest.mark.parametrize(("placement", "least"), [("auto", (2, 8)), ("mincut", (5, 15))])
def test_some_exported_models_are_better_off(placement: str, least: tuple[int, int]) -> None:
    """Were the two the same everywhere, the test above would show nothing."""
    fewer = cheap = 0
    for name in FIXTURES:
        draft = drafted(name, placement)
        placing, spread, cut = both(draft)
        fewer += casts(draft, cut) < casts(draft, spread)
        cheap += placing.seconds(cut) < placing.seconds(spread)
    assert (fewer >= least[0], cheap >= least[1]) == (True, True), (fewer, cheap)


@both_placements
@every_fixture
def test_an_exported_model_that_was_placed_stays_as_it_is(name: str, placement: str) -> None:
    once = placed(MODELS / f"{name}.onnx", placement=placement).model
    onnx.load_external_data_for_model(once, str(MODELS))
    assert placed(once, placement=placement).plan.empty


@pytest.mark.parametrize("name", ["llama_dynamo21", "t5_dynamo18", "bert_ts13"])
def test_by_default_residual_sums_that_spreading_leaves_float32_are_not_lowered(name: str) -> None:
    draft = drafted(name, "auto")
    _, spread, cut = both(draft)
    two = {op.id for op in draft.view.ops if op.kind == "Add" and not any(map(draft.view.constant, op.inputs))}
    assert [
        draft.view.ops[op].name
        for op, name in cut.paints
        if op in two and cut.paints[op, name] != spread.paints[op, name]
    ] == []


@every_fixture
def test_unasked_what_the_allow_list_lowers_stays_low(name: str) -> None:
    _, spread, cut = both(drafted(name, "auto"))
    roots = {key for key, paint in spread.paints.items() if paint.rule == "allow_root"}
    assert roots == {key for key, paint in cut.paints.items() if paint.rule == "allow_root"}


@pytest.fixture(scope="module")
def cuda_stub() -> Path:
    folder, reason = stub.folder()
    if folder is None:
        pytest.skip(reason)
    return folder


FUSED = re.compile("Norm|Gelu|Bias|Fused|Attention|Skip|Gemm|Conv")
WAYS_TO_PLACE = ("propagate", "auto", "mincut")
FOLDED: Mapping[str, Counter[str]] = {"cnn_dynamo18": Counter(BatchNormalization=4)}
"""Ops that stand in float32 models alone, because converting folds them into their Conv."""


@functools.cache
def on_the_stub() -> Mapping[str, list[dict[str, Any]]]:
    """What the stub says of each model in float32, placed in each way and by default; at once: starting costs."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in FIXTURES:
            files.append(MODELS / f"{name}.onnx")
            for way in WAYS_TO_PLACE:
                files.append(Path(folder, f"{name}.{way}.onnx"))
                convert(MODELS / f"{name}.onnx", placement=way, fuse="basic").save(files[-1])
            files.append(Path(folder, f"{name}.operators.onnx"))
            convert(MODELS / f"{name}.onnx").save(files[-1])
        told = stub.placements(files)
    size = 2 + len(WAYS_TO_PLACE)
    return {name: told[size * i : size * (i + 1)] for i, name in enumerate(FIXTURES)}


ON_THE_HOST: Mapping[str, list[str]] = {"unet_ts15": ["Cast /attention/Pow_output_0_float16_cast"]}
"""Casts of single numbers that the runtime computes from shapes on the host, in float32, too."""


COUNTED = 2
"""Casts from truth values to int32 and back, by which a model finds the rows of attention that a mask hides whole."""


def worse(float32: Mapping[str, Any], cut: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is worse in than in float32: fusions lost, floats on the host, copies between the two."""
    return {
        "lost": fused(float32) - fused(cut),
        "on the host": sorted(set(cut["cpu_float"]) - set(float32["cpu_float"])),
        "of unknown type": cut["cpu_unknown"],
        "copies": max(0, cut["memcpy"] - float32["memcpy"]),
    }


def fused(row: Mapping[str, Any]) -> Counter[str]:
    return Counter({kind: n for kind, n in row["ops"].items() if FUSED.search(kind)})


@pytest.mark.stub
@every_fixture
def test_a_placed_model_loses_no_fusion_and_leaves_nothing_on_the_host(name: str, cuda_stub: Path) -> None:
    """Of what the runtime fuses in float32, and puts on the GPU there."""
    float32, spread, *cuts, _ = on_the_stub()[name]
    for cut in cuts:
        assert "error" not in cut, cut
        assert worse(float32, cut) == {
            "lost": FOLDED.get(name, Counter()),
            "on the host": ON_THE_HOST.get(name, []),
            "of unknown type": [],
            "copies": 0,
        }
        assert cut["casts"] <= spread["casts"]


@pytest.mark.stub
@every_fixture
def test_operators_of_onnxruntime_leave_nothing_on_the_host(name: str, cuda_stub: Path) -> None:
    float32, spread, *_, operators = on_the_stub()[name]
    assert "error" not in operators, operators
    found = worse(float32, operators)
    assert (found["on the host"], found["of unknown type"], found["copies"]) == (ON_THE_HOST.get(name, []), [], 0)
    assert operators["casts"] <= spread["casts"] + COUNTED


@pytest.mark.stub
def test_spreading_alone_loses_fusions(cuda_stub: Path) -> None:
    """A must-fail twin: the test above can fail."""
    lost = {
        name: dict(fused(rows[0]) - fused(rows[1]) - FOLDED.get(name, Counter()))
        for name, rows in on_the_stub().items()
    }
    assert {name: what for name, what in lost.items() if what} == {
        "lstm_dynamo18": {"Gemm": 1},
        "lstm_ts13": {"Gemm": 1},
        "t5_dynamo18": {"com.microsoft:FusedMatMul": 1},
        "t5_ts14": {"com.microsoft:FusedMatMul": 1},
        "whisper_encoder_dynamo19": {"com.microsoft:SkipLayerNormalization": 1},
    }


@pytest.mark.stub
def test_an_op_without_a_kernel_for_half_runs_on_the_host_behind_copies(cuda_stub: Path, tmp_path: Path) -> None:
    """Another twin: so would floats on the host and copies be seen, if the gate let such an op be lowered."""
    text = (
        '<ir_version: 10, opset_import: ["" : 22]> g (float[1,1,8,8] x, float[1,8,8,2] at, float[1,1,1,1] w)'
        " => (float[1,1,8,8] y) { a = Conv (x, w) s = GridSample (a, at) y = Conv (s, w) }"
    )
    model = onnx.parser.parse_model(text)
    model.graph.node[1].name = "sample"
    onnx.save(model, tmp_path / "float32.onnx")
    for target in ("ort-cuda", "onnx"):
        convert(model, target=target, lower=["op=GridSample"]).save(tmp_path / f"{target}.onnx")
    float32, gated, forced = stub.placements([tmp_path / f"{n}.onnx" for n in ("float32", "ort-cuda", "onnx")])
    nothing = {"lost": Counter(), "on the host": [], "of unknown type": [], "copies": 0}
    assert worse(float32, gated) == nothing
    assert worse(float32, forced) == {**nothing, "on the host": ["GridSample sample"], "copies": 2}


# -- around it -----------------------------------------------------------------------------------------------


def test_the_report_tells_what_moving_the_border_saved() -> None:
    model = cases.build("g=Gemm(x,w)", ("g",), constants={"w": np.ones((8, 8))})
    told = [finding for finding in placed(model).report.findings if finding.kind == "placement"]
    assert [(f.kind, f.subject, f.message) for f in told] == [
        (
            "placement",
            "model",
            # 2 bytes of 3 times 64 elements in float32, or 2 kernels and 6 bytes of 2 times 64 cast, 1555 GB a second
            "moving the border between the types saved 2 Casts, 1.8 µs less (predicted on A100)",
        )
    ]
    assert [f for way in ("auto", "propagate") for f in convert(model, placement=way).report.findings] == []


def test_regions_are_judged_apart_and_a_worse_one_keeps_what_it_had() -> None:
    """Three readers of float32, apart: the first two gain by their Cast, the third does not."""
    apart = Labelling((9, 9, 1), tuple(Conversion(HIGH, (v,), 5) for v in range(3)))
    assert apart.improved([False] * 3, [True] * 3) == [False] * 3  # cheaper, but a Cast more each
    assert apart.improved([True] * 3, [False] * 3) == [True, True, False]
    assert apart.improved([True, True, False], apart.best()) == [True, True, False]
    together = Labelling((9, 9, 1), (Conversion(HIGH, (0, 1, 2), 5),))
    assert together.improved([True, True, False], [True] * 3) == [True] * 3


def test_a_cast_that_the_model_has_counts_as_none_but_costs_as_much() -> None:
    question = Labelling((9,), (Conversion(HIGH, (0,), 5, casts=0), Conversion(0, (LOW,), 1)))
    assert (question.casts([True]), question.casts([False]), question.cost([True])) == (0, 1, 5)
    assert question.improved([False], [True]) == [True]


@pytest.mark.parametrize(
    ("spelling", "gpu"),
    [("auto", "A100"), ("mincut", "A100"), ("mincut:T4", "T4"), (" MinCut:h200", "H200"), ("propagate", None)],
)
def test_a_placement_is_spelled_with_or_without_a_gpu(spelling: str, gpu: str | None) -> None:
    found = Placement.parse(spelling)
    assert (found.gpu.gpu if found.gpu else None) == gpu
    assert Placement.parse(found.spelling) == found


@pytest.mark.parametrize("spelling", ["best", "mincut:", "mincut:Z80", "propagate:T4", "auto:T4", ""])
def test_an_unknown_placement_is_an_error_that_names_the_known_ones(spelling: str) -> None:
    with pytest.raises(PolicyError) as error:
        Placement.parse(spelling)
    assert str(error.value) == (
        f"unknown value {spelling!r} for placement; use auto, propagate, mincut, or with a GPU "
        + ", ".join(f"mincut:{name}" for name in ROOFS)
    )


def test_auto_is_the_default() -> None:
    assert Request.of().placement == AUTO
    model = corpus.text_model("value_info")
    assert convert(model).model == convert(model, placement="auto").model


def test_weights_cost_nothing_to_cast() -> None:
    model = cases.build("m=MatMul(x,w)", ("m",), shapes={"x": (8, 8)}, constants={"w": np.ones((8, 4096))})
    draft = Draft.of(model, Request.of(placement="mincut"))
    draft.paint()
    assert draft.placing is not None
    weights = numpy_helper.to_array(model.graph.initializer[0]).size
    assert all(c.cost < draft.placing.costs.roof.bandwidth * weights for c in draft.placing.labelling.conversions)
    assert len(draft.placing.labelling.conversions) == 2
