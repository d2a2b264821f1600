"""Calibration: run a model on data and measure the ranges of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.instrument.range_nodes import merged, neutral, ranges
from amp_rewrite.evidence.instrument.taps import Taps, tapped
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.passes.inline import inline_functions, inline_schema_functions
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.settings.choices import Target
from amp_rewrite.settings.op_lists import load_lists
from amp_rewrite.settings.policy import Policy, low_type

CHUNK = 2000
"""Taps in one session. Taps hold no memory between runs, but each adds to the time of opening a session."""

Progress = Callable[[int, int], None]


def calibrate(
    model: object,
    data: object,
    *,
    to: str | DType | Policy = "float16",
    allow_nonfinite: bool = False,
    chunk: int | None = None,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Ranges:
    """The range of every floating value of a model over data: see `Ranges` and docs/how-to/calibration.md.

    `model`: what `Model.load` takes (`folder`: where its external data lies). What is in a low type
    already is measured in its widened twin, so that its true ranges are seen. `data`: what `Feed.of` takes, or a Feed;
    NaN and infinity in it only with `allow_nonfinite`. `to`: as `convert` takes it. `chunk`: taps in one session,
    so that there are fewer nodes in each, and more runs. `threads` for one op; None: one per core.
    `progress(done, total)` counts runs; the total asks the data for its length.

    Everything is measured inside onnxruntime, on the CPU, without optimizations: each op computes what stands in the
    model. PolicyError for another type, a chunk or threads below 1; ModelError and FeedError as `Model.load`,
    `Feed.of` and `Runner` raise them.
    """
    low = low_type(to)
    size = CHUNK if chunk is None else chunk
    if size < 1:
        raise PolicyError(f"{size} is not a valid number of taps per session; use a chunk of 1 or more")
    if threads is not None and threads < 1:
        raise PolicyError(f"{threads} is not a valid number of threads; use 1 or more, or omit it for one per core")
    source = Model.load(model, folder=folder)
    parts = tuple(_parts(source, low))
    feed = Feed.of(data, parts[0].view.model, allow_nonfinite=allow_nonfinite)
    measured, batches = _measured(parts, feed, low, size, threads or 0, progress)
    values: dict[str, Range] = {}
    for part, found in zip(parts, measured, strict=True):
        for value in part.taps.constants:
            found[value] = Range().merge(part.view.fit(value, low)).times(batches)
        for copy, of in part.taps.copies.items():
            found[copy] = found[of] if of in found else values[key(part.view, of)]
        values |= _by_key(part.view, found)
    print_ = fingerprint(source)
    return Ranges(
        to=low.spelling,
        values=values,
        batches=batches,
        origin=feed.origin,
        random=feed.random,
        model=source.path.name if source.path else source.proto.graph.name,
        graph=print_.graph,
        weights=print_.weights,
        untapped=parts[0].taps.untapped,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A view and its measured values."""

    view: View
    taps: Taps


def _parts(source: Model, low: DType) -> Iterator[_Part]:
    """Yield the model with functions inlined as in a conversion, or its widened twin if it has low values.

    Then yield the bodies of the standard's functions that a conversion with the default lists inlines for CUDA.
    """
    view = inline_functions(View.of(source))[0]
    if view.low_types:
        widened = View.of(emulate(source, rounding=False, io="float32"))
        yield _Part(widened, Taps.of(widened))
        return
    yield _Part(view, Taps.of(view))
    inside, inlined = inline_schema_functions(view, load_lists(low), low, Target.ORT_CUDA)
    if inlined:
        known = {key(view, value.id) for value in view.values}
        yield _Part(inside, Taps.of(inside).only(v.id for v in inside.values if key(inside, v.id) not in known))


def _measured(
    parts: Sequence[_Part], feed: Feed, to: DType, chunk: int, threads: int, progress: Progress | None
) -> tuple[list[dict[ValueId, Range]], int]:
    """Return the ranges of the tapped values of each part, and the number of batches. One session is open at a time."""
    pieces = [(i, part.taps.taps[at : at + chunk]) for i, part in enumerate(parts) for at in _starts(part, chunk)]
    total = len(feed) * len(pieces) if progress else 0
    measured: list[dict[ValueId, Range]] = [{} for _ in parts]
    batches = 0
    for number, (i, piece) in enumerate(pieces):
        made = tapped(parts[i].view, piece, to)
        runner = Runner.open(
            made.model, SessionOptions(outputs_only=(made.rows,), optimized=False, spinning=False, threads=threads)
        )
        rows = neutral(len(made.values))
        for batches, batch in enumerate(feed, 1):
            rows = merged(rows, np.asarray(runner.run(batch)[made.rows]))
            if progress:
                progress(number * (total // len(pieces)) + batches, total)
        measured[i].update(zip(made.values, ranges(rows), strict=True))
    return measured, batches if pieces else len(feed)


def _starts(part: _Part, chunk: int) -> range:
    return range(0, len(part.taps.taps), chunk)


def _by_key(view: View, found: Mapping[ValueId, Range]) -> dict[str, Range]:
    """Return ranges by key in topological order; values with equal keys are merged."""
    named: dict[str, Range] = {}
    for value in sorted(found):
        name = key(view, value)
        named[name] = named[name].merge(found[value]) if name in named else found[value]
    return named
