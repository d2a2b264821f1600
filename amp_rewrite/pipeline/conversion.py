"""One conversion: draft, paint, plan, apply, report.

The draft does not depend on data, and it is cheap to paint it again with other pins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from onnx import ModelProto

from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.paint import Coloring, paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.needs.find import Needs, find_needs
from amp_rewrite.decide.plan import Plan, plan_casts
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, count
from amp_rewrite.files.model import METADATA_KEY, Model
from amp_rewrite.ir.op_classes import LOW_ONLY
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.versions import OLDEST_MOVED
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.pipeline.findings import (
    cuda_findings,
    mostly_float32,
    needs_release,
    oldest_onnxruntime,
    refuse_unknown,
    state_findings,
    target_findings,
    without_kernel,
)
from amp_rewrite.reports.result import Result
from amp_rewrite.rewrite.apply import apply
from amp_rewrite.rewrite.check import check, check_source
from amp_rewrite.rewrite.passes.canonicalize import canonicalize, carry_over
from amp_rewrite.runtime.faults import ONNXRUNTIME, fault_findings, swapped_transposes
from amp_rewrite.settings.choices import AUTO_OPSET, KEEP_KEY, KEEP_OPSET, NEEDS
from amp_rewrite.settings.io_rules import io_types, parse_io
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.option import checked
from amp_rewrite.settings.request import Request
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.reports.evidence import Evidence
    from amp_rewrite.reports.page.page import Figure
    from amp_rewrite.reports.report import Report
    from amp_rewrite.reports.rows import ShiftRow


@dataclass(frozen=True)
class Draft:
    """A model in standard form with its needs, and the patterns of its request resolved to ops.

    `source`: the caller's model. `base`: the result if nothing is lowered. `view`: the model to paint; `changes`:
    findings about its differences from `source`. `rescale`: quantizers get scales of the low type. `notes`: findings
    that also apply if nothing is lowered. `widened`: low values of the model have become float32. `shifts`: regions of
    overflowing values, and their fate. `pins`: ops kept in float32 because of data; `evidence`: a summary of that data.
    """

    request: Request
    source: Model
    base: Model
    view: View
    needs: Needs
    keep: Mapping[OpId, str]
    lower: Mapping[OpId, str]
    io: Mapping[ValueId, DType]
    changes: tuple[Finding, ...] = ()
    rescale: bool = False
    notes: tuple[Finding, ...] = ()
    widened: bool = False
    shifts: tuple[ShiftRow, ...] = ()
    pins: tuple[Pin, ...] = ()
    evidence: Evidence | None = None

    @classmethod
    def of(
        cls,
        model: object,
        request: Request,
        *,
        folder: str | Path | None = None,
        widen: bool = False,
        low_only: bool = True,
    ) -> Draft:
        """Return the draft of anything accepted by `Model.load`. O(nodes + uses); reads each constant once.

        `widen`: treat low values of the model as float32. `low_only`: allow operators that the target has only in the
        low type, unless they would stay float32.
        """
        request.tell("read")
        source = Model.load(model, folder=folder)
        index = View.of(source)
        request.tell("decide")
        low_only = low_only and not index.of_kinds(LOW_ONLY)
        draft = cls._of(source, index, request, widen, low_only)
        if low_only and not draft.is_loadable():
            draft = cls._of(source, index, request, widen, False)
        if isinstance(request.opset, int) or index.opset >= min(draft.view.opset, OLDEST_MOVED):
            return draft
        kept = cls._of(source, index, replace(request, opset=KEEP_OPSET), widen, low_only)
        drawback = _drawback_of_opset(draft, kept)
        if drawback is None:
            return draft
        note = f"the model stays at opset {index.opset}: at opset {draft.view.opset} {drawback}"
        findings = (Finding("opset", "ai.onnx", note),) if drawback else ()
        return replace(kept, request=request, notes=(*kept.notes, *findings))

    @classmethod
    def _of(cls, source: Model, index: View, request: Request, widen: bool, low_only: bool) -> Draft:
        refuse_unknown(index, request.target)
        standard = canonicalize(index, request, widen=widen, low_only=low_only)
        view = standard.view
        needs, io = _resolved(view, request, rescale=standard.rescale)
        return cls(
            request,
            source,
            standard.base,
            view,
            needs,
            standard.keep,
            standard.lower,
            io,
            standard.findings,
            standard.rescale,
            (*index.model.mends, *standard.notes),
            widen,
        )

    def with_view(self, view: View, results: Mapping[OpId, tuple[str, ...]], findings: Sequence[Finding]) -> Draft:
        """Return the draft for a rewritten view. `results`: names of the results of rewritten ops."""
        needs, io = _resolved(view, self.request, rescale=self.rescale)
        return replace(
            self,
            view=view,
            needs=needs,
            keep=carry_over(self.keep, self.view, view, results),
            lower=carry_over(self.lower, self.view, view, results),
            io=io,
            changes=(*self.changes, *findings),
        )

    def paint(self, pins: Sequence[Pin] = ()) -> Coloring:
        """Return the coloring, with pins from a search beyond those from data and safety rules. O(nodes + uses).

        Pins from data or a search apply to the whole cluster of their op.
        """
        return self._painted(pins) if pins else self._unpinned

    def is_loadable(self) -> bool:
        """True if every op with only low kernels is low, so the model can be loaded."""
        return not self.view.of_kinds(LOW_ONLY) or self.paint().is_loadable(self.view)

    @cached_property
    def _unpinned(self) -> Coloring:
        return self._painted(())

    def _painted(self, pins: Sequence[Pin]) -> Coloring:
        coloring = paint(self.problem(pins))
        return replace(coloring, findings=(*coloring.findings, *self.notes)) if self.notes else coloring

    def problem(self, pins: Sequence[Pin] = ()) -> Problem:
        """Return the painter's problem: needs, the options of the request, patterns, pins and clusters."""
        return Problem(
            self.view,
            self.request,
            self.needs,
            keep=self.keep,
            lower=self.lower,
            pins=(*self.pins, *pins),
            clusters=clusters(self.view),
            low_io=self.io,
            rescale=self.rescale,
        )


