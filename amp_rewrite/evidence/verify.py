"""Verification: compare the outputs of two models on the same data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.instrument.lazy_weights import opening
from amp_rewrite.evidence.metric import Criterion, Difference, compare, criterion
from amp_rewrite.evidence.verdict import Fed, Ran, Row, Verdict
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.emulate import emulate as emulated
from amp_rewrite.runtime.ports import Port
from amp_rewrite.runtime.runner import CPU, CUDA, Given, Runner, SessionOptions, cuda_opens

Array = NDArray[Any]


def verify(
    a: object,
    b: object,
    data: object,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    metric: str | Callable[[Array, Array], float] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    outputs: Sequence[str] | str = (),
    equal_nan: bool = False,
    allow_nonfinite: bool = False,
    emulate: bool | None = None,
    provider: str | None = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Whether `b`, the candidate, gives what `a`, the reference, gives: a Verdict, with every number and why.

    `a`, `b`: what `Model.load` takes. `data`: what `Feed.of` takes, or a Feed (`Feed.randomly`); both models get it,
    each input in the type that it has there. What decides has no default: `rtol` and/or `atol`, or a `metric` (a name
    in `metric.MEASURES`, or a callable) with `at_least` or `at_most`. `outputs` alone are compared, if given. NaN on
    both sides passes only with `equal_nan`; the data may hold NaN and infinity only with `allow_nonfinite`.

    `emulate`: low-precision ops run as float32 ops that round (`amp_rewrite.emulate`); None: where no CUDA provider
    opens, because onnxruntime's CPU provider does not round. `provider`: the one that must open; None: CUDA where
    it opens, else the CPU. `names` are what the verdict calls the models. `progress(done, total)` counts batches.

    One batch is in memory at a time. ModelError, FeedError and PolicyError say what is wrong with what was given;
    a candidate with other outputs is no error but a verdict that is not ok.
    """
    by = criterion(rtol=rtol, atol=atol, metric=metric, at_least=at_least, at_most=at_most)
    alone = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    return verdict_of(a, b, data, Comparison(by, alone, equal_nan, allow_nonfinite, emulate, provider, names, progress))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A criterion, and the other arguments of `verify`."""

    by: Criterion
    outputs: Sequence[str] = ()
    equal_nan: bool = False
    allow_nonfinite: bool = False
    emulate: bool | None = None
    provider: str | None = None
    names: tuple[str, str] | None = None
    progress: Callable[[int, int], None] | None = None


def verdict_of(a: object, b: object, data: object, comparison: Comparison) -> Verdict:
    """Return the verdict of `verify` for arguments that are folded into one object."""
    chosen = comparison.provider or (CUDA if cuda_opens() else CPU)
    emulates = comparison.emulate if comparison.emulate is not None else not cuda_opens()
    called = comparison.names or (None, None)
    reference = _Side.of(a, called[0] or name_of(a, "the reference"), emulates, chosen)
    candidate = _Side.of(b, called[1] or name_of(b, "the candidate"), emulates, chosen)
    feed = Feed.of(data, reference.model, allow_nonfinite=comparison.allow_nonfinite)
    compared, refusals = _compared(reference, candidate, comparison.outputs)
    runs = () if refusals else tuple(_rows(reference, candidate, feed, compared, comparison))
    notes = (
        *_of_data(feed),
        *_nan(comparison.equal_nan),
        *_left_out(reference, compared),
        *_unfed(reference, candidate),
    )
    batches = len({row.batch for row in runs})
    return Verdict(
        Ran(reference.name, reference.as_),
        Ran(candidate.name, candidate.as_),
        Fed(feed.origin, feed.random, batches),
        comparison.by,
        runs,
        refusals,
        (*notes, *reference.notes, *candidate.notes),
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two models as it runs, with a description of how it runs."""

    name: str
    model: Model
    runner: Runner
    as_: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: object, name: str, emulates: bool, provider: str) -> _Side:
        model = Model.load(given)
        low = low_types(model)
        runs = opening(emulated(model, io="float32")) if emulates and low else model
        runner = Runner.open(runs, SessionOptions(providers=(provider, CPU) if provider != CPU else (CPU,)))
        if runner.provider != provider:
            raise ModelError(
                f"{name} was to run on {provider}, and only {runner.provider} opens here; ask for"
                f" that, or install what {provider} needs"
            )
        spelled = " and ".join(low) or "float32"
        how = f"{spelled} emulated" if emulates and low else spelled
        unrounded = provider == CPU and low and not emulates
        note = f"{name}: onnxruntime's CPU provider computes most {spelled} ops in float32 and does not round"
        notes = (*drawing(model, name), *((note,) if unrounded else ()))
        return cls(name, runs, runner, f"{how} on {runner.provider}", notes)


def name_of(given: object, default: str) -> str:
    """Return the file name of a model, or the default."""
    path = given.path if isinstance(given, Model) else Path(given) if isinstance(given, (str, os.PathLike)) else None
    return path.name if path is not None else default


def low_types(model: Model) -> tuple[str, ...]:
    """Return the names of the low types in a model."""
    return tuple(sorted(dtype.spelling for dtype in View.of(model).low_types))


