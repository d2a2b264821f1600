"""One conversion: draft, guard, paint, plan, apply, check, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from onnx import ModelProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.cast_plan import Plan, plan_casts
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.errors import Finding
from amp_rewrite.files.model import Model
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.ir.schema import of_runtime_alone
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.reports.dump import dump
from amp_rewrite.reports.evidence import UNCHECKED, Evidence
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.rewrite.apply import apply
from amp_rewrite.rewrite.check import check, check_source
from amp_rewrite.runtime.hazards import told
from amp_rewrite.settings.choices import HEADROOM, Target
from amp_rewrite.settings.options import Options, Request, takes_options
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.evidence.guard import Guarded
    from amp_rewrite.evidence.ranges import Ranges

METADATA_KEY = "amp_rewrite"
"""Key of the metadata entry of a converted model: version, type, lists and settings."""


@dataclass(frozen=True)
class Converted:
    """Result of `convert`: the model, the report, and the steps in between.

    `result` holds the model with its weights still in their files: save that for models of any size.
    """

    result: Model
    report: Report
    view: View
    coloring: Coloring
    plan: Plan

    @cached_property
    def model(self) -> ModelProto:
        """Converted model, whole in memory. ModelError over 2 GB; `save` has no such limit."""
        return self.result.to_proto()

    def save(self, path: str | Path, *, overwrite: bool = False, external_data: bool | None = None) -> None:
        """Write the model, weights streamed, whole or not at all; see `Model.save`."""
        self.result.save(path, overwrite=overwrite, external_data=external_data)


@takes_options
@gc_paused()
def convert(
    model: object,
    *,
    ranges: Ranges | str | Path | None = None,
    headroom: float = HEADROOM,
    folder: str | Path | None = None,
    **options: Unpack[Options],
) -> Converted:
    """Convert a float32 model to mixed precision; the report says why each op has its type.

    `model`: a path, bytes, a ModelProto (`folder`: where its external data lies), a torch ONNXProgram or an
    onnx_ir.Model; it is never changed. `ranges`: the result of `calibrate`, or its file; an op that would read or make
    a value that does not fit `to` with a factor `headroom` to spare stays float32.

    The function reads AMP_REWRITE_LEVEL, AMP_REWRITE_LISTS, the list edits (AMP_REWRITE_DENYLIST_ADD …) and
    AMP_REWRITE_LOG_PATH; an argument wins over them.

    Raises ModelError, ListError, PatternError, PolicyError, ConfigError or EvidenceError, each saying what to do.
    A model with nothing to lower comes back unchanged.
    """
    request = Request.of(**options)
    draft = Draft.of(model, request, folder=folder)  # load, view, canonicalize, find_hazards
    measured = guarded(draft, ranges_for(draft, ranges), headroom) if ranges is not None else None
    if measured is None:
        return finish(draft, draft.paint())  # plan_casts, apply, check, report_of
    return finish(draft, draft.paint(measured.pins), measured.findings, evidence=measured.evidence)


def ranges_for(draft: Draft, ranges: Ranges | str | Path) -> Ranges:
    """Return ranges, or those in a file. EvidenceError for ranges of another model than the draft's."""
    from amp_rewrite.evidence.ranges import Ranges

    ranges = ranges if isinstance(ranges, Ranges) else Ranges.load(ranges)
    ranges.check(draft.source)
    return ranges


def guarded(draft: Draft, ranges: Ranges, headroom: float = HEADROOM) -> Guarded:
    """Return the pins and findings that ranges imply for a draft."""
    from amp_rewrite.evidence.guard import guard  # late: only conversions with ranges pay for it

    to, saturate = draft.request.to, draft.hazards.saturate
    return guard(draft.view, draft.paint, ranges, to, headroom=headroom, saturate=saturate)


def finish(
    draft: Draft,
    coloring: Coloring,
    findings: Sequence[Finding] = (),
    words: Sequence[str] = (),
    evidence: Evidence = UNCHECKED,
) -> Converted:
    """Return the checked model of a painted draft, and its report. `words`: more words for the metadata entry.

    For an empty plan the result is the source itself, unexpanded.
    """
    view = draft.view
    plan = plan_casts(view, coloring, draft.io, draft.hazards.saturate)
    foreign = _unknown_elsewhere(view, draft.request.target)
    findings = (*_unserved(view, coloring), *foreign, *coloring.findings, *findings)
    if plan.empty:
        result = draft.base
        check_source(result)
    else:
        result = _signed(apply(view, plan), draft.request, words)
        unchecked = check(view.model, view, plan, result)
        planned = {(finding.kind, finding.subject) for finding in plan.findings}
        hazardous = [f for f in draft.hazards.findings if (f.kind, f.subject) not in planned]
        dangers = told(view, lambda value: plan.retype.get(value) or view.dtype(value))
        findings = (*draft.expansions, *hazardous, *unchecked, *dangers, *findings)
    return Converted(result, _report(draft, coloring, plan, findings, evidence), view, coloring, plan)


def _report(draft: Draft, coloring: Coloring, plan: Plan, findings: Sequence[Finding], evidence: Evidence) -> Report:
    """Return the report; with AMP_REWRITE_LOG_PATH also write dumps of before, after and the four lists."""
    request, view = draft.request, draft.view
    name = draft.source.path.name if draft.source.path else None
    report = report_of(
        view, coloring, plan, name=name, tool=VERSION, lists=request.lists, findings=findings, **request.settings
    )
    report = replace(report, evidence=evidence)
    if request.log_path is not None:
        dump(request.log_path, report_of(view, name=name, tool=VERSION), report, request.lists)
    return report


def _unserved(view: View, coloring: Coloring) -> tuple[Finding, ...]:
    """Return findings about op types that opset, kernels or an unknown type keep from a low type."""
    notes: dict[tuple[str, str], str] = {}
    for op in view.ops:
        paint = coloring.of(op.id) if op.signature is not None else None
        if paint is not None and paint.rule in (reasons.SCHEMA_GATE, reasons.KERNEL_GATE, reasons.UNKNOWN_TYPE):
            notes.setdefault((paint.rule, op.kind), paint.note)
    return tuple(Finding(rule, kind, note) for (rule, kind), note in sorted(notes.items()))


def _unknown_elsewhere(view: View, target: Target) -> tuple[Finding, ...]:
    """Return findings about operators of ai.onnx that onnxruntime alone knows, for other targets than onnxruntime."""
    if target is Target.ORT_CUDA:
        return ()
    opset = view.opsets.get("", 1)
    kinds = sorted({op.op_type for op in view.ops if not op.domain})
    note = f"not in ai.onnx opset {opset}: an operator that onnxruntime's optimizers write, and it alone knows"
    return tuple(Finding("runtime_only", kind, note) for kind in kinds if of_runtime_alone("", kind, opset))


def _signed(result: Model, request: Request, more: Sequence[str]) -> Model:
    """Return the model with a metadata entry about its conversion."""
    lists = f"lists={request.lists.name}@{request.lists.fingerprint[:12]}"
    settings = (f"{key}={value}" for key, value in request.settings.items())
    words = (f"version={VERSION}", f"to={request.to.spelling}", lists, *settings, *more)
    entries = result.proto.metadata_props
    entry = next((p for p in entries if p.key == METADATA_KEY), None) or entries.add()
    entry.key, entry.value = METADATA_KEY, " ".join(words)
    return result
