"""Graphs whose nodes stand before those that they depend on: onnxruntime sorts them, and so does a view."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, refill
from amp_rewrite.ir.build import in_order
from amp_rewrite.ir.view import View
from support.corpus import exported, text_model

NAMES = ("if_ts13", "loop_ts16", "bert_ts13", "vit_dynamo22")
TEXTS = ("captures", "if_in_loop", "local_function", "same_names_in_branches")


def shuffled(model: ModelProto, seed: int = 3) -> ModelProto:
    """The model with the nodes of each graph and function in random order, the last one first at least."""
    mixed, rng = ModelProto(), random.Random(seed)
    mixed.CopyFrom(model)
    for holder in (*all_graphs(mixed.graph), *mixed.functions):
        first, *rest = reversed(holder.node)
        rng.shuffle(rest)
        refill(holder, "node", [first, *rest])
    return mixed


def decided(model: ModelProto) -> Counter[tuple[str, str, str | None]]:
    return Counter((row.op, row.dtype, row.rule) for row in amp_rewrite.convert(model).report.rows)


@pytest.mark.parametrize("name", [*NAMES, *TEXTS])
def test_a_shuffled_model_is_converted_as_the_sorted_one(name: str) -> None:
    model = exported(f"tests/models/{name}.onnx") if name in NAMES else text_model(name)
    mixed = shuffled(model)
    with pytest.raises(onnx.checker.ValidationError, match="topologically sorted"):
        onnx.checker.check_model(mixed)
    assert decided(mixed) == decided(model)
    result = amp_rewrite.convert(mixed)
    onnx.checker.check_model(result.model)
    assert [f.subject for f in result.report.findings if f.kind == "mended"] == ["model"]
    assert "mended" not in {finding.kind for finding in amp_rewrite.convert(model).report.findings}


def test_nodes_that_are_in_order_keep_it() -> None:
    model = exported("tests/models/bert_ts13.onnx")
    assert in_order(model) == model
    assert View.of(loaded := Model.load(model)).model is loaded


def test_an_unsorted_model_with_nothing_to_lower_comes_back_in_order(tmp_path: Path) -> None:
    head = '<ir_version: 8, opset_import: ["": 17]>'
    model = onnx.parser.parse_model(f"{head} g (float[2] x) => (float[2] y) {{ y = Exp (a)  a = Exp (x) }}")
    result = amp_rewrite.convert(model)
    assert [node.output[0] for node in result.model.graph.node] == ["a", "y"]
    result.save(tmp_path / "out.onnx")
    onnx.checker.check_model(tmp_path / "out.onnx")
