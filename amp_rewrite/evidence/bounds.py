"""Bounds of a model's values as a result: their classes, and the chain of each proof."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.decide.bounds.analysis import bounds as bounds_of
from amp_rewrite.decide.bounds.bound import Bound, BoundClass, BoundOptions
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import EvidenceError, PatternError, PolicyError, advice
from amp_rewrite.evidence.ranges import Ranges, key
from amp_rewrite.evidence.verdict import json_of
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.ir.view import MAIN, ValueId, View
from amp_rewrite.reports.render import plain, table
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import BoundRow
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.settings.choices import HEADROOM, check_headroom
from amp_rewrite.settings.keywords import checked
from amp_rewrite.settings.policy import LowType, low_type

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure

SCHEMA = 1
_STEPS = 64
"""Steps of a chain that are shown at most."""
Interval = tuple[float, float]


@dataclass(frozen=True, repr=False)
class Bounds(Result):
    """Bounds of one model's float values, for the low type `to`.

    Attributes:
        model: file name of the model.
        to: "float16" or "bfloat16".
        rows: one per value that an op computes or the model takes, in order.
        inputs: the ranges of inputs that were given.

    Example:
        >>> import amp_rewrite
        >>> bounds = amp_rewrite.bounds("model.onnx")
        >>> bounds.find("op=Softmax")[0].klass
        'proved to fit'
    """

    model: str
    to: str
    rows: tuple[BoundRow, ...]
    inputs: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def brief(self) -> str:
        """Model, type, and the number of values by class."""
        known = ", ".join(f"{number} {klass}" for klass, number in self.counts().items() if number)
        return plain(f"{self.model} for {self.to}: {known or 'no float value'}")

    def counts(self, *, heavy: bool = False) -> dict[str, int]:
        """Return the number of values by class.

        Args:
            heavy: only results of products, convolutions, recurrent cells and attention.
        """
        counted = Counter(row.klass for row in self.rows if row.heavy or not heavy)
        return {klass.value: counted[klass.value] for klass in BoundClass}

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the rows as dictionaries."""
        return map(asdict, self.rows)

    def figures(self) -> Sequence[Figure]:
        """Return the bounds along the depth, against the range of the low type."""
        from amp_rewrite.reports.page.bounds import bounds_figure  # late: few runs draw

        return (bounds_figure(self.rows, DType.parse(self.to), self._given()),)

    def _given(self) -> str:
        return ", ".join(f"{name} in [{lo:g}, {hi:g}]" for name, (lo, hi) in self.inputs.items())

    def find(self, name: str) -> tuple[BoundRow, ...]:
        """Return the rows of a value, of an op, or of a type of ops.

        Args:
            name: the name of a value or of the op that makes it, a type ("Softmax" or "op=Softmax") or a class.

        Raises:
            PatternError: nothing has that name; with names to use instead.
        """
        tests: tuple[Callable[[BoundRow], bool], ...] = (
            lambda row: row.value == name,
            lambda row: row.op == name and row.kind != "input",
            lambda row: name in (row.klass, row.kind) or row.kind == name.removeprefix("op="),
        )
        for test in tests:
            if found := tuple(filter(test, self.rows)):
                return found
        names = sorted({row.value for row in self.rows} | {row.kind for row in self.rows})
        raise PatternError(
            f"no float value or op {name!r}; {advice(name, names, 'name a value, an op or a type of ops')}"
        )

    def chain(self, row: BoundRow) -> tuple[BoundRow, ...]:
        """Return a row and those that its proof rests on, up to the op that bounds its result whatever it reads."""
        known = {other.value: other for other in self.rows}
        steps: dict[str, BoundRow] = {}
        at: BoundRow | None = row
        while at is not None and at.value not in steps and len(steps) < _STEPS:
            steps[at.value] = at
            at = known.get(at.rests_on) if at.rests_on is not None else None
        return tuple(steps.values())

    def text(self, *names: str, verbose: bool = False) -> str:
        """Return a summary, if `verbose` every row, and the chain of each name as `find` takes it. Ends with a newline.

        Raises:
            PatternError: nothing has one of the names.
        """
        lines = self._explained(names) if names else self._summary()
        if verbose:
            cells = ((r.value, r.kind, _interval(r), r.klass, r.because) for r in self.rows)
            lines += ["", *table(cells, head=("value", "op", "bound", "class", "because"))]
        return "\n".join(map(plain, lines)) + "\n"

    def _summary(self) -> list[str]:
        every, heavy = self.counts(), self.counts(heavy=True)
        cells = [(klass.value, str(every[klass.value]), str(heavy[klass.value])) for klass in BoundClass]
        lines = [f"{self.model}: bounds for {self.to}, from weights alone"]
        lines += [f"  given: {self._given()}"] if self.inputs else []
        lines += ["", *table(cells, head=("class", "values", "products"), right=" >>")]
        reasons = Counter(row.because for row in self._roots())
        if reasons:
            lines += ["", "where a proof ends", *table([(str(n), why) for why, n in reasons.most_common(8)], right=">")]
        return lines

    def _roots(self) -> Iterator[BoundRow]:
        """Yield the values of unknown class that rest on no other value of unknown bound."""
        known = {row.value: row for row in self.rows}
        for row in self.rows:
            below = known.get(row.rests_on) if row.rests_on is not None else None
            if row.klass == BoundClass.UNKNOWN.value and (below is None or math.isfinite(below.absmax)):
                yield row

    def _explained(self, names: Sequence[str]) -> list[str]:
        lines: list[str] = []
        for name in names:
            for row in self.find(name)[:8]:
                lines += [""] if lines else []
                for step, part in enumerate(self.chain(row)):
                    lines.append(f"{'because ' if step else ''}{part.value} {_interval(part)}: {part.because}")
                    if not step:
                        lines.append(f"    {part.klass}")
        return lines

    def to_json(self) -> str:
        """Return JSON, one value per line; infinity is "inf"."""
        inputs = {name: list(ends) for name, ends in self.inputs.items()}
        head = {
            "schema": SCHEMA,
            "model": self.model,
            "to": self.to,
            "inputs": inputs,
            "counts": self.counts(),
            "products": self.counts(heavy=True),
        }
        return json_of(head, rows=map(asdict, self.rows))


