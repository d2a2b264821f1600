"""Pages of reports and diffs in a browser: content, keyboard control and safety from hostile names."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from amp_rewrite import Report, convert, diff
from amp_rewrite.errors import Finding
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.reports.delta import Delta
from amp_rewrite.reports.page.page import page_of
from amp_rewrite.reports.page.report_figures import report_figures
from amp_rewrite.reports.rows import CastRow, Header, PortRow, Row, Totals
from amp_rewrite.reports.sources import report_in
from suites.browser.conftest import NARROW, WIDE, Visit, Visiting
from support.corpus import exported, text_model

pytestmark = [pytest.mark.browser, pytest.mark.slow]

BERT = "tests/models/bert_ts13.onnx"


@cache
def bert() -> Converted:
    return convert(exported(BERT), fuse="basic")


@cache
def bert_page() -> str:
    return bert().to_html()


def legend(visit: Visit) -> dict[str, int]:
    """Return the counts beside the graph's colors."""
    keys = visit.page.locator("#graph .legend .key")
    return {key.get_attribute("data-class"): int(key.get_attribute("data-count")) for key in keys.all()}


def find(visit: Visit, text: str) -> None:
    visit.page.get_by_label("Search ops by name or type").fill(text)
    visit.page.keyboard.press("Enter")


def details(visit: Visit) -> str:
    text: str = visit.page.locator(".details").inner_text()
    return text


# -- kinds of pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conversion", "inventory", "in_file", "empty", "if_in_loop", "local_function"])
def test_a_page_opens_without_errors_and_requests_and_fits(visit: Visiting, name: str) -> None:
    pages = {
        "conversion": bert_page,
        "inventory": lambda: report_in(exported(BERT)).to_html(),
        "in_file": lambda: Report.from_json(bert().report.to_json(), "r.json").to_html(),
        "empty": lambda: Report(Header("empty", 8, {}), Totals(), ()).to_html(),
    }
    visited = visit(pages[name]() if name in pages else convert(text_model(name)).to_html(), width=NARROW)
    assert visited.quiet, (visited.errors, visited.requests)
    assert visited.page.locator("main h1").count() == 1
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= NARROW


def test_the_counts_on_the_page_match_the_json(visit: Visiting) -> None:
    data = {"graph": bert().figures()[1].data}
    visited = visit(bert_page())
    rows = range(data["graph"]["rows"])
    sides = [data["graph"]["ops"]["side"][v] for v in rows if data["graph"]["ops"]["place"][2 * v] >= 0]
    counts = dict(zip(("low", "high", "muted"), map(sides.count, range(3)), strict=True))
    assert legend(visited) == counts | {"cast": len(data["graph"]["casts"])}
    in_page = visited.page.evaluate("JSON.parse(document.getElementById('data').textContent)")
    assert in_page == data


# -- reasons, Casts, search ------------------------------------------------------------------------------


def test_a_click_on_an_op_shows_its_chain_of_reasons_and_its_list_entry(visit: Visiting) -> None:
    report = bert().report
    at = next(
        i
        for i, row in enumerate(report.rows)
        if row.because_row >= 0 and row.rule and row.op not in ("Constant", "Identity")
    )
    row = report.rows[at]
    visited = visit(bert_page())
    find(visited, row.path)  # expands the scopes around it
    visited.page.locator(".details .close").click()
    visited.page.locator(f"[data-part='{at}']").click()
    text = details(visited)
    assert row.path in text and str(row.rule) in text and report.rows[row.because_row].path in text
    assert row.source in text and row.outputs[0] in text
    assert visited.quiet, visited.errors


def test_casts_are_drawn_on_edges_with_bytes_and_visited_in_turn(visit: Visiting) -> None:
    casts = bert().figures()[1].data["casts"]
    visited = visit(bert_page())
    for cast in (*casts, casts[0]):
        visited.page.get_by_role("button", name="Go to the next Cast").click()
        assert cast["value"] in details(visited) and "moved" in details(visited)
        edge = visited.page.locator(".edge.withcast.near")
        assert edge.count() >= 1
    assert visited.page.locator(".castmark").count() > 1


