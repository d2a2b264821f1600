"""Prediction: the errors of a model's outputs for any choice of low ops, from a few runs of the adjoint model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.evidence.instrument.vertices import TypeChoice, Vertex
from amp_rewrite.evidence.metric import Criterion
from amp_rewrite.evidence.prediction.adjoint import Adjoint, adjoint
from amp_rewrite.evidence.prediction.probes import Outputs, probing, worst_of
from amp_rewrite.evidence.prediction.profile import profiled
from amp_rewrite.evidence.prediction.single_op_runs import SingleOpRuns
from amp_rewrite.evidence.prediction.sites import RoundingSites
from amp_rewrite.ir.view import OpId, ValueId, View

Floats = NDArray[np.float64]

_DOUBT = 0.05
"""Variance of the ratio of true to summed squares, by which the roundings of a model fail to be independent."""


@dataclass(frozen=True)
class PredictedErrors:
    """Squared errors of outputs, relative to |y|², by probe and site.

    `square[p, s]` is sum (g·δ)² of site s as probe p sees it, `signed[p, s]` sum g·δ, `bound[p, s]` sum |g·δ|; each
    probe is run with `repeats` signs, one after the other. `lost`: sites where a finite value becomes infinite.
    `reasons`: ops without a usable gradient; `measured`: their squared errors, from a run of each alone. Those that
    could not be run alone either are unknown.
    """

    sites: RoundingSites
    outputs: tuple[Outputs, ...]
    square: Floats
    signed: Floats
    bound: Floats
    lost: NDArray[np.bool_]
    repeats: int = 1
    measured: Mapping[OpId, Floats] = field(default_factory=dict)
    reasons: Mapping[OpId, str] = field(default_factory=dict)

    @property
    def view(self) -> View:
        """Return the model."""
        return self.sites.view

    def alone(self, op: OpId) -> Floats:
        """Return the squared error of each probe if this op alone is low; inf if it makes infinity, NaN if unknown."""
        if op in self.reasons:
            return self.measured.get(op, np.full(self._probes, np.nan))
        return self._of(self._by_op.get(op, []))

    def under(self, choice: TypeChoice) -> Floats:
        """Return the squared error of each probe under a choice of low ops. O(sites + probes)."""
        by_op = self._on(choice)
        total = self._of([i for op, sites in by_op.items() if op not in self.reasons for i in sites])
        for op in by_op:
            if op in self.reasons:
                total = total + self.alone(op)
        return total

    def parts(self, choice: TypeChoice) -> dict[OpId, Floats]:
        """Return the squared error of each probe by the roundings of each op that has some under a choice."""
        by_op = self._on(choice)
        return {op: self.alone(op) if op in self.reasons else self._of(sites) for op, sites in by_op.items()}

    def _on(self, choice: TypeChoice) -> dict[OpId, list[int]]:
        """Return the sites where values are rounded under a choice, by op, in topological order.

        An op whose roundings lie elsewhere has an entry if it is low.
        """
        by_op: dict[OpId, list[int]] = {
            op: []
            for op in self.sites.hidden
            if any(choice.lowered(op, variable.name) for variable in self.view.variables[op])
        }
        for i, site in enumerate(self.sites.all):
            if site.on(choice):
                by_op.setdefault(site.op, []).append(i)
        return dict(sorted(by_op.items()))

    def worst_case(self, op: OpId) -> float:
        """Return an estimate of the largest relative error of the outputs that the roundings of one op can sum to.

        By the triangle inequality the error is at most sum |J_i| |δ_i|; |g_i| is |J_i| on average over signs but for a
        factor of at most √2 (Khintchine).
        """
        if op in self.reasons:
            return math.nan
        if any(self.lost[i] for i in self._by_op.get(op, [])):
            return math.inf
        bound = self._by_probe(self.bound[:, self._by_op.get(op, [])].sum(axis=1))
        return float(np.sqrt(2 * (bound @ bound) / self._shares))

    def error(self, energies: Floats) -> float:
        """Return the root of the mean relative squared error of the outputs, over outputs and batches."""
        return float(np.sqrt(energies.sum() / self._shares))

    def score(self, energies: Floats, by: Criterion) -> float:
        """Return the worst expected score of an output in a batch; NaN if it is not finite."""
        return worst_of(self.outputs, energies, by)

    def of_site(self, number: int) -> float:
        """Return the squared error of one site, summed over probes."""
        return float(self._of([number]).sum())

    @property
    def runs(self) -> int:
        """Return the number of runs of the backward pass for each batch."""
        return len(self.square) // max(1, len(self.outputs))

    @property
    def _probes(self) -> int:
        return len(self.square) // self.repeats

    @property
    def _shares(self) -> int:
        """Number of outputs over all batches: each has a relative error of its own."""
        return max(1, sum(len(each.values) for each in self.outputs))

    @property
    def _by_op(self) -> Mapping[OpId, list[int]]:
        if not self._grouped:
            for i, site in enumerate(self.sites.all):
                self._grouped.setdefault(site.op, []).append(i)
        return self._grouped

    _grouped: dict[OpId, list[int]] = field(default_factory=dict, repr=False)

    def _of(self, sites: Sequence[int]) -> Floats:
        """Return the squared errors of roundings that happen together.

        The squares assume independent roundings. The square of the signed sum does not, but it is one number of a
        random projection. The mean of both, weighted by their variances, is spread over the probes as the squares are.
        """
        if not len(sites):
            return np.zeros(self._probes)
        if self.lost[sites].any():
            return np.full(self._probes, np.inf)
        squares = self._by_probe(self.square[:, sites].sum(axis=1))
        projections = self._by_probe(self.signed[:, sites].sum(axis=1) ** 2)
        weights, weight = self._weights
        total = float(squares.sum())
        mean = (1 - weight) * total + weight * float(projections.sum())
        parts: Floats = (1 - weights) * squares + weights * projections
        whole = float(parts.sum())
        return parts * (mean / whole) if whole else parts

    def _by_probe(self, runs: Floats) -> Floats:
        """Return the mean of numbers over the signs of each probe."""
        return np.asarray(runs.reshape(-1, self.repeats).mean(axis=1))

    @cached_property
    def _weights(self) -> tuple[Floats, float]:
        """Return the weight of the projections of each probe, and of all together."""
        sizes = np.array([sum(b.size for b in blocks) for each in self.outputs for blocks in each.probes])
        probes, elements = len(sizes), float(sizes.sum())
        each = _weight(sizes, 2 / self.repeats * (1 - 1 / sizes))
        return each, float(_weight(elements, 2 / probes / self.repeats * (1 - probes / elements)))


def _weight(elements: Floats | float, variance: Floats | float) -> Any:
    """Return the weight of projections with a variance beside squares of so many elements.

    They are exact where each element has a probe of its own.
    """
    of_squares = 2 / elements + _DOUBT
    return of_squares / (of_squares + variance)


@dataclass(frozen=True)
class PredictedModel:
    """A model whose error is to be predicted: its vertices that may be low, the type, and values that are clamped."""

    view: View
    may: Collection[Vertex]
    to: DType
    saturate: Collection[ValueId] = ()


def predict(
    asked: PredictedModel,
    batches: Iterable[tuple[Batch, Mapping[str, Any]]],
    alone: SingleOpRuns | None = None,
    *,
    search: bool = False,
    seed: int = 0,
) -> PredictedErrors:
    """Return the prediction for a float32 model, from batches with the outputs of the reference.

    `alone` runs the ops that no gradient tells of, and the model with all ops low; without it the first are unknown,
    and errors are thought even. `search`: for a search, with few probes; else every op is run alone where steps, such
    as Round, stand before all outputs. GradientError before opset 12, for a model without floating outputs, and in a
    search for one whose outputs are all steps.
    """
    view = asked.view
    number_of, repeats = probing(view, search=search)
    sites = RoundingSites.of(view, asked.may, asked.to)
    rng = np.random.default_rng(seed)
    opened: dict[object, Adjoint] = {}
    careful = frozenset[int]()
    outputs: list[Outputs] = []
    rows: list[tuple[Floats, Floats, Floats]] = []
    fed: list[Batch] = []
    lost, wild = (np.zeros(len(sites.all), np.bool_) for _ in range(2))
    for number, (batch, results) in enumerate(batches):
        values = {name: y for name, y in results.items() if _counts(y)}
        if not values:
            raise GradientError(
                "no output is a floating tensor with elements; the error of the model cannot be predicted"
            )
        key = tuple((name, np.shape(value)) for name, value in sorted(batch.items()))
        shapes = {name: tuple(y.shape) for name, y in values.items()}
        build = partial(adjoint, sites, asked.to, shapes, batch, saturate=asked.saturate)
        if key not in opened:
            opened[key] = build(careful=careful)
            if search and len(opened[key].dark) == len(sites.all):
                raise GradientError("no gradient reaches the outputs: they are steps, such as those of a Round")
        outputs.append(Outputs.of(number, values, number_of))
        fed.append(batch)
        for probe in range(len(outputs[-1].probes)):
            for _ in range(repeats):
                seeds = outputs[-1].seeds(probe, rng)
                while (got := opened[key].run(batch, seeds)).unclear:
                    careful |= got.unclear
                    opened[key] = build(careful=careful)
                rows.append((got.square, got.signed, got.bound))
                lost |= got.lost
                wild |= got.wild
    square, signed, bound = (np.stack(part) for part in zip(*rows, strict=True))
    dark = {i: reason for each in opened.values() for i, reason in each.dark.items()}
    dark |= {int(i): "its gradient is not finite" for i in np.flatnonzero(wild)}
    spread = profiled(outputs, [alone.together(batch) for batch in fed]) if alone is not None else tuple(outputs)
    found = PredictedErrors(sites, spread, square, signed, bound, lost, repeats)
    return _with_measured(found, dark, fed, alone)


def _with_measured(
    found: PredictedErrors, dark: Mapping[int, str], fed: Sequence[Batch], alone: SingleOpRuns | None
) -> PredictedErrors:
    """Return the prediction with ops measured that no gradient tells of."""
    reasons = dict(found.sites.hidden)
    for i, reason in dark.items():
        reasons.setdefault(found.sites.all[i].op, reason)
    measured: dict[OpId, Floats] = {}
    for op in reasons:
        runs = [alone(op, batch) if alone is not None else None for batch in fed]
        if all(run is not None for run in runs):
            pairs = zip(found.outputs, runs, strict=True)
            measured[op] = np.concatenate([each.energies(run) for each, run in pairs if run is not None])
    return replace(found, measured=measured, reasons=reasons)


def _counts(value: object) -> bool:
    """True for a floating tensor with elements."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size > 0
