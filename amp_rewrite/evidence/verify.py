"""Comparison of the outputs of two models on the same data, with a verdict as data, text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Unpack

from amp_rewrite.errors import ModelError, spelled
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.data.feedback import option_values, state_pairs
from amp_rewrite.evidence.metric import criterion, differences
from amp_rewrite.evidence.opening import (
    Device,
    check_as_is,
    decompose,
    low_types,
    name_of,
    open_on,
    quick_to_load,
    random_op_notes,
    session_on,
)
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.names import as_names
from amp_rewrite.reports.evidence import ALLCLOSE, Criterion, Difference, OutputRow
from amp_rewrite.reports.json_records import line_by_line
from amp_rewrite.reports.render import count, table
from amp_rewrite.reports.result import Result
from amp_rewrite.rewrite.emulate import emulate as emulated
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, Runner, Value
from amp_rewrite.settings.choices import Target, recorded_target
from amp_rewrite.settings.option import CriterionKeywords, Data, checked, takes
from amp_rewrite.settings.request import CRITERION

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure

EMULATED = "emulated"
"""Word in the description of an emulated run."""

_MAX_CACHED = 1 << 30
"""Maximum size of the outputs cached between runs, in bytes; the others are computed again."""

Progress = Callable[[int, int], None]


@takes(CRITERION)
@checked
def verify(
    a: ModelSource,
    b: ModelSource,
    data: Data,
    *,
    outputs: Sequence[str] | str = (),
    equal_nan: bool = False,
    emulate: bool | None = None,
    provider: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **near: Unpack[CriterionKeywords],
) -> Verdict:
    """Compare the outputs of the candidate `b` with those of the reference `a`.

    The criterion has no default: pass `tolerance`, `rtol` and/or `atol`, or a `metric`. Only one batch is in memory at
    a time.

    Args:
        a: the reference; anything that `Model.load` accepts.
        b: the candidate; anything that `Model.load` accepts.
        data: a Feed, or any data that `Feed.of` accepts, cast to the input types of each model; with feedback, each
            model gets its own states.
        outputs: names of the outputs to compare; by default all.
        equal_nan: accept NaN on both sides.
        emulate: run low ops as float32 ops with rounding; by default unless CUDA loads, since the CPU does not round.
        provider: the required provider; None means WebGPU for a model converted for it; otherwise CUDA or the CPU.
        progress: called as `progress(done, total)` after each batch.
        **near: the criterion, as one of the options below.

    Returns:
        The verdict, which is not ok if the outputs of the candidate have other names or another order.

    Raises:
        ModelError: a model is invalid or does not run.
        FeedError: the data does not fit a model.
        PolicyError: the criterion is missing or invalid.

    Example:
        >>> import amp_rewrite
        >>> low = amp_rewrite.convert("model.onnx")
        >>> amp_rewrite.verify("model.onnx", low, "batches.npz", tolerance=1e-2).ok
        True
    """
    comparison = Comparison(criterion(**near), as_names(outputs), equal_nan)
    require("verify")
    device = Device(provider, emulate)
    reference = Side.of(a, name_of(a, "the reference"), device)
    candidate = Side.of(b, name_of(b, "the candidate"), device)
    return verdict_of(reference, candidate, Feed.of(data, reference.model), comparison, progress)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A criterion and the outputs to compare, by default all.

    `equal_nan`: NaN on both sides passes. `to_failure`: stop after the first batch that fails.
    """

    by: Criterion
    outputs: Sequence[str] = ()
    equal_nan: bool = False
    to_failure: bool = False