def test_the_search_finds_names_and_types(visit: Visiting) -> None:
    visited = visit(bert_page())
    expected = [row.path for row in bert().report.rows if "softmax" in (row.op + row.path).lower()]
    find(visited, "softmax")
    assert visited.page.locator(".found").inner_text() == f"1 of {len(expected)}"
    assert expected[0] in details(visited)
    visited.page.keyboard.press("Enter")
    assert expected[1] in details(visited)


# -- keyboard, print, no script --------------------------------------------------------------------------


def test_the_graph_works_with_only_a_keyboard(visit: Visiting) -> None:
    visited = visit(bert_page())
    page = visited.page
    page.get_by_role("button", name="Fit the graph").focus()
    page.keyboard.press("Tab")
    focused = "document.activeElement.getAttribute('data-part')"
    first = page.evaluate(focused)
    assert first is not None
    page.keyboard.press("ArrowDown")
    second = page.evaluate(focused)
    assert second not in (None, first)
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) not in (None, second)

    find(visited, "Softmax")
    page.keyboard.press("Escape")  # out of the search, into the graph
    page.keyboard.press("Enter")
    assert "Softmax" in details(visited)
    page.keyboard.press("Escape")
    assert "Select an op" in details(visited)
    before = page.locator("[data-part]").count()
    page.keyboard.press("Escape")  # collapses the scope around it
    assert page.locator("[data-part]").count() < before
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    page.keyboard.press("Enter")
    assert page.locator("[data-part]").count() == before
    page.keyboard.press("c")
    assert "Cast" in details(visited)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    assert visited.quiet, visited.errors


def test_printing_shows_the_whole_graph_without_controls(visit: Visiting) -> None:
    visited = visit(bert_page())
    visited.page.emulate_media(media="print")
    assert not visited.page.locator(".toolbar").is_visible()
    visited.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert visited.page.locator(".canvas").get_attribute("viewBox")
    visited.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not visited.page.locator(".canvas").get_attribute("viewBox")


def test_the_summary_needs_no_script(visit: Visiting, chromium: object) -> None:
    context = chromium.new_context(java_script_enabled=False)  # type: ignore[attr-defined]
    page = context.new_page()
    page.set_content(bert_page())
    assert page.locator("#summary .card").count() > 5
    assert "needs JavaScript" in page.locator("#graph").inner_text()
    context.close()


# -- hostile and large -----------------------------------------------------------------------------------

EVIL = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "]]><!--",
    "\"'><img src=x onerror=alert(3)>",
    "a\u202eb\u2066c\u200f",
    "line\nbreak\x00\x1b[2J",
    "lone\ud800surrogate",
    "javascript:alert(4)",
    "{{7*7}}${alert(5)}`",
    "__proto__",
    "/" * 300,
    "x" * 5000,
)


def hostile() -> Report:
    """Build a report with only hostile texts."""
    rows = tuple(
        Row(
            f"{evil}/{evil}{i}",
            evil,
            "float16" if i % 2 else evil,
            evil if i % 3 == 0 else "",
            variables={evil: "float16", "U": "float32"},
            color=evil,
            rule=evil,
            because=evil,
            because_row=i - 1,
            note=evil,
            source=evil,
            reason=evil,
            inputs=(evil, "float16"),
            outputs=("float32",),
            reads=(i - 1, i - 2) if i > 1 else (),
        )
        for i, evil in enumerate(EVIL)
    )
    casts = tuple(
        CastRow(evil, "float32", "float16", reason=evil, readers=1, after=i) for i, evil in enumerate(EVIL[:-1])
    )
    findings = tuple(Finding(evil, evil, f"{evil} · {evil} · {evil}") for evil in EVIL)
    ports = (PortRow(EVIL[0], EVIL[1]),), (PortRow(EVIL[2], "float32", len(rows) - 1),)
    header = Header(EVIL[1], 8, {EVIL[0]: 1}, to="float16")
    return Report(header, Totals(ops=len(rows)), rows, casts, (), findings, *ports, {EVIL[0]: 12})


