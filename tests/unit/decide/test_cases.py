"""The painter and the rewrite against a table of small graphs: what is lowered, how many casts, and does it load."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from support import cases, objections
from support.counting import crossings, lowered_ops
from support.paths import TESTS

TABLE: list[dict[str, Any]] = json.loads((TESTS / "data" / "cases.json").read_text("utf-8"))["cases"]
BOUND = 64 * DType.FLOAT16.eps
"""Of the largest output: some ten roundings of half an eps each, and an Exp or two that multiply what is before."""

every_case = pytest.mark.parametrize("case", TABLE, ids=lambda case: case["id"])


def model_of(case: dict[str, Any]) -> ModelProto:
    opset = case.get("options", {}).get("opset", 17)
    return cases.build(case["graph"], case["outputs"], shapes=case.get("shapes"), types=case.get("types"), opset=opset)


def converted(case: dict[str, Any], model: ModelProto) -> Converted:
    options = {k: v for k, v in case.get("options", {}).items() if k != "opset"}
    return convert(model, **{"lists": ["tensorflow"], "safety": "none", "target": "onnx", **options})


def feeds_of(case: dict[str, Any], model: ModelProto) -> dict[str, cases.Feed]:
    given = {name: np.asarray(value, np.float32) for name, value in case.get("feeds", {}).items()}
    return {**cases.feeds(model), **given}


@functools.cache
def by_id(name: str) -> Converted:
    """A row converted. Shared: never change it."""
    case = next(case for case in TABLE if case["id"] == name)
    return converted(case, model_of(case))


def low_type(case: dict[str, Any]) -> DType:
    return DType.parse(case.get("options", {}).get("to", "float16"))


@every_case
def test_the_right_ops_are_lowered(case: dict[str, Any]) -> None:
    result = by_id(case["id"])
    assert lowered_ops(result.view, result.coloring) == tuple(sorted(case["half"]))
    assert sorted(op.name for op in result.view.ops) == sorted(case["half"] + case["single"])


@every_case
def test_there_are_as_many_casts_as_the_rules_call_for(case: dict[str, Any]) -> None:
    model, result = model_of(case), by_id(case["id"])
    assert crossings(result.view, result.coloring).casts == case["casts"]
    assert len(result.plan.casts) + len(result.plan.bakes) == case["casts"]
    assert inserted(model, result.model) == case["casts"]


@every_case
def test_the_model_is_sound_and_opens_at_basic_and_all(case: dict[str, Any]) -> None:
    model, result = model_of(case), by_id(case["id"])
    assert objections.of_checker(result.model) == []
    assert objections.of_types(result.view, result.plan, result.model) == []
    assert objections.of_casts(result.model, model) == []
    assert objections.of_names(result.model) == []
    assert objections.of_io(model, result.model) == []
    if low_type(case) is DType.FLOAT16:  # onnxruntime's CPU provider opens no bfloat16 model
        assert objections.of_loading(result.model) == []


@every_case
def test_the_model_computes_what_it_did(case: dict[str, Any]) -> None:
    """The CPU provider computes most half ops in float32: this finds wrong wiring, not lost digits."""
    if low_type(case) is not DType.FLOAT16:
        pytest.skip("onnxruntime's CPU provider runs no bfloat16 model")
    model = model_of(case)
    feeds = feeds_of(case, model)
    before, after = objections.run(model, feeds), objections.run(by_id(case["id"]).model, feeds)
    assert objections.of_outputs(before, after, bound=BOUND) == []


@every_case
def test_a_second_run_changes_nothing(case: dict[str, Any]) -> None:
    once = by_id(case["id"]).model
    twice = converted(case, once)
    assert twice.plan.empty
    assert twice.model.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


def inserted(before: ModelProto, after: ModelProto) -> int:
    """How many nodes were added; all must be Casts."""
    more = Counter(n.op_type for n in after.graph.node) - Counter(n.op_type for n in before.graph.node)
    assert set(more) <= {"Cast"}, more
    return more["Cast"]