def verdict_of(
    reference: Side, candidate: Side, feed: Feed, comparison: Comparison, progress: Progress | None = None
) -> Verdict:
    """Run both models and return the verdict. `feed`: batches for the reference."""
    outputs, refusals = _outputs_to_compare(reference, candidate, comparison.outputs)
    total = len(feed) if progress and not refusals else 0
    rows: list[OutputRow] = []
    back = feed.feedback
    read = outputs if back is None else tuple(dict.fromkeys((*outputs, *(out for out, _ in back.pairs))))
    expected: Mapping[str, Value] = {}
    results: Mapping[str, Value] = {}
    for number, batch in enumerate(() if refusals else feed):
        first, second = (batch if back is None else back.inputs(number, batch, found) for found in (expected, results))
        expected, results = reference.run(number, first, read), candidate.run(number, second, read)
        rows += (added := list(rows_of(feed.place(number), expected, results, outputs, comparison)))
        if progress:
            progress(number + 1, total)
        if comparison.to_failure and not all(row.difference.ok for row in added):
            break
    states = {} if feed.feedback or not rows else state_pairs(reference.model)
    words = option_values(states, reference.outputs)
    notes = list(_caveats(reference, candidate, feed, outputs, comparison))
    if states:
        (out, into), option = next(iter(states.items())), spelled("feedback", words[0]) + " …" * (len(words) > 1)
        more = f", and so on for {len(states)} states" if len(states) > 1 else ""
        reason = f"output {out!r} looks like the next {into!r}{more}"
        notes.append(f"without {option}, this comparison misses errors that build up over many steps: {reason}")
    data = FedData(feed.origin, feed.random, len({row.batch for row in rows}))
    return Verdict(reference.ran, candidate.ran, data, comparison.by, tuple(rows), refusals, tuple(notes), words)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models, loaded in a session, with a description of its runs.

    `cache`: outputs by run; None to cache nothing.
    """

    ran: ModelRun
    model: Model
    runner: Runner
    notes: tuple[str, ...]
    cache: dict[int, Mapping[str, Value]] | None = None

    @classmethod
    def of(cls, source: object, name: str, device: Device, *, cached: bool = False, valid: bool = False) -> Side:
        """Open a model. `cached`: cache its outputs; `valid`: skip the check before an emulation."""
        model = Model.load(source)
        low = " and ".join(low_types(model))
        provider, emulates = device.choose(model)
        if emulates and not low:
            model, emulates = decompose(model), False
        notes = list(random_op_notes(model, name))
        if provider == CPU and low and not emulates:
            notes.append(f"{name}: onnxruntime's CPU provider computes most {low} ops in float32, without rounding")
        if emulates:
            if not valid:
                check_as_is(model, name, provider)
            model = quick_to_load(emulated(model, io="float32"))
        runner = open_on(model, name, session_on(provider))
        how = f" {EMULATED}{' as on CUDA' if recorded_target(model) == Target.WEBGPU else ''}" if emulates else ""
        description = f"{low or 'float32'}{how} on {runner.provider}"
        return cls(ModelRun(name, description), model, runner, tuple(notes), {} if cached else None)

    def run(self, number: int, batch: Batch, outputs: Sequence[str]) -> Mapping[str, Value]:
        """Return the outputs of a run, with the batch cast to the model's input types; all outputs if cached."""
        if self.cache is not None and number in self.cache:
            return self.cache[number]
        arrays = {name: array for name, array in batch.items() if name in self.inputs}
        inputs = next(iter(Feed.of(arrays, self.model, allow_nonfinite=True)))
        results = self.runner.run(inputs, outputs if self.cache is None else None)
        if self.cache is not None:
            sizes = (getattr(value, "nbytes", 0) for run in (results, *self.cache.values()) for value in run.values())
            if sum(sizes) <= _MAX_CACHED:
                self.cache[number] = results
        return results

    @property
    def inputs(self) -> list[str]:
        return [port.name for port in self.runner.inputs]

    @property
    def outputs(self) -> list[str]:
        return [port.name for port in self.runner.outputs]


