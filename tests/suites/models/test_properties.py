"""What holds for graphs that nobody wrote: the invariants of docs/architecture.md, and a bound on every output."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from onnx import ModelProto

from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.apply import apply
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.op_lists import load_lists
from support import objections
from support.random_graphs import Graph, Step, graphs
from support.random_rarer import RARER
from support.random_templates import LATEST, TEMPLATES, Template
from support.sandwich import sandwiches

bounded = settings(max_examples=20)
WAYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "lower_all": {"level": "lower-all"},
    "force_all": {"level": "unsafe-force-all", "safety": "none", "target": "onnx"},
    "bfloat16": {"to": "bfloat16"},
    "tensorrt": {"target": "tensorrt"},
}
every_way = pytest.mark.parametrize("way", WAYS)


def new(check: Callable[[ModelProto], list[str]], before: ModelProto, after: ModelProto) -> list[str]:
    """What there is to object to in a model that there was not before."""
    left = Counter(check(after)) - Counter(check(before))
    return sorted(left.elements())


def _of_node_names(model: ModelProto) -> list[str]:
    """Names that nodes of one graph share; bodies may have those of the outer graph."""
    names = [Counter(n.name for n in graph.node if n.name) for graph in objections.graphs(model.graph)]
    return [name for counted in names for name, count in counted.items() if count > 1]


def written(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def _of_casts(model: ModelProto) -> list[str]:
    """What there is to object to in Casts, without names: a Cast of the model itself may read another value now.

    One that makes an output may stand beside an inserted one: two outputs are two nodes.
    """
    return [re.sub("'.*'", "…", text) for text in objections.of_casts(model) if not re.match(r"\d+ Casts of", text)]


@every_way
@given(graph=graphs())
@bounded
def test_every_invariant_holds(way: str, graph: Graph) -> None:
    note(graph.text())
    model = graph.model()
    before = written(model)
    result = convert(model, **WAYS[way])
    assert written(model) == before
    after = result.model
    assert written(convert(model, **WAYS[way]).model) == written(after)
    assert written(apply(result.view, Plan(result.coloring.to)).to_proto()) == written(result.view.model.to_proto())
    assert objections.of_io(model, after) == []
    assert [text for text in objections.of_names(after) if "nodes are named" not in text] == []
    assert new(_of_node_names, model, after) == []
    assert new(objections.of_checker, model, after) == []
    if not result.plan.empty and objections.of_checker(model) == []:
        wrong = objections.of_types(result.view, result.plan, after)
        # onnx infers nothing behind an op of com.microsoft, and inside a body then gives up altogether.
        assert [text for text in wrong if "com.microsoft" not in graph.text() or "any more" not in text] == []
        assert new(_of_casts, model, after) == []
    inserted = [(cast.value, cast.to) for cast in result.plan.casts]
    assert len(set(inserted)) == len(inserted)
    if way != "bfloat16":
        assert new(objections.of_loading, model, after) == []
    again = convert(after, **WAYS[way])
    assert again.plan.casts == again.plan.bakes == ()
    assert written(again.model) == written(after)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 13, 17, 20, LATEST])
def test_every_template_between_two_products_is_converted_soundly_at_every_opset(opset: int) -> None:
    """Random graphs of this size hold a tenth of all pairs of a template and an opset; here stands each of them."""
    found = {}
    usable = [t for t in dict.fromkeys((*TEMPLATES, *RARER)) if t.since <= opset <= t.until]
    for start in range(0, len(usable), LINE):
        model = lined(usable[start : start + LINE], opset).model()
        assert objections.of_checker(model) == objections.of_loading(model) == []
        for way in ("default", "lower_all", "bfloat16") if opset in (9, 17, LATEST) else ("lower_all",):
            if texts := _of_conversion(model, way):
                found[way, start] = texts
    assert found == {}


LINE = 24


def lined(templates: Sequence[Template], opset: int) -> Graph:
    """One template after the other, a product behind each."""
    product = next(t for t in TEMPLATES if t.text.startswith("{o} = MatMul"))
    steps = [Step("v0", product, ("x",), "w0")]
    for template in templates:
        before = steps[-1].result
        steps.append(Step(f"v{len(steps)}", template, (before, "z")[: template.operands], "w1"))
        steps.append(Step(f"v{len(steps)}", product, (steps[-1].result,), "w0"))
    return Graph(opset, tuple(steps), (steps[-1].result,), False, "")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lower_all", "force_all"])
def test_every_operator_between_two_products_is_converted_soundly(way: str) -> None:
    found = {name: texts for name, model in sandwiches().items() if (texts := _of_conversion(model, way))}
    assert found == {}


def test_every_listed_operator_stands_in_a_sandwich_or_a_random_graph() -> None:
    made = {word for template in (*TEMPLATES, *RARER) for word in re.findall(r"= ([A-Z]\w+) ", template.text)}
    listed = {e.name for e in load_lists(DType.FLOAT16) if e.color is not Color.UNLISTED and "::" not in e.name}
    newer = {"CausalConvWithState", "LinearAttention", "SwiGLU"}  # than onnxruntime's opset
    untested = {"GlobalLpPool", "SimplifiedLayerNormalization"}  # with floats, by onnx itself
    assert listed - made - sandwiches().keys() == newer | untested


def _of_conversion(model: ModelProto, way: str) -> list[str]:
    """Everything to object to in a conversion; what onnx or onnxruntime has against the model itself is not held
    against the result."""
    try:
        result = convert(model, **WAYS[way])
    except (AmpRewriteError, RuntimeError) as error:
        return [f"dies: {error}"]
    texts = [*objections.of_names(result.model), *objections.of_io(model, result.model)]
    if objections.of_checker(model) == []:
        texts += objections.of_checker(result.model)
        texts += [] if result.plan.empty else objections.of_types(result.view, result.plan, result.model)
        texts += objections.of_casts(result.model, model)
    if way != "bfloat16" and objections.of_loading(model) == []:
        texts += objections.of_loading(result.model)
    return texts


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["default", "lower-all"])
@given(graph=graphs(), seed=st.integers(0, 3), truth=st.booleans())
@bounded
def test_every_output_stays_within_its_bound(to: str, level: str, graph: Graph, seed: int, truth: bool) -> None:
    note(graph.text())
    bounds = graph.bounds(DType.parse(to).eps)
    if all(map(math.isinf, bounds.values())):
        return
    rng = np.random.default_rng(seed)
    feeds = graph.feeds(rng, truth)
    model = graph.model()
    after = emulate(convert(model, to=to, level=level).model).to_proto()
    expected, found = objections.run(model, feeds, "BASIC"), objections.run(after, feeds)
    for (name, bound), left, right in zip(bounds.items(), expected, found, strict=not graph.holding):
        if not math.isinf(bound):
            np.testing.assert_allclose(right, left, rtol=0, atol=bound, err_msg=name)
