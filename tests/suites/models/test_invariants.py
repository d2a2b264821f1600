"""Invariants of conversions, for every model of the tests."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper

from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from support import corpus, objections
from support.counting import crossings
from support.objections import written
from support.paths import TESTS

SMALL = (*corpus.TEXT_MODELS, *corpus.BUILT)
FORCED: dict[str, Any] = {"level": "unsafe-force-all", "safety": "none", "target": "onnx"}
OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "lower_all": {"level": "lower-all"}, "force_all": FORCED}
RAISING: dict[str, Any] = {"target": "onnx", "lists": [{"base": "empty"}]}

FIXTURES = tuple(f"tests/models/{name}.onnx" for name in corpus.KINDS)

every_model = pytest.mark.parametrize("name", [*SMALL, *FIXTURES])


def source(name: str) -> ModelProto:
    if name in corpus.BUILT:
        return corpus.BUILT[name]()
    return corpus.text_model(name) if name in corpus.TEXT_MODELS else corpus.exported(name)


@cache
def converted(name: str) -> Converted:
    """Convert a model. The result is shared: never change it."""
    return convert(source(name))


# -- each conversion -------------------------------------------------------------------------------------

EXCUSED = {
    # The CPU provider has no EyeLike from integers to half.
    ("eye_like", "force_all"): "onnxruntime",
    # TensorFlow's rule lowers a Cast to a model output beside an equal one that stays.
    ("cast_like", "force_all"): "Casts of",
}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, way) for name in SMALL for way in OPTIONS), *((name, "default") for name in FIXTURES)]
)
def test_every_invariant_holds(name: str, way: str) -> None:
    levels = objections.LEVELS if name in SMALL else ()  # test_fixtures runs the others
    found = objections.of_convert(source(name), OPTIONS[way], levels)
    excused = EXCUSED.get((name, way), "nothing")
    assert [text for text in found if excused not in text] == []


@pytest.mark.parametrize("name", [name for name in (*SMALL, *FIXTURES) if name != "custom_domain"])
def test_every_invariant_holds_for_a_raised_half_export(name: str) -> None:
    """As a whole and by kinds of op; without `custom_domain`, whose unknown op has no inferred type."""
    half = convert(source(name), io="low", **FORCED).model
    for kind in ("*", "op=LayerNormalization", "op=Softmax", "op=MatMul", "op=Add"):
        if kind == "*" or any(node.op_type == kind[3:] for g in objections.graphs(half.graph) for node in g.node):
            # onnxruntime's NchwcTransformer crashes on some float16 LSTMs.
            levels = ("BASIC",) if "lstm" in name else objections.LEVELS
            assert objections.of_convert(half, {"keep": [kind], **RAISING}, levels, again=RAISING) == [], kind
    assert written(convert(half, lists=[{"base": "empty"}]).model) == written(half)


@every_model
def test_the_plan_has_exactly_the_casts_that_the_colours_need(name: str) -> None:
    """Fewer are allowed if the model's own Casts already read or write that type."""
    result = converted(name)
    cross = crossings(result.view, result.coloring)
    planned = Counter(result.view.value_name(step.value) for step in (*result.plan.casts, *result.plan.bakes))
    called_for = Counter((*cross.to_low, *cross.to_float))
    # A Cast of ours may replace one of the model's own, or serve readers of a copy by one.
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


# -- determinism ----------------------------------------------------------------------------------------


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
    """Return a digest over models and reports of some conversions."""
    digest = hashlib.sha256()
    chosen = ["captures", "sequences", "local_function", "names_of_ours", "value_info", FIXTURES[0]]
    for name in chosen:
        result = convert(source(name))
        digest.update(written(result.model))
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


# -- faults are noticed ---------------------------------------------------------------------------------


def test_only_new_faults_are_objections() -> None:
    broken = source("captures")
    broken.graph.node.append(helper.make_node("Identity", ["nowhere"], ["z"]))
    result = converted("captures")
    assert objections.of_result(source("captures"), result) == []
    for before, known in ((source("captures"), False), (broken, True)):
        faulty = replace(result, result=replace(result.result, proto=broken))
        assert any("checker" in text for text in objections.of_result(before, faulty)) is not known


# -- graphs deeper than Python's stack: chains are followed without recursion ---------------------------------

DEEP = sys.getrecursionlimit() + 50


def test_chains_of_casts_without_effect_are_skipped() -> None:
    chain = [f"c{i + 1} = Cast <to = 1> (c{i})" for i in range(DEEP)]
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[8,8] c0, float[8,8] w) => (float[8,8] y)'
    result = convert(onnx.parser.parse_model(f"{head} {{ {' '.join(chain)} y = MatMul (c{DEEP}, w) }}")).model
    assert [(node.op_type, list(node.input)) for node in result.graph.node] == [
        ("Cast", ["w"]),
        ("Cast", ["c0"]),  # the last one in the chain, which now casts to float16
        ("MatMul", [f"c{DEEP}", "w_float16"]),
        ("Cast", ["y_float16"]),
    ]


def test_copies_between_a_transpose_and_a_product_are_skipped() -> None:
    chain = [f"c{i + 1} = Identity (c{i})" for i in range(DEEP)]
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[2,3,8] x, float[8,8] w) => (float[3,2,8] y)'
    body = f"c0 = Transpose <perm = [1, 0, 2]> (x) {' '.join(chain)} y = MatMul (c{DEEP}, w)"
    report = convert(onnx.parser.parse_model(f"{head} {{ {body} }}")).report
    assert {row.dtype for row in report.rows} == {"float16"}
