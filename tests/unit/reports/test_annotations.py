"""`convert --annotate`: type, rule and reason in the metadata of each node."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.checker
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.graphs import all_nodes
from amp_rewrite.reports.annotations import DTYPE, KEYS, REASON, RULE, annotation, unannotate
from support import corpus
from support.paths import ROOT

NAMES = (*corpus.TEXT_MODELS, *corpus.BUILT)


def source(name: str) -> ModelProto:
    return corpus.BUILT[name]() if name in corpus.BUILT else corpus.text_model(name)


def run(*words: object) -> str:
    """What a command printed that has to succeed."""
    done = CliRunner().invoke(program, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def written(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def stated(model: ModelProto) -> list[dict[str, str]]:
    return [annotation(node) for node in all_nodes(model.graph.node)]


@pytest.mark.parametrize("name", NAMES)
def test_annotations_say_what_the_report_says(name: str) -> None:
    converted = amp_rewrite.convert(source(name), annotate=True)
    model = converted.model
    onnx.checker.check_model(model)
    said = [entries for entries in stated(model) if entries.get(RULE) not in ("inserted", None)]
    rows = [row for row in converted.report.rows if row.rule]
    gone = [row for row in rows if row.op == "Cast"]  # a plan may drop Casts
    assert len(rows) - len(gone) <= len(said) <= len(rows)
    assert {(entries[DTYPE], entries[RULE]) for entries in said} <= {(row.dtype, row.rule) for row in rows}
    inserted = [node for node in all_nodes(model.graph.node) if annotation(node).get(RULE) == "inserted"]
    assert sum(node.op_type == "Cast" for node in inserted) == sum(
        c.origin == "inserted" for c in converted.report.casts
    )
    assert all(entries[REASON] for entries in stated(model) if RULE in entries)


@pytest.mark.parametrize("name", NAMES)
def test_annotations_are_all_that_the_option_adds(name: str) -> None:
    annotated = clone(amp_rewrite.convert(source(name), annotate=True).model)
    plain = amp_rewrite.convert(source(name)).model
    assert not amp_rewrite.diff(plain, annotated).differs
    unannotate(annotated)
    assert written(annotated) == written(plain)


def test_every_node_has_its_type_in_bodies_too() -> None:
    for name in ("if_in_loop", "scan", "same_names_in_branches"):
        assert all(entries.get(DTYPE) for entries in stated(amp_rewrite.convert(source(name), annotate=True).model)), (
            name
        )


def test_other_metadata_of_nodes_stays() -> None:
    model = amp_rewrite.convert(source("everything_beside"), annotate=True).model
    assert {"from", *KEYS} == {entry.key for node in model.graph.node for entry in node.metadata_props}


def test_another_conversion_replaces_or_drops_annotations() -> None:
    once = amp_rewrite.convert(source("tied_weights"), annotate=True).model
    kept = {"keep": "op=MatMul"}
    again = amp_rewrite.convert(once, annotate=True, **kept)
    assert "raised" in {entries.get(RULE) for entries in stated(again.model)}
    assert {e[DTYPE] for e in stated(again.model) if e.get(RULE) == "raised"} == {"float32"}
    assert not any(stated(amp_rewrite.convert(once, **kept).model))
    same = amp_rewrite.convert(once, annotate=True)
    assert same.plan.empty
    assert [entries.get(RULE) for entries in stated(same.model)] == [entries.get(RULE) for entries in stated(once)]


def test_a_model_with_nothing_to_lower_is_annotated_too() -> None:
    model = source("strings_and_integers")
    before = written(model)
    converted = amp_rewrite.convert(model, annotate=True, lists=[{"base": "empty"}])
    assert converted.plan.empty
    assert all(entries[DTYPE] for entries in stated(converted.model))
    assert written(model) == before


def test_files_keep_annotations_through_onnxruntime_and_onnx_ir(tmp_path: Path) -> None:
    file = tmp_path / "low.onnx"
    run("convert", ROOT / "examples/models/digits_mlp.onnx", "-o", file, "--annotate", "-q")
    said = stated(onnx.load(file))
    assert all(entries.keys() == KEYS for entries in said if entries.get(RULE))
    onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    ir = pytest.importorskip("onnx_ir")
    ir.save(ir.load(file), tmp_path / "again.onnx")
    assert stated(onnx.load(tmp_path / "again.onnx")) == said


def test_annotations_of_a_large_model_are_written_without_its_weights(tmp_path: Path) -> None:
    name = "tests/models/cnn_external_dynamo22.onnx"
    amp_rewrite.convert(ROOT / name, annotate=True).save(tmp_path / "a.onnx", external_data=True)
    amp_rewrite.convert(ROOT / name).save(tmp_path / "b.onnx", external_data=True)
    data = [next(tmp_path.glob(f"{stem}.*.data")).read_bytes() for stem in "ab"]
    assert data[0] == data[1]
    assert any(stated(onnx.load(tmp_path / "a.onnx", load_external_data=False)))


@pytest.mark.parametrize("words", [("--json",), ("--html", "page.html"), ("--expect", "io = float16")])
def test_node_data_are_printed_alone(words: tuple[str, ...]) -> None:
    file = ROOT / "examples/models/digits_mlp.onnx"
    done = CliRunner().invoke(program, ["report", str(file), "--format", "model-explorer", *words])
    assert done.exit_code == 2 and "prints node data alone" in done.stderr


def test_the_command_prints_layers_of_what_it_wrote(tmp_path: Path) -> None:
    file = tmp_path / "low.onnx"
    run("convert", ROOT / "examples/models/digits_mlp.onnx", "-o", file, "--annotate", "-q")
    for layer in ("type", "rule"):
        printed = run("report", file, "--format", "model-explorer", "--layer", layer)
        (graph, data), *others = json.loads(printed).items()
        assert (graph, data["name"], others) == ("main_graph", layer, [])
        assert set(data["results"]) == {node.name for node in onnx.load(file).graph.node}