def drawing(model: Model, name: str) -> Iterator[str]:
    """Yield a note if ops draw random numbers without a seed, because comparing their outputs is meaningless."""
    view = View.of(model)
    drawn = [op for op in view.ops if _draws(view, op) and all(a.name != "seed" for a in op.node.attribute)]
    if drawn:
        more = f" and {len(drawn) - 1} more" if drawn[1:] else ""
        yield (
            f"{drawn[0].name!r} ({drawn[0].kind}){more} in {name} draws random numbers without a seed, others in each"
            " run; give it the attribute seed"
        )


def _draws(view: View, op: Op) -> bool:
    """True if an op gives different numbers in each run; Dropout does if its third input, training mode, is true."""
    if op.op_type != "Dropout":
        return op.op_type in RANDOM
    mode = op.inputs[2] if len(op.inputs) > 2 else None
    tensor = view.constant(mode)
    return mode is not None and (tensor is None or bool(view.model.array(tensor).any()))


# -- what is compared ----------------------------------------------------------------------------------


def _compared(reference: _Side, candidate: _Side, wanted: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the outputs to compare, and objections to the comparison. Raise ModelError for an unknown output."""
    mine, theirs = ([port.name for port in side.runner.outputs] for side in (reference, candidate))
    for name in wanted:
        if name not in mine:
            raise ModelError(f"{reference.name} has no output {name!r}; it has {', '.join(map(repr, mine))}")
    compared = tuple(wanted or mine)
    missing = [name for name in compared if name not in theirs]
    extra = [] if wanted else [name for name in theirs if name not in mine]
    refusals = []
    if not wanted and mine != theirs and sorted(mine) == sorted(theirs):
        refusals.append(f"{candidate.name} gives its outputs in another order: {', '.join(map(repr, theirs))}")
    if missing:
        refusals.append(f"{candidate.name} has no output {', '.join(map(repr, missing))}")
    if extra:
        refusals.append(f"{reference.name} has no output {', '.join(map(repr, extra))}")
    return compared, tuple(refusals)


def _rows(
    reference: _Side, candidate: _Side, feed: Feed, compared: Sequence[str], comparison: Comparison
) -> Iterator[Row]:
    by, equal_nan, progress = comparison.by, comparison.equal_nan, comparison.progress
    total = len(feed) if progress else 0
    for number, batch in enumerate(feed):
        found = reference.runner.run(_fed(reference, batch), compared)
        others = candidate.runner.run(_fed(candidate, batch), compared)
        yield from rows_of(number, found, others, compared, by, equal_nan=equal_nan)
        if progress:
            progress(number + 1, total)


def rows_of(
    number: int,
    expected: Mapping[str, Given],
    given: Mapping[str, Given],
    compared: Sequence[str],
    by: Criterion,
    *,
    equal_nan: bool = False,
) -> Iterator[Row]:
    """Yield the rows of one batch: the difference of each output from the expected one."""
    for name in compared:
        for part, x, y in _tensors("", expected[name], given[name]):
            apart = x if isinstance(x, Difference) else compare(x, y, by, equal_nan=equal_nan)
            yield Row(name, number, apart, part)


def _fed(side: _Side, batch: Batch) -> Mapping[str, Any]:
    """Return the batch in the types of one side, without inputs that it lacks."""
    ports = {port.name: port for port in side.runner.inputs}
    mine = {name: array for name, array in batch.items() if name in ports}
    if all(_fits(ports[name], array) for name, array in mine.items()) and len(mine) == len(ports):
        return mine
    return next(iter(Feed.of(mine, side.model, allow_nonfinite=True)))


def _fits(port: Port, value: object) -> bool:
    dtype = port.dtype
    known = dtype is not None and dtype is not DType.STRING
    return known and isinstance(value, np.ndarray) and value.dtype == dtype.numpy  # type: ignore[union-attr]


def _tensors(part: str, a: Given, b: Given) -> Iterator[tuple[str, Any, Any]]:
    """Yield pairs of arrays with their position in the output, or a Difference if the structures differ."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        yield part, a, b
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _tensors(f"{part}[{i}]", x, y)
        if not a:
            yield part, Difference(0, True, "an empty sequence on both sides"), None
    elif a is None and b is None:
        yield part, Difference(0, True, "nothing on both sides"), None
    else:
        yield part, Difference(0, False, f"the reference gives {_called(a)}, the candidate {_called(b)}"), None


def _called(value: Given) -> str:
    if value is None:
        return "nothing"
    return f"a sequence of {len(value)}" if isinstance(value, list) else "a tensor"


# -- what a reader should know ---------------------------------------------------------------------------


def _of_data(feed: Feed) -> Iterator[str]:
    if feed.random:
        yield "the data are random: they show wiring and ranges of random inputs, not accuracy on yours"
    yield from feed.notes


def _nan(equal_nan: bool) -> Iterator[str]:
    if equal_nan:
        yield "NaN on both sides counts as equal"


def _left_out(reference: _Side, compared: Sequence[str]) -> Iterator[str]:
    left = [port.name for port in reference.runner.outputs if port.name not in compared]
    if left:
        yield f"not compared: output {', '.join(map(repr, left))}"


def _unfed(reference: _Side, candidate: _Side) -> Iterator[str]:
    theirs = {port.name for port in candidate.runner.inputs}
    unread = [port.name for port in reference.runner.inputs if port.name not in theirs]
    if unread:
        yield f"{candidate.name} has no input {', '.join(map(repr, unread))}"
