"""Overlays for Model Explorer: their form, their layers, and the node ids that they name."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import amp_rewrite
from amp_rewrite import Model, ReportError
from amp_rewrite.reports.measurements import LocatedErrors
from amp_rewrite.reports.model_explorer import TYPES, overlay, overlay_of_report, places
from amp_rewrite.reports.sources import report_in
from support.corpus import text_model
from support.paths import ROOT
from support.viewer_models import HOSTILE, functions, nested, unnamed


def layer(model: onnx.ModelProto, name: str = "type", **more: object) -> dict[str, dict[str, object]]:
    return json.loads(overlay(Model.load(model), name, **more))  # type: ignore[arg-type]


def values(data: dict[str, object]) -> dict[str, object]:
    return {node: result["value"] for node, result in data["results"].items()}  # type: ignore[attr-defined]


def located(tmp_path: Path, *rows: dict[str, object]) -> LocatedErrors:
    file = tmp_path / "located.json"
    file.write_text(json.dumps({"schema": 1, "rows": rows}))
    return LocatedErrors.load(file)


def test_nameless_and_equal_nodes_have_the_ids_of_the_adapter() -> None:
    ids = [place.id for place in places(unnamed())]
    assert ids == [
        "node",
        "node_1",
        "node_1_1",
        "node_2",
        "same",
        "same_1",
        "same_1_1",
        "same_2",
        HOSTILE,
        f"{HOSTILE}_1",
    ]


def test_branches_stand_beside_their_if_and_bodies_in_graphs_of_their_own() -> None:
    found = {(place.graph, place.id) for place in places(nested())}
    assert ("main_graph", "same/then_branch/same") in found  # the Loop in the If
    inside = {node for graph, node in found if graph == "same/then_branch/same/body"}
    assert {"choose", "choose/then_branch/same"} < inside  # the If in that Loop
    bodies = {"same/then_branch/same/body", "same_1/body"}  # a body inside a body is not shown
    assert {graph for graph, _ in found} == {"main_graph", *bodies}


def test_a_function_shows_the_types_of_all_its_calls() -> None:
    data = layer(functions())
    assert values(data["[function]own::once"]) == {"node": "float16, float32", "node_1": "float16, float32"}
    assert values(data["[function]own::twice"]) == {"node": "float16, float32", "node_1": "float16, float32"}
    assert set(values(data["g"])) == {"node", "node_1", "node_2"}


def test_the_type_layer_has_a_color_for_each_type() -> None:
    converted = amp_rewrite.convert(text_model("tied_weights"))
    results = layer(converted.model)[converted.model.graph.name]["results"]
    assert {result["bgColor"] for result in results.values() if result["value"] == "float16"} == {TYPES["float16"]}  # type: ignore[attr-defined]
    assert len(set(TYPES.values())) == len(TYPES)


def test_rules_of_a_report_match_the_source_too() -> None:
    source = text_model("tied_weights")
    report = amp_rewrite.convert(source).report
    found = values(layer(source, "rule", report=report)[source.graph.name])
    assert set(found) == {node.name for node in source.graph.node if node.op_type != "Constant"}


def test_a_model_without_rules_or_errors_says_what_to_hand_in() -> None:
    with pytest.raises(ReportError, match=r"give the report of its conversion with --reasons"):
        layer(text_model("tied_weights"), "rule")
    with pytest.raises(ReportError, match=r"locate --json.*--errors"):
        layer(text_model("tied_weights"), "error")


def test_a_model_without_floats_has_an_empty_layer_of_rules() -> None:
    source = text_model("strings_and_integers")
    converted = amp_rewrite.convert(source)
    assert layer(source, "rule", report=converted.report) == {}
    assert json.loads(overlay_of_report(converted.report, "rule"))["results"] == {}
    with pytest.raises(ReportError, match="holds no rules"):
        overlay_of_report(report_in(source), "rule")


def test_shares_of_error_sum_to_100(tmp_path: Path) -> None:
    model = text_model("tied_weights")
    first, second, *_ = [(node.name, node.op_type) for node in model.graph.node]
    rows = [{"op": first[0], "kind": first[1], "own": 3e-4}, {"op": second[0], "kind": second[1], "own": 1e-4}]
    assert list(values(layer(model, "error", errors=located(tmp_path, *rows))[model.graph.name]).values()) == [
        75.0,
        25.0,
    ]
    rows[0]["own"] = "inf"
    found = values(layer(model, "error", errors=located(tmp_path, *rows))[model.graph.name])
    assert list(found.values()) == ["overflows", 100.0]


def test_the_report_of_another_model_is_refused() -> None:
    report = amp_rewrite.convert(ROOT / "examples/models/digits_vit.onnx").report
    with pytest.raises(ReportError, match=r"digits_vit\.onnx, which has few ops in common with digits_cnn\.onnx"):
        overlay(Model.load(ROOT / "examples/models/digits_cnn.onnx"), "rule", report=report)


def test_errors_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"1 op, of which .* has 0"):
        layer(text_model("tied_weights"), "error", errors=located(tmp_path, {"op": "?", "kind": "Add", "own": 1.0}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rows": 1}',
        '{"rows": [1]}',
        '{"rows": [{"op": "a"}]}',
        '{"rows": [{"op": "a", "kind": "Add", "own": "far"}]}',
        '{"rows": [{"op": "a", "kind": "Add", "own": -1}]}',
        "[" * 9999,
    ],
)
def test_other_json_than_that_of_locate_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "located.json"
    file.write_text(text)
    with pytest.raises(ReportError, match=r"located\.json"):
        LocatedErrors.load(file)


def test_a_report_alone_gives_the_data_of_the_open_graph() -> None:
    report = amp_rewrite.convert(text_model("tied_weights")).report
    for name in ("type", "rule"):
        data = json.loads(overlay_of_report(report, name))
        assert set(data["results"]) == {row.name for row in report.rows if not row.scope}


def test_a_number_beyond_floats_is_an_overflow(tmp_path: Path) -> None:
    model = text_model("tied_weights")
    node = model.graph.node[0]
    file = tmp_path / "located.json"
    file.write_text(f'{{"rows": [{{"op": "{node.name}", "kind": "{node.op_type}", "own": 1{"0" * 400}}}]}}')
    found = layer(model, "error", errors=LocatedErrors.load(file))
    assert list(values(found[model.graph.name]).values()) == ["overflows"]
