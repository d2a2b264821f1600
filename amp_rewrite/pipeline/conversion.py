"""One conversion: draft, guard, paint, plan, apply, report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from onnx import ModelProto

from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.plan import Plan, plan_casts
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, count
from amp_rewrite.files.model import METADATA_KEY, Model
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.findings import (
    cuda_findings,
    in_float64,
    kept_caches,
    mostly_float32,
    needs_release,
    oldest_for,
    recurrent_states,
    target_findings,
    without_kernel,
)
from amp_rewrite.reports.result import Result
from amp_rewrite.rewrite.apply import apply
from amp_rewrite.rewrite.check import check, check_source
from amp_rewrite.runtime.faults import ONNXRUNTIME, told, turned
from amp_rewrite.settings.choices import AUTO_OPSET, KEEP_KEY, NEEDS
from amp_rewrite.settings.option import checked
from amp_rewrite.settings.request import Request
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.reports.evidence import Evidence, Guarded
    from amp_rewrite.reports.page.page import Figure
    from amp_rewrite.reports.report import Report
    from amp_rewrite.reports.rows import ShiftRow


@dataclass(frozen=True, repr=False)
class Converted(Result):
    """Result of `convert`: the model, the report, and the steps in between.

    Attributes:
        result: the model, with its weights still where they were; save it for models of any size.
        view: the model that was painted, indexed.
        coloring: the type of each type variable of each op.
        plan: the Casts and other changes.
        request: the options.
        name: the model's file, if there is one.
        findings: what to know about the result.
        evidence: how far data have checked the conversion; None if none have.
        shifts: regions of values that are computed times a power of two.
        config: the settings that came from a file, and the file.
    """

    result: Model
    view: View
    coloring: Coloring
    plan: Plan
    request: Request
    name: str | None = None
    findings: tuple[Finding, ...] = ()
    evidence: Evidence | None = None
    shifts: tuple[ShiftRow, ...] = ()
    config: str = ""

    @cached_property
    def report(self) -> Report:
        """The type of each op, with the reason. It is made when it is first read."""
        from amp_rewrite.reports.report_builder import report_of  # late: trials and drop-ins read none

        lists, settings = self.request.op_lists, self.request.settings
        report = report_of(
            self.view,
            self.coloring,
            self.plan,
            name=self.name,
            tool=VERSION,
            lists=lists,
            findings=self.findings,
            **settings,
        )
        header = replace(report.model, config=self.config)
        evidence = report.evidence if self.evidence is None else self.evidence
        return replace(report, model=header, evidence=evidence, shifts=self.shifts)

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
        self,
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
        if overwrite:  # of the source, perhaps, that the report reads
            _ = self.report
        self.result.save(path, overwrite=overwrite, external_data=external_data)


def finish(
    draft: Draft,
    coloring: Coloring,
    guarded: Guarded | None = None,
    findings: Sequence[Finding] = (),
    words: Sequence[str] = (),
) -> Converted:
    """Return the checked model of a painted draft; for an empty plan the source itself, unexpanded.

    `guarded`: pins, findings and evidence from ranges. `words`: more words for the metadata entry.
    """
    view, target, to = draft.view, draft.request.target, draft.request.to
    plan = plan_casts(view, coloring, draft.io, draft.needs.saturate)

    def made(value: ValueId) -> DType | None:
        return plan.retype.get(value) or view.dtype(value)

    if not plan.empty:
        plan = replace(plan, parted=frozenset(op.id for op in turned(view, made)))
    dangers = (*told(view, made, target.aim, plan.parted), *_parted(view, plan), *cuda_findings(view, made, target))
    if not plan.empty:
        dangers += (*kept_caches(view, made), *recurrent_states(view, made))
    view.forget()  # the checks need the memory, and little of what the rules shared
    beyond = (*target_findings(view, target, tried=draft.request.opset == AUTO_OPSET), *dangers)
    measured = () if guarded is None else guarded.findings
    findings = (*without_kernel(view, coloring), *beyond, *coloring.findings, *measured, *findings)
    if plan.empty:
        result = draft.base
        check_source(result)
    else:
        oldest = oldest_for(view, target, to)
        needs = () if oldest is None else (needs_release(view, oldest, to),)
        words = words if oldest is None else (*words, f"{NEEDS}={ONNXRUNTIME}>={oldest}")
        result = _signed(apply(view, plan), draft.request, words)
        unchecked = check(view.model, view, plan, result)
        known = {(finding.kind, finding.subject) for finding in draft.needs.findings}  # they say what harm it does
        plan = replace(plan, findings=tuple(f for f in plan.findings if (f.kind, f.subject) not in known))
        findings = (*draft.expansions, *needs, *draft.needs.findings, *unchecked, *findings)
    findings = (*findings, *in_float64(view, coloring), *mostly_float32(view, coloring, draft.request))
    return Converted(
        result,
        view,
        coloring,
        plan,
        draft.request,
        name=draft.source.path.name if draft.source.path else None,
        findings=findings,
        evidence=guarded.evidence if guarded else None,
        shifts=draft.shifts,
    )


def _parted(view: View, plan: Plan) -> Iterator[Finding]:
    if plan.parted:
        number = count(len(plan.parted), "Transpose stands", "Transposes stand")
        yield Finding(
            "parted",
            view.ops[min(plan.parted)].name,
            f"{number} between two Reshapes, which move nothing: onnxruntime from 1.20 on swaps such a Transpose with"
            " the Cast before a product, and crashes",
        )


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
