"""Coloring rules, each on a graph and its near miss; and a table of small graphs with lowered ops and Casts."""

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from amp_rewrite import Report, decide
from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import HEADINGS, REASONS, RULES, Reason, Strength
from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from support import cases, corpus, objections
from support.counting import crossings, lowered_ops
from support.paths import TESTS

TENSORFLOW = {"lists": ["tensorflow"], "safety": "none", "target": "onnx"}
IMAGES = {"x": [1, 4, 8, 8], "w": [4, 4, 3, 3]}
NORM = (
    "a=MatMul(x,x);m=ReduceMean[axes=-1](a);s=Sub(a,m);p=Pow(s,two);v=ReduceMean[axes=-1](p);"
    "e=Add(v,eps);q=Sqrt(e);n=Div(s,q);b=MatMul(n,x)"
)
NORM_CONSTANTS = {"two": 2.0, "eps": 1e-3}
TAILED = NORM.replace("b=MatMul(n,x)", "g=Mul(n,k);o=Add(g,c);b=MatMul(o,x)")
TAILED_CONSTANTS = {**NORM_CONSTANTS, "k": np.ones(8), "c": np.ones(8)}
SEQUENCE = "a=MatMul(x,x);s=SequenceConstruct(a,x);r=SequenceAt(s,i);b=MatMul(r,r)"


@dataclass(frozen=True)
class Graph:
    """A graph ending in its last statement's result, the op under test, and the options."""

    text: str
    op: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    def converted(self) -> Converted:
        options = {**TENSORFLOW, **self.options}
        last = self.text.split(";")[-1].split("=")[0].split(",")[0]
        model = cases.build(self.text, self.outputs or (last,), opset=options.pop("opset", 17), **self.inputs)
        return convert(model, fuse="none", **options)  # the unchanged graph

    def rules(self) -> set[str]:
        return painted(self.converted(), self.op)


def safe(**more: Any) -> dict[str, Any]:
    return {"safety": "default", **more}


FIRES = {
    "allow_root": Graph("a=MatMul(x,x)", "a"),
    "force_all": Graph("a=Exp(x)", "a", {"level": "unsafe-force-all"}),
    "lower_all": Graph("a=Tanh(x)", "a", {"level": "lower-all"}),
    "lower": Graph("a=Exp(x)", "a", {"lower": ["a"]}),
    "between_allow": Graph("a=MatMul(x,x);t=Tanh(a);b=MatMul(t,t)", "t"),
    "gray_follows_allow": Graph("a=MatMul(x,x);t=Tanh(a)", "t", {"to": "bfloat16"}),
    "allow_through_clear": Graph("r=Relu(x);a=MatMul(r,r)", "r"),
    "existing_cast": Graph("k=Cast[to=float](x);a=MatMul(k,k)", "k", inputs={"types": {"x": "bool"}}),
    "sequence_cluster": Graph("a=MatMul(x,x);s=SequenceConstruct(a,x)", "s"),
    "deny": Graph("a=MatMul(x,x);d=Exp(a)", "d"),
    "deny_forward": Graph("d=Exp(x);r=Relu(d);t=Tanh(r);a=MatMul(t,t)", "r"),
    "keep": Graph("a=MatMul(x,x);b=MatMul(a,a)", "a", {"keep": ["a"]}),
    "unlisted": Graph("a=MatMul(x,x);s=Sin(a);b=MatMul(s,s)", "s"),
    "unpainted": Graph("a=MatMul(x,x);t=Tanh(a);r=Relu(t)", "r"),
    "kernel_gate": Graph("a=MatMul(x,x);h=Hardmax(a);b=MatMul(h,h)", "h", {"target": "ort-cuda"}),
    "schema_gate": Graph("a=Conv(x,w)", "a", {"to": "bfloat16", "opset": 21}, {"shapes": IMAGES}),
    "norm_tail": Graph(TAILED, "g", inputs={"constants": TAILED_CONSTANTS}),
    "shape_follows": Graph("a=MatMul(x,x);s=Shape(a)", "s", safe(lists=["tensorflow"], level="tensor-cores-only")),
}

