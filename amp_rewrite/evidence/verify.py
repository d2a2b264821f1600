"""Verification: compare the outputs of two models on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

from amp_rewrite.errors import ModelError, spelled
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.data.feedback import state_pairs, words_of
from amp_rewrite.evidence.metric import criterion, differences
from amp_rewrite.evidence.opening import (
    Device,
    check_as_is,
    drawing,
    low_types,
    name_of,
    open_on,
    opening,
    session_on,
)
from amp_rewrite.evidence.verdict import FedData, ModelRun, Verdict
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.names import as_names
from amp_rewrite.reports.evidence import Criterion, OutputRow
from amp_rewrite.rewrite.emulate import emulate as emulated
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, Given, Runner
from amp_rewrite.settings.choices import Target, target_of
from amp_rewrite.settings.option import CriterionKeywords, Data, checked, takes
from amp_rewrite.settings.request import CRITERION

EMULATED = "emulated"
"""Word in the description of a run whose low type was emulated."""

KEPT = 1 << 30
"""Bytes of the reference's outputs that are kept between runs; the others are computed again."""

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
    """Return the verdict on the outputs of the candidate `b` against those of the reference `a`, with every number.

    The criterion has no default: `tolerance`; `rtol` and/or `atol`; or a `metric`. One batch is in memory at a time.

    Args:
        a: the reference, as `Model.load` takes it.
        b: the candidate, as `Model.load` takes it.
        data: a Feed, or an argument of `Feed.of`; each model gets it in the types of its inputs, and with feedback its
            own states.
        outputs: the only ones to compare.
        equal_nan: accept NaN on both sides.
        emulate: run low ops as float32 ops that round; None: unless CUDA opens, since the CPU does not round.
        provider: the one that must open; None: WebGPU for a model converted for it, CUDA, or the CPU, as they open.
        progress: called as `progress(done, total)` with batches.
        **near: the criterion, by the options below.

    Returns:
        The verdict. A candidate with other outputs gives one that is not ok.

    Raises:
        ModelError: a model is invalid or does not run.
        FeedError: the data do not fit a model.
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
    """A criterion, its outputs (all by default), and True if NaN on both sides passes.

    `to_failure`: stop after the first batch that fails.
    """

    by: Criterion
    outputs: Sequence[str] = ()
    equal_nan: bool = False
    to_failure: bool = False


def verdict_of(
    reference: Side, candidate: Side, feed: Feed, comparison: Comparison, progress: Progress | None = None
) -> Verdict:
    """Return the verdict on a candidate. `feed`: batches for the reference."""
    outputs, refusals = _compared(reference, candidate, comparison.outputs)
    total = len(feed) if progress and not refusals else 0
    rows: list[OutputRow] = []
    read = tuple(dict.fromkeys((*outputs, *(out for out, _ in feed.feedback.pairs)))) if feed.feedback else outputs
    sides = [Stepped(feed, partial(side.run, outputs=read)) for side in (reference, candidate)]
    for number, batch in enumerate(() if refusals else feed):
        expected, results = (side(number, batch) for side in sides)
        rows += (added := list(rows_of(feed.place(number), expected, results, outputs, comparison)))
        if progress:
            progress(number + 1, total)
        if comparison.to_failure and not all(row.difference.ok for row in added):
            break
    states = {} if feed.feedback or not rows else state_pairs(reference.model)
    words = words_of(states, reference.outputs)
    notes = (*_caveats(reference, candidate, feed, outputs, comparison), *_unfed(states, words))
    fed = FedData.of(feed, rows)
    return Verdict(reference.ran, candidate.ran, fed, comparison.by, tuple(rows), refusals, notes, words)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models as it runs, with a description of how it runs.

    `kept`: outputs by batch, computed once as far as memory allows; None if each batch comes once.
    """

    ran: ModelRun
    model: Model
    runner: Runner
    notes: tuple[str, ...]
    kept: dict[int, Mapping[str, Given]] | None = None

    @classmethod
    def of(cls, source: object, name: str, device: Device, *, keeps: bool = False, valid: bool = False) -> Side:
        """Open a model. `keeps`: outputs stay in memory; `valid`: the model need not be checked."""
        model = Model.load(source)
        spelled = " and ".join(low_types(model))
        provider, emulates = device.way(model)
        emulates = emulates and bool(spelled)
        notes = list(drawing(model, name))
        if provider == CPU and spelled and not emulates:
            notes.append(
                f"{name}: onnxruntime's CPU provider computes most {spelled} ops in float32 and does not round"
            )
        if emulates:
            if not valid:
                check_as_is(model, name, provider)
            model = opening(emulated(model, io="float32"))
        runner = open_on(model, name, session_on(provider))
        like = f" {EMULATED}{' as on CUDA' if target_of(model) == Target.WEBGPU else ''}" if emulates else ""
        how = f"{spelled or 'float32'}{like} on {runner.provider}"
        return cls(ModelRun(name, how), model, runner, tuple(notes), {} if keeps else None)

    def run(self, number: int, batch: Batch, outputs: Sequence[str] = ()) -> Mapping[str, Given]:
        """Return the outputs for the batch of a number, cast to the model's inputs; all if they are kept."""
        if self.kept is not None and number in self.kept:
            return self.kept[number]
        mine = {name: array for name, array in batch.items() if name in self.inputs}
        fed = next(iter(Feed.of(mine, self.model, allow_nonfinite=True)))
        found = self.runner.run(fed, outputs or None if self.kept is None else None)
        if self.kept is not None:
            sizes = (getattr(value, "nbytes", 0) for held in (found, *self.kept.values()) for value in held.values())
            if sum(sizes) <= KEPT:
                self.kept[number] = found
        return found

    @property
    def inputs(self) -> list[str]:
        return [port.name for port in self.runner.inputs]

    @property
    def outputs(self) -> list[str]:
        return [port.name for port in self.runner.outputs]


