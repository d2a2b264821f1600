"""What holds for every model that the tests have, whatever is in it."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from onnx import ModelProto, TensorProto, helper

from amp_rewrite.decide.plan import Plan
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.apply import apply
from support import corpus, objections
from support.counting import crossings, lowered_ops
from support.paths import TESTS

SMALL = (*corpus.TEXT_MODELS, *corpus.BUILT)
FORCED = {"level": "unsafe-force-all", "safety": "none", "target": "onnx"}
OPTIONS = {"default": {}, "lower_all": {"level": "lower-all"}, "force_all": FORCED}

FIXTURES = tuple(f"tests/models/{name}.onnx" for name in corpus.KINDS)

every_model = pytest.mark.parametrize("name", [*SMALL, *FIXTURES])
every_small_model = pytest.mark.parametrize("name", SMALL)
every_way = pytest.mark.parametrize("way", OPTIONS)


def source(name: str) -> ModelProto:
    if name in corpus.BUILT:
        return corpus.BUILT[name]()
    return corpus.text_model(name) if name in corpus.TEXT_MODELS else corpus.exported(name)


@cache
def converted(name: str, way: str = "default") -> Converted:
    """A model converted. Shared: never change it."""
    return convert(source(name), **OPTIONS[way])


def written(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


# -- nothing to do, nothing done; the input is not touched, and once is enough ---------------------------


@every_model
def test_converting_does_not_touch_its_argument(name: str) -> None:
    model = source(name)
    before = written(model)
    result = convert(model)
    assert written(model) == before
    apply(result.view, result.plan)
    assert written(result.view.model.proto) == written(converted(name).view.model.proto)
    assert written(result.model) == written(converted(name).model)
    assert written(apply(View.of(Model.load(model)), Plan(result.coloring.to)).to_proto()) == before


@every_model
def test_a_second_conversion_changes_nothing(name: str) -> None:
    once = converted(name)
    again = convert(once.model)
    assert again.plan.casts == again.plan.bakes == ()
    assert written(again.model) == written(once.model)


# -- 3: what is emitted is valid, and of the planned types ---------------------------------------------


@every_way
@every_small_model
def test_the_result_is_valid_and_opens(name: str, way: str) -> None:
    model, result = source(name), converted(name, way).model
    assert new(objections.of_checker, model, result) == []
    if objections.of_loading(model) == [] and not (name == "eye_like" and way == "force_all"):
        assert objections.of_loading(result) == []  # the CPU provider has no EyeLike from integers to half


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in SMALL for way in OPTIONS if name != "sparse_weight"),
        *((name, "default") for name in FIXTURES),
    ],
)
def test_every_value_has_the_planned_type_and_no_cast_is_needless(name: str, way: str) -> None:
    """By onnx's strict inference, which knows no sparse weights."""
    result = converted(name, way)
    assert objections.of_types(result.view, result.plan, result.model) == []
    if (name, way) != ("cast_like", "force_all"):
        # TensorFlow's rule lowers a Cast there whose result leaves the model, beside its twin that stays.
        assert objections.of_casts(result.model, source(name)) == []


@every_model
def test_the_plan_casts_what_the_colours_call_for_and_no_more(name: str) -> None:
    """Fewer are fine where the model's own Casts read or write the type that is there already."""
    result = converted(name)
    cross = crossings(result.view, result.coloring)
    planned = Counter(result.view.value_name(step.value) for step in (*result.plan.casts, *result.plan.bakes))
    called_for = Counter((*cross.to_low, *cross.to_float))
    # A Cast of ours may stand for one of the model's own, or serve what read a copy by one.
    dropped = Counter(result.view.value_name(result.view.ops[op].inputs[0]) for op in result.plan.drop)
    assert not {name for name in planned - called_for if not dropped[name]}
    unserved = set(called_for - planned)
    near_casts = {
        result.view.value_name(v)
        for op in result.view.ops
        if op.op_type == "Cast"
        for v in (*op.inputs, *op.outputs)
        if v is not None
    }
    assert unserved <= near_casts


# -- 5: edges, names, determinism ----------------------------------------------------------------------


@every_model
def test_inputs_outputs_and_names_are_what_they_were(name: str) -> None:
    model, result = source(name), converted(name).model
    assert new(objections.of_names, model, result) == []
    result = copy.deepcopy(result)
    for found in (model, result):
        if found.ir_version < 4:  # there initializers stand among the inputs, and follow their baked type
            filled = {t.name for t in found.graph.initializer}
            kept = [v for v in found.graph.input if v.name not in filled]
            del found.graph.input[:]
            found.graph.input.extend(kept)
    assert objections.of_io(model, result) == []


