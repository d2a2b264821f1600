"""Foresight: the cheapest choice of float32 ops whose predicted error meets a criterion."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.pin import Pin
from amp_rewrite.errors import GradientError, ModelError
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.evidence.instrument.switchable import SwitchableModel, switchable_model
from amp_rewrite.evidence.instrument.vertices import LowVertices, TypeChoice, Vertex
from amp_rewrite.evidence.metric import Criterion, worse
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.regions import Region, painted, regions_of
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.roofline import ROOFS, Roof
from amp_rewrite.runtime.runner import Runner

if TYPE_CHECKING:
    from amp_rewrite.decide.placement.tradeoff import RoundingLoss, Tradeoff
    from amp_rewrite.evidence.prediction.prediction import PredictedErrors

MOST_BATCHES = 4
"""Batches of the data that are predicted; a trial confirms on all."""
_LEAST, _MOST = -10, 16
"""Powers of 4 that bound the price of an error: from none to all, in units of the time that float32 loses."""
_REFINED = 2
"""Halvings of the last factor of 4."""
_FEW = 8
"""Regions of a choice without each of which it is painted."""
_OWN = 0.5
"""Part of the squared error of a region alone that it adds to others at least: some of its roundings happen anyway."""
_CORRECTED, _HALVINGS = 5.0, 8
"""Bound on the binary logarithm of a correction, and the steps to find it."""


@dataclass(frozen=True)
class WidenedTwin:
    """The float32 twin of a model that is half already, and the vertices of the model that its own follow, if low."""

    view: View
    low: Mapping[Vertex, Vertex]

    @classmethod
    def of(cls, half: View, base: Coloring) -> WidenedTwin:
        """Return the twin of a view. `base`: the coloring in which its low vertices are those that may be low."""
        view = View.of(emulate(half.model, rounding=False, io="float32"))
        ops = {op.name: op.id for op in half.ops}
        pairs = {
            (op.id, variable.name): (ops[op.name], variable.name)
            for op in view.ops
            for variable in view.variables[op.id]
            if op.name in ops
        }
        return cls(view, {mine: theirs for mine, theirs in pairs.items() if is_low(half, base, theirs)})

    def choice(self, coloring: Coloring) -> TypeChoice:
        """Return the choice of the twin's vertices that acts as a coloring of the half model."""
        return LowVertices(
            {mine for mine, theirs in self.low.items() if coloring.dtype(*theirs) in (None, coloring.to)}
        )


def is_low(half: View, coloring: Coloring, vertex: Vertex) -> bool:
    """True if a type variable is low under a coloring: painted so, or as it is in the model."""
    dtype = coloring.dtype(*vertex)
    types = (v.type.dtype for v in half.variables[vertex[0]] if v.name == vertex[1] and v.type is not None)
    return dtype is coloring.to if dtype is not None else next(types, None) is coloring.to


@dataclass(frozen=True)
class PredictedChoice:
    """A choice: the regions that stay float32, its coloring, and its predicted squared errors."""

    held: frozenset[int]
    coloring: Coloring
    energies: Any


