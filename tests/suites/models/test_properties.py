"""Random graphs: the invariants of docs/architecture.md, and a bound on every output."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.op_lists import load_lists
from support import objections
from support.random_graphs import Branch, Graph, Looped, Step, graphs
from support.random_rarer import RARER
from support.random_templates import LATEST, TEMPLATES, Template
from support.sandwich import sandwiches

LOW = (DType.FLOAT16, DType.BFLOAT16)
bounded = settings(max_examples=20)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "lower_all": {"level": "lower-all"},
    "force_all": {"level": "unsafe-force-all", "safety": "none", "target": "onnx"},
    "bfloat16": {"to": "bfloat16"},
    "tensorrt": {"target": "tensorrt"},
}
RAISING: Mapping[str, Any] = {"target": "onnx", "lists": [{"base": "empty"}]}


def wrong(graph: Graph, model: ModelProto, options: Mapping[str, Any], **more: Any) -> list[str]:
    """Return all objections to a conversion.

    A Cast of the model to an output stays beside an inserted one. onnx cannot infer types after an op of
    com.microsoft, and gives up entirely inside a body.
    """
    found = objections.of_convert(model, options, **more)
    unknown = "com.microsoft" in graph.text()
    return [text for text in found if not re.match(r"\d+ Casts of", text) and not (unknown and "lost its type" in text)]


@pytest.mark.parametrize("way", WAYS)
@given(graph=graphs())
@bounded
def test_every_invariant_holds(way: str, graph: Graph) -> None:
    note(graph.text())
    levels = () if way == "bfloat16" else objections.LEVELS
    assert wrong(graph, graph.model(), WAYS[way], levels=levels) == []


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 13, 17, 20, LATEST])
def test_every_template_between_two_products_is_converted_soundly_at_every_opset(opset: int) -> None:
    """Random graphs of this size cover a tenth of all pairs of template and opset; here each is tested."""
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
    """Chain templates, each followed by a product."""
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


def test_every_listed_operator_is_in_a_sandwich_or_a_random_graph() -> None:
    covered = {word for template in (*TEMPLATES, *RARER) for word in re.findall(r"= ([A-Z]\w+) ", template.text)}
    listed = {e.name for e in load_lists(DType.FLOAT16) if e.color is not Color.UNLISTED and "::" not in e.name}
    newer = {"CausalConvWithState", "LinearAttention", "SwiGLU"}  # than onnxruntime's opset
    untested = {"GlobalLpPool", "SimplifiedLayerNormalization"}  # with floats, by onnx itself
    assert listed - covered - sandwiches().keys() == newer | untested


def _of_conversion(model: ModelProto, way: str) -> list[str]:
    return objections.of_convert(model, WAYS[way], () if way == "bfloat16" else objections.LEVELS)


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


# -- raised half models ----------------------------------------------------------------------------------


def low_kinds(model: ModelProto) -> Counter[str]:
    """Count the types of ops with a low value, except Shape and Size."""
    view = View.of(Model.load(model))
    touching = (
        op.kind for op in view.ops if any(v is not None and view.dtype(v) in LOW for v in (*op.inputs, *op.outputs))
    )
    return Counter(kind for kind in touching if kind not in ("Shape", "Size"))


def kinds_of(model: ModelProto) -> set[str]:
    return {op.kind for op in View.of(Model.load(model)).ops}


def _edged(graph: Graph) -> bool:
    """Whether values cross the edges of bodies or are in sequences, which keep their type."""
    return "Sequence" in graph.text() or any(isinstance(step, (Branch, Looped)) for step in graph.steps)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@given(graph=graphs(), data=st.data())
@bounded
def test_any_random_part_of_a_random_half_model_can_be_raised(to: str, graph: Graph, data: st.DataObject) -> None:
    note(graph.text())
    castable = to == "float16" or graph.opset >= 13
    io = data.draw(st.sampled_from(["low", "keep"])) if castable else "keep"
    model = convert(graph.model(), to=to, io=io, **WAYS["force_all"]).model
    kinds = sorted(low_kinds(model))
    chosen = data.draw(st.lists(st.sampled_from(kinds), unique=True, min_size=1)) if kinds else []
    keep = [f"op={kind}" for kind in chosen]
    kept = kinds_of(convert(model, to=to, keep=keep, **RAISING).model)
    again = {"to": to, "keep": [f"op={kind}" for kind in chosen if kind in kept], **RAISING}
    levels = objections.LEVELS if to == "float16" else ()
    assert wrong(graph, model, {"to": to, "keep": keep, **RAISING}, levels=levels, again=again) == []


@given(graph=graphs(), seed=st.integers(0, 3), truth=st.booleans())
@bounded
def test_a_random_model_raised_as_a_whole_rounds_only_at_its_edges(graph: Graph, seed: int, truth: bool) -> None:
    graph = replace(graph, holding=False)  # its bounds only cover float32 tensors
    note(graph.text())
    feeds = graph.feeds(np.random.default_rng(seed), truth)
    half = convert(graph.model(), **WAYS["force_all"]).model
    whole = convert(half, keep=["*"], **RAISING).model if low_kinds(half) else half
    wide = emulate(half, rounding=False, io="float32").to_proto()
    found = objections.run(emulate(whole).to_proto(), feeds, "BASIC")
    expected = objections.run(wide, feeds, "BASIC")
    bounds = graph.bounds(DType.FLOAT16.eps) if _edged(graph) else dict.fromkeys(graph.outputs, 0.0)
    for (name, bound), left, right in zip(bounds.items(), expected, found, strict=True):
        if np.isfinite(bound) and np.isfinite(left).all():
            np.testing.assert_allclose(right, left, rtol=0, atol=bound, err_msg=name)