def test_bytes_and_reports_do_not_depend_on_the_hash_seed() -> None:
    code = "from suites.models import test_invariants; print(test_invariants.fingerprint())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TESTS,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == fingerprint()


def fingerprint() -> str:
    """A digest over models and reports of some conversions."""
    digest = hashlib.sha256()
    chosen = ["captures", "sequences", "local_function", "names_of_ours", "value_info", FIXTURES[0]]
    for name in chosen:
        result = convert(source(name))
        digest.update(result.model.SerializeToString())
        digest.update(result.report.to_json().encode())
    return digest.hexdigest()


def test_colours_do_not_depend_on_the_names_of_the_nodes() -> None:
    for name in SMALL:
        model = source(name)
        for graph in objections.graphs(model.graph):
            for node in graph.node:
                node.name = ""
        kinds = [op.kind for op in lowered(convert(model))]
        assert kinds == [op.kind for op in lowered(converted(name))], name


def lowered(result: Converted) -> list[object]:
    return [op for op in result.view.ops if (p := result.coloring.of(op.id)) and p.dtype is result.coloring.to]


# -- onnx's own node tests -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_models_of_onnx_itself_survive_every_level() -> None:
    """One of each operator, every op that can be lowered is; what opened before opens after."""
    found = [text for name, model in corpus.backend_models() for text in _backend_objections(name, model)]
    assert len(corpus.backend_models()) > 140
    assert not found, f"{len(found)} objections:\n" + "\n".join(text[:300] for text in found[:40])


def _backend_objections(name: str, model: ModelProto) -> Iterator[str]:
    try:
        yield from _objections_when_forced(name, model)
    except AmpRewriteError as error:
        yield f"{name}: {type(error).__name__}: {error}"


def _objections_when_forced(name: str, model: ModelProto) -> Iterator[str]:
    before = written(model)
    result = convert(model, **FORCED)
    if written(model) != before:
        yield f"{name}: the input was changed"
    for check in (objections.of_checker, objections.of_names):
        yield from (f"{name}: {text}" for text in new(check, model, result.model))
    yield from (f"{name}: {text}" for text in objections.of_io(model, result.model))
    if not objections.of_checker(model):
        yield from (f"{name}: {text}" for text in objections.of_casts(result.model, model))
        yield from (f"{name}: {text}" for text in objections.of_types(result.view, result.plan, result.model))
    if written(convert(result.model, **FORCED).model) != written(result.model):
        yield f"{name}: twice is not once"
    if written(convert(model, lists=[{"base": "empty"}]).model) != before:
        yield f"{name}: lists that name nothing changed it"
    if objections.of_loading(model, ["BASIC"]) == []:
        yield from (f"{name}: {text}" for text in objections.of_loading(result.model) if "NOT_IMPLEMENTED" not in text)


# -- the checks of this file can fail -------------------------------------------------------------------


def new(check: object, before: ModelProto, after: ModelProto) -> list[str]:
    """What a check objects to in `after`, unless it objects to `before` as well."""
    return [] if check(before) else check(after)  # type: ignore[operator]


def test_what_was_wrong_before_is_no_objection_and_what_is_new_is() -> None:
    sound, broken = source("captures"), source("captures")
    broken.graph.node.append(helper.make_node("Identity", ["nowhere"], ["z"]))
    assert new(objections.of_checker, sound, broken) != []
    assert new(objections.of_checker, broken, broken) == []


def test_a_model_of_every_kind_is_in_the_corpus() -> None:
    models = [source(name) for name in SMALL]
    assert any(m.training_info for m in models)
    assert any(m.graph.sparse_initializer for m in models)
    assert any(m.functions for m in models)
    assert any(m.graph.quantization_annotation for m in models)
    assert any(m.metadata_props for m in models)
    ops = {n.op_type for m in models for g in objections.graphs(m.graph) for n in g.node}
    assert {"If", "Loop", "Scan", "Optional", "SequenceInsert", "QuantizeLinear"} <= ops
    assert any(v.type.tensor_type.elem_type == TensorProto.STRING for m in models for v in m.graph.input)
    assert any(lowered_ops(converted(n).view, converted(n).coloring) for n in SMALL)