def _interval(row: BoundRow) -> str:
    if row.lo == -row.hi and row.hi < math.inf:
        words = f"≤ {row.hi:.4g}"
    else:
        words = f"in [{row.lo:.4g}, {row.hi:.4g}]" if row.absmax < math.inf else "unknown"
    words = f"{words} beside a mask's fill" if row.fills else words
    return f"{words}, ≥ {row.least:.4g} for ones" if row.klass == BoundClass.OVERFLOWS.value else words


@checked
def bounds(
    model: ModelSource,
    inputs: Mapping[str, Interval] | None = None,
    *,
    to: LowType = "float16",
    ranges: Ranges | str | Path | None = None,
    headroom: float = HEADROOM,
    folder: str | Path | None = None,
) -> Bounds:
    """Return sound bounds of the float values of a model, from its weights alone.

    The proofs are in docs/concepts/bounds.md.

    Args:
        model: as `Model.load` takes it.
        inputs: the range (lowest, highest) of each input that is known by name.
        to: the low type, as `convert` takes it. Its roundings are part of the bounds.
        ranges: the result of `calibrate`, or its file: values without a proof that were measured to fit have a class.
        headroom: factor to spare between a measured value and the largest one of `to`.
        folder: where the external data of a ModelProto lies.

    Returns:
        The bound and the class of each value.

    Raises:
        ModelError: the model is invalid.
        PolicyError: `to` is not a low type, or an input or its range is not valid.
        EvidenceError: the ranges are those of another model or type.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.bounds("model.onnx").counts()["unknown"] > 0
        True
    """
    low, source = low_type(to), Model.load(model, folder=folder)
    check_headroom(headroom)
    view = View.of(inlined(source))
    given = _checked(view, dict(inputs or {}))
    measured = _measured(view, source, ranges, low) if ranges is not None else {}
    found = bounds_of(view, BoundOptions(low, given, measured, headroom))
    name = source.path.name if source.path is not None else "the model"
    return Bounds(name, low.spelling, tuple(rows_of(view, found)), given)


def rows_of(view: View, found: Mapping[ValueId, Bound]) -> Iterator[BoundRow]:
    """Yield the rows of bounds, in the order of their values."""
    for value, bound in found.items():
        op = view.producer(value)
        first = next((key(view, v) for v in bound.rests_on if v in found), None) if not _resets(bound) else None
        yield BoundRow(
            key(view, value),
            op.name if op is not None else "",
            op.kind if op is not None else "input",
            op is not None and op.kind in HEAVY,
            bound.lo,
            bound.hi,
            bound.klass.value,
            bound.because,
            first,
            bound.fills,
            bound.least,
        )


def _resets(bound: Bound) -> bool:
    """True for a bound that holds whatever the op reads."""
    return any(word in bound.because for word in ("√", "lies in", "a part of its norm", "0 or 1")) and "√x" not in (
        bound.because
    )


def _checked(view: View, inputs: dict[str, Interval]) -> dict[str, Interval]:
    """Return the ranges of inputs as floats. PolicyError for an unknown input or an empty range."""
    known = {view.value_name(v): v for v in view.scopes[MAIN].inputs}
    given = {}
    for name, ends in inputs.items():
        if name not in known:
            hint = advice(name, known, f"its inputs are {', '.join(map(repr, list(known)[:8]))}")
            raise PolicyError(f"the model has no input {name!r}; {hint}")
        try:
            lo, hi = (float(end) for end in ends)
        except (TypeError, ValueError) as cause:
            raise PolicyError(f"the range of {name!r} is not a pair of numbers; give (lowest, highest)") from cause
        if not -math.inf < lo <= hi < math.inf:
            raise PolicyError(f"the range of {name!r} goes from {lo:g} to {hi:g}; give two finite numbers in order")
        given[name] = (lo, hi)
    return given


def _measured(view: View, source: Model, ranges: Ranges | str | Path, low: DType) -> dict[ValueId, float]:
    known = ranges if isinstance(ranges, Ranges) else Ranges.load(ranges)
    known.check(source)
    if known.to != low.spelling:
        raise EvidenceError(f"the ranges are for {known.to}, not for {low.spelling}; calibrate again")
    return magnitudes(view, known)


def magnitudes(view: View, ranges: Ranges) -> dict[ValueId, float]:
    """Return the largest measured magnitude of each value that was finite throughout."""
    seen = ((value.id, ranges.of(view, value.id)) for value in view.values)
    return {value: seen.absmax for value, seen in seen if seen is not None and seen.count and not seen.nonfinite}
