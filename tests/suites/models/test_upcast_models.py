"""What holds for every half model that is raised: those of the tests, exported in half, and random ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from onnx import ModelProto

from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.apply import apply
from amp_rewrite.rewrite.emulate import emulate
from support import corpus, objections
from support.paths import ROOT
from support.random_graphs import Branch, Graph, Looped, graphs

SMALL = (*corpus.TEXT_MODELS, *corpus.BUILT)
FIXTURES = tuple(f"tests/models/{name}.onnx" for name in corpus.KINDS)
FORCED = {"level": "unsafe-force-all", "safety": "none", "target": "onnx"}
RAISING: dict[str, Any] = {"target": "onnx", "lists": [{"base": "empty"}]}
KINDS = ("LayerNormalization", "Softmax", "MatMul", "Add")
LOW = (DType.FLOAT16, DType.BFLOAT16)

every_model = pytest.mark.parametrize("name", [*SMALL, *FIXTURES])
every_fixture = pytest.mark.parametrize("name", FIXTURES)
bounded = settings(max_examples=20)


def written(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def source(name: str) -> ModelProto:
    if name in corpus.BUILT:
        return corpus.BUILT[name]()
    return corpus.text_model(name) if name in corpus.TEXT_MODELS else corpus.exported(name)


@cache
def twin(name: str) -> ModelProto:
    """A model as somebody would export it in float16, edges and all. Shared: never change it."""
    return convert(source(name), io="low", **FORCED).model


@cache
def raised(name: str, keep: str) -> Converted:
    """Shared: never change it."""
    return convert(twin(name), keep=[keep], **RAISING)


def keeps(name: str) -> Iterator[str]:
    """Everything, and each of some kinds of op that computes in a low type there."""
    yield "*"
    yield from (f"op={kind}" for kind in KINDS if kind in low_kinds(twin(name)))


def low_kinds(model: ModelProto) -> Counter[str]:
    """The types of the ops that read or make a value of a low type, Shape and Size left out, which read none."""
    view = View.of(Model.load(model))
    touching = (
        op.kind for op in view.ops if any(v is not None and view.dtype(v) in LOW for v in (*op.inputs, *op.outputs))
    )
    return Counter(kind for kind in touching if kind not in ("Shape", "Size"))


def kinds_of(model: ModelProto) -> set[str]:
    return {op.kind for op in View.of(Model.load(model)).ops}


def new(check: Any, before: ModelProto, after: ModelProto) -> list[str]:
    """What a check objects to in `after`, unless it objects to `before` as well."""
    return [] if check(before) else check(after)


def of_raising(before: ModelProto, result: Converted) -> list[str]:
    """What there is to object to in a raised model, whether or not it opens."""
    after = result.model
    found = [*new(objections.of_checker, before, after), *new(objections.of_names, before, after)]
    if before.ir_version >= 4:  # before, initializers stand among the inputs, and follow their type
        found += objections.of_io(before, after)
    if objections.of_checker(before) == []:
        found += objections.of_casts(after, before)
        found += [] if result.plan.empty else objections.of_types(result.view, result.plan, after)
    inserted = Counter((cast.value, cast.to) for cast in result.plan.casts)
    return found + [f"{count} casts of one value to one type" for count in inserted.values() if count > 1]


# -- the invariants ------------------------------------------------------------------------------------


@every_model
def test_a_raised_model_is_valid_and_has_no_needless_cast(name: str) -> None:
    if name in ("sparse_weight", "custom_domain"):
        pytest.skip("onnx's inference knows neither sparse weights nor what an unknown op gives")
    found = {keep: texts for keep in keeps(name) if (texts := of_raising(twin(name), raised(name, keep)))}
    assert found == {}


@pytest.mark.slow
@every_model
def test_a_raised_model_opens(name: str) -> None:
    # onnxruntime 1.31's NchwcTransformer crashes on some float16 LSTMs; see test_fixtures.
    levels = ("BASIC",) if "lstm" in name else ("BASIC", "ALL")
    for keep in keeps(name):
        if objections.of_loading(twin(name), levels) == []:
            assert objections.of_loading(raised(name, keep).model, levels) == [], keep


@every_model
def test_the_half_model_is_not_touched_and_comes_back_when_nothing_is_named(name: str) -> None:
    before = written(twin(name))
    raised(name, "*")
    assert written(twin(name)) == before
    assert written(convert(twin(name), lists=[{"base": "empty"}]).model) == before
    view = View.of(Model.load(twin(name)))
    assert written(apply(view, Plan(DType.FLOAT16)).to_proto()) == before


# -- what a model computes that is raised whole ----------------------------------------------------------


@cache
def inner_twin(name: str) -> ModelProto:
    """A model whose inside is float16, so that no edge rounds. Shared: never change it."""
    return convert(source(name), **FORCED).model


def batch(name: str) -> dict[str, Any]:
    with np.load((ROOT / name).with_suffix(".npz")) as stored:
        return {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}


@every_fixture
def test_a_model_that_is_raised_whole_computes_what_its_widened_twin_does(name: str) -> None:
    """Both hold the same float32 ops, so to the bit; at BASIC, since fusions may differ."""
    result = convert(inner_twin(name), keep=["*"], **RAISING).model
    assert low_kinds(result) == Counter()
    wide = emulate(inner_twin(name), rounding=False, io="float32").to_proto()
    expected, found = (objections.run(model, batch(name), "BASIC") for model in (wide, result))
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_array_equal(right, left)


# -- random models ---------------------------------------------------------------------------------------


def _edged(graph: Graph) -> bool:
    """Whether values pass the edges of bodies, which keep their type."""
    return any(isinstance(step, (Branch, Looped)) for step in graph.steps)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@given(graph=graphs(), data=st.data())
@bounded
def test_any_random_part_of_a_random_half_model_can_be_raised(to: str, graph: Graph, data: st.DataObject) -> None:
    note(graph.text())
    castable = to == "float16" or graph.opset >= 13
    io = data.draw(st.sampled_from(["low", "keep"])) if castable else "keep"
    model = convert(graph.model(), to=to, io=io, **FORCED).model
    kinds = sorted(low_kinds(model))
    chosen = data.draw(st.lists(st.sampled_from(kinds), unique=True, min_size=1)) if kinds else []
    keep = [f"op={kind}" for kind in chosen]
    result = convert(model, to=to, keep=keep, **RAISING)
    # A Cast of the model that makes the output of a body stays beside an inserted one: the output has its name.
    wrong = [text for text in of_raising(model, result) if not re.match(r"\d+ Casts of", text)]
    # onnx infers nothing behind an op of com.microsoft, and inside a body then gives up altogether.
    assert [text for text in wrong if "com.microsoft" not in graph.text() or "any more" not in text] == []
    if to == "float16":
        assert new(objections.of_loading, model, result.model) == []
    again = [f"op={kind}" for kind in chosen if kind in kinds_of(result.model)]
    assert written(convert(result.model, to=to, keep=again, **RAISING).model) == written(result.model)


@given(graph=graphs(), seed=st.integers(0, 3), truth=st.booleans())
@bounded
def test_a_random_model_that_is_raised_whole_rounds_no_more_than_its_edges(
    graph: Graph, seed: int, truth: bool
) -> None:
    graph = replace(graph, holding=False)  # its bounds are those of tensors of float32
    note(graph.text())
    feeds = graph.feeds(np.random.default_rng(seed), truth)
    half = convert(graph.model(), **FORCED).model
    whole = convert(half, keep=["*"], **RAISING).model if low_kinds(half) else half
    wide = emulate(half, rounding=False, io="float32").to_proto()
    found = objections.run(emulate(whole).to_proto(), feeds, "BASIC")
    expected = objections.run(wide, feeds, "BASIC")
    bounds = graph.bounds(DType.FLOAT16.eps) if _edged(graph) else dict.fromkeys(graph.outputs, 0.0)
    for (name, bound), left, right in zip(bounds.items(), expected, found, strict=True):
        if np.isfinite(bound) and np.isfinite(left).all():
            np.testing.assert_allclose(right, left, rtol=0, atol=bound, err_msg=name)