MUST_NOT = {
    "allow_root": Graph("a=Exp(x)", "a"),
    "force_all": Graph("a=RandomNormalLike(x)", "a", {"level": "unsafe-force-all"}),
    "lower_all": Graph("a=Exp(x)", "a", {"level": "lower-all"}),
    "lower": Graph("b=Exp(x);a=Exp(b)", "a", {"lower": ["b"]}),
    "between_allow": Graph("a=MatMul(x,x);d=Exp(a);t=Tanh(d);b=MatMul(t,t)", "t"),
    "gray_follows_allow": Graph("a=MatMul(x,x);r=Relu(a);t=Tanh(r)", "t", {"to": "bfloat16"}),
    "allow_through_clear": Graph("t=Tanh(x);r=Relu(t);u=Tanh(r);a=MatMul(u,u)", "r"),
    "existing_cast": Graph(
        "k=Cast[to=float](x);a=MatMul(k,k);d=Exp(k)", "k", inputs={"types": {"x": "bool"}}, outputs=("a", "d")
    ),
    "sequence_cluster": Graph(SEQUENCE, "s", inputs={"types": {"i": "int"}, "shapes": {"i": []}}),
    "deny": Graph("a=MatMul(x,x);d=Exp(a)", "d", {"lists": ["tensorflow", {"gray": ["Exp"]}]}),
    "deny_forward": Graph("d=Exp(x);r=Relu(d);a=MatMul(r,r)", "r"),
    "keep": Graph("a=MatMul(x,x);b=MatMul(a,a)", "b", {"keep": ["a"]}),
    "unlisted": Graph("a=MatMul(x,x);s=Sin(a);b=MatMul(s,s)", "s", {"lists": ["tensorflow", {"gray": ["Sin"]}]}),
    "unpainted": Graph("a=MatMul(x,x);r=Relu(a)", "r"),
    "kernel_gate": Graph("a=MatMul(x,x);h=Hardmax(a);b=MatMul(h,h)", "h"),
    "schema_gate": Graph("a=Conv(x,w)", "a", {"to": "bfloat16", "opset": 22}, {"shapes": IMAGES}),
    "norm_tail": Graph(TAILED, "g", {"opset": 13}, {"constants": TAILED_CONSTANTS}),
    "shape_follows": Graph("a=MatMul(x,x);s=Shape(x)", "s", safe(level="lower-all")),
    # A Cast of a follows its MatMul in any case, because Exp reads a in float32.
}


@pytest.mark.parametrize("rule", dict.fromkeys((*FIRES, *MUST_NOT)))
def test_the_rule_fires_and_not_on_its_twin(rule: str) -> None:
    assert rule in FIRES[rule].rules()
    assert rule not in MUST_NOT[rule].rules()


def test_the_edges_of_a_body_and_of_an_unknown_op_are_boundaries() -> None:
    for name, op in (("if_branches_apart", "choice"), ("loop_from_deny", "loop"), ("scan", "scan")):
        assert painted(convert(corpus.text_model(name), **TENSORFLOW), op) == {"boundary"}
    known = cases.build("a=MatMul(x,x)", ["a"], domains={"elsewhere": 1})
    known.graph.node[0].domain = "elsewhere"
    assert painted(convert(known, **TENSORFLOW), "a") == {"boundary"}


def painted(result: Converted, name: str) -> set[str]:
    """Return the rules that colored an op's type variables."""
    found = next(op.id for op in result.view.ops if op.name == name)
    return {paint.rule for (op, _), paint in result.coloring.paints.items() if op == found}


@pytest.mark.parametrize("kept", [["t"], []])
def test_a_kept_op_still_propagates_denial(kept: list[str]) -> None:
    """In Exp, Tanh (kept), Sqrt, MatMul, the Sqrt is denied through the Tanh, kept or not."""
    graph = Graph("a=MatMul(x,x);d=Exp(a);t=Tanh(d);q=Sqrt(t);b=MatMul(q,q)", "q", {"keep": kept})
    assert graph.rules() == {"deny_forward"}
    assert Graph(graph.text, "t", graph.options).rules() == {"keep" if kept else "deny_forward"}


