"""Ranges of a draft's values, measured on data or read, and their pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, spelled
from amp_rewrite.evidence.calibrate import calibrate
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.guard import guard
from amp_rewrite.evidence.ranges import Ranges, key
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.reports.evidence import Guarded
from amp_rewrite.settings.choices import NO_SHIFT
from amp_rewrite.settings.option import Data


def ranges_of(draft: Draft, data: Data | None, ranges: Ranges | str | Path | None) -> Ranges:
    """Return the ranges of a draft, measured on data without others, or given, or in a file.

    EvidenceError for those of another model, PolicyError for those for another type.
    """
    if ranges is None:
        return calibrated(draft, Feed.of(data, draft.source), partial(draft.request.tell, "calibrate"))
    ranges = ranges if isinstance(ranges, Ranges) else Ranges.load(ranges)
    ranges.check(draft.source)
    to = draft.request.to.spelling
    if ranges.to != to:
        raise PolicyError(f"the ranges are for {ranges.to}, not for {to}; calibrate with {spelled('to', to)}")
    view, values = draft.view, dict(ranges.values)
    for op in view.of_kinds(("com.microsoft::RotaryEmbedding",)):  # a fusion made it; grows by at most the root of 2
        source, (result, *_) = op.inputs[0], op.results
        if source is not None and (known := ranges.of(view, source)) is not None:
            values.setdefault(key(view, result), replace(known, absmax=known.absmax * 2**0.5))
    return replace(ranges, values=values)


def calibrated(draft: Draft, feed: Feed, progress: Callable[[int, int], None] | None = None) -> Ranges:
    """Calibrate a draft: return ranges of all its values, under the fingerprint of its source."""
    ranges = calibrate(draft.view.model, feed, to=draft.request.to, progress=progress)
    of = fingerprint(draft.source)
    return replace(ranges, model=model_name(draft), graph=of.graph, weights=of.weights)


def model_name(draft: Draft) -> str:
    """Return the file's own name, if there is one."""
    return draft.source.path.name if draft.source.path is not None else "the model"


def shifted_and_guarded(draft: Draft, ranges: Ranges, headroom: float) -> tuple[Draft, Guarded]:
    """Return the draft, shifted unless that is off, and the pins and findings of ranges."""

    def guarded(draft: Draft, ranges: Ranges) -> Guarded:
        return guard(draft.view, draft.paint, ranges, headroom=headroom, saturate=draft.needs.saturate)

    if draft.request.shift == NO_SHIFT or draft.request.to is not DType.FLOAT16:
        return draft, guarded(draft, ranges)
    from amp_rewrite.pipeline.shift import chosen  # late: few shift

    return chosen(draft, ranges, headroom, guarded)
