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

from amp_rewrite.reports.page.chart import (
    Axis,
    Line,
    backdrop,
    number_text,
    numbers,
    rows,
    sample,
    spot,
    stretch,
    upright,
    written,
)

ANY = st.floats(allow_nan=True, allow_infinity=True)
LOG = Axis.logarithmic("error", [1e-4, 1.0])
DEPTH = Axis.linear("op", [0, 10])
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


# -- marks ---------------------------------------------------------------------------------------------


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
        rows(DEPTH, [Line(name, stretch(DEPTH, 1, 2, "low", name), EVIL)], name=name, legend=[sample("low", EVIL)]),
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


def test_a_table_aligns_its_numbers_and_keeps_short_words_together() -> None:
    text = written(numbers(("op", "error"), [("a", "0.1"), ("b" * 30, "0.2")], right=1, note="Two of them."))
    assert text.count('class="number"') == 3 and text.count('class="short"') == 2 and "Two of them." in text