def test_lower_wins_over_safety_rules_and_the_gate_over_all() -> None:
    huge = {"constants": {"k": 1e6}}
    assert Graph("a=Mul(x,k);b=MatMul(a,a)", "a", safe(), huge).rules() == {"constant_range"}
    assert Graph("a=Mul(x,k);b=MatMul(a,a)", "a", safe(lower=["a"]), huge).rules() == {"lower"}
    gated = FIRES["kernel_gate"]
    assert Graph(gated.text, "h", {**gated.options, "lower": ["h"]}).rules() == {"kernel_gate"}


def test_a_sequence_is_lowered_whole_despite_a_gray_op_off_the_path() -> None:
    text = "s=SequenceEmpty();t=SequenceInsert(s,x);r=SequenceAt(t,i);b=MatMul(r,r)"
    lists = {"lists": ["tensorflow", {"gray": ["SequenceInsert"]}]}
    inputs = {"types": {"i": "int"}, "shapes": {"i": []}}
    assert Graph(text, "r", lists, inputs).rules() == {"allow_through_clear"}
    assert Graph(text, "t", lists, inputs).rules() == Graph(text, "s", lists, inputs).rules() == {"sequence_cluster"}


@pytest.mark.parametrize(
    ("value", "kind", "kept"), [(1e6, "saturated", 65504.0), (-1e6, "saturated", -65504.0), (1e-9, "flushed", 0.0)]
)
def test_a_constant_that_does_not_fit_is_reported_without_safety_rules(value: float, kind: str, kept: float) -> None:
    weight = np.ones((8, 8))
    weight[0, 0] = value
    result = convert(cases.build("a=MatMul(x,w)", ["a"], constants={"w": weight}), **TENSORFLOW)
    assert [(f.kind, f.subject) for f in result.report.findings] == [(kind, "w")]
    assert numpy_helper.to_array(result.model.graph.initializer[0])[0, 0] == np.float16(kept)


@pytest.mark.parametrize(("largest", "harmless"), [(1.0, True), (1e-5, False)])
def test_lost_weights_are_harmless_beside_larger_rounding_errors(largest: float, harmless: bool) -> None:
    weight = np.full((8, 8), largest)
    weight[0, :4] = 1e-9
    result = convert(cases.build("a=MatMul(x,w)", ["a"], constants={"w": weight}), **TENSORFLOW)
    (found,) = result.report.findings
    assert (found.kind, "harmless" in found.message) == ("flushed", harmless)


TABLE: list[dict[str, Any]] = json.loads((TESTS / "data" / "cases.json").read_text("utf-8"))["cases"]
BOUND = 64 * DType.FLOAT16.eps
"""Relative to the largest output: some ten roundings of half an eps each, multiplied by an Exp or two."""

every_case = pytest.mark.parametrize("case", TABLE, ids=lambda case: case["id"])


def model_of(case: dict[str, Any]) -> ModelProto:
    opset = case.get("options", {}).get("opset", 17)
    return cases.build(case["graph"], case["outputs"], shapes=case.get("shapes"), types=case.get("types"), opset=opset)


def converted(case: dict[str, Any], model: ModelProto) -> Converted:
    options = {k: v for k, v in case.get("options", {}).items() if k != "opset"}
    return convert(model, **{"lists": ["tensorflow"], "safety": "none", "target": "onnx", **options})


@functools.cache
def by_id(name: str) -> Converted:
    """Convert a row. The result is shared: never change it."""
    case = next(case for case in TABLE if case["id"] == name)
    return converted(case, model_of(case))


def low_type(case: dict[str, Any]) -> DType:
    return DType.parse(case.get("options", {}).get("to", "float16"))


@every_case
def test_the_right_ops_are_lowered_with_the_casts_that_the_rules_need(case: dict[str, Any]) -> None:
    model, result = model_of(case), by_id(case["id"])
    assert lowered_ops(result.view, result.coloring) == tuple(sorted(case["half"]))
    assert sorted(op.name for op in result.view.ops) == sorted(case["half"] + case["single"])
    assert crossings(result.view, result.coloring).casts == case["casts"]
    assert len(result.plan.casts) + len(result.plan.bakes) == case["casts"]
    more = Counter(n.op_type for n in result.model.graph.node) - Counter(n.op_type for n in model.graph.node)
    assert more == Counter(Cast=case["casts"])


