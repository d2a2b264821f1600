"""Charts: where numbers stand on an axis, which bars show them, and those that an axis cannot show."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_rewrite.reports.page.page import Axis, Band, Bar, bars, number_text, numbers_table, written

ANY = st.floats(allow_nan=True, allow_infinity=True)
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


def test_bars_stand_before_bands() -> None:
    shown = [Bar("a", 0.01, 0.1, "low", "2", "some words"), Bar("b", math.inf, math.inf, "high")]
    drawn = bars(LOG, shown, [Band(0.01, math.inf, "high", "too large")], name="ops")
    marks = [rect for rect in drawn.iter("rect") if str(rect.get("x")).endswith("%")]
    spans, band = ([rect for rect in marks if str(rect.get("class")).startswith(kind)] for kind in ("span", "band"))
    assert [(bar.get("x"), bar.get("width")) for bar in spans] == [("50%", "25%"), ("99.7%", "0.3%")]
    assert spans[0].findtext("title") == "some words" and {b.get("x") for b in band} == {"50%"}
    assert "too large" in written(drawn)


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


def test_a_table_aligns_its_numbers_and_keeps_short_words_together() -> None:
    text = written(numbers_table(("op", "error"), [("a", "0.1"), ("b" * 30, "0.2")], right=1, note="Two of them."))
    assert text.count('class="number"') == 3 and text.count('class="short"') == 2 and "Two of them." in text