def _resolved(view: View, request: Request, *, rescale: bool) -> tuple[Needs, Mapping[ValueId, DType]]:
    needs = find_needs(view, request.to, target=request.target, rescale=rescale) if request.safe else Needs()
    return needs, io_types(view, parse_io(request.io), request.to)


def _drawback_of_opset(moved: Draft, kept: Draft) -> str | None:
    """Return the drawback of a newer opset; None if it has none, "" if nothing becomes low there."""
    after, before = Costs.of(moved, moved.paint()), Costs.of(kept, kept.paint())
    if not after.low:
        return ""
    if after.without_kernel > before.without_kernel:
        return f"the target would leave {count(after.without_kernel - before.without_kernel, 'more op')} to the CPU"
    if after.casts > before.casts and after.compute <= before.compute:
        return f"it would have {after.casts} Casts instead of {before.casts}, and lower no more products"
    more_ops, more_low = after.ops - before.ops, max(after.low - before.low, 0)
    if more_ops > more_low:
        return f"it would have {count(more_ops, 'more op')}, but only {more_low} more in the low type"
    return None


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a painted draft, as counts of ops, low ops, Casts, ops without a kernel, and low compute ops."""

    ops: int
    low: int
    casts: int
    without_kernel: int
    compute: int

    @classmethod
    def of(cls, draft: Draft, coloring: Coloring) -> Costs:
        view, gate = draft.view, Gate(draft.request.target, draft.request.to)
        lowered: dict[OpId, list[str]] = {}
        for op, variable in coloring.low:
            lowered.setdefault(op, []).append(variable)
        candidates = [op for op in view.ops if op.signature is not None and not op.bodies and op.kind != "Constant"]
        return cls(
            ops=sum(op.kind != "Constant" for op in view.ops),
            low=len(lowered),
            casts=len(plan_casts(view, coloring, draft.io, draft.needs.saturate).casts),
            without_kernel=sum(not gate.runs(view, op, tuple(lowered.get(op.id, ()))) for op in candidates),
            compute=sum(coloring.entries[op].color is Color.ALLOW for op in lowered),
        )


@dataclass(frozen=True, repr=False)
class Converted(Result):
    """The result of `convert`: the model, the report, and the intermediate results.

    Attributes:
        result: the model, with its weights still in their files; `save` writes models of any size.
        view: the index of the painted model.
        coloring: the type of each type variable of each op.
        plan: the Casts and other changes.
        request: the options.
        name: the file name of the model, if it has one.
        findings: observations about the result.
        evidence: the check of the conversion on data; None without one.
        shifts: regions of values that are scaled by a power of two.
        config: settings from a file, and the name of the file.
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
        """The type of each op, with the reason; computed on first use."""
        from amp_rewrite.reports.report_builder import report_of  # late: trials and drop-in functions do not need it

        report = report_of(
            self.view,
            self.coloring,
            self.plan,
            name=self.name,
            tool=VERSION,
            lists=self.request.op_lists,
            findings=self.findings,
            **self.request.settings,
        )
        header = replace(report.model, config=self.config)
        evidence = report.evidence if self.evidence is None else self.evidence
        return replace(report, model=header, evidence=evidence, shifts=self.shifts)

    @property
    def brief(self) -> str:
        """The gist of the report."""
        return self.report.brief

    def text(self, *, verbose: bool = False) -> str:
        """Return the text of the report; with `verbose`, every row."""
        return self.report.text(verbose=verbose)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return self.report.to_json()

    def figures(self, command: str | None = None) -> Sequence[Figure]:
        """Return the figures of the report, with the modules and the work of the model. `command`: the next step."""
        from amp_rewrite.reports.page.report_figures import report_figures  # late: most conversions are not drawn

        return report_figures(self.report, self.view, command)

    @cached_property
    def model(self) -> ModelProto:
        """The converted model, completely in memory.

        Raises:
            ModelError: the model is larger than 2 GB; `save` has no such limit.
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
        """Write the model atomically, streaming its weights. The arguments are those of `Model.save`.

        Raises:
            ModelError: the file cannot be written, or exists.
            PolicyError: an argument has the wrong type.
        """
        if overwrite:  # it may overwrite the source, which the report still needs
            _ = self.report
        self.result.save(path, overwrite=overwrite, external_data=external_data)


def finish(
    draft: Draft,
    coloring: Coloring,
    findings: Sequence[Finding] = (),
    settings: Sequence[str] = (),
) -> Converted:
    """Apply and check a painted draft. If nothing changes, the result is the source itself.

    `settings`: additional settings for the metadata entry.
    """
    view, target, to = draft.view, draft.request.target, draft.request.to
    plan = plan_casts(view, coloring, draft.io, draft.needs.saturate)

    def dtype_of(value: ValueId) -> DType | None:
        return plan.retype.get(value) or view.dtype(value)

    if not plan.empty:
        plan = replace(plan, parted=frozenset(op.id for op in swapped_transposes(view, dtype_of)))
    at_run_time = (
        *target_findings(view, target, tried=draft.request.opset == AUTO_OPSET),
        *fault_findings(view, dtype_of, target.runtime_target, plan.parted),
        *_parted_findings(view, plan),
        *cuda_findings(view, dtype_of, target),
        *(() if plan.empty else state_findings(view, dtype_of)),
    )
    view.forget()  # frees memory for the checks
    findings = (*without_kernel(view, coloring), *at_run_time, *coloring.findings, *findings)
    if plan.empty:
        result = draft.base
        check_source(result)
    else:
        oldest = oldest_onnxruntime(view, target, to)
        needs = () if oldest is None else (needs_release(view, oldest, to),)
        settings = settings if oldest is None else (*settings, f"{NEEDS}={ONNXRUNTIME}>={oldest}")
        result = _with_metadata(apply(view, plan), draft.request, settings)
        check_findings = check(view.model, view, plan, result)
        better = {(finding.kind, finding.subject) for finding in draft.needs.findings}  # these also describe the harm
        plan = replace(plan, findings=tuple(f for f in plan.findings if (f.kind, f.subject) not in better))
        findings = (*draft.changes, *needs, *draft.needs.findings, *check_findings, *findings)
    findings = (*findings, *mostly_float32(view, coloring, draft.request))
    return Converted(
        result,
        view,
        coloring,
        plan,
        draft.request,
        name=draft.source.path.name if draft.source.path else None,
        findings=findings,
        evidence=draft.evidence,
        shifts=draft.shifts,
    )


def _parted_findings(view: View, plan: Plan) -> Iterator[Finding]:
    if plan.parted:
        number = count(len(plan.parted), "Transpose enclosed", "Transposes enclosed")
        yield Finding(
            "parted",
            view.ops[min(plan.parted)].name,
            f"{number} in two Reshapes, which move no data: otherwise onnxruntime 1.20 and later would swap the"
            " Transpose with the Cast before a product, and crash",
        )


def _with_metadata(result: Model, request: Request, more: Sequence[str]) -> Model:
    """Add metadata entries about the conversion: its settings, and the patterns of `keep`."""
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
