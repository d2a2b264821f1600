"""Pages of reports, without a browser: scopes, layers, Casts on edges, and counts."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from amp_rewrite import Report, convert, diff
from amp_rewrite.ir.op_classes import ELEMENTLESS
from amp_rewrite.reports.page.graph import MOST, graph, layers_of, module_of, paths_of, tree_of
from amp_rewrite.reports.page.report_figures import report_figures
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import FIRST_INPUT, LOW, NO_ROW, CastRow, Header, PortRow, Row, Totals
from amp_rewrite.reports.sources import report_and_view
from support.cases import build
from support.corpus import EXPORTED, TEXT_MODELS, exported, text_model

BERT = "tests/models/bert_ts13.onnx"
FLOATS = {"float16", "float32", "float64", "double", "bfloat16"}


def report_of_rows(*rows: Row) -> Report:
    return Report(Header("net", 8, {"ai.onnx": 17}), Totals(ops=len(rows)), rows)


def noted(**metadata: str) -> onnx.NodeProto:
    node = helper.make_node("Relu", ["x"], ["y"])
    for key, value in metadata.items():
        node.metadata_props.add(key=key.replace("__", "."), value=value)
    return node


# -- modules and scopes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scopes", "module"),
    [
        ("['', 'encoder', 'encoder.layer.0', 'encoder.layer.0.attention', 'relu']", "encoder/layer.0/attention"),
        ("['', 'relu']", ""),
        ("__import__('os').abort()", ""),
        ("[" * 4000, ""),
        (r"['\d', 'a']", r"\d"),
        ("""["it's", 'a',]""", "it's"),
        ("", ""),
    ],
)
def test_a_module_is_read_from_the_metadata_of_an_exporter(scopes: str, module: str) -> None:
    assert module_of(noted(pkg__torch__onnx__name_scopes=scopes)) == module


def test_scopes_come_from_names_bodies_and_inputs_and_give_way_or_are_split() -> None:
    rows = (
        Row("copy_of_a_weight", "Identity", "float32"),
        Row("/a/b/MatMul", "MatMul", "float32", reads=(0,)),
        Row("fused", "Gelu", "float32", reads=(1,)),
        Row("loop/body/Add_3", "Add", "float32", scope="loop/body/", named=False),
    )
    assert paths_of(report_of_rows(*rows)) == [("a", "b"), ("a", "b"), ("a", "b"), ("loop", "body")]
    lean = tree_of([("a", "b"), ("a", "b"), ("c",)], range(3))
    assert lean.names == ["", "a/b"]
    assert lean.home == [1, 1, 0]

    flat = tree_of([()] * 20_000, range(20_000))
    assert max(len(parts) for parts in flat.parts(range(20_000)).values()) <= MOST
    assert all(parent < scope for scope, parent in enumerate(flat.parents))


# -- layers ----------------------------------------------------------------------------------------------


def layers(paths: list[tuple[str, ...]], edges: list[tuple[int, int]]) -> list[int]:
    places = layers_of(tree_of(paths, range(len(paths))), edges, range(len(paths)))
    return places[::2]


def test_layers_follow_what_is_read_also_between_scopes_that_read_each_other() -> None:
    assert layers([()] * 4, [(0, 1), (1, 2), (3, 2)])[:4] == [0, 1, 2, 1]
    assert sorted(layers([("a",), ("b",), ("a",), ("b",)], [(0, 1), (1, 2), (2, 3)])[-2:]) == [0, 1]


# -- the graph -------------------------------------------------------------------------------------------


def drawn(result: Result) -> Any:
    """The data of the graph of a result."""
    return result.figures()[1].data


def source(name: str) -> ModelProto:
    return text_model(name) if name in TEXT_MODELS else exported(name)


@pytest.mark.parametrize(
    "name", [BERT, *(name for name in EXPORTED if "dynamo21" in name or "t5" in name), *TEXT_MODELS]
)
def test_a_page_counts_what_the_report_counts(name: str) -> None:
    converted = convert(source(name))
    report, graph = converted.report, drawn(converted)
    assert graph["rows"] == len(report.rows)
    low = [row.dtype in LOW and row.op not in ELEMENTLESS for row in report.rows]
    assert [side == 0 for side in graph["ops"]["side"][: graph["rows"]]] == low
    casts = [c for c in report.casts if c.origin != "folded" and {c.from_, c.to} <= FLOATS]
    assert len(graph["casts"]) == len(casts)
    for row, shown in zip(casts, graph["casts"], strict=True):
        assert 0 <= len(shown["edges"]) // 2 <= max(row.readers, 2)
        # a body's own input has no edge, nor a Cast back to the type before another one
        assert shown["edges"] or row.after == -1 or name == "rounding_pair", row
    assert graph == json.loads(json.dumps(graph))


def test_names_are_whole_and_every_drawn_vertex_has_a_place_of_its_own() -> None:
    report = convert(exported(BERT)).report
    data = graph(report).data
    ops, words = data["ops"], data["words"]
    names = [words[prefix] + name for prefix, name in zip(ops["prefix"], ops["name"], strict=True)]
    assert names[: len(report.rows)] == [row.path for row in report.rows]
    places = [
        (scope, *ops["place"][2 * v : 2 * v + 2]) for v, scope in enumerate(ops["scope"]) if ops["place"][2 * v] >= 0
    ]
    taken = [
        (parent, *data["scopes"]["place"][2 * s : 2 * s + 2]) for s, parent in enumerate(data["scopes"]["parent"]) if s
    ]
    assert len({*places, *taken}) == len(places) + len(taken)
    hidden = {report.rows[v].op for v in range(len(report.rows)) if ops["place"][2 * v] < 0}
    assert hidden == {"Constant", "Identity"}


def test_a_page_of_a_report_in_a_file_lacks_what_the_model_tells() -> None:
    converted = convert(exported(BERT))
    whole, alone = drawn(converted), drawn(converted.report)
    assert converted.report.totals.flops == sum(whole["flops"])
    assert "flops" not in alone
    assert all("bytes" in cast for cast in whole["casts"])
    read = Report.from_json(converted.report.to_json(), "report.json")
    assert drawn(read) == alone


def test_findings_are_cards_with_what_to_do_and_a_fill_that_only_selects_is_a_fact() -> None:
    large = build("y=MatMul(x,w)", ["y"], constants={"w": np.full((8, 8), 1e6)})
    (card,) = convert(large, safety="none").figures()[0].drawing.iterfind("div/article[@class='card finding warning']")
    text = "".join(card.itertext())
    assert text.startswith("saturated") and "It means: harmless in a mask, an error elsewhereTo do: --keep" in text
    summary = convert(exported(BERT)).figures()[0].drawing
    notes = ["".join(card.itertext()) for card in summary.iter("article") if card.get("class") == "card finding note"]
    (card,) = (note for note in notes if note.startswith("saturated"))
    assert "It means: harmless: it only selects" in card


def test_the_verdict_and_what_to_do_come_first_and_flops_state_their_shapes() -> None:
    report, view = convert(exported(BERT)).report, report_and_view(exported(BERT))[1]
    summary, graph_of_ops = report_figures(report, view)
    text = "".join(summary.drawing.itertext())
    assert text.startswith("evidence" + "not checked on data") and graph_of_ops.name == "graph"
    assert "next: amp_rewrite.repair(model, data, tolerance=1e-2)" in text
    assert "with input_ids 128×128" in text and "findings need no action" in text
    text = "".join(report_figures(report, command="amp-rewrite a/b.onnx")[0].drawing.itertext())
    assert "free dimensions as 128" in text and "next: amp-rewrite a/b.onnx" in text


def test_groups_are_named_after_modules_or_the_ends_of_what_they_hold() -> None:
    model = text_model("tied_weights")
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', 'part', 'part.{node.op_type}', 'x']")
    report, view = report_and_view(model)
    names = graph(report, view).data["scopes"]["name"]  # type: ignore[index]
    assert names[1].startswith("part")
    rows = [Row(f"Conv_{i}", "Conv", "float32", reads=(i - 1,)) for i in range(2 * MOST)]
    data = graph(report_of_rows(*rows)).data
    names = data["scopes"]["name"][1:]  # type: ignore[index]
    assert len(names) > 1 and names[0].startswith("Conv_0 to Conv_") and names[-1].endswith(f"to Conv_{2 * MOST - 1}")
    assert not any("#" in name for name in names)


# -- graphs of a difference ------------------------------------------------------------------------------


def chain(*kinds: str, scope: str = "/net/layer.{}/") -> Report:
    rows = [
        Row(f"{scope.format(i // 3)}{kind}_{i}", kind, "float32", inputs=("float32",), outputs=("float32",),
            variables={"T": "float32"}, reads=(i - 1 if i else FIRST_INPUT,)) for i, kind in enumerate(kinds)
    ]  # fmt: skip
    ports = (PortRow("x", "float32"),), (PortRow("y", "float32", len(rows) - 1),)
    return replace(report_of_rows(*rows), inputs=ports[0], outputs=ports[1])


def test_changes_stand_at_their_ops_with_their_types_and_those_of_removed_ops_in_the_table_alone() -> None:
    before, after = chain("Conv", "Relu", "Add", "Tanh"), chain("Conv", "Relu", "Exp", "Tanh")
    rows = list(after.rows)
    rows[1] = rows[1]._replace(dtype="float16", variables={"T": "float16"}, outputs=("float16",))
    cast = CastRow("Relu_1", "float16", "float32", after=1, readers=1)
    delta = diff(before, replace(after, rows=tuple(rows), casts=(cast,)))
    table, figure = delta.figures()
    changes, words = figure.data["changes"], figure.data["words"]
    spelled = [tuple(words[at] for at in column) for column in zip(*list(changes.values())[1:], strict=True)]  # type: ignore
    assert changes["vertex"] == [1, 2]  # type: ignore[index]
    assert spelled == [("lowered", "", "float32", "float16"), ("added", "", "", "float32")]
    assert [row[0].text for row in table.drawing.find(".//tbody")] == ["lowered", "added", "removed", "cast +"]  # type: ignore
    assert [cast["sign"] for cast in figure.data["casts"]] == ["+"]  # type: ignore[attr-defined]
    links = [cell.get("data-vertex") for cell in table.drawing.iter("td") if cell.get("data-vertex")]
    assert links == ["1", "2"]


def test_a_cast_stands_on_the_edges_to_those_that_read_through_it() -> None:
    x = FIRST_INPUT
    rows = (
        Row("p", "MatMul", "float16", inputs=("float16",), outputs=("float16",), reads=(x,)),
        Row("low", "Relu", "float16", inputs=("float16",), outputs=("float16",), reads=(0,)),
        Row("high", "Exp", "float32", inputs=("float32",), outputs=("float32",), reads=(0,)),
        Row("other", "Exp", "float32", inputs=("float32",), outputs=("float32",), reads=(0,)),
        Row("if", "If", "float32", inputs=("bool",), outputs=("float32",), reads=(NO_ROW, 0, 2)),
    )
    told = [("p", "float16", "float32", 0), ("p", "float16", "float64", 0)]
    told += [("p", "float32", "float16", 0), ("high", "float32", "float16", 2), ("x", "float32", "float16", x)]
    casts = [CastRow(value, from_, to, after=after) for value, from_, to, after in told]
    ports = (PortRow("x", "float32"),), (PortRow("y", "float32", after=0),)
    first = replace(report_of_rows(*rows), casts=tuple(casts), inputs=ports[0], outputs=ports[1])
    shown = drawn(first)["casts"]
    assert {(cast["value"], cast["from"], cast["to"]): cast["edges"] for cast in shown} == {
        ("p", "float16", "float32"): [0, 2, 0, 3, 0, 4, 0, 6],
        ("p", "float16", "float64"): [],
        ("p", "float32", "float16"): [],
        ("high", "float32", "float16"): [],
        ("x", "float32", "float16"): [5, 0],
    }
