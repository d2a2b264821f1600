"""The page of what a run found."""

from __future__ import annotations

from suites.conformance.page import page
from suites.conformance.run import Results
from suites.conformance.trial import MODES, Ground, Outcome


def page_of(verdict: str) -> str:
    results = Results()
    results.add(Ground("node/test_a", "counted"), [Outcome("node/test_a", mode, verdict, note="why") for mode in MODES])
    return page(results)


def test_a_section_about_data_stands_there_only_if_a_case_needs_data() -> None:
    assert "### data" not in page_of("right")
    assert "- `node/test_a`: every mode (data: why)" in page_of("data").split("### data")[1]