def walk(visited: Visit, ops: int) -> None:
    """Open everything on a page; none of it may be markup or a script."""
    page = visited.page
    page.get_by_role("button", name="Expand all scopes").click()
    for v in range(ops):
        page.locator(f"[data-part='{v}']").focus()
        page.keyboard.press("Enter")
        assert details(visited)
    for table in page.locator("summary").all():
        table.click()
    assert page.locator("img, iframe, script:not(#data):not(:last-of-type), a").count() == 0
    assert page.locator("[onerror], [onclick]").count() == 0
    assert not set(page.inner_text("body")) & set("\u202e\u2066\u200f\x00\x1b\ud800")


def test_hostile_names_run_nothing_and_break_nothing(visit: Visiting) -> None:
    report = hostile()
    visited = visit(report.to_html())
    walk(visited, len(EVIL))
    for _ in report.casts:
        visited.page.keyboard.press("c")
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= WIDE
    assert visited.quiet, (visited.errors, visited.dialogs, visited.requests)


def test_a_page_runs_only_its_own_script_and_loads_nothing(visit: Visiting) -> None:
    page = visit(bert_page()).page
    page.evaluate(
        """() => {
            document.body.append(Object.assign(document.createElement("script"), {textContent: "window.ran = 1"}));
            document.body.insertAdjacentHTML("beforeend", "<img src='//example.org/a' onerror='window.ran = 2'>");
        }"""
    )
    assert page.evaluate("window.ran") is None


def large(rows: int, named: bool) -> Report:
    """Build a report of a chain with skips over two ops."""
    chain = tuple(
        Row(
            f"/net/stage.{i // 1000}/layer.{i // 10}/Op_{i}" if named else f"op_{i}",
            "Tanh" if i % 10 == 9 else "MatMul",
            "float32" if i % 10 == 9 else "float16",
            rule="deny" if i % 10 == 9 else "allow_root",
            inputs=("float16",),
            outputs=("float16",),
            reads=(i - 1, i - 3) if i > 2 else (i - 1,),
        )
        for i in range(rows)
    )
    return replace(hostile(), model=Header("net", 8, {}, to="float16"), rows=chain, casts=(), outputs=())


@pytest.mark.parametrize("named", [True, False])
def test_a_graph_of_many_ops_stays_small_on_screen(visit: Visiting, named: bool) -> None:
    rows = 20_000
    report = large(rows, named)
    visited = visit(page_of("large", report_figures(report)[1:]))
    page = visited.page
    assert 0 < page.locator("[data-part]").count() <= 200
    assert legend(visited)["high"] == rows // 10
    page.get_by_role("button", name="Expand all scopes").click()
    assert page.locator("[data-part]").count() < 3000
    page.get_by_role("button", name="Collapse all scopes", exact=True).click()
    find(visited, "op_17777")
    assert report.rows[17_777].path in details(visited)
    assert page.locator("[data-part='17777']").count() == 1
    assert visited.quiet, visited.errors


# -- wide names ------------------------------------------------------------------------------------------


def test_wide_names_fit_their_boxes_and_are_cut_between_characters(visit: Visiting) -> None:
    row = Row("\U0001f600" * 99, "\u6a21" * 99, "float32", inputs=("float32",), outputs=("float32",), reads=(-1,))
    page = visit(Report(Header("m", 8, {"": 17}), Totals(ops=1), (row,), (), ()).to_html()).page
    texts = page.locator("[data-part='0'] text")
    assert "\ufffd" not in "".join(texts.all_text_contents())
    assert page.evaluate("""() => {
        const node = document.querySelector("[data-part='0']");
        const right = node.querySelector("rect").getBoundingClientRect().right;
        return [...node.querySelectorAll("text")].every((text) => text.getBoundingClientRect().right <= right);
    }""")
    assert all(text.isprintable() and text.encode("utf-8") for text in texts.all_text_contents())


# -- diffs -----------------------------------------------------------------------------------------------


