"""Ops that need float32 get it, so that results are accurate, and near misses stay low."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.emulate import emulate
from suites.harm.case import HIT, NEAR, Case, every, lowered, table
from support import objections
from support.rounded_products import relative_error, rounded_products

RUNS = 300
"""Runs of a model with feedback."""


@dataclass(frozen=True, slots=True, eq=False)
class NeedCase(Case):
    """A model of a class, which is its `principle`.

    `fed`: the input to which each output is fed back. `feeds` is evaluated for each run, with its number as `t`;
    fed-back outputs replace it from the second run on. Schemas rather than kernel tables decide what may be low, and
    nothing is fused.
    """

    fed: Mapping[str, str] = field(default_factory=dict)
    opset: int = 22
    options: Mapping[str, Any] = field(default_factory=lambda: {"target": "onnx", "fuse": "none"})

    def __str__(self) -> str:
        """Return the name of the case in test ids."""
        return " ".join((self.principle, self.kind, self.name, self.to.spelling))


@cache
def conversion(case: NeedCase, safety: str, placement: str = "mincut") -> Converted:
    """Convert the model of a case. The result is shared: never change it."""
    options = {**case.options, "safety": safety, "placement": placement}
    return convert(case.model(), to=case.to, **options)


def warned(case: NeedCase) -> bool:
    """True if the safety rules reported a finding."""
    with_rules, without = ({f.kind for f in conversion(case, s).report.findings} for s in ("default", "none"))
    return bool(with_rules - without - {"mostly_float32"})


@cache
def exact(case: NeedCase) -> list[np.ndarray]:
    return _outputs(case.model(), case)


def error(case: NeedCase, safety: str = "default", placement: str = "mincut") -> float:
    """Run a conversion, emulated; return its error over all runs, relative to the largest magnitude of an output."""
    twin = emulate(conversion(case, safety, placement).model).to_proto()
    return relative_error(exact(case), _outputs(twin, case))


@cache
def error_of_products(case: NeedCase) -> float:
    """Return the error of rounding the operands and results of products."""
    return relative_error(exact(case), _outputs(rounded_products(case.model(), case.to, results=True), case))


def _outputs(model: ModelProto, case: NeedCase) -> list[np.ndarray]:
    """Return each output, stacked over the runs."""
    session: Any = objections.session(model, "BASIC")
    names = [port.name for port in session.get_outputs()]
    state: dict[str, np.ndarray] = {}
    rows = []
    for batch in case.arrays(case.feeds, RUNS if case.fed else 1):
        rows.append(session.run(None, {**batch, **state}))
        state = {case.fed[name]: value for name, value in zip(names, rows[-1], strict=True) if name in case.fed}
    return [np.stack(column) for column in zip(*rows, strict=True)]


CASES = tuple(case for path in sorted(Path(__file__).parent.glob("*.onnxtxt")) for case in table(path, NeedCase))


AS_PRODUCTS = ("raw", "recursions", "states")
"""Classes with accurate results if only products round; a conversion must not be worse there."""
SLACK = {DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}
"""The error that low ops other than products may add: a few roundings of the largest magnitude."""
HITS = [case for case in CASES if case.kind == HIT]


def is_right(case: NeedCase, error: float) -> bool:
    """True if the class of the case allows an error."""
    if case.principle in AS_PRODUCTS:
        return error <= case.tolerance * (1.5 * error_of_products(case) + SLACK[case.to])
    return error <= case.limit


@every(HITS)
def test_results_are_within_tolerance_or_a_finding_warns(case: NeedCase) -> None:
    assert lowered(case).isdisjoint(case.stays.split())
    found = error(case)
    assert is_right(case, found) or (case.principle not in AS_PRODUCTS and warned(case)), found


@every([case for case in CASES if case.kind == NEAR])
def test_near_misses_of_a_need_stay_low_and_accurate(case: NeedCase) -> None:
    assert set(case.lowers.split()) <= lowered(case)
    assert error(case) <= case.limit


@pytest.mark.parametrize("name", dict.fromkeys((case.principle, case.name) for case in HITS), ids=" ".join)
def test_without_safety_rules_a_hit_fails_in_at_least_one_type(name: tuple[str, str]) -> None:
    """With either placement, because one may keep an op in float32 by chance."""
    cases = [case for case in HITS if (case.principle, case.name) == name]
    trials = ((case, placement) for placement in ("propagate", "mincut") for case in cases)
    assert not all(is_right(case, error(case, "none", placement)) for case, placement in trials)
