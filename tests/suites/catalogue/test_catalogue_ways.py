"""Every case of the catalogue in other modes of conversion: other types, targets, fusions, opsets."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from suites.catalogue.case import Case, converted, lowered, of_result
from suites.catalogue.test_catalogue import CASES

MODES: Mapping[str, Mapping[str, str]] = {
    "bfloat16 at the opset that serves it": {"to": "bfloat16", "opset": "auto"},
    "one type per op": {"target": "tensorrt"},
    "not fused": {"fuse": "none"},
}
NORMED = "an instance norm of small changes on a large offset that the caller feeds"  # no CUDA kernel at opset 22


def _in(mode: str) -> list[Case]:
    """Return the cases in a mode; another type excludes cases that state theirs. Casts are counted elsewhere."""
    options = MODES[mode]
    cases = [case for case in CASES if not ("to" in case.options and "to" in options)]
    if "opset" in options:  # onnxruntime's CPU provider has no kernel for the random numbers of opset 22
        cases = [case for case in cases if "Random" not in case.text]
    return [replace(case, casts=None, options={**case.options, **options}) for case in cases]


@pytest.mark.parametrize("mode", MODES)
def test_every_case_is_valid_opens_and_computes_the_same_in_every_mode(mode: str) -> None:
    found = {case.name: texts for case in _in(mode) if (texts := of_result(case, converted(case).model))}
    assert found == {}


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_that_converts_nothing_would_be_noticed(mode: str) -> None:
    """Models below opset 13 are not moved to opsets in which convolutions, Pad and Clip have bfloat16."""
    idle = {case.name for case in _in(mode) if case.lowers and case.opset >= 13 and not lowered(case)}
    assert idle == ({NORMED} if mode == "bfloat16 at the opset that serves it" else set())
