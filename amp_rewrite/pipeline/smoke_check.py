"""Check a conversion without user data, on one random batch in float32 and in half precision, and repair it.

Nothing in this module depends on a clock or the number of cores, so a request gives the same file on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, FeedError, MachineError, ModelError, spelled
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.data.sources import Drawing
from amp_rewrite.evidence.opening import Device, casting_in_graph, random_op_notes
from amp_rewrite.evidence.verify import Comparison, rows_of
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LOW_ONLY
from amp_rewrite.pipeline.conversion import Converted, Draft
from amp_rewrite.pipeline.measured import calibrated, guarded
from amp_rewrite.pipeline.repair import Search, reference_of, with_tf32
from amp_rewrite.reports.evidence import FAILED, NONE, REPAIRED, SMOKE, Criterion, Evidence, OutputRow
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import NO_KERNEL, require
from amp_rewrite.runtime.runner import CPU, Runner, SessionOptions, Value
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.request import Request
from amp_rewrite.settings.selectors import exactly

MAX_ERROR = 0.1
"""Maximum error of a correct conversion on a random batch, relative to the largest value of an output."""
MAX_WEIGHTS = 10**9
"""Maximum size of the weights, in bytes, for a check without data."""
_MAX_TF32_RATIO = 1.5
"""The largest acceptable error with TF32, as a multiple of the error without it."""
_FREE = 16
"""Assumed size of free dimensions if their names do not suggest one."""
_MAX_INPUT = 1 << 28
"""Maximum size of an input, in bytes; a larger one suggests a mistake in its shape."""
_MAX_REPAIRS = 2
"""Maximum number of repairs; the second starts with the ops that the first keeps in float32."""
_LIGHT = SessionOptions(optimized=False, pooled=False, lean=True, spinning=False)
"""Options for a single run: weights stay in their files, and the graph is not optimized."""
_MAX_PLANNED_NODES = 2000
"""Number of nodes above which planning memory reuse takes longer than the run."""

Convert = Callable[[Request], tuple[Draft, Converted]]
"""A function that converts a model according to a request and also returns the draft."""


def smoke_checked(convert: Convert, batch: Feed | Mapping[str, Any], request: Request) -> Converted:
    """Return the conversion with its evidence; keep ops in float32 if the batch shows wrong results.

    `batch`: the data, or keywords of `Feed.randomly`.
    """
    draft, converted = convert(request)
    if converted.plan.empty:
        return _unchanged(draft.source, converted)
    try:
        request.tell("check in float32")
        reference = _Reference.of(draft, batch)
        request.tell(f"check in {request.to.spelling}")
        rows = reference.rows(converted.result)
        reference.check_comparable(rows, request.to)
    except AmpRewriteError as cause:
        if isinstance(cause, FeedError) and any(batch.values() if isinstance(batch, Mapping) else ()):
            raise
        return replace(converted, evidence=Evidence(NONE, objection=str(cause)))
    level, found = SMOKE, list[str]()
    for _ in range(_MAX_REPAIRS):
        if not any(map(_is_wrong, rows)):
            break
        with suppress(ModelError):  # values inside the model cannot be measured
            outputs = tuple(dict.fromkeys(row.output for row in rows if _is_wrong(row)))
            found = list(dict.fromkeys((*found, *_culprits(draft, reference.feed, outputs))))
            draft, converted = convert(replace(request, keep=(*request.keep, *found), found=tuple(found)))
            rows, level = reference.rows(converted.result), REPAIRED
    if any(map(_is_wrong, rows)):
        return reference.with_evidence(converted, rows, FAILED, found)
    checked, limit = reference.with_evidence(converted, rows, level, found), _MAX_TF32_RATIO * (_error(rows) or 0.0)
    return with_tf32(draft, checked, lambda model: _error(reference.rows(model)), limit)


def _error(rows: Sequence[OutputRow]) -> float | None:
    """Return the largest error of some rows; None if one is wrong."""
    errors = [row.difference.scaled for row in rows if row.difference.scaled is not None]
    return None if any(map(_is_wrong, rows)) else max(errors, default=None)


def _unchanged(source: Model, converted: Converted) -> Converted:
    """Return an unchanged model, with an objection if onnxruntime cannot load it."""
    try:
        require("the check of a conversion")
        if source.nbytes <= MAX_WEIGHTS:
            Runner.open(source, _LIGHT)
    except ModelError as cause:
        if NO_KERNEL not in str(cause):  # a GPU may have one
            return replace(converted, evidence=Evidence(NONE, objection=str(cause)))
    except MachineError:
        pass
    return converted


def _culprits(draft: Draft, feed: Feed, outputs: tuple[str, ...]) -> Iterator[str]:
    """Yield patterns of ops to keep in float32 for these outputs: overflowing ops first, then ops from a search."""
    ranges = calibrated(draft, feed, partial(draft.request.tell, "calibrate"))
    draft = guarded(draft, ranges)
    search = Search(draft, feed, _CRITERION, ranges, progress=draft.request.progress, outputs=outputs, device=_EMULATED)
    for op in (*(pin.op for pin in draft.pins), *(op for region in search.repaired().regions for op in region.ops)):
        if op not in draft.lower:
            pattern = exactly(draft.view.ops[op])
            # In float32, an op of another kind replaces an op with only low kernels.
            yield pattern.partition(",")[2] if draft.view.ops[op].kind in LOW_ONLY else pattern


_EMULATED = Device(CPU, emulate=True)
_CRITERION = Criterion("scaled", MAX_ERROR)


@dataclass(frozen=True)
class _Reference:
    """A float32 model, the random batches, and the outputs for each batch."""

    model: Model
    feed: Feed
    outputs: tuple[Mapping[str, Value], ...]

    @classmethod
    def of(cls, draft: Draft, batch: Feed | Mapping[str, Any]) -> _Reference:
        """Run the reference; AmpRewriteError if the model cannot be checked."""
        require("the check of a conversion")
        source = draft.source
        if source.nbytes > MAX_WEIGHTS:
            size = f"the weights take up {source.nbytes / 1e9:.1f} GB"
            raise ModelError(f"{size}; above 1 GB, a check needs input data: pass {spelled('data')}")
        defaults = Drawing(scale=HEADROOM, free=_FREE, limit=_MAX_INPUT)
        feed = batch if isinstance(batch, Feed) else Feed.drawn(source, replace(defaults, **batch))
        for note in random_op_notes(source, "the model"):
            raise ModelError(note)
        model = reference_of(draft)
        outputs = tuple(_run(model, feed))
        for name, value in ((name, value) for results in outputs for name, value in results.items()):
            if _is_floating(value) and np.isnan(value).any():  # type: ignore[arg-type]
                raise ModelError(f"output {name!r} of the float32 model is NaN ({feed.origin})")
        return cls(model, feed, outputs)

    def rows(self, result: Model) -> list[OutputRow]:
        """Return the differences in the floating-point outputs of an emulated conversion."""
        return self._compared(_run(emulate(casting_in_graph(result), io="float32"), self.feed))

    def check_comparable(self, rows: Sequence[OutputRow], to: DType) -> None:
        """Raise ModelError for no floating-point output, or if rounding the inputs changes the reference by as much."""
        wrong = [row for row in rows if _is_wrong(row)]
        if not wrong and all(row.difference.scaled is None for row in rows):
            raise ModelError("the model has no floating-point output to compare")
        if not any(map(_is_off, wrong)) or any(map(_is_lost, wrong)):
            return
        rounded = ({name: _rounded(value, to) for name, value in batch.items()} for batch in self.feed)
        if any(_is_off(row) for row in self._compared(_run(self.model, rounded))):
            raise ModelError(
                f"the float32 model itself changes by more than {MAX_ERROR:g} of the largest value of an output when"
                f" its inputs are rounded to {to.spelling}"
            )

    def with_evidence(self, result: Converted, rows: Sequence[OutputRow], level: str, kept: Sequence[str]) -> Converted:
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
        return replace(result, evidence=evidence)

    def _compared(self, candidate: Iterator[Mapping[str, Value]]) -> list[OutputRow]:
        comparison, rows = Comparison(_CRITERION, equal_nan=True), list[OutputRow]()
        for number, (expected, results) in enumerate(zip(self.outputs, candidate, strict=True)):
            rows += rows_of((number, None), expected, results, expected, comparison)
        return rows


def _run(model: Model, batches: Feed | Iterator[Batch]) -> Iterator[Mapping[str, Value]]:
    runner = Runner.open(model, replace(_LIGHT, planned=len(model.proto.graph.node) <= _MAX_PLANNED_NODES))
    return (runner.run({name: _widened(value) for name, value in batch.items()}) for batch in batches)


def _widened(value: Any) -> Any:
    low = isinstance(value, np.ndarray) and value.dtype.name in ("float16", "bfloat16")
    return value.astype(np.float32) if low else value


def _is_floating(value: Value) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.name in ("float16", "bfloat16", "float32", "float64")


def _rounded(value: Any, to: DType) -> Any:
    return value.astype(to.numpy).astype(value.dtype) if _is_floating(value) else value


def _is_wrong(row: OutputRow) -> bool:
    return _is_lost(row) or _is_off(row)


def _is_lost(row: OutputRow) -> bool:
    reference, candidate = row.difference.nonfinite
    return candidate > reference


def _is_off(row: OutputRow) -> bool:
    return row.difference.scaled is not None and row.difference.scaled > MAX_ERROR  # None for integers
