"""Guidance of one model in a batch: what they ask of a conversion and of a repair."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from amp_rewrite.pipeline.guidance import Guidance

ALWAYS = {"to": "bfloat16", "headroom": 2.0}
PLAIN: dict[str, Any] = ALWAYS | {"check": False, "progress": print}


@pytest.mark.parametrize(
    ("guidance", "fed", "expected"),
    [
        (Guidance(headroom=2.0), False, PLAIN),
        (Guidance(headroom=2.0, ranges="r.json", budget=3), False, PLAIN | {"ranges": "r.json"}),
        (Guidance(headroom=2.0, check={}), False, PLAIN | {"check": {}}),
        (
            Guidance("d.npz", headroom=2.0, criterion={"rtol": 0.1}),
            True,
            ALWAYS | {"allow_nonfinite": False, "progress": print, "rtol": 0.1},
        ),
        (
            Guidance("d.npz", headroom=2.0, budget=3, allow_nonfinite=True),
            True,
            ALWAYS | {"allow_nonfinite": True, "progress": print, "budget": 3},
        ),
    ],
)
def test_a_model_is_repaired_where_there_are_data_with_all_that_was_asked_for(
    guidance: Guidance, fed: bool, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    repaired = SimpleNamespace(converted="converted")
    monkeypatch.setattr("amp_rewrite.pipeline.convert.convert", lambda _, **words: seen.append(("convert", words)))
    monkeypatch.setattr(
        "amp_rewrite.pipeline.repair.repair", lambda _, feed, **words: seen.append(("repair", words)) or repaired
    )
    feed: Any = object() if fed else None
    found = guidance.convert("model.onnx", {"to": "bfloat16"}, feed, print)
    assert seen == [("repair" if fed else "convert", expected)]
    assert found == (("converted", repaired) if fed else (None, None))


def test_data_and_ranges_guide_and_settings_alone_do_not() -> None:
    guiding = [Guidance("d.npz"), Guidance(ranges="r.json"), Guidance("d.npz", ranges="r.json")]
    assert all(guiding)
    assert not any([Guidance(), Guidance(check={}), Guidance(headroom=2.0, budget=3, criterion={"rtol": 0.1})])
