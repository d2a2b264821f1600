"""The draft: the part of a conversion before any data. Painting it again with other pins is cheap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.paint import Coloring, paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.needs.find import Needs, find_needs
from amp_rewrite.decide.plan import plan_casts
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, count
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LOW_ONLY
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.versions import OLDEST_MOVED
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.pipeline.findings import refuse_unknown
from amp_rewrite.rewrite.passes.canonicalize import canonicalize, followed
from amp_rewrite.settings.choices import KEEP_OPSET
from amp_rewrite.settings.io_rules import io_types, parse_io
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.request import Request

if TYPE_CHECKING:
    from amp_rewrite.reports.rows import ShiftRow


@dataclass(frozen=True)
class Draft:
    """A model in standard form with its needs, and its request, resolved to ops.

    `source` is the caller's model, `base` the result if nothing is lowered, `view` the one to paint, with the
    `expansions` that led to it. `rescale`: quantizers get scales of the low type. `notes`: findings of a model left
    alone, too. `widened`: low values of the model have become float32. `shifts`: what became of values beyond the type.
    """

    request: Request
    source: Model
    base: Model
    view: View
    needs: Needs
    keep: Mapping[OpId, str]
    lower: Mapping[OpId, str]
    io: Mapping[ValueId, DType]
    expansions: tuple[Finding, ...] = ()
    rescale: bool = False
    notes: tuple[Finding, ...] = ()
    widened: bool = False
    shifts: tuple[ShiftRow, ...] = ()

    @classmethod
    def of(
        cls,
        model: object,
        request: Request,
        *,
        folder: str | Path | None = None,
        widen: bool = False,
        grouped: bool = True,
    ) -> Draft:
        """Return the draft of a model, as `Model.load` takes it. O(nodes + uses); reads each constant once.

        `widen`: decide about low values of the model as if they were float32. `grouped`: as for `Context`; what would
        not become low is drafted without.
        """
        request.tell("read")
        source = Model.load(model, folder=folder)
        indexed = View.of(source)
        request.tell("decide")
        grouped = grouped and not indexed.of_kinds(LOW_ONLY)
        draft = cls._of(source, indexed, request, widen, grouped)
        if grouped and not draft.opens():
            draft = cls._of(source, indexed, request, widen, False)
        if isinstance(request.opset, int) or not draft.view.opset > indexed.opset < OLDEST_MOVED:
            return draft
        kept = cls._of(source, indexed, replace(request, opset=KEEP_OPSET), widen, grouped)
        why = _worse(draft, kept)
        if why is None:
            return draft
        note = f"opset {indexed.opset} stays: at {draft.view.opset} {why}"
        told = (Finding("opset", "ai.onnx", note),) if why else ()
        return replace(kept, request=request, notes=(*kept.notes, *told))

    @classmethod
    def _of(cls, source: Model, indexed: View, request: Request, widen: bool, grouped: bool) -> Draft:
        refuse_unknown(indexed, request.target)
        standard = canonicalize(indexed, request, widen=widen, grouped=grouped)
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
            (*indexed.model.mends, *standard.notes),
            widen,
        )

    def on(self, view: View, results: Mapping[OpId, tuple[str, ...]], findings: Sequence[Finding]) -> Draft:
        """Return the draft on a rewritten view. `results`: names of the results of rewritten ops."""
        needs, io = _resolved(view, self.request, rescale=self.rescale)
        return replace(
            self,
            view=view,
            needs=needs,
            keep=followed(self.keep, self.view, view, results),
            lower=followed(self.lower, self.view, view, results),
            io=io,
            expansions=(*self.expansions, *findings),
        )

    def paint(self, pins: Sequence[Pin] = ()) -> Coloring:
        """Return the coloring, with pins from data on top of the safety rules'. O(nodes + uses).

        A pin from data pins the whole cluster of its op.
        """
        return self._painted(pins) if pins else self._unpinned

    def opens(self, pins: Sequence[Pin] = ()) -> bool:
        """True if every op with kernels for low types alone is low under pins from data."""
        return not self.view.of_kinds(LOW_ONLY) or self.paint(pins).opens(self.view)

    @cached_property
    def _unpinned(self) -> Coloring:
        return self._painted(())

    def problem(self, pins: Sequence[Pin] = ()) -> Problem:
        """Return the problem for the painter: needs, the options of the request, patterns, pins and clusters."""
        request = self.request
        return Problem(
            self.view,
            request.op_lists,
            request.to,
            self.needs,
            level=request.level,
            target=request.target,
            gray_follows_allow=request.gray_follows_allow,
            keep=self.keep,
            lower=self.lower,
            pins=pins,
            clusters=clusters(self.view),
            low_inputs=self.io,
            place=request.places,
            rescale=self.rescale,
            found=request.found,
        )

    def _painted(self, pins: Sequence[Pin]) -> Coloring:
        coloring = paint(self.problem(pins))
        return replace(coloring, findings=(*coloring.findings, *self.notes)) if self.notes else coloring


def _resolved(view: View, request: Request, *, rescale: bool) -> tuple[Needs, Mapping[ValueId, DType]]:
    needs = find_needs(view, request.to, target=request.target, rescale=rescale) if request.safe else Needs()
    return needs, io_types(view, parse_io(request.io), request.to)


def _worse(moved: Draft, kept: Draft) -> str | None:
    """Return why the draft at a newer opset is worse than at the model's own; None if it is not, "" if no better.

    What lowers nothing is not better: such a model stays as it is.
    """
    after, before = Costs.of(moved, moved.paint()), Costs.of(kept, kept.paint())
    if not after.low:
        return ""
    if after.unserved > before.unserved:
        return f"the target would leave {count(after.unserved - before.unserved, 'more op')} to the CPU"
    if after.casts > before.casts and after.compute <= before.compute:
        return f"it would have {after.casts} Casts instead of {before.casts}, and lower no more products"
    added, served = after.ops - before.ops, max(after.low - before.low, 0)
    if added > served:
        return f"it would have {count(added, 'more op')}, and {served} more in the low type"
    return None


@dataclass(frozen=True, slots=True)
class Costs:
    """Numbers of a painted draft: ops, low ones, Casts, ops without a kernel, low compute ops."""

    ops: int
    low: int
    casts: int
    unserved: int
    compute: int

    @classmethod
    def of(cls, draft: Draft, coloring: Coloring) -> Costs:
        view, gate = draft.view, Gate(draft.request.target, draft.request.to)
        lowered: dict[OpId, list[str]] = {}
        for op, variable in coloring.low:
            lowered.setdefault(op, []).append(variable)
        known = [op for op in view.ops if op.signature is not None and not op.bodies and op.kind != "Constant"]
        return cls(
            ops=sum(op.kind != "Constant" for op in view.ops),
            low=len(lowered),
            casts=len(plan_casts(view, coloring, draft.io, draft.needs.saturate).casts),
            unserved=sum(not gate.runs(view, op, tuple(lowered.get(op.id, ()))) for op in known),
            compute=sum(coloring.entries[op].color is Color.ALLOW for op in lowered),
        )