@cache
def lowered() -> Delta:
    """Compare a model with its conversion: ops lowered, added and removed, Casts added."""
    return diff(exported(BERT), convert(exported(BERT), fuse="basic"))


@cache
def kept() -> Delta:
    """Compare two conversions of a model: a few ops raised, with Casts around them."""
    return diff(convert(exported(BERT), fuse="basic"), convert(exported(BERT), fuse="basic", keep=["op=Add"]))


@pytest.mark.parametrize(("compare", "width", "dark"), [(lowered, WIDE, False), (kept, NARROW, True)])
def test_the_page_of_a_diff_opens_without_errors_and_its_counts_are_right(
    visit: Visiting, compare: object, width: int, dark: bool
) -> None:
    delta = compare()  # type: ignore[operator]
    visited = visit(delta.to_html(), width=width, dark=dark)
    assert visited.quiet, visited.errors
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= width
    counts = legend(visited)
    ops = Counter(kind for kind, _ in {(change.kind, change.name) for change in delta.changes})
    found = [counts.get(name, 0) for name in ("low", "high", "only")]
    assert found == [ops["lowered"], ops["raised"], delta.counts["added"]]
    assert counts.get("cast alone", 0) == sum(cast.sign == "+" for cast in delta.casts)
    assert sum(delta.counts.values()) > 10


def test_keys_visit_changes_in_turn_and_each_is_announced_and_explained(visit: Visiting) -> None:
    visited = visit(kept().to_html())
    page = visited.page
    page.locator("[data-part][tabindex='0']").focus()
    number = len({change.name for change in kept().changes})
    seen = set()
    for turn in range(1, number + 1):
        page.keyboard.press("n")
        assert f"({turn} of {number})" in page.locator(".status").inner_text()
        seen.add(page.locator(".node.chosen").get_attribute("data-part"))
    assert len(seen) == number
    page.keyboard.press("N")
    assert f"({number - 1} of {number})" in page.locator(".status").inner_text()
    chosen = page.locator(".node.chosen")
    assert "raised: float16 → float32" in chosen.get_attribute("aria-label")
    rule = kept().report.rows[int(str(chosen.get_attribute("data-part")))].rule  # type: ignore[union-attr]
    assert "raised: float16 → float32" in details(visited) and str(rule) in details(visited)
    page.keyboard.press("Escape")
    assert page.locator(".node.chosen").count() == 0
    assert visited.quiet, visited.errors


def test_new_items_are_marked_and_new_casts_are_visited_first(visit: Visiting) -> None:
    visited = visit(lowered().to_html())
    page = visited.page
    page.get_by_role("button", name="Expand all scopes").click()
    added = page.locator(".node.changed.alone").first
    assert added.locator(".head").text_content().startswith("+ ")  # type: ignore[union-attr]
    assert added.locator(".box").evaluate("(box) => getComputedStyle(box).strokeDasharray") != "none"
    assert page.locator(".node.op.changed.low").first.locator(".head").text_content().startswith("▼ ")  # type: ignore
    assert page.locator(".castmark.changed").first.text_content().startswith("+ ")  # type: ignore[union-attr]
    page.get_by_role("button", name="Go to the next Cast").click()
    assert "new: " in details(visited)
    assert f"of {sum(cast.sign == '+' for cast in lowered().casts)})" in page.locator(".status").inner_text()


def test_the_table_of_differences_links_to_the_graph(visit: Visiting) -> None:
    visited = visit(kept().to_html(), width=NARROW)
    row = visited.page.locator("#changes details tbody tr").first
    name = row.locator("td").nth(1).inner_text()
    assert row.bounding_box()["height"] < 120  # names are not broken letter by letter
    row.get_by_role("button").click()
    assert name in details(visited)


def test_hostile_names_in_a_diff_run_nothing(visit: Visiting) -> None:
    report = hostile()
    rows = tuple(row._replace(outputs=("float16",)) for row in report.rows[:-1])
    visited = visit(diff(report, replace(report, rows=rows, outputs=(), casts=())).to_html())
    walk(visited, len(EVIL) - 1)
    assert visited.quiet, (visited.errors, visited.dialogs, visited.requests)
