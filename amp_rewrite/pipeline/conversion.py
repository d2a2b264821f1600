"""One conversion: draft, guard, paint, plan, apply, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from onnx import ModelProto

from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.plan import Plan, plan_casts
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, PolicyError, count, spelled
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.findings import (
    channels_last,
    in_float64,
    mostly_float32,
    needs_release,
    oldest_for,
    target_findings,
    without_kernel,
)
from amp_rewrite.reports.evidence import Guarded
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.reports.result import Result
from amp_rewrite.rewrite.apply import apply
from amp_rewrite.rewrite.check import check, check_source
from amp_rewrite.rewrite.contrib.multi_head_attention import ROTARY_KIND
from amp_rewrite.runtime.faults import ONNXRUNTIME, told, turned
from amp_rewrite.settings.choices import AUTO_OPSET, KEEP_KEY, METADATA_KEY, NEEDS, NO_SHIFT
from amp_rewrite.settings.option import checked
from amp_rewrite.settings.request import Request
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.evidence.ranges import Ranges
    from amp_rewrite.reports.page.page import Figure


class HasResult(Protocol):
    """Holder of a converted model."""

    @property
    def result(self) -> Model: ...


@dataclass(frozen=True, repr=False)
class Converted(Result):
    """Result of `convert`: the model, the report, and the steps in between.

    Attributes:
        result: the model, with its weights still where they were; save it for models of any size.
        report: the type of each op, with the reason.
        view: the model that was painted, indexed.
        coloring: the type of each type variable of each op.
        plan: the Casts and other changes.
    """

    result: Model
    report: Report
    view: View
    coloring: Coloring
    plan: Plan

    @property
    def brief(self) -> str:
        """Gist of the report."""
        return self.report.brief

    def text(self, *, verbose: bool = False) -> str:
        """Return the text of the report, with `verbose` every row."""
        return self.report.text(verbose=verbose)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return self.report.to_json()

    def figures(self, command: str | None = None) -> Sequence[Figure]:
        """Return the figures of the report, with the modules and the work of its model; `command` as in `text`."""
        from amp_rewrite.reports.page.report_figures import report_figures  # late: most conversions are not drawn

        return report_figures(self.report, self.view, command)

    @cached_property
    def model(self) -> ModelProto:
        """Converted model, whole in memory.

        Raises:
            ModelError: it is larger than 2 GB; `save` has no such limit.
        """
        return self.result.to_proto()

    @checked
    def save(
        self: HasResult,
        path: str | Path,
        *,
        overwrite: bool = False,
        external_data: bool | str | None = None,
    ) -> None:
        """Write the model, weights streamed, whole or not at all. Arguments are those of `Model.save`.

        Raises:
            ModelError: the file cannot be written, or exists.
            PolicyError: a keyword has a value of a wrong type.
        """
        self.result.save(path, overwrite=overwrite, external_data=external_data)


def ranges_for(draft: Draft, ranges: Ranges | str | Path) -> Ranges:
    """Return ranges, or those in a file. EvidenceError for those of another model, PolicyError for another type."""
    from amp_rewrite.evidence.ranges import Ranges, key

    ranges = ranges if isinstance(ranges, Ranges) else Ranges.load(ranges)
    ranges.check(draft.source)
    to = draft.request.to.spelling
    if ranges.to != to:
        raise PolicyError(f"the ranges are for {ranges.to}, not for {to}; calibrate with {spelled('to', to)}")
    view, values = draft.view, dict(ranges.values)
    for op in view.of_kinds((ROTARY_KIND,)):  # not measured, a fusion made it; grows by at most the root of 2
        source, (result, *_) = op.inputs[0], op.results
        if source is not None and (known := ranges.of(view, source)) is not None:
            values.setdefault(key(view, result), replace(known, absmax=known.absmax * 2**0.5))
    return replace(ranges, values=values)


def calibrated(draft: Draft, feed: Feed, progress: Callable[[int, int], None] | None = None) -> Ranges:
    """Calibrate a draft: return ranges of all its values, under the fingerprint of its source."""
    from amp_rewrite.evidence.calibrate import calibrate  # late: only conversions with data pay for it
    from amp_rewrite.files.fingerprint import fingerprint

    to = draft.request.to
    ranges = calibrate(draft.view.model, feed, to=to, progress=progress)
    of = fingerprint(draft.source)
    return replace(ranges, model=model_name(draft), graph=of.graph, weights=of.weights)


def model_name(draft: Draft) -> str:
    """Return the file's own name, if there is one."""
    return draft.source.path.name if draft.source.path is not None else "the model"


