"""Local and accumulated error of each op against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.errors import Errors, Pairing, reads
from amp_rewrite.evidence.opening import check_as_is, low_types, name_of, provider_or_default, random_op_notes, unrolled
from amp_rewrite.evidence.verify import SCHEMA, FedData, json_of
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.dataflow import reach
from amp_rewrite.ir.view import OpId, ValueId
from amp_rewrite.reports.evidence import OpErrors
from amp_rewrite.reports.render import count, share, table
from amp_rewrite.reports.result import Result
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.runtime.installation import require
from amp_rewrite.settings.option import Data, checked

JUMP = 10.0
"""Factor by which the error must grow in one op to count as a jump."""


@dataclass(frozen=True, repr=False)
class Located(Result):
    """Compared ops in topological order, and the first jump in the error.

    Attributes:
        reference: name of the reference.
        candidate: name of the candidate.
        fed: the data.
        low: the low type.
        rows: one per compared op.
        first_jump: first op with an accumulated error over `JUMP` times the larger of epsilon and its inputs' errors.
        matched: number of floating-point values of the candidate that match a value of the reference.
        matchable: number of floating-point values of the candidate.
        notes: caveats.
    """

    reference: str
    candidate: str
    fed: FedData
    low: str
    rows: tuple[OpErrors, ...]
    first_jump: OpErrors | None
    matched: int
    matchable: int
    notes: tuple[str, ...] = ()

    @property
    def brief(self) -> str:
        """One line with both models and the op of the first jump."""
        where = f"the error first jumps at {self.first_jump.op}" if self.first_jump else _NO_JUMP
        return f"{self.candidate} against {self.reference}: {where}"

    def top(self, number: int) -> tuple[OpErrors, ...]:
        """Return the ops with the largest local error, in topological order among equals."""
        with_error = [row for row in self.rows if row.own]
        return tuple(sorted(with_error, key=lambda row: -(row.own or 0.0))[:number])

    def text(self, *, top: int = 10) -> str:
        """Return the first jump and the `top` ops with the largest local error as text, ending with a newline."""
        facts = (
            ("reference", self.reference),
            ("candidate", f"{self.candidate}: {self.low}{'' if self.low == DType.FLOAT.spelling else ' emulated'}"),
            ("data", str(self.fed)),
            ("matched", f"{self.matched} of {count(self.matchable, 'value')} ({share(self.matched, self.matchable)})"),
        )
        lines = [f"{self.candidate} against {self.reference}", *table(facts), ""]
        if self.first_jump is None:
            lines.append(_NO_JUMP)
        else:
            lines += ["the error first jumps at", *_table([self.first_jump])]
        if shown := self.top(top):
            lines += ["", "ops that add the most error", *_table(shown)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) + "\n"

    def to_json(self, *, top: int | None = None) -> str:
        """Return JSON, one op per line: the `top` ops by local error; None means all. Infinity is "inf"."""
        head = {
            "schema": SCHEMA,
            "reference": self.reference,
            "candidate": self.candidate,
            "low": self.low,
            "data": asdict(self.fed),
            "matched": self.matched,
            "matchable": self.matchable,
            "first_jump": asdict(self.first_jump) if self.first_jump else None,
            "notes": self.notes,
        }
        return json_of(head, rows=map(asdict, self.rows if top is None else self.top(top)))


@checked
def locate(
    a: ModelSource,
    b: ModelSource,
    data: Data,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Located:
    """Return the errors of the candidate `b` against the float32 reference `a`, op by op.

    Ops and values are matched by structure and name, so `b` need not be a conversion of `a` by this package. Low ops
    are emulated on every machine. The ops of the main graph are measured; an op with bodies counts as one op.

    Args:
        a: anything that `Model.load` accepts; a model with low types is replaced by a float32 copy without rounding.
        b: anything that `Model.load` accepts.
        data: a Feed, or any data that `Feed.of` accepts, for `a`; with feedback, both get the reference's states.
        progress: called as `progress(done, total)` after each run.

    Returns:
        The local and the accumulated error of each op, and the first op at which the error jumps.

    Raises:
        ModelError: nothing matches, or the candidate has inputs that are missing in the reference.
        FeedError: the data does not fit the model.

    Example:
        >>> import amp_rewrite
        >>> low = amp_rewrite.convert("model.onnx").model
        >>> located = amp_rewrite.locate("model.onnx", low, "batches.npz")
        >>> worst = located.top(1)[0]
    """
    require("locate")
    first, second = name_of(a, "the reference"), name_of(b, "the candidate")
    reference, candidate = (inlined(Model.load(model)) for model in (a, b))
    if low_types(candidate):
        check_as_is(candidate, second, provider_or_default(None))
    random = (*random_op_notes(reference, first), *random_op_notes(candidate, second))
    widened = low_types(reference)
    if widened:
        reference = emulate(reference, rounding=False, io="float32")
    source = Feed.of(data, reference)
    feed = unrolled(source, reference)
    pairing = Pairing.of(reference, candidate, feed)
    accumulated = pairing.accumulated(progress)
    errors_by_op = _errors_by_op(pairing, accumulated, pairing.local(progress))
    notes = ["the data is random", *feed.notes] if feed.random else [*feed.notes]
    if widened:
        twin = f"{first} uses {' and '.join(widened)}: the reference is its float32 twin, which rounds nothing"
        notes.insert(0, twin)
    return Located(
        first,
        second,
        FedData(feed.origin, feed.random, source.place(len(feed) - 1)[0] + 1),
        pairing.low.spelling,
        tuple(errors_by_op.values()),
        next((row for op, row in errors_by_op.items() if _jumps(pairing, accumulated, op, row.accumulated)), None),
        len(pairing.measured),
        pairing.measurable,
        (*notes, *random),
    )


def _errors_by_op(pairing: Pairing, accumulated: Errors, local: Errors) -> dict[OpId, OpErrors]:
    view, reference = pairing.candidate, pairing.reference
    by_op: dict[OpId, list[ValueId]] = {}
    for value in accumulated:
        if (op := view.values[value].producer) is not None:
            by_op.setdefault(op, []).append(value)
    errors_by_op = {}
    for op, values in sorted(by_op.items()):
        counterpart = reference.producer(pairing.measured[values[0]]) or view.ops[op]
        errors = [accumulated[v] for v in values]
        local_stats = [local[v] for v in values if v in local]
        unmeasured = 0.0 if pairing.is_low(op) and not pairing.rounds(view.ops[op]) else None
        errors_by_op[op] = OpErrors(
            counterpart.name,
            view.ops[op].kind,
            pairing.low.spelling if pairing.is_low(op) else "float32",
            max((error.error(pairing.low.tiny) for error in local_stats), default=unmeasured),
            max(error.error(pairing.low.tiny) for error in errors),
            max(error.max_abs or (math.inf if error.lost else 0.0) for error in errors),
            max(error.absmax for error in errors),
            any(error.lost for error in local_stats),
        )
    return errors_by_op


def _jumps(pairing: Pairing, accumulated: Errors, op: OpId, error: float) -> bool:
    """True if an op's error is over JUMP times the largest error of the nearest measured values that it depends on."""
    view = pairing.candidate

    def upstream(value: ValueId) -> Iterator[ValueId]:
        producer = view.producer(value)
        return reads(view, producer) if producer is not None and value not in accumulated else iter(())

    operands = (v for v in reach(reads(view, view.ops[op]), upstream) if v in accumulated)
    input_error = max((accumulated[v].error(pairing.low.tiny) for v in operands), default=0.0)
    return error > JUMP * max(input_error, pairing.low.eps)


_NO_JUMP = "no op's error stands out"
_HEAD = ("op", "type", "runs as", "adds", "off by", "max abs", "largest value", "")


def _table(rows: Sequence[OpErrors]) -> list[str]:
    return table(map(_cells, rows), head=_HEAD, right="   >>>>")


def _cells(row: OpErrors) -> tuple[str, ...]:
    local = "-" if row.own is None else f"{row.own:.2g}"
    numbers = (local, f"{row.accumulated:.2g}", f"{row.max_abs:.3g}", f"{row.absmax:.3g}")
    return row.op, row.kind, row.dtype, *numbers, "overflows" if row.overflows else ""
