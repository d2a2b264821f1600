"""Local error of each op, and accumulated error of each value against the reference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.instrument.error_nodes import ErrorStats
from amp_rewrite.evidence.instrument.shadow import CHUNK, Bench
from amp_rewrite.evidence.instrument.side_by_side import reads
from amp_rewrite.evidence.verdict import Fed
from amp_rewrite.evidence.verify import drawing, low_types, name_of
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import OpId, ValueId
from amp_rewrite.reports.render import count, share, table
from amp_rewrite.rewrite.emulate import emulate

SCHEMA = 1
JUMP = 10.0
"""Factor by which an error grows in one op to count as a jump."""


@dataclass(frozen=True, slots=True)
class Spot:
    """One op of the candidate, by the name that it has in the reference.

    Errors are sqrt(sum (value - reference)^2 / sum reference^2) over all batches, the largest over all outputs.
    `own`: the local error, of the op fed with the reference's values; 0 if it only moves or selects values; None if it
    has no low type or cannot be measured alone. `accumulated`: the error of its output in the candidate as it runs.
    `max_abs` is the largest accumulated error, `absmax` the largest value in the reference. `overflows`: fed with the
    reference's values, it gives infinity or NaN for values that are finite there.
    """

    op: str
    kind: str
    dtype: str
    own: float | None
    accumulated: float
    max_abs: float
    absmax: float
    overflows: bool = False


@dataclass(frozen=True)
class Located:
    """Compared ops in topological order, and the first at which the error jumps.

    `first_jump`: the first op whose accumulated error is more than `JUMP` times the largest error of its inputs (or of
    the low type's epsilon); None without a jump. `matched` of `matchable` floating values of the candidate match a
    value of the reference.
    """

    reference: str
    candidate: str
    fed: Fed
    low: str
    rows: tuple[Spot, ...]
    first_jump: Spot | None
    matched: int
    matchable: int
    notes: tuple[str, ...] = ()

    def top(self, number: int) -> tuple[Spot, ...]:
        """Return the ops with the largest local error, in topological order among equals."""
        adding = [row for row in self.rows if row.own]
        return tuple(sorted(adding, key=lambda row: -(row.own or 0.0))[:number])

    def text(self, *, top: int = 10) -> str:
        """Return a text of the first jump and of the ops with the largest local error; it ends with a newline."""
        shown = self.top(top)
        facts = (
            ("reference", self.reference),
            ("candidate", f"{self.candidate}: {self.low}{'' if self.low == DType.FLOAT.spelling else ' emulated'}"),
            ("data", f"{self.fed.origin}: {count(self.fed.batches, 'batch', 'batches')}"),
            ("matched", f"{self.matched} of {count(self.matchable, 'value')} ({share(self.matched, self.matchable)})"),
        )
        lines = [f"{self.candidate} against {self.reference}", *table(facts), "", *self._jump()]
        if shown:
            lines += ["", "ops that add most", *table(map(_cells, shown), head=_HEAD, right="   >>>>")]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def _jump(self) -> Iterator[str]:
        if self.first_jump is None:
            yield "the error jumps nowhere"
        else:
            yield "the error first jumps at"
            yield from table([_cells(self.first_jump)], head=_HEAD, right="   >>>>")

    def to_json(self, *, top: int | None = None) -> str:
        """Return JSON, one op per line in topological order, or the `top` largest local errors; infinity is "inf"."""
        head = {
            "schema": SCHEMA,
            "reference": self.reference,
            "candidate": self.candidate,
            "low": self.low,
            "data": asdict(self.fed),
            "matched": self.matched,
            "matchable": self.matchable,
            "first_jump": _encoded(self.first_jump) if self.first_jump else None,
            "notes": list(self.notes),
        }
        lines = [f'  "{name}": {json.dumps(value, allow_nan=False)}' for name, value in head.items()]
        rows = self.rows if top is None else self.top(top)
        listed = ",\n".join(f"    {json.dumps(_encoded(row), allow_nan=False)}" for row in rows)
        lines.append(f'  "rows": [\n{listed}\n  ]' if listed else '  "rows": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def locate(
    a: object,
    b: object,
    data: object,
    *,
    allow_nonfinite: bool = False,
    names: tuple[str, str] | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> Located:
    """Where the candidate `b` departs from the float32 reference `a`, op by op.

    `a`, `b`: what `Model.load` takes; of an `a` that is half already, its float32 twin without rounding is the
    reference. `data`: what `Feed.of` takes for `a`, or a Feed, with NaN and infinity only if `allow_nonfinite`. `names`
    are what the result calls the two. Ops and values are matched by structure and name, so `b` need not be a conversion
    of `a` by this package. Low ops are emulated, on every machine. Nothing but a few numbers per value leaves the
    runtime; `chunk` and `progress` as for `local_errors`.

    Ops of the main graph are measured; an op with bodies as a whole. ModelError if nothing matches, or for two
    models that do not stand in one graph (other opsets, other inputs).
    """
    called = names or (name_of(a, "the reference"), name_of(b, "the candidate"))
    reference, candidate = (Model.load(m) for m in (a, b))
    random = (*drawing(reference, called[0]), *drawing(candidate, called[1]))
    widened = low_types(reference)
    if widened:
        reference = emulate(reference, rounding=False, io="float32")
    bench = Bench.of(reference, candidate)
    feed = Feed.of(data, reference, allow_nonfinite=allow_nonfinite)
    matchable = bench.pairing.measurable
    bench = bench.of_one_shape(feed)
    accumulated = bench.accumulated_errors(feed, chunk=chunk, progress=progress)
    local = bench.local_errors(feed, chunk=chunk, progress=progress)
    spots = _spots(bench, accumulated, local)
    return Located(
        called[0],
        called[1],
        Fed(feed.origin, feed.random, len(feed)),
        bench.low.spelling,
        tuple(spots.values()),
        next((spots[op] for op in spots if _jumps(bench, accumulated, op)), None),
        len(bench.pairing.measured),
        matchable,
        (*_notes(called[0], widened, feed), *random),
    )


def _notes(name: str, widened: Sequence[str], feed: Feed) -> Iterator[str]:
    if widened:
        yield f"{name} is {' and '.join(widened)}: the reference is its float32 twin, in which nothing is rounded"
    if feed.random:
        yield "the data are random"
    yield from feed.notes


def _spots(
    bench: Bench, accumulated: Mapping[ValueId, ErrorStats], local: Mapping[ValueId, ErrorStats]
) -> dict[OpId, Spot]:
    """Return the row of each op of the candidate, in its order."""
    view, reference = bench.pairing.candidate, bench.pairing.reference
    by_op: dict[OpId, list[ValueId]] = {}
    for value in accumulated:
        if (op := view.values[value].producer) is not None:
            by_op.setdefault(op, []).append(value)
    found = {}
    for op, values in sorted(by_op.items()):
        theirs = reference.producer(bench.pairing.measured[values[0]])
        seen = [accumulated[v] for v in values]
        alone = [local[v] for v in values if v in local]
        found[op] = Spot(
            theirs.name if theirs is not None else view.ops[op].name,
            view.ops[op].kind,
            bench.low.spelling if bench.is_low(op) else "float32",
            max((apart.error(bench.floor) for apart in alone), default=_unmeasured(bench, op)),
            max(apart.error(bench.floor) for apart in seen),
            max(apart.max_abs for apart in seen),
            max(apart.absmax for apart in seen),
            any(apart.lost for apart in alone),
        )
    return found


def _unmeasured(bench: Bench, op: OpId) -> float | None:
    """Return the local error of an op without a shadow: 0 if it is low and exact, else None for unknown."""
    known = bench.is_low(op) and not bench.rounds(bench.pairing.candidate.ops[op])
    return 0.0 if known else None


def _jumps(bench: Bench, accumulated: Mapping[ValueId, ErrorStats], op: OpId) -> bool:
    """True if the error of an op's outputs is more than JUMP times that of its inputs."""
    view = bench.pairing.candidate
    error = max(accumulated[v].error(bench.floor) for v in view.ops[op].outputs if v is not None and v in accumulated)
    most = max((accumulated[v].error(bench.floor) for v in _measured_above(bench, accumulated, op)), default=0.0)
    return error > JUMP * max(most, bench.low.eps)


def _measured_above(bench: Bench, accumulated: Mapping[ValueId, ErrorStats], op: OpId) -> Iterator[ValueId]:
    """Yield the nearest measured values upstream of an op."""
    view = bench.pairing.candidate
    pending, seen = [op], {op}
    while pending:
        for value in reads(view, view.ops[pending.pop()]):
            made_by = view.values[value].producer
            if value in accumulated:
                yield value
            elif made_by is not None and made_by not in seen:
                seen.add(made_by)
                pending.append(made_by)


_HEAD = ("op", "type", "runs as", "adds", "off by", "max abs", "largest value", "")


def _cells(row: Spot) -> tuple[str, ...]:
    own = "-" if row.own is None else f"{row.own:.2g}"
    numbers = (own, f"{row.accumulated:.2g}", f"{row.max_abs:.3g}", f"{row.absmax:.3g}")
    return row.op, row.kind, row.dtype, *numbers, "overflows" if row.overflows else ""


def _encoded(row: Spot) -> dict[str, object]:
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(row).items()}
