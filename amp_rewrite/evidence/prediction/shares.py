"""Shares: the part of the outputs' error that each op of a candidate causes, as `locate` prints it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.instrument.pairing import Pairing
from amp_rewrite.evidence.instrument.switchable import switchable_model
from amp_rewrite.evidence.instrument.vertices import LowVertices, Vertex
from amp_rewrite.evidence.prediction.prediction import PredictedErrors, PredictedModel, predict
from amp_rewrite.evidence.prediction.single_op_runs import SingleOpRuns
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.reports.page.effects import Effect
from amp_rewrite.reports.render import count, share, table
from amp_rewrite.runtime.runner import Runner

GRADIENT, MEASURED, UNKNOWN = "gradient", "measured", "unknown"
"""The ways to the error of an op: by its gradient; by emulating it alone; none."""


@dataclass(frozen=True, slots=True)
class Share(Effect):
    """Effect of one op of the candidate. `because`: why the gradient does not tell, if it does not."""

    because: str = ""


@dataclass(frozen=True, slots=True)
class Shares:
    """The ops of a candidate by their effect on the outputs.

    `error`: the predicted relative error of the outputs; `measured`: that of the candidate as it runs, emulated.
    `outputs`: the float outputs that count. `probes`: runs of the backward pass for each batch.
    """

    rows: tuple[Share, ...]
    error: float
    measured: float
    outputs: tuple[str, ...]
    probes: int
    notes: tuple[str, ...] = ()

    def top(self, number: int) -> tuple[Share, ...]:
        """Return the ops of the largest effect: those that make infinity first, then unknown ones."""
        return tuple(sorted(self.rows, key=lambda row: -math.inf if math.isnan(row.error) else -row.error)[:number])

    def to_dict(self, top: int | None = None) -> dict[str, object]:
        """Return the shares for JSON, in topological order, or the largest of them."""
        rows = self.rows if top is None else self.top(top)
        return {**asdict(self), "rows": [asdict(row) for row in rows]}

    def lines(self, top: int) -> Iterator[str]:
        """Yield the lines of a text."""
        yield f"predicted error of the outputs {_number(self.error)}, measured {_number(self.measured)}"
        if shown := self.top(top):
            yield from table(map(_cells, shown), head=_HEAD, right="  >>>")
        yield from (f"note: {note}" for note in self.notes)


def shares_of(pairing: Pairing, feed: Feed, measured: float) -> Shares:
    """Return the shares of a candidate's ops in the error of the outputs; `measured`: that error as it is.

    Ops are those of the reference that the candidate runs in a low type. GradientError if nothing can be predicted.
    """
    reference = pairing.reference
    if pairing.low is DType.FLOAT:
        raise ModelError("the candidate contains no low type; there are no roundings to predict")
    low, lost = _low_vertices(pairing)
    choice = LowVertices(low)
    twin = switchable_model(reference, low, pairing.low)
    runner = Runner.open(reference.model)
    prediction = predict(
        PredictedModel(reference, low, pairing.low),
        ((b, runner.run(b)) for b in feed),
        SingleOpRuns(twin) if twin else None,
    )
    parts = prediction.parts(choice)
    whole = prediction.error(prediction.under(choice)) ** 2
    rows = [_share(prediction, op, prediction.error(energies), whole) for op, energies in parts.items()]
    outputs = tuple(prediction.outputs[0].values)
    return Shares(
        tuple(rows), math.sqrt(whole), measured, outputs, prediction.runs, tuple(_notes(reference, outputs, rows, lost))
    )


def _low_vertices(pairing: Pairing) -> tuple[frozenset[Vertex], int]:
    """Return the type variables of the reference that the candidate runs in a low type, and low ops without a match."""
    reference, candidate = pairing.reference, pairing.candidate
    low: set[Vertex] = set()
    lost = 0
    for op in candidate.ops:
        names = {v.name for v in candidate.variables[op.id] if v.type and v.type.dtype is pairing.low}
        if not names or op.kind in CASTS or op.kind == "Constant":
            continue
        paired = (pairing.values.get(v) for v in op.outputs if v is not None)
        makers = {reference.values[v].producer for v in paired if v is not None} - {None}
        theirs = {v.name for maker in makers if maker is not None for v in reference.variables[maker]}
        low |= {(maker, name) for maker in makers if maker is not None for name in names & theirs}
        lost += not makers
    return frozenset(low), lost


def _share(prediction: PredictedErrors, op: OpId, error: float, whole: float) -> Share:
    known = prediction.view.ops[op]
    because = prediction.reasons.get(op, "")
    by = GRADIENT if not because else MEASURED if op in prediction.measured else UNKNOWN
    part = error**2 / whole if whole and math.isfinite(whole) else math.nan
    return Share(known.name, known.kind, error, prediction.worst_case(op), part, by, because)


def _notes(reference: View, outputs: Sequence[str], rows: Sequence[Share], lost: int) -> Iterator[str]:
    left = [name for v in reference.scopes[0].outputs if (name := reference.value_name(v)) not in outputs]
    if left:
        yield f"not predicted: {', '.join(map(repr, left))}, which hold no floats"
    if lost:
        yield f"{count(lost, 'low op')} of the candidate match no op of the reference; their rounding is not predicted"
    for by, words in ((MEASURED, "was emulated alone"), (UNKNOWN, "is unknown")):
        if found := [row for row in rows if row.by == by]:
            yield f"the effect of {count(len(found), 'op')} {words}: {found[0].op!r}, because {found[0].because}"
    if any(row.error == math.inf for row in rows):
        yield "ops with inf turn finite values into infinity; the error of the outputs is then not predicted"


_HEAD = ("op", "type", "share", "error", "worst case", "")


def _cells(row: Share) -> tuple[str, ...]:
    part = "-" if math.isnan(row.share) else share(round(row.share * 1000), 1000)
    how = "" if row.by == GRADIENT else row.by
    return row.op, row.kind, part, _number(row.error), _number(row.worst), how


def _number(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.2g}"