def _outputs_to_compare(
    reference: Side, candidate: Side, chosen: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the outputs to compare, and the differences in names and order."""
    expected, given = reference.outputs, candidate.outputs
    first, second = reference.ran.model, candidate.ran.model
    for name in chosen:
        if name not in expected:
            raise ModelError(f"{first} has no output {name!r}; it has {_quoted(expected)}")
    compared = tuple(chosen or expected)
    refusals = [f"{second} has no output {name!r}" for name in compared if name not in given]
    if not chosen:
        refusals += [f"{first} has no output {name!r}" for name in given if name not in expected]
        if not refusals and expected != given:
            refusals = [f"{second} returns its outputs in a different order: {_quoted(given)}"]
    return compared, tuple(refusals)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def rows_of(
    place: tuple[int, int | None],
    expected: Mapping[str, Value],
    results: Mapping[str, Value],
    outputs: Iterable[str],
    comparison: Comparison,
) -> Iterator[OutputRow]:
    """Yield the rows of one run: the difference of each output. `place`: batch and step of the run."""
    batch, step = place
    for name in outputs:
        parts = differences(expected[name], results[name], comparison.by, equal_nan=comparison.equal_nan)
        yield from (OutputRow(name, batch, difference, part, step) for part, difference in parts)


def _caveats(
    reference: Side, candidate: Side, feed: Feed, outputs: Sequence[str], comparison: Comparison
) -> Iterator[str]:
    if feed.random:
        yield "random data shows that the models run, not how accurate they are on your data"
    yield from feed.notes
    if comparison.equal_nan:
        yield "NaN on both sides counts as equal"
    if omitted := [name for name in reference.outputs if name not in outputs]:
        yield f"not compared: output {_quoted(omitted)}"
    if missing := [name for name in reference.inputs if name not in candidate.inputs]:
        yield f"{candidate.ran.model} has no input {_quoted(missing)}"
    yield from (*reference.notes, *candidate.notes)


# -- the verdict ---------------------------------------------------------------------------------------------

SCHEMA = 1

_DEFAULT_STEPS = 100
"""Number of steps in the suggested command."""
_MAX_ROUNDING = 0.16
"""Largest error to attribute to rounding to bfloat16: twice the suggested tolerance."""


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The name of a model, and a description of its run, such as "float32 on CPUExecutionProvider"."""

    model: str
    as_: str

    def __str__(self) -> str:
        return f"{self.model}: {self.as_}"


@dataclass(frozen=True, slots=True)
class FedData:
    """Origin and size of the data."""

    origin: str
    random: bool
    batches: int

    def __str__(self) -> str:
        return f"{self.origin}: {count(self.batches, 'batch', 'batches')}"


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """Verdict on a candidate's outputs against a reference's, with the reason.

    It is `ok` only if every row is ok, every output has at least one compared value, and there are no `refusals`.

    Attributes:
        reference: name and run of the reference.
        candidate: name and run of the candidate.
        fed: the data.
        criterion: tolerance or metric.
        rows: one per output and run; a run is a batch, or with feedback a step on a batch.
        refusals: differences in the names and order of the outputs.
        notes: caveats, for example that the data is random.
        states: suggested values of `feedback`, if outputs that look like states were not fed back.
    """

    reference: ModelRun
    candidate: ModelRun
    fed: FedData
    criterion: Criterion
    rows: tuple[OutputRow, ...]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the candidate passes."""
        return not self._objections

    def __bool__(self) -> bool:
        return self.ok

    @property
    def because(self) -> str:
        """Reason in one line: the first failure and the number of others, or the number of compared values."""
        objections = self._objections
        if objections:
            more = f" ({count(len(objections) - 1, 'more failure')})" if len(objections) > 1 else ""
            return objections[0] + more
        values = sum(row.difference.compared for row in self.rows)
        where = f"{count(len(self.outputs), 'output')} and {count(self.fed.batches, 'batch', 'batches')}"
        return f"{count(values, 'value')} compared in {where}"

    @property
    def brief(self) -> str:
        """Verdict and reason in one line."""
        return f"{'ok' if self.ok else 'failed'}: {self.because}"

    def figures(self) -> Sequence[Figure]:
        """Return a figure of the outputs' scores and the limit."""
        from amp_rewrite.reports.page.measured_figures import outputs_figure  # imported late: few runs draw figures

        return (outputs_figure(self.rows, self.criterion, self.brief, self._remarks),)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the compared outputs, in order."""
        return tuple(dict.fromkeys(row.output for row in self.rows))

    @property
    def worst(self) -> tuple[OutputRow, ...]:
        """Worst row of each output: a failure without a score first, then by score."""
        rows = [[row for row in self.rows if row.output == output] for output in self.outputs]
        return tuple(max(group, key=lambda row: _badness(self.criterion, row.difference)) for group in rows)

    @property
    def largest(self) -> float | None:
        """Largest error relative to the largest value of its output; None without finite values."""
        return max((r.difference.scaled for r in self.rows if r.difference.scaled is not None), default=None)

    @property
    def score(self) -> float | None:
        """Worst score of all rows; None without a score."""
        scores = [row.difference.score for row in self.rows if row.difference.score is not None]
        return (min(scores) if self.criterion.higher else max(scores)) if scores else None

    @property
    def reached(self) -> str:
        """Sentence with a tolerance a failed candidate would pass; "" if it has other faults or a metric."""
        failed = [row.difference.score for row in self.rows if not row.difference.ok]
        largest = self.largest or math.inf
        if not failed or None in failed or largest > _MAX_ROUNDING or self.criterion.name not in (ALLCLOSE, "scaled"):
            return ""
        step = 10.0 ** math.floor(math.log10(largest))
        passing = f"{math.ceil(largest / step) * step:g}"
        return f"the largest error is {largest:.2g}, so the candidate passes with a tolerance of {passing}"

    @property
    def _remarks(self) -> tuple[str, ...]:
        if self.ok or self.refusals:
            return self.notes
        return (
            *self.notes,
            *filter(None, [self.reached]),
            "`amp-rewrite locate` finds the op that causes the error",
        )

    @property
    def _objections(self) -> tuple[str, ...]:
        if self.refusals:
            return self.refusals
        if not self.rows:
            return ("nothing was compared, because there is no batch or no output",)
        failures = [
            f"output {r.label!r}, batch {r.place}: {r.difference.because}" for r in self.rows if not r.difference.ok
        ]
        nonempty = {row.output for row in self.rows if row.difference.compared or not row.difference.ok}
        empty = [
            f"output {output!r}: no batch had a value to compare; use data that produces one"
            for output in self.outputs
            if output not in nonempty
        ]
        return (*failures, *empty)

    def text(self, *, verbose: bool = False, command: str = "") -> str:
        """Return text: both runs, a table of the worst row per output (`verbose`: of all rows), and the verdict.

        `command`: the command to suggest next.
        """
        facts = (
            ("reference", str(self.reference)),
            ("candidate", str(self.candidate)),
            ("data", str(self.fed)),
            ("passes if", str(self.criterion)),
        )
        lines = [f"{self.candidate.model} against {self.reference.model}", *table(facts)]
        if self.rows:
            shown = [i for i, name in enumerate(_HEAD) if name != "score" or self.criterion.name != "scaled"]
            cells = map(_cells, self.rows if verbose else self.worst)
            head, right = [_HEAD[i] for i in shown], " >>>>"[: len(shown) - 4]
            lines += ["", *table([[row[i] for i in shown] for row in cells], head=head, right=right)]
        lines += ["", self.brief]
        lines += [f"note: {note}" for note in self._remarks]
        lines += [f"next: {command}"] if command else []
        return "\n".join(lines) + "\n"

    @property
    def advised(self) -> tuple[str, ...]:
        """Command-line options for feedback of the states."""
        words = [word for text in self.states for word in ("--feedback", text)]
        return (*words, "--steps", str(_DEFAULT_STEPS)) if words and self.fed.batches == 1 else tuple(words)

    def to_json(self) -> str:
        """Return JSON with one row per line; infinities and NaN are "inf", "-inf" and "nan". It ends with a newline.

        `docs/reference/verify.md` describes the fields. Equal verdicts have equal JSON.
        """
        head = {
            "schema": SCHEMA,
            "ok": self.ok,
            "because": self.because,
            "reference": {"model": self.reference.model, "ran": self.reference.as_},
            "candidate": {"model": self.candidate.model, "ran": self.candidate.as_},
            "data": asdict(self.fed),
            "criterion": str(self.criterion),
            "limit": self.criterion.limit,
            "higher": self.criterion.higher,
            "notes": self.notes,
        }
        return json_of(head, worst=map(_encoded, self.worst), rows=map(_encoded, self.rows))


def json_of(head: Mapping[str, object], **lists: Iterable[object]) -> str:
    """Return JSON with each field and each list item on its own line; infinities and NaN are strings."""
    encoded = {name: map(_json, items) for name, items in lists.items()}
    return line_by_line({name: _json(value) for name, value in head.items()}, encoded)


def _badness(by: Criterion, difference: Difference) -> tuple[int, bool, float]:
    """Return a sort key from best to worst: passed without a score, by score, failed without a score."""
    score = difference.score
    if score is None:
        return (0 if difference.ok else 2), False, 0.0
    return 1, not difference.ok, math.inf if math.isnan(score) else -score if by.higher else score


_HEAD = ("output", "batch", "max abs", "scaled", "score", "at", "reference", "candidate", "")


def _cells(row: OutputRow) -> tuple[str, ...]:
    difference = row.difference
    where = "-" if difference.where is None else str(list(difference.where))
    scores = (difference.max_abs, difference.scaled, difference.score)
    numbers = ("-" if score is None else f"{score:.3g}" for score in scores)
    values = (_short(difference.reference), _short(difference.candidate))
    return row.label, row.place, *numbers, where, *values, "" if difference.ok else difference.because


def _short(value: str) -> str:
    try:
        return f"{float(value):.5g}" if not value.lstrip("-").isdigit() else value
    except ValueError:
        return value or "-"


def _encoded(row: OutputRow) -> dict[str, object]:
    step = {} if row.step is None else {"step": row.step}
    return {"output": row.label, "batch": row.batch, **step, **asdict(row.difference)}


def _json(value: object) -> str:
    return json.dumps(plain_json(value), allow_nan=False)


def plain_json(value: object) -> object:
    """Replace infinities and NaN with strings, including in nested dictionaries."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    return value
