"""Runs a model on data and gives the ranges of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.emulate import emulate
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.feed import Feed
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.evidence.tally import merged, neutral, ranges
from amp_rewrite.evidence.taps import Taps, tapped
from amp_rewrite.expand import inline_functions
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.ort.runner import Runner
from amp_rewrite.view import ValueId, View

CHUNK = 2000
"""Taps in one session. They hold no memory, as each runs and is done, but opening a session takes time with them."""

Progress = Callable[[int, int], None]


def calibrate(
    model: object,
    data: object,
    *,
    to: str | DType = "float16",
    allow_nonfinite: bool = False,
    chunk: int | None = None,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Ranges:
    """The range of every floating value of a model over data: see `Ranges` and docs/calibration.md.

    `model`: a Model, or what `Model.load` takes (`folder`: where its external data lies). What is in a low type
    already is measured in its widened twin, so that its true ranges are seen. `data`: what `Feed.of` takes, or a Feed;
    NaN and infinity in it only with `allow_nonfinite`. `to`: "float16" or "bfloat16". `chunk`: taps in one session,
    so that there are fewer nodes in each, and more runs. `threads` for one op; None: one per core.
    `progress(done, total)` counts runs; the total asks the data for its length.

    Everything is measured inside onnxruntime, on the CPU, without optimizations: each op computes what stands in the
    model. PolicyError for another type, a chunk below 1 or negative threads; ModelError and FeedError as `Model.load`,
    `Feed.of` and `Runner` raise them.
    """
    low = to if isinstance(to, DType) else DType.parse(to)
    if not low.low:
        raise PolicyError(f"ranges are for a low type, and {low.spelling} is none; use float16 or bfloat16")
    size = CHUNK if chunk is None else chunk
    if size < 1:
        raise PolicyError(f"{size} taps in a session measure nothing; use a chunk of 1 or more")
    if threads is not None and threads < 0:
        raise PolicyError(f"{threads} threads compute nothing; use 1 or more, or leave it out for one per core")
    source = model if isinstance(model, Model) else Model.load(model, folder=folder)
    view = _measurable(source)
    feed = Feed.of(data, view.model, allow_nonfinite=allow_nonfinite)
    taps = Taps.of(view)
    found, batches = _measured(view, taps, feed, low, size, threads or 0, progress)
    for value in taps.constants:
        found[value] = Range().merge(view.fit(value, low)).times(batches)
    for copy, of in taps.copies.items():
        found[copy] = found[of]
    print_ = fingerprint(source)
    return Ranges(
        to=low.spelling,
        values=_by_key(view, found),
        batches=batches,
        origin=feed.origin,
        random=feed.random,
        model=source.path.name if source.path else source.proto.graph.name,
        graph=print_.graph,
        weights=print_.weights,
        untapped=taps.untapped,
    )


def _measurable(source: Model) -> View:
    """The model as a conversion looks at it, functions inlined; its widened twin if it has low values."""
    view = View.of(inline_functions(source)[0])
    if not any(found is not None and found.dtype is not None and found.dtype.low for found in view.types):
        return view
    return View.of(emulate(source, rounding=False, io="float32"))


def _measured(
    view: View, taps: Taps, feed: Feed, to: DType, chunk: int, threads: int, progress: Progress | None
) -> tuple[dict[ValueId, Range], int]:
    """The ranges of the tapped values, and how many batches there were. One session is open at a time."""
    pieces = [taps.taps[at : at + chunk] for at in range(0, len(taps.taps), chunk)]
    total = len(feed) * len(pieces) if progress else 0
    found: dict[ValueId, Range] = {}
    batches = 0
    for number, piece in enumerate(pieces):
        made = tapped(view, piece, to)
        runner = Runner.open(made.model, outputs_only=(made.rows,), optimized=False, threads=threads)
        rows = neutral(len(made.values))
        for batches, batch in enumerate(feed, 1):
            rows = merged(rows, np.asarray(runner.run(batch)[made.rows]))
            if progress:
                progress(number * (total // len(pieces)) + batches, total)
        found.update(zip(made.values, ranges(rows), strict=True))
    return found, batches if pieces else len(feed)


def _by_key(view: View, found: Mapping[ValueId, Range]) -> dict[str, Range]:
    """In topological order; values of one key are merged."""
    named: dict[str, Range] = {}
    for value in sorted(found):
        name = key(view, value)
        named[name] = named[name].merge(found[value]) if name in named else found[value]
    return named
