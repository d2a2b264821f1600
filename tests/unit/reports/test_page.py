"""Pages of reports, without a browser: scopes, layers, Casts on edges, counts, and figures of results."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from amp_rewrite import DType, Report, convert, diff
from amp_rewrite.evidence.metric import MEASURES
from amp_rewrite.files.casting import Fit
from amp_rewrite.ir.op_classes import ELEMENTLESS
from amp_rewrite.reports.delta import Delta
from amp_rewrite.reports.evidence import Criterion, Difference, OutputRow
from amp_rewrite.reports.page.graph import MAX_PARTS, graph, layers_of, module_of, paths_of, tree_of
from amp_rewrite.reports.page.measured_figures import Axis, Band, Bar, bars, number_text, outputs_figure, ranges_figure
from amp_rewrite.reports.page.page import Figure, html_of, numbers_table, page_of
from amp_rewrite.reports.page.report_figures import report_figures
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import FIRST_INPUT, LOW, NO_ROW, CastRow, Change, Header, PortRow, Row, Totals
from amp_rewrite.reports.sources import report_and_view
from support.cases import build
from support.corpus import EXPORTED, TEXT_MODELS, exported, text_model

BERT = "tests/models/bert_ts13.onnx"
FLOATS = {"float16", "float32", "float64", "double", "bfloat16"}


def report_of_rows(*rows: Row) -> Report:
    return Report(Header("net", 8, {"ai.onnx": 17}), Totals(ops=len(rows)), rows)


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
    node = helper.make_node("Relu", ["x"], ["y"])
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    assert module_of(node) == module


def test_scopes_follow_names_bodies_and_inputs_and_merge_or_split() -> None:
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
    assert max(len(parts) for parts in flat.parts(range(20_000)).values()) <= MAX_PARTS
    assert all(parent < scope for scope, parent in enumerate(flat.parents))


def layers(paths: list[tuple[str, ...]], edges: list[tuple[int, int]]) -> list[int]:
    places = layers_of(tree_of(paths, range(len(paths))), edges, range(len(paths)))
    return places[::2]


def test_layers_follow_the_data_flow_even_between_mutually_dependent_scopes() -> None:
    assert layers([()] * 4, [(0, 1), (1, 2), (3, 2)])[:4] == [0, 1, 2, 1]
    assert sorted(layers([("a",), ("b",), ("a",), ("b",)], [(0, 1), (1, 2), (2, 3)])[-2:]) == [0, 1]


def drawn(result: Result) -> Any:
    """Return the graph data of a result."""
    return result.figures()[1].data


@pytest.mark.parametrize(
    "name", [BERT, *(name for name in EXPORTED if "dynamo21" in name or "t5" in name), *TEXT_MODELS]
)
def test_the_counts_on_a_page_match_the_report(name: str) -> None:
    converted = convert(text_model(name) if name in TEXT_MODELS else exported(name))
    report, graph = converted.report, drawn(converted)
    assert graph["rows"] == len(report.rows)
    low = [row.dtype in LOW and row.op not in ELEMENTLESS for row in report.rows]
    assert [side == 0 for side in graph["ops"]["side"][: graph["rows"]]] == low
    casts = [c for c in report.casts if c.origin != "folded" and {c.from_, c.to} <= FLOATS]
    assert len(graph["casts"]) == len(casts)
    for row, drawn_cast in zip(casts, graph["casts"], strict=True):
        assert 0 <= len(drawn_cast["edges"]) // 2 <= max(row.readers, 2)
        # a body's own input has no edge, nor a Cast back to the type before another one
        assert drawn_cast["edges"] or row.after == -1 or name == "rounding_pair", row
    assert graph == json.loads(json.dumps(graph))


def test_names_are_whole_and_vertices_do_not_overlap() -> None:
    report = convert(exported(BERT)).report
    data = graph(report).data
    ops, words = data["ops"], data["words"]
    names = [words[prefix] + name for prefix, name in zip(ops["prefix"], ops["name"], strict=True)]
    assert names[: len(report.rows)] == [row.path for row in report.rows]
    places = [
        (scope, *ops["place"][2 * v : 2 * v + 2]) for v, scope in enumerate(ops["scope"]) if ops["place"][2 * v] >= 0
    ]
    scopes = [
        (parent, *data["scopes"]["place"][2 * s : 2 * s + 2]) for s, parent in enumerate(data["scopes"]["parent"]) if s
    ]
    assert len({*places, *scopes}) == len(places) + len(scopes)
    hidden = {report.rows[v].op for v in range(len(report.rows)) if ops["place"][2 * v] < 0}
    assert hidden == {"Constant", "Identity"}


def test_a_page_of_a_stored_report_lacks_details_of_the_model() -> None:
    converted = convert(exported(BERT))
    whole, alone = drawn(converted), drawn(converted.report)
    assert converted.report.totals.flops == sum(whole["flops"])
    assert "flops" not in alone
    assert all("bytes" in cast for cast in whole["casts"])
    read = Report.from_json(converted.report.to_json(), "report.json")
    assert drawn(read) == alone


def test_findings_are_cards_with_a_remedy_and_a_selecting_fill_is_a_fact() -> None:
    large = build("y=MatMul(x,w)", ["y"], constants={"w": np.full((8, 8), 1e6)})
    (card,) = convert(large, safety="none").figures()[0].drawing.iterfind("div/article[@class='card finding warning']")
    text = "".join(card.itertext())
    assert text.startswith("saturated") and "It means: harmless in a mask, an error elsewhereTo do: outside" in text
    summary = convert(exported(BERT)).figures()[0].drawing
    notes = ["".join(card.itertext()) for card in summary.iter("article") if card.get("class") == "card finding note"]
    (card,) = (note for note in notes if note.startswith("saturated"))
    assert "It means: harmless: it only selects" in card


def test_the_verdict_and_the_remedy_come_first_and_flops_state_their_shapes() -> None:
    report, view = convert(exported(BERT)).report, report_and_view(exported(BERT))[1]
    summary, graph_of_ops = report_figures(report, view)
    text = "".join(summary.drawing.itertext())
    assert text.startswith("evidence" + "not checked on data") and graph_of_ops.name == "graph"
    assert "next: amp_rewrite.repair(model, data, tolerance=1e-2)" in text
    assert "with input_ids 128×128" in text and "findings need no action" in text
    text = "".join(report_figures(report, command="amp-rewrite a/b.onnx")[0].drawing.itertext())
    assert "free dimensions as 128" in text and "next: amp-rewrite a/b.onnx" in text


def test_groups_are_named_after_modules_or_their_first_and_last_op() -> None:
    model = text_model("tied_weights")
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', 'part', 'part.{node.op_type}', 'x']")
    report, view = report_and_view(model)
    names = graph(report, view).data["scopes"]["name"]  # type: ignore[index]
    assert names[1].startswith("part")
    rows = [Row(f"Conv_{i}", "Conv", "float32", reads=(i - 1,)) for i in range(2 * MAX_PARTS)]
    data = graph(report_of_rows(*rows)).data
    names = data["scopes"]["name"][1:]  # type: ignore[index]
    assert names[1:] and names[0].startswith("Conv_0 to Conv_") and names[-1].endswith(f"to Conv_{2 * MAX_PARTS - 1}")
    assert not any("#" in name for name in names)


def chain(*kinds: str, scope: str = "/net/layer.{}/") -> Report:
    rows = [
        Row(f"{scope.format(i // 3)}{kind}_{i}", kind, "float32", inputs=("float32",), outputs=("float32",),
            variables={"T": "float32"}, reads=(i - 1 if i else FIRST_INPUT,)) for i, kind in enumerate(kinds)
    ]  # fmt: skip
    ports = (PortRow("x", "float32"),), (PortRow("y", "float32", len(rows) - 1),)
    return replace(report_of_rows(*rows), inputs=ports[0], outputs=ports[1])


def test_changes_are_drawn_at_their_ops_and_removed_ops_listed_in_the_table() -> None:
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


def test_a_cast_is_drawn_on_the_edges_to_its_readers() -> None:
    x = FIRST_INPUT
    rows = (
        Row("p", "MatMul", "float16", inputs=("float16",), outputs=("float16",), reads=(x,)),
        Row("low", "Relu", "float16", inputs=("float16",), outputs=("float16",), reads=(0,)),
        Row("high", "Exp", "float32", inputs=("float32",), outputs=("float32",), reads=(0,)),
        Row("other", "Exp", "float32", inputs=("float32",), outputs=("float32",), reads=(0,)),
        Row("if", "If", "float32", inputs=("bool",), outputs=("float32",), reads=(NO_ROW, 0, 2)),
    )
    facts = [("p", "float16", "float32", 0), ("p", "float16", "float64", 0)]
    facts += [("p", "float32", "float16", 0), ("high", "float32", "float16", 2), ("x", "float32", "float16", x)]
    casts = [CastRow(value, from_, to, after=after) for value, from_, to, after in facts]
    ports = (PortRow("x", "float32"),), (PortRow("y", "float32", after=0),)
    first = replace(report_of_rows(*rows), casts=tuple(casts), inputs=ports[0], outputs=ports[1])
    casts_drawn = drawn(first)["casts"]
    assert {(cast["value"], cast["from"], cast["to"]): cast["edges"] for cast in casts_drawn} == {
        ("p", "float16", "float32"): [0, 2, 0, 3, 0, 4, 0, 6],
        ("p", "float16", "float64"): [],
        ("p", "float32", "float16"): [],
        ("high", "float32", "float16"): [],
        ("x", "float32", "float16"): [5, 0],
    }


ANY = st.floats(allow_nan=True, allow_infinity=True)
SIZE = st.floats(0.0, allow_infinity=False)
MAYBE = st.one_of(st.none(), ANY)
COUNT = st.integers(0, 5)
NAME = st.text(max_size=4)


def checked(figure: Figure) -> str:
    """Return the text of a figure after checking that its page encodes and its marks are in range."""
    page_of("t", [figure]).encode()
    shares = [
        float(share)
        for share in re.findall(r'(?:[xy]|[xy][12]|c[xy]|width|height)="([^"%]*)%"', html_of(figure.drawing))
    ]
    assert all(-5.0 <= share <= 105.0 for share in shares)
    assert figure.title and figure.lead
    return "".join(figure.drawing.itertext())


def rows(figure: Figure) -> list[list[str]]:
    """Return the cells of the first table."""
    table = next(figure.drawing.iter("tbody"))
    return [["".join(cell.itertext()) for cell in row] for row in table]


def outputs(scores: list[OutputRow], limit: float = 1.0, verdict: str = "ok", notes: Sequence[str] = ()) -> Figure:
    return outputs_figure(scores, Criterion("scaled", limit), verdict, notes)


FITS = st.builds(
    lambda ends, rest: Fit(20, rest[0], max(ends), min(ends), *rest[1:]), st.tuples(SIZE, SIZE), st.tuples(*[COUNT] * 4)
)
SCORES = st.builds(lambda *numbers: scored(*numbers), NAME, COUNT, MAYBE, MAYBE, st.booleans(), NAME)

LIMITS = st.builds(Criterion, st.sampled_from([*MEASURES]), st.floats(0.0))


def scored(output: str, batch: int, score: float | None, scaled: float | None, ok: bool, because: str) -> OutputRow:
    return OutputRow(output, batch, Difference(1, ok, because, score=score, scaled=scaled))


@given(st.dictionaries(NAME, FITS, max_size=6), st.sampled_from([DType.FLOAT16, DType.BFLOAT16]))
def test_any_ranges_are_drawn(values: dict[str, Fit], to: DType) -> None:
    figure = ranges_figure(values, to, "1 batch")
    checked(figure)
    assert len(rows(figure)) == sum(bool(fit.absmax or fit.nonfinite) for fit in values.values())


@given(st.lists(SCORES, max_size=6), LIMITS)
def test_any_scores_are_drawn(scores: list[OutputRow], allowed: Criterion) -> None:
    figure = outputs_figure(scores, allowed, "ok")
    checked(figure)
    assert len(rows(figure)) == len(scores)


MANY = 20_000


def test_of_many_ranges_the_tightest_are_drawn_and_a_masks_fill_is_no_warning() -> None:
    values = {f"v{i}": Fit(9, 0, 2.0 + i % 7, 0.5 / (1 + i % 5)) for i in range(MANY)} | {"big": Fit(9, 0, 7e4, 1.0, 3)}
    figure = ranges_figure(values, DType.FLOAT16, "1 batch")
    checked(figure)
    assert (rows(figure)[0][0], len(rows(figure))) == ("big", 500) and f"{MANY + 1} values" in figure.lead
    assert len(html_of(figure.drawing)) < 300_000
    figure = ranges_figure({"mask": Fit(9, 0, DType.FLOAT.max, 1.0, 3), "x": Fit(9, 0, 9.0, 1.0)}, DType.FLOAT16, "d")
    assert "not fit" not in figure.lead and "The tightest is x" in figure.lead
    assert 'class="span high"' not in html_of(figure.drawing)


def test_of_many_outputs_the_worst_are_drawn_with_caveats_below() -> None:
    scores = [scored(f"y{i}", batch, i * 1e-4, None, i < 90, "off") for i in range(100) for batch in range(3)]
    figure = outputs(scores, 0.009, "failed")
    checked(figure)
    assert {row[0] for row in rows(figure)} == {f"y{i}" for i in range(60, 100)} and "worst are listed" in figure.lead
    html = html_of(outputs([], notes=("random data show little", "<i>NaN</i>")).drawing)
    assert "<li>random data show little</li><li>&lt;i&gt;NaN&lt;/i&gt;</li>" in html
    (figure,) = Delta("a", "b", settings=(("to", "float16", "bfloat16"),)).figures()
    assert rows(figure) == [["to", "float16", "bfloat16"]]


@pytest.mark.parametrize(
    ("fit", "words"),
    [
        (Fit(100, 0, 6.4e4, 1.0), "1.02× to spare"),
        (Fit(100, 0, 7e4, 1.0, 3), "3% overflow"),
        (Fit(100, 5, 7e4, 1.0, 3), "5% infinite or NaN"),
    ],
)
def test_the_tightest_value_is_named_with_its_headroom(fit: Fit, words: str) -> None:
    figure = ranges_figure({"wide": Fit(9, 0, 2.0, 1.0), "tight": fit}, DType.FLOAT16, "1 batch")
    assert f"The tightest is tight: 1 to {fit.absmax:.0f}, {words}." in figure.lead
    assert [row[0] for row in rows(figure)] == ["tight", "wide"]


def test_names_of_any_length_leave_sentences_readable() -> None:
    name = "<b>\u202e" + "n" * 100_000
    for figure in (
        ranges_figure({name: Fit(9, 0, 2.0, 1.0)}, DType.FLOAT16, name),
        outputs([scored(name, 0, 1.0, 1.0, True, name)], verdict=name, notes=[name]),
        *Delta(name, name, (Change("lowered", name, name, why=name),), settings=((name, name, name),)).figures(),
    ):
        assert len(figure.lead) < 1000 and len(figure.title) < 300 and len(html_of(figure.drawing)) < 10_000


LOG = Axis.of("error", [1e-4, 1.0])
EVIL = "<script>alert(1)</script>\"'&\x1b[2J\u202e\ud800\n"


@pytest.mark.parametrize(
    ("number", "place"),
    [(1e-4, 0.0), (1e-2, 0.5), (1.0, 1.0), (1e-9, 0.0), (50.0, 1.0), (0.0, 0.0), (-1.0, 0.0), (math.inf, 1.0),
     (math.nan, 1.0)],
)  # fmt: skip
def test_a_logarithmic_axis_spaces_powers_evenly_and_clamps_others(number: float, place: float) -> None:
    assert LOG.at(number) == pytest.approx(place)


@given(st.lists(ANY, max_size=5), ANY, ANY)
def test_a_larger_number_is_never_drawn_lower(limits: list[float], a: float, b: float) -> None:
    axis = Axis.of("x", limits)
    low, high = sorted(number for number in (a, b) if not math.isnan(number)) if not math.isnan(a + b) else (a, a)
    assert 0.0 <= axis.at(low) <= axis.at(high) <= 1.0


@given(st.lists(ANY, max_size=5))
def test_ticks_ascend_within_the_axis_and_are_few(limits: list[float]) -> None:
    axis = Axis.of("x", limits)
    ticks = axis.ticks()
    assert axis.first < axis.last and 1 <= len(ticks) <= 5
    assert all(a < b for (a, _), (b, _) in pairwise(ticks))
    assert all(10.0**axis.first <= tick <= 10.0**axis.last and words for tick, words in ticks)


def test_numbers_and_ticks_have_few_digits() -> None:
    assert [words for _, words in Axis.of("x", [1e-8, 1e7]).ticks()] == ["1e-8", "1e-4", "1", "10000"]
    texts = [number_text(n) for n in (None, 0.0, 3.0, 0.00012345, 65504.0, 12345.6, 5e9, math.inf, -math.inf, math.nan)]
    assert texts == ["–", "0", "3", "0.000123", "65504", "12300", "5e+09", "infinity", "-infinity", "NaN"]


def test_names_are_cut_and_escaped_everywhere() -> None:
    name = EVIL + "x" * 10_000
    chart = bars(LOG, [Bar(name, 0.1, 0.2, "low", EVIL, name)], [Band(0.1, 1, "low", name)], name=name)
    text = "".join(map(html_of, (chart, numbers_table(("op", EVIL), [(name, "1")], right=1))))
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert "svg" in tags and "script" not in tags and not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800]", text)
    assert len(text) < 20_000
    text.encode()
