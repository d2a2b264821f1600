"""Inventory: a report from the view of a model, and from coloring and plan if it is converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from zlib import crc32

from onnx import TypeProto

from amp_rewrite.decide import reasons, sizes
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import HEAVY, INTEGER
from amp_rewrite.ir.patterns.clusters import integer_ops
from amp_rewrite.ir.schema import INNER_DTYPE_ATTRIBUTES, ValueType
from amp_rewrite.ir.view import MAIN, Op, OpId, Use, ValueId, View
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import FLOATING, LOW, NO_ROW, BakeRow, CastRow, Header, PortRow, Row, Totals
from amp_rewrite.reports.values import NONE, Lineage, PlannedTypes, counting, retyped, spell, spell_type
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.op_lists import OpLists
from amp_rewrite.settings.request import STATED


def report_of(
    view: View,
    coloring: Coloring | None = None,
    plan: Plan | None = None,
    *,
    name: str | None = None,
    tool: str = "",
    lists: OpLists | None = None,
    findings: Iterable[Finding] = (),
    **settings: str | None,
) -> Report:
    """Return the report of a conversion, or the inventory of a model as it is. O(nodes + uses).

    Args:
        view: the model's index; an inventory has local functions in place of their calls.
        coloring: the types; None: the inventory.
        plan: the changes; None: the inventory.
        name: the model's file, of which the last part is kept; by default the graph's name.
        tool: version of this package.
        lists: the lists in force.
        findings: those on top of the plan's.
        **settings: spellings of options that the header states.

    Returns:
        The report.

    Example:
        >>> from amp_rewrite import Model, View, report_of
        >>> len(report_of(View.of(Model.load("model.onnx"))).rows)
        7
    """
    if not isinstance(view, View):
        raise TypeError(f"report_of takes a View, not {type(view).__name__}; give View.of(Model.load(path))")
    for unknown in settings.keys() - set(STATED):
        raise TypeError(f"report_of() got an unexpected keyword argument {unknown!r}")
    if coloring is None and view.model.proto.functions:
        view = inventory_view(view.model)
    stock = _ReportBuilder(view, coloring, plan)
    rows = tuple(stock.row(op) for op in view.ops)
    casts = tuple(stock.casts())
    baked = tuple(stock.bakes())
    sorted_findings = tuple(sorted({*findings, *(plan.findings if plan else ())}))
    proto = view.model.proto
    header = Header(
        name=_last_part(name) if name else proto.graph.name,
        ir_version=proto.ir_version,
        opsets=dict(sorted((domain or "ai.onnx", version) for domain, version in view.opsets.items())),
        tool=tool,
        to=coloring.to.spelling if coloring else None,
        settings={name: text for name, text in settings.items() if text is not None},
        lists=lists.name if lists else None,
        fingerprint=lists.fingerprint if lists else None,
    )
    totals = stock.totals(rows, casts, baked, sorted_findings)
    ports = tuple(stock.inputs()), tuple(stock.outputs())
    return Report(header, totals, rows, casts, baked, sorted_findings, *ports, stock.stored())


def inventory_view(model: Model) -> View:
    """Return the view of a model for an inventory, with local functions in place of their calls.

    ModelError if a graph cannot run, or functions cannot be put in place of their calls.
    """
    return View.of(inlined(model))


@lru_cache(maxsize=64)  # called for each row, mostly with the same list file
def _last_part(path: str) -> str:
    return PureWindowsPath(PurePosixPath(path).name).name


_Traits = tuple[tuple[int, ...], Mapping[str, str], str]
"""Reads, attributes and constants of a row."""


@dataclass(frozen=True)
class _ReportBuilder:
    view: View
    coloring: Coloring | None
    plan: Plan | None

    @cached_property
    def _types(self) -> PlannedTypes:
        return PlannedTypes(self.view, self.coloring, self.plan)

    # -- rows --------------------------------------------------------------------------------------

    def row(self, op: Op) -> Row:
        paint = self.coloring.of(op.id) if self.coloring else None
        entry = self.coloring.entries[op.id] if self.coloring else None
        cause = self.view.ops[paint.because] if paint and paint.because is not None else None
        types = self._types.row_types(op)
        reason = entry.because if entry else ""
        return Row(  # there is one for each op, and arguments by name take three times as long
            op.name,
            self._kind(op),
            types.dtype,
            self.view.scopes[op.scope].path,
            bool(op.node.name),
            types.variables,
            _COLORS[entry.color] if entry else None,
            paint.rule if paint else None,
            cause.name if cause else None,
            cause.id if cause else NO_ROW,
            paint.note if paint and paint.note != reason else "",
            _last_part(entry.source) if entry else "",
            reason,
            types.inputs,
            types.outputs,
            *self._traits(op),
        )

    @cached_property
    def _lineage(self) -> Lineage:
        return Lineage(self.view, self.plan.identities if self.plan else frozenset())

    def _traits(self, op: Op) -> _Traits:
        reads, names, row_of = list[int](), "", self._lineage.rows
        for value in op.inputs:
            reads.append(NO_ROW if value is None else row_of[value])
            if value is not None and self.view.values[source := self._lineage.source[value]].tensor is not None:
                names += f"{self.view.values[source].name}\0"
        reads += [row_of[value] for body in op.bodies for value in self.view.scopes[body].outputs]
        while reads and reads[-1] == NO_ROW:
            reads.pop()
        stated = () if self.plan and op.id in self.plan.identities else op.node.attribute
        attributes = counting(op.domain, op.signature, stated) if stated else NONE
        if attributes and self.plan and op.id in self.plan.raised:
            attributes = {name: "float32" if name in INNER_DTYPE_ATTRIBUTES else a for name, a in attributes.items()}
        return tuple(reads), attributes, f"{crc32(names.encode('utf-8', 'replace')):08x}" if names else ""

    def _kind(self, op: Op) -> str:
        return "Identity" if self.plan and op.id in self.plan.identities else op.kind

    # -- inputs and outputs ------------------------------------------------------------------------

    def inputs(self) -> Iterator[PortRow]:
        """Yield the inputs of the model, without those with an initializer as default."""
        declared = {formal.name: formal.type for formal in self.view.model.proto.graph.input}
        for value in self._lineage.inputs:
            name = self.view.values[value].name
            yield PortRow(name, self._port(self._types.made[value], declared.get(name)))

    def outputs(self) -> Iterator[PortRow]:
        """Yield the outputs of the model. A conversion does not change their types unless the caller asks for it."""
        declared = self.view.model.proto.graph.output
        fixed = self.plan.io if self.plan else {}
        for value, formal in zip(self.view.scopes[MAIN].outputs, declared, strict=True):
            dtype = self._port(retyped(self.view.types[value], fixed.get(value)), formal.type)
            yield PortRow(formal.name, dtype, self._lineage.rows[value], self._slot(value))

    def _slot(self, value: ValueId) -> int:
        """Return the output of the row behind a value."""
        source = self._lineage.source[value]
        made_by = self.view.producer(source)
        return made_by.outputs.index(source) if made_by else 0

    def _port(self, known: ValueType | None, declared: TypeProto | None) -> str:
        if declared is not None and (known is None or known.dtype is None):
            return spell_type(declared)
        return spell(known)

    # -- casts and weights -------------------------------------------------------------------------

    def casts(self) -> Iterator[CastRow]:
        """Yield the casts of the model itself in the order of its ops, then the inserted ones in the plan's."""
        folded = self.plan.drop | self.plan.identities if self.plan else frozenset()
        for op in self.view.ops:
            if op.id not in folded and op.id not in self._lineage.casts:
                continue
            value, result = op.inputs[0], op.outputs[0]
            before, after = self._types.read(op, 0), self._types.written(op, 0)
            if value is not None and result is not None and before and after:
                origin = "folded" if op.id in folded else "existing"
                readers = self._readers(result)
                yield self._cast(value, before.dtype, after.dtype, origin, f"the op {op.name!r}", readers)
        if self.plan is None:
            return
        readers_of = Counter(name for use, name in self.plan.rewire.items() if use.op in self._live)
        for cast in self.plan.casts:
            readers = readers_of[cast.name]
            if cast.name == self.view.value_name(cast.value):  # it gives a public value its name back
                readers += self._readers(cast.value, self.plan.rewire)
            made = self._types.made[cast.value]
            dtype = made.dtype if made is not None else None
            yield self._cast(cast.value, dtype, cast.to, "inserted", cast.reason, readers)

    def _readers(self, value: ValueId, but: Container[Use] = ()) -> int:
        read = sum(use.op in self._live and use not in but for use in self.view.uses[value])
        return read + (value in self.view.yielded)

    @cached_property
    def _live(self) -> Collection[OpId]:
        """Ops with an effect on an output of the model."""
        live = {self.view.values[value].producer for value in self.view.scopes[MAIN].outputs}
        for op in reversed(self.view.ops):
            if op.id in live:
                given = (value for body in op.bodies for value in self.view.scopes[body].outputs)
                live.update(self.view.values[value].producer for value in (*op.inputs, *given) if value is not None)
        return {op for op in live if op is not None}

    def _cast(
        self, value: ValueId, before: DType | None, to: DType | None, origin: str, reason: str, readers: int
    ) -> CastRow:
        return CastRow(
            self.view.values[value].name,
            before.spelling if before else "unknown",
            to.spelling if to else "unknown",
            origin,
            reason,
            self.view.scopes[self.view.values[value].scope].path,
            readers,
            to.nbytes(min(sizes.size(self.view, value), _MOST)) if to else None,
            self._lineage.rows[value],
            self._slot(value),
        )

    def bakes(self) -> Iterator[BakeRow]:
        for bake in self.plan.bakes if self.plan else ():
            value = self.view.values[bake.value]
            elements = prod(value.tensor.dims) if value.tensor is not None else 0
            dtype = self.view.dtype(bake.value) or DType.FLOAT
            scope = self.view.scopes[value.scope].path
            sizes = (dtype.nbytes(elements), bake.to.nbytes(elements))
            yield BakeRow(value.name, bake.to.spelling, *sizes, scope, bake.keeps_original)

    def _weights(self) -> Counter[str]:
        weights: Counter[str] = Counter()
        for value in self.view.values:
            if value.tensor is not None and (dtype := self.view.dtype(value.id)) is not None:
                weights[dtype.spelling] += dtype.nbytes(prod(value.tensor.dims))
        return weights

    def stored(self) -> dict[str, int]:
        """Return the bytes of `_weights` after the conversion."""
        weights = self._weights()
        for bake in self.plan.bakes if self.plan else ():
            tensor, dtype = self.view.values[bake.value].tensor, self.view.dtype(bake.value)
            if tensor is not None and dtype is not None:
                weights[bake.to.spelling] += bake.to.nbytes(prod(tensor.dims))
                if not bake.keeps_original:
                    weights[dtype.spelling] -= dtype.nbytes(prod(tensor.dims))
        return {dtype: size for dtype, size in sorted(weights.items()) if size}

    def totals(
        self,
        rows: tuple[Row, ...],
        casts: tuple[CastRow, ...],
        baked: tuple[BakeRow, ...],
        findings: tuple[Finding, ...],
    ) -> Totals:
        between = {at for at in integer_ops(self.view) if rows[at].dtype not in LOW}
        integer = between | {OpId(at) for at, row in enumerate(rows) if row.op in INTEGER}
        floats = [row for row in rows if _floating(row)]
        computing = [at for at, row in enumerate(rows) if _floating(row) and _computes(row) and at not in integer]
        compute = [rows[at] for at in computing]
        flops = [min(round(sizes.flops(self.view, self.view.ops[at])), _MOST) for at in computing]
        origins = Counter(cast.origin for cast in casts)
        inserted = Counter(cast.to in LOW for cast in casts if cast.origin == "inserted")
        kinds = Counter(finding.kind for finding in findings)
        weights = self._weights().total()
        return Totals(
            ops=len(rows),
            float_ops=len(floats),
            compute_ops=len(compute),
            integer_ops=len(integer),
            flops=sum(flops),
            flops_low=sum(n for n, row in zip(flops, compute, strict=True) if row.dtype in LOW),
            compute_lowered=sum(row.dtype in LOW for row in compute),
            raised=sum(row.rule == reasons.RAISED for row in rows),
            compute_raised=sum(row.rule == reasons.RAISED for row in compute),
            casts_to_low=inserted[True],
            casts_to_float32=inserted[False],
            casts_existing=origins["existing"],
            casts_folded=origins["folded"],
            baked=len(baked),
            saturated=kinds["saturated"],
            flushed=kinds["flushed"],
            refused=sum(row.rule == reasons.KERNEL_GATE for row in rows),
            weights_before=weights,
            weights_after=sum(self.stored().values()),
        )


_MOST = 1 << 48
"""Operations of an op, or elements of a value; more are not a measure, but hostile dimensions."""
_COLORS = {color: color.value for color in Color}


def _floating(row: Row) -> bool:
    return bool(row.variables) or row.dtype in FLOATING or row.rule == reasons.UNKNOWN_TYPE


def _computes(row: Row) -> bool:
    return row.color == _COLORS[Color.ALLOW] if row.color else row.op in HEAVY
