"""Charts: where numbers stand on an axis, which marks show them, and those that an axis cannot show."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_rewrite.reports.page.axis import Axis, binned, number_text
from amp_rewrite.reports.page.chart import Line, numbers, plot, rows, sample
from amp_rewrite.reports.page.marks import (
    backdrop,
    band,
    caption,
    envelope,
    limit,
    pins,
    spans,
    spot,
    stretch,
    upright,
)
from amp_rewrite.reports.page.markup import written

ANY = st.floats(allow_nan=True, allow_infinity=True)
LOG = Axis.logarithmic("error", [1e-4, 1.0])
DEPTH = Axis.linear("op", [0, 10], zero=True)
EVIL = "<script>alert(1)</script>\"'&\x1b[2J\u202e\ud800\n"


def attributes(marks: list[Element], name: str) -> list[str | None]:
    return [mark.get(name) for mark in marks]


# -- axes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "place"),
    [(1e-4, 0.0), (1e-2, 0.5), (1.0, 1.0), (1e-9, 0.0), (50.0, 1.0), (0.0, 0.0), (-1.0, 0.0), (math.inf, 1.0)],
)
def test_a_logarithmic_axis_places_powers_evenly_and_others_at_its_ends(number: float, place: float) -> None:
    assert LOG.at(number) == pytest.approx(place)
    assert LOG.holds(number) is (1e-4 <= number <= 1.0)


def test_nan_has_no_place() -> None:
    assert LOG.at(math.nan) is None and not LOG.holds(math.nan)


@given(st.lists(ANY, max_size=5), ANY, ANY, st.sampled_from([Axis.linear, Axis.logarithmic]))
def test_a_larger_number_never_stands_lower(shown: list[float], a: float, b: float, kind: type[Axis]) -> None:
    axis = kind("x", shown)  # type: ignore[call-arg, arg-type]
    low, high = (axis.at(number) for number in (min(a, b), max(a, b)))
    assert low is None or high is None or 0.0 <= low <= high <= 1.0


@given(st.lists(ANY, max_size=5), st.integers(2, 9), st.sampled_from([Axis.linear, Axis.logarithmic]))
def test_ticks_ascend_within_the_axis_and_are_few(shown: list[float], most: int, kind: type[Axis]) -> None:
    axis = kind("x", shown)  # type: ignore[call-arg, arg-type]
    ticks = axis.ticks(most)
    assert 1 <= len(ticks) <= most
    assert all(a < b for (a, _), (b, _) in pairwise(ticks))
    span = axis.high - axis.low
    assert all(axis.low - 1e-9 * span <= tick <= axis.high + 1e-9 * span for tick, _ in ticks)
    assert all(words and "nan" not in words for _, words in ticks)


def test_ticks_of_powers_are_labelled() -> None:
    assert [words for _, words in Axis.logarithmic("x", [1e-8, 1e7]).ticks()] == ["1e-6", "1e-3", "1", "1000", "1e6"]
    assert [words for _, words in Axis.linear("x", [0, 9]).ticks()] == ["0", "2", "4", "6", "8"]


@pytest.mark.parametrize("shown", [[], [math.nan], [math.inf, -math.inf], [0.0], [None]])
def test_an_axis_of_nothing_has_two_ends(shown: list[float]) -> None:
    for axis in (Axis.linear("x", shown), Axis.logarithmic("x", shown)):
        assert axis.low < axis.high and axis.ticks()


def test_numbers_in_few_digits() -> None:
    shown = [number_text(n) for n in (None, 0.0, 3.0, 0.00012345, 65504.0, 12345.6, 5e9, math.inf, -math.inf, math.nan)]
    assert shown == ["–", "0", "3", "0.000123", "65504", "12300", "5e+09", "infinity", "-infinity", "NaN"]


# -- bins ----------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), ANY), max_size=60), st.integers(1, 12))
def test_bins_are_few_and_lose_no_extreme(series: list[float | None], most: int) -> None:
    bins = binned(series, series, most)
    assert len(bins) <= most
    assert all(a.last < b.first for a, b in pairwise(bins))
    seen = [math.inf if math.isnan(n) else n for n in series if n is not None]
    assert [min(b.low for b in bins), max(b.high for b in bins)] == [min(seen), max(seen)] if seen else not bins


# -- marks ---------------------------------------------------------------------------------------------


def test_a_band_lies_between_its_numbers() -> None:
    (box,) = band(LOG, 1e-3, 1e-2, "low")
    assert (box.get("y"), box.get("height")) == ("50%", "25%")
    assert band(LOG, 5.0, 9.0, "high") == []
    (words,) = caption(LOG, 1e-3, 1e-2, "normal")
    assert (words.text, words.get("y")) == ("normal", "50%")
    assert caption(LOG, 1e-3, 1.1e-3, "normal") == []


def test_a_limit_stands_on_the_axis_or_not_at_all() -> None:
    line, words = limit(LOG, 1e-2, "tolerance 0.01")
    assert (line.get("y1"), line.get("class"), words.text) == ("50%", "tolerance", "tolerance 0.01")
    assert limit(LOG, 2.0, "tolerance 2") == []


def test_spans_and_envelopes_take_their_places() -> None:
    (bar,) = spans(DEPTH, LOG, [(5, 1e-2, 1.0, "v")], "low")
    assert (bar.get("x"), bar.get("width"), bar.get("y")) == ("51%", "8%", "-0.2%")
    (area,) = envelope(DEPTH, LOG, binned([1e-2, 1e-4], [1.0, 1e-2], 1), "high")
    assert area[0].get("d") == "M0 1002V-2H200V1002Z"


@given(st.lists(st.tuples(st.floats(0, 10), ANY), max_size=8))
def test_pins_never_cover_each_other(places: list[tuple[float, float]]) -> None:
    drawn = pins(DEPTH, LOG, [(place, number, str(i)) for i, (place, number) in enumerate(places)])
    spots = [tuple(float((pin.get(name) or "").rstrip("%")) for name in ("x", "y")) for pin in drawn]
    for i, (x, y) in enumerate(spots):
        assert all(abs(x - a) > 6.4 or abs(y - b) > 6.4 for a, b in spots[:i])


def test_marks_of_a_row() -> None:
    (bar,) = stretch(DEPTH, 2.0, 4.0, "low", "two to four")
    assert (bar.get("x"), bar.get("width"), bar.find("title").text) == ("20%", "20%", "two to four")  # type: ignore[union-attr]
    assert attributes(backdrop(DEPTH, 5.0, math.inf, "high"), "x") == ["50%"]
    assert attributes(upright(DEPTH, 5.0, "tolerance"), "x1") == ["50%"] and upright(DEPTH, 11.0, "tolerance") == []
    assert [spot(DEPTH, number, "low")[0].tag for number in (3.0, math.nan, 99.0, -1.0)] == ["circle"] + ["text"] * 3
    assert spot(DEPTH, None, "low") == [] and stretch(DEPTH, 4.0, 2.0, "low") == []


# -- charts --------------------------------------------------------------------------------------------


def test_names_are_cut_and_escaped_everywhere() -> None:
    name = EVIL + "x" * 10_000
    drawn = [
        plot(DEPTH, LOG, [*spans(DEPTH, LOG, [(1, 0.1, 0.2, name)], "low"), *limit(LOG, 0.1, EVIL)], name=name),
        rows(DEPTH, [Line(name, [], EVIL)], name=name, legend=[sample("low", EVIL)]),
        numbers(("op", EVIL), [(name, "1")], right=1),
    ]
    text = "".join(map(written, drawn))
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert "svg" in tags and "script" not in tags and not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800]", text)
    assert len(text) < 20_000
    text.encode()


def test_a_chart_of_nothing_still_has_its_axes() -> None:
    text = written(plot(Axis.linear("x", []), Axis.logarithmic("y", []), [], name="nothing"))
    assert 'aria-label="nothing"' in text and "<line" in text
    assert "row" in written(rows(DEPTH, [], name="nothing"))


def test_a_table_aligns_its_numbers_and_keeps_short_words_together() -> None:
    text = written(numbers(("op", "error"), [("a", "0.1"), ("b" * 30, "0.2")], right=1, note="Two of them."))
    assert text.count('class="number"') == 3 and text.count('class="short"') == 2 and "Two of them." in text
