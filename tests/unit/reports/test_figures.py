"""Figures of results: what each draws, names and holds as data, for any numbers and for many of them."""

import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_rewrite import DType
from amp_rewrite.evidence.metric import MEASURES
from amp_rewrite.files.casting import Fit
from amp_rewrite.reports.delta import Delta
from amp_rewrite.reports.evidence import Criterion, Difference, OutputRow
from amp_rewrite.reports.page.measured_figures import Axis, Band, Bar, bars, number_text, outputs_figure, ranges_figure
from amp_rewrite.reports.page.page import Figure, numbers_table, page_of, written
from amp_rewrite.reports.rows import Change

ANY = st.floats(allow_nan=True, allow_infinity=True)
SIZE = st.floats(0.0, allow_infinity=False)
MAYBE = st.one_of(st.none(), ANY)
COUNT = st.integers(0, 5)
NAME = st.text(max_size=4)


def checked(figure: Figure) -> str:
    """Return the text of a figure, once its page is written and every mark stands near its area."""
    page_of("t", [figure]).encode()
    shares = [
        float(share)
        for share in re.findall(r'(?:[xy]|[xy][12]|c[xy]|width|height)="([^"%]*)%"', written(figure.drawing))
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


# -- any numbers ---------------------------------------------------------------------------------------

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


# -- many numbers --------------------------------------------------------------------------------------

MANY = 20_000


def test_many_ranges_leave_the_tightest_and_the_fill_of_a_mask_raises_no_alarm() -> None:
    values = {f"v{i}": Fit(9, 0, 2.0 + i % 7, 0.5 / (1 + i % 5)) for i in range(MANY)} | {"big": Fit(9, 0, 7e4, 1.0, 3)}
    figure = ranges_figure(values, DType.FLOAT16, "1 batch")
    checked(figure)
    assert (rows(figure)[0][0], len(rows(figure))) == ("big", 500) and f"{MANY + 1} values" in figure.lead
    assert len(written(figure.drawing)) < 300_000
    figure = ranges_figure({"mask": Fit(9, 0, DType.FLOAT.max, 1.0, 3), "x": Fit(9, 0, 9.0, 1.0)}, DType.FLOAT16, "d")
    assert "not fit" not in figure.lead and "The tightest is x" in figure.lead
    assert 'class="span high"' not in written(figure.drawing)


def test_many_outputs_leave_the_worst_and_caveats_stand_below() -> None:
    scores = [scored(f"y{i}", batch, i * 1e-4, None, i < 90, "off") for i in range(100) for batch in range(3)]
    figure = outputs(scores, 0.009, "failed")
    checked(figure)
    assert {row[0] for row in rows(figure)} == {f"y{i}" for i in range(60, 100)} and "worst are listed" in figure.lead
    html = written(outputs([], notes=("random data show little", "<i>NaN</i>")).drawing)
    assert "<li>random data show little</li><li>&lt;i&gt;NaN&lt;/i&gt;</li>" in html
    (figure,) = Delta("a", "b", settings=(("to", "float16", "bfloat16"),)).figures()
    assert rows(figure) == [["to", "float16", "bfloat16"]]


# -- what is said --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fit", "words"),
    [
        (Fit(100, 0, 6.4e4, 1.0), "1.02× to spare"),
        (Fit(100, 0, 7e4, 1.0, 3), "3 % overflow"),
        (Fit(100, 5, 7e4, 1.0, 3), "5 % infinite or NaN"),
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
        assert len(figure.lead) < 1000 and len(figure.title) < 300 and len(written(figure.drawing)) < 10_000


# -- axes and tables ----------------------------------------------------------------------------------

LOG = Axis.of("error", [1e-4, 1.0])
EVIL = "<script>alert(1)</script>\"'&\x1b[2J\u202e\ud800\n"


@pytest.mark.parametrize(
    ("number", "place"),
    [(1e-4, 0.0), (1e-2, 0.5), (1.0, 1.0), (1e-9, 0.0), (50.0, 1.0), (0.0, 0.0), (-1.0, 0.0), (math.inf, 1.0),
     (math.nan, 1.0)],
)  # fmt: skip
def test_a_logarithmic_axis_places_powers_evenly_and_others_at_its_ends(number: float, place: float) -> None:
    assert LOG.at(number) == pytest.approx(place)


@given(st.lists(ANY, max_size=5), ANY, ANY)
def test_a_larger_number_never_stands_lower(shown: list[float], a: float, b: float) -> None:
    axis = Axis.of("x", shown)
    low, high = sorted(number for number in (a, b) if not math.isnan(number)) if not math.isnan(a + b) else (a, a)
    assert 0.0 <= axis.at(low) <= axis.at(high) <= 1.0


@given(st.lists(ANY, max_size=5))
def test_ticks_ascend_within_the_axis_and_are_few(shown: list[float]) -> None:
    axis = Axis.of("x", shown)
    ticks = axis.ticks()
    assert axis.first < axis.last and 1 <= len(ticks) <= 5
    assert all(a < b for (a, _), (b, _) in pairwise(ticks))
    assert all(10.0**axis.first <= tick <= 10.0**axis.last and words for tick, words in ticks)


def test_numbers_and_ticks_have_few_digits() -> None:
    assert [words for _, words in Axis.of("x", [1e-8, 1e7]).ticks()] == ["1e-8", "1e-4", "1", "10000"]
    shown = [number_text(n) for n in (None, 0.0, 3.0, 0.00012345, 65504.0, 12345.6, 5e9, math.inf, -math.inf, math.nan)]
    assert shown == ["–", "0", "3", "0.000123", "65504", "12300", "5e+09", "infinity", "-infinity", "NaN"]


def test_names_are_cut_and_escaped_everywhere() -> None:
    name = EVIL + "x" * 10_000
    chart = bars(LOG, [Bar(name, 0.1, 0.2, "low", EVIL, name)], [Band(0.1, 1, "low", name)], name=name)
    text = "".join(map(written, (chart, numbers_table(("op", EVIL), [(name, "1")], right=1))))
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert "svg" in tags and "script" not in tags and not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800]", text)
    assert len(text) < 20_000
    text.encode()