def shifted_and_guarded(draft: Draft, ranges: Ranges | None, headroom: float) -> tuple[Draft, Guarded]:
    """Return the draft, shifted unless that is off, and the pins and findings of ranges; none without ranges."""
    shift = draft.request.shift
    if ranges is None:
        if isinstance(shift, int):
            raise PolicyError(f"{spelled('shift', shift)} shifts what goes beyond float16 by data; give data or ranges")
        return draft, Guarded()
    from amp_rewrite.evidence.guard import guard  # late: only conversions with data need it

    def guarded(draft: Draft, ranges: Ranges) -> Guarded:
        return guard(draft.view, draft.paint, ranges, headroom=headroom, saturate=draft.needs.saturate)

    if shift == NO_SHIFT or draft.request.to is not DType.FLOAT16:
        return draft, guarded(draft, ranges)
    from amp_rewrite.pipeline.shift import chosen  # late: few shift

    return chosen(draft, ranges, headroom, guarded)


def finish(
    draft: Draft,
    coloring: Coloring,
    findings: Sequence[Finding] = (),
    words: Sequence[str] = (),
    measured: Guarded | None = None,
) -> Converted:
    """Return the checked model of a painted draft, and its report. `words`: more words for the metadata entry.

    `measured`: pins and evidence from ranges.

    For an empty plan the result is the source itself, unexpanded.
    """
    view = draft.view
    plan = plan_casts(view, coloring, draft.io, draft.needs.saturate)
    made, aim = _made(view, plan), draft.request.target.aim
    if not plan.empty:
        plan = replace(plan, parted=frozenset(op.id for op in turned(view, made)))
    dangers = (*told(view, made, aim, plan.parted), *_parted(view, plan))
    dangers += channels_last(view, made, draft.request.target)
    view.forget()  # the checks need the memory, and little of what the rules shared
    beyond = (*target_findings(view, draft.request.target, tried=draft.request.opset == AUTO_OPSET), *dangers)
    findings = (*without_kernel(view, coloring), *beyond, *coloring.findings, *findings)
    if plan.empty:
        result = draft.base
        check_source(result)
    else:
        oldest = oldest_for(view, draft.request.target, draft.request.to)
        needs = () if oldest is None else (needs_release(view, oldest, draft.request.to),)
        words = words if oldest is None else (*words, f"{NEEDS}={ONNXRUNTIME}>={oldest}")
        result = _signed(apply(view, plan), draft.request, words)
        unchecked = check(view.model, view, plan, result)
        known = {(finding.kind, finding.subject) for finding in draft.needs.findings}  # they say what harm it does
        plan = replace(plan, findings=tuple(f for f in plan.findings if (f.kind, f.subject) not in known))
        findings = (*draft.expansions, *needs, *draft.needs.findings, *unchecked, *findings)
    findings = (*findings, *in_float64(view, coloring), *mostly_float32(view, coloring, draft.request))
    report = _report(draft, coloring, plan, findings, measured)
    return Converted(result, report, view, coloring, plan)


def _made(view: View, plan: Plan) -> Callable[[ValueId], DType | None]:
    return lambda value: plan.retype.get(value) or view.dtype(value)


def _parted(view: View, plan: Plan) -> Iterator[Finding]:
    if plan.parted:
        number = count(len(plan.parted), "Transpose stands", "Transposes stand")
        yield Finding(
            "parted",
            view.ops[min(plan.parted)].name,
            f"{number} between two Reshapes, which move nothing: onnxruntime from 1.20 on swaps such a Transpose with"
            " the Cast before a product, and crashes",
        )


def _report(
    draft: Draft, coloring: Coloring, plan: Plan, findings: Sequence[Finding], measured: Guarded | None
) -> Report:
    request, view = draft.request, draft.view
    name = draft.source.path.name if draft.source.path else None
    report = report_of(
        view, coloring, plan, name=name, tool=VERSION, lists=request.op_lists, findings=findings, **request.settings
    )
    if measured is not None:
        report = replace(report, evidence=measured.evidence)
    if draft.shifts:
        report = replace(report, shifts=draft.shifts)
    return report


def _signed(result: Model, request: Request, more: Sequence[str]) -> Model:
    """Return the model with metadata entries about its conversion: settings, and patterns to keep."""
    lists = f"lists={request.op_lists.name}@{request.op_lists.fingerprint[:12]}"
    settings = (f"{key}={value}" for key, value in request.settings.items())
    words = (f"version={VERSION}", f"to={request.to.spelling}", lists, *settings, *more)
    entries = result.proto.metadata_props
    for key, value in ((METADATA_KEY, " ".join(words)), (KEEP_KEY, "\n".join(request.keep))):
        entry = next((p for p in entries if p.key == key), None)
        if value:
            entry = entry or entries.add()
            entry.key, entry.value = key, value
        elif entry is not None:
            entries.remove(entry)
    return result