@every_case
def test_the_model_is_sound_and_opens_at_basic_and_all(case: dict[str, Any]) -> None:
    model, result = model_of(case), by_id(case["id"])
    assert objections.of_checker(result.model) == []
    assert objections.of_types(result.view, result.plan, result.model) == []
    assert objections.of_casts(result.model, model) == []
    assert objections.of_names(result.model) == []
    assert objections.of_io(model, result.model) == []
    if low_type(case) is DType.FLOAT16:  # onnxruntime's CPU provider cannot open bfloat16 models
        assert objections.of_loading(result.model) == []


@every_case
def test_the_model_computes_the_same(case: dict[str, Any]) -> None:
    """The CPU provider computes most half ops in float32, so this finds wrong wiring but not lost digits."""
    if low_type(case) is not DType.FLOAT16:
        pytest.skip("onnxruntime's CPU provider runs no bfloat16 model")
    model = model_of(case)
    given = {name: np.asarray(value, np.float32) for name, value in case.get("feeds", {}).items()}
    feeds = {**cases.feeds(model), **given}
    before, after = objections.run(model, feeds), objections.run(by_id(case["id"]).model, feeds)
    assert objections.of_outputs(before, after, bound=BOUND) == []


@every_case
def test_a_second_run_changes_nothing(case: dict[str, Any]) -> None:
    once = by_id(case["id"]).model
    twice = converted(case, once)
    assert twice.plan.empty
    assert twice.model.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


named = pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
CASES = [(rule, case) for rule in RULES for case in rule.pairs]


def report_of(text: str, target: str = "", safety: str = "default") -> Report:
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    result = convert(model, target=target or None, safety=safety)
    assert objections.of_checker(result.model) == objections.of_casts(result.model) == []
    return result.report


def speaks(rule: Reason, report: Report) -> bool:
    """Whether a rule is in a report's rows or findings."""
    names = {row.rule for row in report.rows} | {finding.kind for finding in report.findings}
    return not names.isdisjoint((rule.reason, *rule.findings))


@named
def test_a_rule_has_a_summary_and_text_under_each_heading(rule: Reason) -> None:
    assert rule.summary.endswith(".") and "\n" not in rule.summary
    assert tuple(rule.sections) == HEADINGS
    assert all(text[-1] in ".;" for text in rule.sections.values())


@pytest.mark.parametrize(("rule", "case"), CASES, ids=[case for _, case in CASES])
def test_a_rule_mentions_its_model_and_not_the_near_miss(rule: Reason, case: str) -> None:
    assert speaks(rule, report_of(rule.model("hit", case), rule.target))
    assert not speaks(rule, report_of(rule.model("near", case), rule.target))
    unsafe = report_of(rule.model("hit", case), rule.target, safety="none")
    assert rule.reason not in {row.rule for row in unsafe.rows}


def test_every_example_model_belongs_to_a_rule() -> None:
    files = {path.name for path in (Path(decide.__file__).parent / "needs/models").iterdir()}
    assert files == {f"{case}.{end}.onnxtxt" for _, case in CASES for end in ("hit", "near")}


def test_every_reason_of_a_safety_rule_has_its_record() -> None:
    safety = {name for name, reason in REASONS.items() if reason.strength is Strength.SAFETY}
    assert {rule.name for rule in RULES} == safety


PACKAGE = Path(reasons.__file__).parents[1]


def test_a_constant_is_the_uppercase_id() -> None:
    assert {name.lower(): getattr(reasons, name) for name in map(str.upper, REASONS)} == {id: id for id in REASONS}
    assert {id: reason.name for id, reason in REASONS.items()} == {id: id for id in REASONS}


def test_tiers_have_the_order_of_the_architecture_page() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    order = page.partition("Precedence: ")[2].partition(".")[0].replace("\n", " ").split(" > ")
    assert order == [tier.words for tier in sorted(Strength, reverse=True)]


def test_a_rule_of_another_version_is_shown_in_its_own_words() -> None:
    assert reasons.words("rule_of_tomorrow") == "rule_of_tomorrow"
