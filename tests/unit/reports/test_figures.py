"""Figures of results: what each draws, names and holds as data, for any numbers and for many of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_rewrite import DType
from amp_rewrite.evidence.metric import MEASURES
from amp_rewrite.files.casting import Fit
from amp_rewrite.reports.delta import Delta
from amp_rewrite.reports.evidence import Criterion, Difference, OutputRow
from amp_rewrite.reports.page.measured_figures import outputs_figure, ranges_figure
from amp_rewrite.reports.page.page import Figure, page_of, written
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


def test_many_ranges_leave_the_tightest() -> None:
    values = {f"v{i}": Fit(9, 0, 2.0 + i % 7, 0.5 / (1 + i % 5)) for i in range(MANY)} | {"big": Fit(9, 0, 7e4, 1.0, 3)}
    figure = ranges_figure(values, DType.FLOAT16, "1 batch")
    checked(figure)
    assert (rows(figure)[0][0], len(rows(figure))) == ("big", 500) and f"{MANY + 1} values" in figure.lead
    assert len(written(figure.drawing)) < 300_000


def test_one_point_is_not_drawn() -> None:
    for number in (1, 2):
        ranges = ranges_figure({f"v{i}": Fit(9, 0, 2.0, 1.0) for i in range(number)}, DType.FLOAT16, "1 batch")
        scores = outputs([scored(f"y{i}", 0, 0.5, 0.5, True, "ok") for i in range(number)])
        drawn = [figure.drawing.find("figure") is not None for figure in (ranges, scores)]
        assert drawn == [number > 1] * 2


def test_the_fill_of_a_mask_raises_no_alarm() -> None:
    figure = ranges_figure({"mask": Fit(9, 0, DType.FLOAT.max, 1.0, 3), "x": Fit(9, 0, 9.0, 1.0)}, DType.FLOAT16, "d")
    assert "not fit" not in figure.lead and "The tightest is x" in figure.lead
    assert 'class="span high"' not in written(figure.drawing)


def test_many_outputs_leave_the_worst() -> None:
    scores = [scored(f"y{i}", batch, i * 1e-4, None, i < 90, "off") for i in range(100) for batch in range(3)]
    figure = outputs(scores, 0.009, "failed")
    checked(figure)
    assert {row[0] for row in rows(figure)} == {f"y{i}" for i in range(60, 100)} and "worst are listed" in figure.lead


def test_many_changes_are_counted_and_the_first_listed() -> None:
    change = Change("lowered", "a", "Add", before="float32", after="float16")
    (figure,) = Delta("a", "b", (change,) * 2000).figures()
    assert (figure.lead, len(rows(figure))) == ("2000 lowered. The table holds the first 500.", 500)


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


def test_caveats_and_settings_stand_below_their_figures() -> None:
    html = written(outputs([], notes=("random data show little", "<i>NaN</i>")).drawing)
    assert "<li>random data show little</li><li>&lt;i&gt;NaN&lt;/i&gt;</li>" in html
    (figure,) = Delta("a", "b", settings=(("to", "float16", "bfloat16"),)).figures()
    assert rows(figure) == [["to", "float16", "bfloat16"]]


def test_names_of_any_length_leave_sentences_readable() -> None:
    name = "<b>\u202e" + "n" * 100_000
    for figure in (
        ranges_figure({name: Fit(9, 0, 2.0, 1.0)}, DType.FLOAT16, name),
        outputs([scored(name, 0, 1.0, 1.0, True, name)], verdict=name, notes=[name]),
        *Delta(name, name, (Change("lowered", name, name, why=name),), settings=((name, name, name),)).figures(),
    ):
        assert len(figure.lead) < 1000 and len(figure.title) < 300 and len(written(figure.drawing)) < 10_000
