"""Each rule of a bound, on models whose runs reach it: lowered by 1 %, it would be exceeded."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite.decide.bounds.walk import STEPS
from support.bound_rows import missed, parts
from support.bound_table import ROWS

NEAR = 0.01
ELSEWHERE = {"com.microsoft::BiasAdd", "com.microsoft::GroupNorm"}
"""Rules of operators without a kernel for CPUs."""


@pytest.mark.parametrize("kind", ROWS)
def test_runs_reach_a_rule_within_one_percent_and_do_not_exceed_it(kind: str) -> None:
    """The box in each row, the ball and the sum of a rule in one of them."""
    given, reached = set[str](), set[str]()
    for row in ROWS[kind]:
        probe = row.probe()
        runs = []
        for feed in row.fed():
            assert probe.violations(feed) == []
            runs += [np.asarray(values["y"], np.float64) for _, values in probe.values(feed) if "y" in values]
        state = probe.states["y"]
        assert state.known, state.why
        far = missed(state, runs, NEAR)
        assert "box" not in far, (row.body, far)
        given |= parts(state)
        reached |= parts(state) - far.keys()
    assert reached == given


def test_every_rule_has_a_row_that_reaches_it() -> None:
    assert STEPS.keys() - ELSEWHERE == ROWS.keys()
