"""The check of a conversion without data: one random batch in float32 and in half, and the repair.

Nothing here depends on a clock or on the number of cores, so that the same request gives the same file everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, FeedError, MachineError, ModelError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.data.sources import Drawing
from amp_rewrite.evidence.opening import Device, casting_in_graph, drawing
from amp_rewrite.evidence.verify import Comparison, rows_of
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LOW_ONLY
from amp_rewrite.pipeline.conversion import Converted, Draft
from amp_rewrite.pipeline.measured import calibrated, guarded
from amp_rewrite.pipeline.repair import Search, reference_of, with_tf32
from amp_rewrite.reports.evidence import FAILED, NONE, REPAIRED, SMOKE, Criterion, Evidence, OutputRow
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import NO_KERNEL, require
from amp_rewrite.runtime.runner import CPU, Given, Runner, SessionOptions
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.request import Request
from amp_rewrite.settings.selectors import exactly

WRONG = 0.1
"""Error, relative to the largest value of an output, above which a random batch shows a conversion wrong."""
MAX_WEIGHTS = 10**9
"""Bytes of weights above which a conversion is not checked unless asked."""
_MORE = 1.5
"""The error with TF32 that a random batch permits, as a multiple of that without."""
_FREE = 16
"""Size of free dimensions whose name does not say what they are."""
_MAX_INPUT = 1 << 28
"""Bytes of an input above which a conversion is not checked: what it declares may be a mistake."""
_ROUNDS = 2
"""Repairs at most; the second one starts from what the first one keeps."""
_LIGHT = SessionOptions(optimized=False, pooled=False, lean=True, spinning=False)
"""Options for one run: weights stay in their files, and no graph is optimized."""
_PLANNED = 2000
"""Nodes above which planning the reuse of memory takes longer than the run."""

Convert = Callable[[Request], tuple[Draft, Converted]]
"""A conversion of one model by a request, with its draft."""


def checked(convert: Convert, batch: Feed | Mapping[str, Any], request: Request) -> Converted:
    """Return the conversion with its evidence; with ops kept float32 if the batch shows it wrong.

    `batch`: the data, or keywords of `Feed.randomly`.
    """
    draft, converted = convert(request)
    if converted.plan.empty:
        return _copied(draft.source, converted)
    try:
        request.tell("check in float32")
        reference = _Reference.of(draft, batch)
        request.tell(f"check in {request.to.spelling}")
        rows = reference.rows(converted.result)
        reference.check_comparable(rows, request.to)
    except AmpRewriteError as why:
        if isinstance(why, FeedError) and any(batch.values() if isinstance(batch, Mapping) else ()):
            raise
        return replace(converted, evidence=Evidence(NONE, objection=str(why)))
    level, found = SMOKE, list[str]()
    for _ in range(_ROUNDS):
        if not any(map(_is_wrong, rows)):
            break
        with suppress(ModelError):  # values inside of the model cannot be measured
            outputs = tuple(dict.fromkeys(row.output for row in rows if _is_wrong(row)))
            found = list(dict.fromkeys((*found, *_blamed(draft, reference.feed, outputs))))
            draft, converted = convert(replace(request, keep=(*request.keep, *found), found=tuple(found)))
            rows, level = reference.rows(converted.result), REPAIRED
    if any(map(_is_wrong, rows)):
        return reference.judged(converted, rows, FAILED, found)
    judged = reference.judged(converted, rows, level, found)
    return with_tf32(draft, judged, lambda model: _error(reference.rows(model)), _MORE * (_error(rows) or 0.0))


def _error(rows: Sequence[OutputRow]) -> float | None:
    """Return the largest error of rows, None for wrong ones."""
    errors = [row.difference.scaled for row in rows if row.difference.scaled is not None]
    return None if any(map(_is_wrong, rows)) else max(errors, default=None)


def _copied(source: Model, unchanged: Converted) -> Converted:
    """Return a conversion without changes, with the objection if onnxruntime does not open the model."""
    try:
        require("the check of a conversion")
        if source.nbytes <= MAX_WEIGHTS:
            Runner.open(source, _LIGHT)
    except ModelError as why:
        if NO_KERNEL not in str(why):  # a GPU may have one
            return replace(unchanged, evidence=Evidence(NONE, objection=str(why)))
    except MachineError:
        pass
    return unchanged


def _blamed(draft: Draft, feed: Feed, outputs: tuple[str, ...]) -> Iterator[str]:
    """Yield patterns of ops to keep float32 for these outputs: those beyond the range, then those of a search."""
    ranges = calibrated(draft, feed, partial(draft.request.tell, "calibrate"))
    draft = guarded(draft, ranges)
    search = Search(draft, feed, _BY, ranges, progress=draft.request.progress, outputs=outputs, device=_EMULATED)
    for op in (*(pin.op for pin in draft.pins), *(op for region in search.repaired().regions for op in region.ops)):
        if op not in draft.lower:
            pattern = exactly(draft.view.ops[op])  # without its kind, if a float32 op of another kind stands for it
            yield pattern.partition(",")[2] if draft.view.ops[op].kind in LOW_ONLY else pattern


_EMULATED = Device(CPU, emulate=True)
_BY = Criterion("scaled", WRONG)


@dataclass(frozen=True)
class _Reference:
    """A float32 model, the random batches, and its outputs for each."""

    model: Model
    feed: Feed
    outputs: tuple[Mapping[str, Given], ...]

    @classmethod
    def of(cls, draft: Draft, batch: Feed | Mapping[str, Any]) -> _Reference:
        """Run the reference. AmpRewriteError, saying why, for an unfit model."""
        require("the check of a conversion")
        source = draft.source
        if source.nbytes > MAX_WEIGHTS:
            raise ModelError(f"its weights take {source.nbytes / 1e9:.1f} GB; above 1 GB, a check must be requested")
        usual = Drawing(scale=HEADROOM, free=_FREE, limit=_MAX_INPUT)
        feed = batch if isinstance(batch, Feed) else Feed.drawn(source, replace(usual, **batch))
        for note in drawing(source, "the model"):
            raise ModelError(note)
        model = reference_of(draft)
        outputs = tuple(_run(model, feed))
        for name, value in ((name, value) for found in outputs for name, value in found.items()):
            if _floating(value) and np.isnan(value).any():  # type: ignore[arg-type]
                raise ModelError(f"output {name!r} of the float32 model is NaN ({feed.origin})")
        return cls(model, feed, outputs)

    def rows(self, result: Model) -> list[OutputRow]:
        """Return the differences of a conversion, emulated, in its floating outputs."""
        return self._compared(_run(emulate(casting_in_graph(result), io="float32"), self.feed))

    def check_comparable(self, rows: Sequence[OutputRow], to: DType) -> None:
        """Raise ModelError if no output is of floats, or the reference changes as much once its inputs are rounded."""
        wrong = [row for row in rows if _is_wrong(row)]
        if not wrong and all(row.difference.scaled is None for row in rows):
            raise ModelError("no floating-point output to compare")
        if not any(map(_is_off, wrong)) or any(map(_is_lost, wrong)):
            return
        rounded = ({name: _rounded(value, to) for name, value in batch.items()} for batch in self.feed)
        if any(_is_off(row) for row in self._compared(_run(self.model, rounded))):
            raise ModelError(
                f"float32 itself is off by more than {WRONG:g} of an output once its inputs are rounded to"
                f" {to.spelling}"
            )

    def judged(self, converted: Converted, rows: Sequence[OutputRow], level: str, kept: Sequence[str]) -> Converted:
        """Return a conversion with the evidence of the rows."""
        largest = max((row.difference.scaled for row in rows if row.difference.scaled is not None), default=None)
        worst = next((row for row in rows if _is_wrong(row)), None)
        evidence = Evidence(
            level,
            self.feed.origin,
            len(self.feed),
            self.feed.random,
            error="" if largest is None else f"{largest:.2g}",
            emulated=True,
            pinned=len(kept),
            objection=f"output {worst.label!r}: {worst.difference.because}" if worst else "",
            largest_error=largest,
            keep=tuple(kept),
        )
        return replace(converted, evidence=evidence)

    def _compared(self, found: Iterator[Mapping[str, Given]]) -> list[OutputRow]:
        comparison, rows = Comparison(_BY, equal_nan=True), list[OutputRow]()
        for number, (expected, results) in enumerate(zip(self.outputs, found, strict=True)):
            rows += rows_of((number, None), expected, results, expected, comparison)
        return rows


def _run(model: Model, batches: Feed | Iterator[Batch]) -> Iterator[Mapping[str, Given]]:
    runner = Runner.open(model, replace(_LIGHT, planned=len(model.proto.graph.node) <= _PLANNED))
    return (runner.run({name: _widened(value) for name, value in batch.items()}) for batch in batches)


def _widened(value: Any) -> Any:
    low = isinstance(value, np.ndarray) and value.dtype.name in ("float16", "bfloat16")
    return value.astype(np.float32) if low else value


def _floating(value: Given) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.name in ("float16", "bfloat16", "float32", "float64")


def _rounded(value: Any, to: DType) -> Any:
    return value.astype(to.numpy).astype(value.dtype) if _floating(value) else value


def _is_wrong(row: OutputRow) -> bool:
    return _is_lost(row) or _is_off(row)


def _is_lost(row: OutputRow) -> bool:
    reference, candidate = row.difference.nonfinite
    return candidate > reference


def _is_off(row: OutputRow) -> bool:
    return row.difference.scaled is not None and row.difference.scaled > WRONG  # None for integers and other shapes
