"""Trials: each made once, within a budget, and judged with the margin that real verdicts teach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from amp_rewrite import emulate
from amp_rewrite.evidence.conditions import Conditions
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.metric import Criterion, criterion
from amp_rewrite.evidence.search import BudgetSpent, Trial, Trials
from amp_rewrite.evidence.verdict import FedData, ModelRun, Verdict
from amp_rewrite.evidence.verify import Side
from amp_rewrite.files.model import Model
from amp_rewrite.pipeline.conversion import finish
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.reports.measurements import Difference, OutputRow
from amp_rewrite.settings.request import Request
from support.cases import build

NONE, ONE, BOTH = frozenset[int](), frozenset({0}), frozenset({0, 1})
NEAR = criterion(tolerance=1.0)


def verdict(score: float, by: Criterion = NEAR) -> Verdict:
    row = OutputRow("y", 0, Difference(4, by.passes(score), "so far apart", compared=4, score=score))
    return Verdict(ModelRun("a", ""), ModelRun("b", ""), FedData("data", False, 1), by, (row,))


class _Painted(frozenset[int]):
    """A set of pins that stands for the coloring with it."""

    float32_ops = property(len)


class _Told:
    """A trial whose scores are told beforehand, by the set that is pinned."""

    def __init__(self, scores: Mapping[frozenset[int], float], by: Criterion) -> None:
        self.scores, self.by = scores, by
        self.asked: list[frozenset[int]] = []

    def run(self, held: frozenset[int]) -> Verdict:
        self.asked.append(held)
        return verdict(self.scores[held], self.by)


def told(scores: Mapping[frozenset[int], float], budget: int = 10, by: Criterion = NEAR) -> tuple[Trials, _Told]:
    trial = _Told(scores, by)
    return Trials(cast(Trial, trial), budget, cast(Any, _Painted)), trial


def test_a_trial_is_made_once_and_stands_in_the_trail() -> None:
    trials, trial = told({NONE: 2.0, ONE: 0.5})

    assert [trials.passes(held) for held in (NONE, ONE, NONE, ONE)] == [False, True, False, True]
    assert trial.asked == [NONE, ONE]
    trail = [(step.pinned, step.ok, step.float32_ops, step.score) for step in trials.trail]
    assert trail == [(0, False, 0, 2.0), (1, True, 1, 0.5)]


def test_what_is_known_costs_nothing_once_the_budget_is_spent() -> None:
    trials, _ = told({NONE: 2.0, ONE: 0.5}, budget=1)

    assert not trials.passes(NONE)
    with pytest.raises(BudgetSpent):
        trials.passes(ONE)
    assert not trials.passes(NONE)


def test_a_real_verdict_that_is_worse_teaches_a_margin_of_twice_the_difference() -> None:
    trials, _ = told({ONE: 0.9, BOTH: 0.5})
    assert trials.passes(ONE)

    assert trials.learn(ONE, verdict(1.1))

    assert trials.margin == pytest.approx(0.4)
    assert (trials.passes(ONE), trials.passes(BOTH)) == (False, True)


def test_the_margin_is_on_the_other_side_where_more_is_better() -> None:
    cosine = criterion(metric="cosine=0.9")
    trials, _ = told({ONE: 0.92, BOTH: 0.99}, by=cosine)
    assert trials.passes(ONE)

    assert trials.learn(ONE, verdict(0.88, cosine))

    assert (trials.passes(ONE), trials.passes(BOTH)) == (False, True)


def test_a_margin_leaves_room_for_what_can_be_had_at_all() -> None:
    trials, _ = told({NONE: 3.0, ONE: 0.7, BOTH: 0.6})
    trials.whole = BOTH
    assert trials.passes(BOTH) and not trials.passes(NONE)

    trials.learn(NONE, verdict(1.0))

    assert trials.margin == pytest.approx(4.0)
    assert (trials.passes(BOTH), trials.passes(ONE)) == (True, True)  # 0.7 and half of 1 - 0.6 is below 1


def test_a_verdict_without_a_number_teaches_nothing() -> None:
    trials, _ = told({ONE: 0.9})
    assert trials.passes(ONE)
    lost = Verdict(
        ModelRun("a", ""),
        ModelRun("b", ""),
        FedData("data", False, 1),
        NEAR,
        (OutputRow("y", 0, Difference(4, False, "lost")),),
    )

    assert not trials.learn(ONE, lost)
    assert not trials.learn(ONE, None)
    assert trials.margin == 0


def test_a_set_is_minimal_only_if_it_was_tried_without_each() -> None:
    trials, _ = told({frozenset({0}): 2.0, frozenset({1}): 0.5, frozenset({2}): 2.0, BOTH: 0.1})
    for held in (frozenset({0}), frozenset({1})):
        trials.passes(held)

    assert trials.each_needed(frozenset({1})) is False  # without it: nothing pinned, which was not tried
    assert not trials.each_needed(BOTH)  # {1} alone passes
    assert not trials.each_needed(frozenset({0, 2}))  # {2} alone was not tried


def test_what_overflows_fails_at_the_first_batch_and_no_other_is_run() -> None:
    model = build("a=MatMul(x,w);y=Relu(a)", ["y"], constants={"w": np.eye(8, dtype=np.float32)})
    draft = Draft.of(model, Request.of(target="onnx"))
    batches = [{"x": np.full((8, 8), size, np.float32)} for size in (1e5, 1.0)]
    feed = Feed.of(batches, draft.source)
    side = Side.of(draft.source, "net", Conditions(), keeps=True)
    trial = Trial(side, feed, NEAR, lambda c: finish(draft, c).result)

    found = trial.run(draft.paint())

    assert (found.ok, found.fed.batches) == (False, 1)
    whole = Trial(side, feed, NEAR, lambda c: emulate(model)).run(draft.paint())
    assert (whole.ok, whole.fed.batches) == (True, 2)


def test_outputs_of_a_reference_that_is_kept_are_computed_once() -> None:
    model = Model.load(build("y=Relu(x)", ["y"]))
    batch = {"x": np.full((8, 8), 3, np.float32)}
    kept, fresh = (Side.of(model, "net", Conditions(), keeps=keeps) for keeps in (True, False))

    assert kept.run(0, batch) is kept.run(0, batch)
    assert kept.run(0, batch) is not kept.run(1, batch)
    assert fresh.run(0, batch) is not fresh.run(0, batch)