@dataclass
class Stepped:
    """The runs of one model, in the order of a feed; inputs take outputs of the run before, as the feedback says."""

    feed: Feed
    run: Callable[[int, Batch], Mapping[str, Any]]
    _states: dict[str, Any] = field(default_factory=dict)

    def __call__(self, number: int, batch: Batch) -> Mapping[str, Any]:
        back = self.feed.feedback
        if back is None:
            return self.run(number, batch)
        outputs = self.run(number, batch if back.begins(number) else {**batch, **self._states})
        self._states = {into: outputs[out] for out, into in back.pairs}
        return outputs


def _compared(reference: Side, candidate: Side, chosen: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the outputs to compare, and the differences in names and order that refuse a candidate."""
    mine, theirs = reference.outputs, candidate.outputs
    first, second = reference.ran.model, candidate.ran.model
    for name in chosen:
        if name not in mine:
            raise ModelError(f"{first} has no output {name!r}; it has {_quoted(mine)}")
    compared = tuple(chosen or mine)
    refusals = [f"{second} has no output {name!r}" for name in compared if name not in theirs]
    if not chosen:
        refusals += [f"{first} has no output {name!r}" for name in theirs if name not in mine]
        if not refusals and mine != theirs:
            refusals = [f"{second} gives its outputs in another order: {_quoted(theirs)}"]
    return compared, tuple(refusals)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def rows_of(
    place: tuple[int, int | None],
    expected: Mapping[str, Given],
    results: Mapping[str, Given],
    outputs: Iterable[str],
    comparison: Comparison,
) -> Iterator[OutputRow]:
    """Yield the rows of one run: the difference of each output from the expected one. `place`: its batch and step."""
    batch, step = place
    for name in outputs:
        parts = differences(expected[name], results[name], comparison.by, equal_nan=comparison.equal_nan)
        yield from (OutputRow(name, batch, difference, part, step) for part, difference in parts)


def _caveats(
    reference: Side, candidate: Side, feed: Feed, outputs: Sequence[str], comparison: Comparison
) -> Iterator[str]:
    if feed.random:
        yield "random data show that the models run, not how accurate they are on yours"
    yield from feed.notes
    if comparison.equal_nan:
        yield "NaN on both sides counts as equal"
    if left := [name for name in reference.outputs if name not in outputs]:
        yield f"not compared: output {_quoted(left)}"
    if unread := [name for name in reference.inputs if name not in candidate.inputs]:
        yield f"{candidate.ran.model} has no input {_quoted(unread)}"
    yield from (*reference.notes, *candidate.notes)


def _unfed(states: Mapping[str, str], words: Sequence[str]) -> Iterator[str]:
    for out, into in list(states.items())[:1]:
        fed = " ".join([spelled("feedback", words[0]), *(["…"] if words[1:] else [])])
        more = f", and so on for {len(states)} states" if len(states) > 1 else ""
        yield (
            f"without {fed} this does not show the hundredth step: output {out!r} looks like the next {into!r}{more}"
        )