@dataclass(frozen=True)
class Foresight:
    """A draft, guarded by `pins`, with the prediction of its errors. `wide`: of a half model, the twin predicted."""

    draft: Draft
    pins: tuple[Pin, ...]
    base: Coloring
    prediction: PredictedErrors
    islands: bool = False
    wide: WidenedTwin | None = None
    _seen: dict[frozenset[int], PredictedChoice] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        draft: Draft,
        pins: tuple[Pin, ...],
        base: Coloring,
        batches: Sequence[tuple[Batch, Mapping[str, Any]]],
        twin: tuple[SwitchableModel, Runner] | None,
        *,
        islands: bool = False,
    ) -> Foresight | None:
        """Return the foresight for batches with the reference's outputs; None if no error can be predicted.

        `base`: the coloring with `pins`. `twin`: runs the ops alone that no gradient tells of; of a half model it is
        made here. `islands`: give up low ops for time, too.
        """
        from amp_rewrite.evidence.prediction.prediction import PredictedModel, predict
        from amp_rewrite.evidence.prediction.single_op_runs import SingleOpRuns  # late: gradients take long to import

        to, saturate = draft.request.to, draft.hazards.saturate
        wide = WidenedTwin.of(draft.view, base) if draft.view.low_types else None
        asked = PredictedModel(*((draft.view, base.low, to, saturate) if wide is None else (wide.view, wide.low, to)))
        try:
            if wide is not None:
                board = switchable_model(wide.view, wide.low, to)
                alone = SingleOpRuns(board) if board is not None else None
            else:
                alone = SingleOpRuns(*twin) if twin is not None else None
            prediction = predict(asked, batches, alone, search=True)
        except (GradientError, ModelError):  # an opset before 12, no floating output, a gradient that does not open
            return None
        return cls(draft, pins, base, prediction, islands or draft.request.placement.islands, wide)

    @cached_property
    def regions(self) -> list[Region]:
        """The regions that may be pinned, those with the largest predicted error first."""
        names = {op.id: op.name for op in self.prediction.view.ops}
        errors = {names[op]: self._effect(op) for op in names}
        found = [*regions_of(self.draft, self.base, errors, foreseen=True)]
        return sorted(found, key=lambda region: (-region.error, region.ops))

    def _effect(self, op: OpId) -> float:
        error = self.prediction.error(self.prediction.alone(op))
        return math.inf if math.isnan(error) else error

    def told(self, region: Region, by: Criterion) -> Region:
        """Return a region with the predicted score of the outputs if its worst op alone is low."""
        worst = next(op.id for op in self.prediction.view.ops if op.name == region.name)
        score = self.prediction.score(self.prediction.alone(worst), by)
        return region if math.isnan(score) else replace(region, effect=by.said(score))

    def painted(self, held: Collection[int]) -> PredictedChoice:
        """Return the choice that holds these regions in float32."""
        key = frozenset(held)
        if key not in self._seen:
            coloring = painted(self.draft, self.pins, [self.regions[i] for i in sorted(key)])
            choice = coloring if self.wide is None else self.wide.choice(coloring)
            self._seen[key] = PredictedChoice(key, coloring, self.prediction.under(choice))
        return self._seen[key]

    def at(self, price: float) -> PredictedChoice:
        """Return the choice of the least time + price · squared error; seconds for a squared error of 1."""
        high = {op for op, _ in self.trade.high(self._losses, price)}
        return self.painted([i for i, region in enumerate(self.regions) if not high.isdisjoint(region.ops)])

    def cheapest(self, by: Criterion, factor: float = 1.0) -> PredictedChoice | None:
        """Return the choice of the lowest price whose predicted error meets a criterion; None if none does.

        `factor`: how much larger errors are than predicted.
        """

        def meets(exponent: float) -> bool:
            score = self.prediction.score(self.at(self.unit * 4.0**exponent).energies * factor**2, by)
            return by.passes(score)

        low, high = float(_LEAST), float(_MOST)
        if not meets(high):
            return None
        rounds = math.ceil(math.log2(high - low)) + _REFINED
        for _ in range(rounds):
            middle = (low + high) / 2
            if meets(middle):
                high = middle
            else:
                low = middle
        return self.at(self.unit * 4.0**high)

    def fewest(self, by: Criterion, factor: float = 1.0) -> PredictedChoice | None:
        """Return a choice of few float32 ops whose predicted error meets a criterion; None if none does.

        It is the smaller one of two: that of the least time, and that of the regions with the largest effects for
        each op; each without what it can spare. Of a half model, whose low ops have no time to win, it is the second.
        """
        chosen = (None if self.wide is not None else self.cheapest(by, factor), self._ranked(by, factor))
        spared = [self._pruned(seen, by, factor) for seen in chosen if seen is not None]
        return min(spared, key=lambda seen: seen.coloring.float32_ops, default=None)

    def _ranked(self, by: Criterion, factor: float) -> PredictedChoice | None:
        """Return the choice of the fewest regions, in order of their effect for each op."""
        order = sorted(range(len(self.regions)), key=self._effect_per_op, reverse=True)

        def seen(count: int) -> PredictedChoice:
            return self.painted(order[:count])

        def meets(count: int) -> bool:
            return by.passes(self.prediction.score(seen(count).energies * factor**2, by))

        if not meets(len(order)):
            return None
        return seen(bisect_left(range(len(order)), True, key=meets))

    def _pruned(self, seen: PredictedChoice, by: Criterion, factor: float) -> PredictedChoice:
        """Return a choice without the regions that it can spare, those of the least effect for each op first.

        Painting takes long: of many regions, those whose own error alone would exceed the criterion are not painted.
        """

        def meets(energies: Any) -> bool:
            return by.passes(self.prediction.score(energies * factor**2, by))

        for region in sorted(seen.held, key=self._effect_per_op):
            if len(seen.held) <= _FEW or meets(seen.energies + self._energies(region) * _OWN):
                less = self.painted(seen.held - {region})
                seen = less if meets(less.energies) else seen
        return seen

    def _energies(self, number: int) -> Any:
        return sum(self.prediction.alone(op) for op in self.regions[number].ops)

    def _effect_per_op(self, number: int) -> float:
        region = self.regions[number]
        return region.error**2 / len(region.ops)

    def factor(self, seen: PredictedChoice, score: float | None, by: Criterion) -> float:
        """Return how much larger the errors of a choice are than predicted, by its measured score; 1 without one."""
        if score is None or not math.isfinite(score) or not math.isfinite(self.prediction.score(seen.energies, by)):
            return 1.0
        low, high = -_CORRECTED, _CORRECTED
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            predicted = self.prediction.score(seen.energies * 4.0**middle, by)
            low, high = (middle, high) if worse(by, score, predicted) else (low, middle)
        return float(2.0**high)

    @cached_property
    def unit(self) -> float:
        """The price at which all errors together cost what float32 loses."""
        total = sum(loss.error for loss in self._losses if math.isfinite(loss.error))
        return self.trade.stake / total if total else 1.0

    @property
    def roof(self) -> Roof:
        """The GPU whose time is predicted."""
        return self.draft.request.placement.gpu or ROOFS["A100"]

    @cached_property
    def trade(self) -> Tradeoff:
        """The predicted times of colorings, and the choice by price."""
        return self.draft.traded(self.pins, self.roof, islands=self.islands)

    @cached_property
    def _losses(self) -> list[RoundingLoss]:
        from amp_rewrite.decide.placement.tradeoff import RoundingLoss

        prediction = self.prediction
        losses = []
        for i, site in enumerate(prediction.sites.all):
            error = prediction.of_site(i)
            if site.op not in prediction.reasons and error:
                losses.append(RoundingLoss(error, site.maker, site.reader))
        for op in prediction.reasons:
            vertex = next((v for v in sorted(prediction.sites.may) if v[0] == op), None)
            error = float(prediction.alone(op).sum())
            if vertex is not None and error:
                losses.append(RoundingLoss(math.inf if math.isnan(error) else error, vertex, None))
        return losses
