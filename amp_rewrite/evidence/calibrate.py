"""Calibration: run a model on data and measure the ranges of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.opening import unrolled
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.evidence.taps import Taps, merged, neutral, ranges, tapped
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.passes.inline import inline_functions, inline_schema_functions
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.settings.choices import LowType, Target, low_type
from amp_rewrite.settings.op_lists import load_lists
from amp_rewrite.settings.option import Data, checked

CHUNK = 2000
"""Taps in one session. Taps hold no memory between runs, but each adds to the time of opening a session."""


@checked
def calibrate(
    model: ModelSource,
    data: Data,
    *,
    to: LowType = "float16",
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ranges:
    """Return the range of every floating value of a model over data; docs/concepts/ranges.md has its use.

    onnxruntime measures everything on the CPU without optimizations: each op computes as the model states. Low
    values are measured in the model's widened twin, so that their true ranges are seen.

    Args:
        model: as `Model.load` takes it.
        data: a Feed, or an argument of `Feed.of`; with feedback the ranges are those of all steps.
        to: the low type, as `convert` takes it.
        threads: for one op; None: one per core.
        folder: where the external data of a ModelProto lies.
        progress: called as `progress(done, total)` with runs; the total asks the data for its length.

    Returns:
        The ranges, for `convert(…, ranges=…)`.

    Raises:
        PolicyError: `to` is not a low type, or `threads` is below 1.
        ModelError: the model is invalid or does not run.
        FeedError: the data do not fit the model.

    Example:
        >>> import amp_rewrite
        >>> ranges = amp_rewrite.calibrate("model.onnx", "batches.npz")
        >>> ranges.save("ranges.json")
    """
    low = low_type(to)
    if threads is not None and threads < 1:
        raise PolicyError(f"{threads} is not a valid number of threads; use 1 or more, or omit it for one per core")
    require("calibrate")
    source = Model.load(model, folder=folder)
    parts = tuple(_parts(source, low))
    feed = Feed.of(data, parts[0].view.model)
    measured, runs = _measured(parts, unrolled(feed, parts[0].view.model), low, threads or 0, progress)
    values: dict[str, Range] = {}
    for part, known in zip(parts, measured, strict=True):
        for value in part.taps.constants:
            known[value] = Range().merge(part.view.fit(value, low)).times(runs)
        values |= _by_key(part.view, known)
    identity = fingerprint(source)
    return Ranges(
        to=low.spelling,
        values=values,
        batches=feed.place(runs - 1)[0] + 1,
        origin=feed.origin,
        random=feed.random,
        model=source.path.name if source.path else source.proto.graph.name,
        graph=identity.graph,
        weights=identity.weights,
        untapped=parts[0].taps.untapped,
    )


class _Part(NamedTuple):
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
        yield _Part(inside, Taps.of(inside, known))


def _measured(
    parts: Sequence[_Part], feed: Feed, to: DType, threads: int, progress: Callable[[int, int], None] | None
) -> tuple[list[dict[ValueId, Range]], int]:
    """Return the ranges of each part's tapped values, and the number of runs."""
    sessions = [
        (i, p.taps.taps[at : at + CHUNK]) for i, p in enumerate(parts) for at in range(0, len(p.taps.taps), CHUNK)
    ]
    measured: list[dict[ValueId, Range]] = [{} for _ in parts]
    total = runs = len(feed) if progress or not sessions else 0
    for number, (i, taps) in enumerate(sessions):
        model = tapped(parts[i].view, taps, to)
        options = SessionOptions(outputs_only=(model.rows,), optimized=False, spinning=False, threads=threads)
        runner = Runner.open(model.model, options)
        rows = neutral(len(model.values))
        for runs, batch in enumerate(feed, 1):
            rows = merged(rows, np.asarray(runner.run(batch)[model.rows]))
            if progress:
                progress(number * total + runs, len(sessions) * total)
        measured[i].update(zip(model.values, ranges(rows), strict=True))
    return measured, runs


def _by_key(view: View, known: Mapping[ValueId, Range]) -> dict[str, Range]:
    named: dict[str, Range] = {}
    for value, range_ in sorted(known.items()):
        name = key(view, value)
        named[name] = named[name].merge(range_) if name in named else range_
    return named
