"""What people ask of a converter, in one test each."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, numpy_helper

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.errors import ConversionError, ModelError
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from suites.catalogue.case import SQUARE, Case, converted
from support import objections

ENCODER = Case(
    0,
    "an embedding, positions, attention scores and a classifier, no node of which has a name",
    """g (int64[4] ids, float[4,8] positions) => (float[4,8] logits, float[4,4] probabilities) {
        e = Gather (table, ids)
        p = MatMul (positions, w)
        h = Add (e, p)
        q = MatMul (h, w)
        k = MatMul (h, w2)
        t = Transpose <perm = [1, 0]> (k)
        s = MatMul (q, t)
        d = Mul (s, scale)
        probabilities = Softmax (d)
        c = MatMul (probabilities, h)
        z = Sigmoid (c)
        logits = MatMul (z, w)
    }""",
    weights={**SQUARE, "table": (16, 8), "scale": [0.5]},
    fails="",
)


def low(result: Converted) -> set[str]:
    """The first results of the lowered ops."""
    ops = {op for (op, _), paint in result.coloring.paints.items() if paint.dtype is result.coloring.to}
    return {result.view.ops[op].node.output[0] for op in ops}


def casts(model: ModelProto) -> int:
    return sum(node.op_type == "Cast" for graph in objections.graphs(model.graph) for node in graph.node)


def test_casts_of_the_model_are_retargeted_and_none_is_put_behind_them() -> None:
    text = """g (int64[8,8] i, float[8,8] x) => (float[8,8] y) {
        f = Cast <to = 1> (i)
        a = MatMul (x, w)
        s = Add (a, f)
        y = MatMul (s, w2)
    }"""
    after = converted(Case(0, "", text, weights=SQUARE, fails="")).model
    assert casts(after) == 3
    assert {n.attribute[0].i for n in after.graph.node if list(n.output) == ["f"]} == {TensorProto.FLOAT16}


def test_every_op_that_stayed_float32_is_listed_with_the_reason() -> None:
    report = convert(ENCODER.model(), keep=["op=Sigmoid", "op=Softmax"]).report
    stayed = [row for row in report.rows if row.dtype == "float32" and row.op != "Constant"]
    assert [row.op for row in stayed if not row.rule] == []
    assert "Sigmoid" in {row.op for row in stayed}
    assert f"{len(stayed)} ops stay float32, " in report.text()


def test_only_the_product_that_feeds_the_softmax_can_be_kept() -> None:
    plain, kept = low(convert(ENCODER.model())), low(convert(ENCODER.model(), keep=["op=MatMul,feeds=Softmax"]))
    assert "s" in plain
    assert {"p", "q", "k", "c", "logits"} <= kept
    assert "s" not in kept


@pytest.mark.parametrize(
    ("pattern", "gone"),
    [("input=positions", "p"), ("op=Gather,input=table", "e"), ("output=logits", "logits")],
)
def test_parts_of_a_model_without_node_names_are_kept_by_pattern(pattern: str, gone: str) -> None:
    plain, kept = low(convert(ENCODER.model())), low(convert(ENCODER.model(), keep=[pattern]))
    assert gone in plain - kept
    assert {"q", "k", "s"} <= kept


def test_a_list_of_ones_own_adds_to_the_shipped_one() -> None:
    text = """g (float[8,8] x) => (float[8,8] y) {
        a = MatMul (x, w)
        s = Sigmoid (a)
        b = MatMul (s, w2)
        e = Exp (b)
        y = MatMul (e, w2)
    }"""
    model = Case(0, "", text, weights=SQUARE, fails="").model()
    assert low(convert(model)) == {"a", "s", "b", "y"}
    assert low(convert(model, lists=[{"deny": ["Sigmoid"]}])) == {"a", "b", "y"}


def test_the_command_line_and_python_convert_alike(tmp_path: Path) -> None:
    onnx.save(ENCODER.model(), tmp_path / "model.onnx")
    done = CliRunner().invoke(
        program, ["convert", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "half.onnx"), "-q"]
    )
    assert done.exit_code == 0, done.output
    convert(tmp_path / "model.onnx").save(tmp_path / "again.onnx")
    assert (tmp_path / "half.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()
    assert objections.of_io(ENCODER.model(), onnx.load(tmp_path / "half.onnx")) == []


def test_a_thousand_warnings_of_one_kind_are_one_line() -> None:
    head = "g (float[8,8] x) => (float[8,8] y) { a0 = MatMul (x, w)\n"
    chain = "\n".join(
        f"m{i} = Where (no, far{i}, a{i}) p{i} = Softmax (m{i}) a{i + 1} = MatMul (p{i}, w)" for i in range(200)
    )
    model = Case(
        0,
        "",
        f"{head}{chain}\ny = Identity (a200) }}",
        weights={"w": np.eye(8), **{f"far{i}": [-1e30 - i * 1e25] for i in range(200)}},
        fails="",
    ).model()
    model.graph.initializer.append(numpy_helper.from_array(np.array([False]), "no"))
    report = convert(model, fuse="none").report
    (kind,) = Counter(finding.kind for finding in report.findings).items()
    assert kind == ("saturated", 200)
    assert sum("saturated" in line for line in report.text().splitlines()) <= 2


def test_a_conversion_that_fails_leaves_no_file(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.eye(256, dtype=np.float32), "w")
    model = Case(0, "", "g (float[256,256] x) => (float[256,256] y) { y = MatMul (x, w) }", fails="").model()
    model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").write_bytes(b"too short")
    done = CliRunner().invoke(program, ["convert", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "half.onnx")])
    assert done.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "w.bin"]


def test_the_same_model_gives_the_same_bytes() -> None:
    first, second = (convert(ENCODER.model()).model.SerializeToString() for _ in range(2))
    assert first == second


def test_what_describes_the_model_and_its_edges_is_kept() -> None:
    model = ENCODER.model()
    model.producer_name, model.doc_string, model.graph.doc_string = "someone", "words", "more words"
    model.metadata_props.add(key="licence", value="any")
    model.opset_import.add(domain="elsewhere", version=2)
    after = convert(model).model
    assert objections.of_io(model, after) == []
    for field in ("producer_name", "doc_string", "ir_version", "opset_import"):
        assert getattr(after, field) == getattr(model, field), field
    assert after.graph.doc_string == "more words"
    assert ("licence", "any") in [(prop.key, prop.value) for prop in after.metadata_props]


def test_the_number_of_casts_is_reported() -> None:
    result = convert(ENCODER.model(), keep=["op=Sigmoid"])
    totals = result.report.totals
    made = totals.casts_to_low + totals.casts_to_float32
    assert made == casts(result.model) > 0
    assert f"\n{made} Casts added" in result.report.text()


def test_a_result_that_came_out_wrong_is_never_handed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rewrite is made to lose a node."""
    module = import_module("amp_rewrite.pipeline.conversion")
    whole = module.apply

    def lossy(view: amp_rewrite.View, plan: object) -> amp_rewrite.Model:
        result = whole(view, plan)
        del result.proto.graph.node[1]
        return result

    monkeypatch.setattr(module, "apply", lossy)
    onnx.save(ENCODER.model(), tmp_path / "model.onnx")
    with pytest.raises((ConversionError, ModelError)):
        convert(tmp_path / "model.onnx")
    done = CliRunner().invoke(program, ["convert", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "half.onnx")])
    assert done.exit_code == 2
    assert not (tmp_path / "half.onnx").exists()
