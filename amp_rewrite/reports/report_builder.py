"""Build a report from the view of a model and, for a conversion, from its coloring and plan."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from pathlib import PurePosixPath, PureWindowsPath

from onnx import AttributeProto, TensorProto, TypeProto
from onnx.helper import get_attribute_value

from amp_rewrite.decide import reasons, sizes
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import casts_floats, input_variable, keeps_type
from amp_rewrite.ir.op_classes import CASTS, HEAVY, INTEGER
from amp_rewrite.ir.patterns.clusters import integer_ops
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, INNER_DTYPE_ATTRIBUTES, Signature, ValueType, default_attributes
from amp_rewrite.ir.view import MAIN, Op, OpId, Use, ValueId, View
from amp_rewrite.reports import work
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import FIRST_INPUT, FLOATING, LOW, NO_ROW, BakeRow, CastRow, Header, PortRow, Row, Totals
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.settings.op_lists import OpLists
from amp_rewrite.settings.request import RECORDED


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
    """Return the report of a conversion, or the inventory of a model. O(nodes + uses).

    Args:
        view: the model's index; an inventory inlines local functions.
        coloring: the assigned types; None for an inventory.
        plan: the planned changes; None for an inventory.
        name: path to the model (the report keeps the file name); by default, the graph's name.
        tool: version of this package.
        lists: the op lists in use.
        findings: findings in addition to the plan's.
        **settings: formatted values of options for the header.

    Returns:
        The report.

    Example:
        >>> from amp_rewrite import Model, View, report_of
        >>> len(report_of(View.of(Model.load("model.onnx"))).rows)
        7
    """
    if not isinstance(view, View):
        raise TypeError(f"report_of takes a View, not {type(view).__name__}; pass View.of(Model.load(path))")
    for unknown in settings.keys() - set(RECORDED):
        raise TypeError(f"report_of() got an unexpected keyword argument {unknown!r}")
    if coloring is None and view.model.proto.functions:
        view = inventory_view(view.model)
    plan = plan or Plan(DType.FLOAT16)
    builder = _ReportBuilder(view, coloring, plan)
    rows = tuple(builder.row(op) for op in view.ops)
    casts = tuple(builder.casts())
    baked = tuple(builder.bakes())
    sorted_findings = tuple(sorted({*findings, *plan.findings}))
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
    totals = builder.totals(rows, casts, baked, sorted_findings)
    ports = tuple(builder.inputs()), tuple(builder.outputs())
    return Report(header, totals, rows, casts, baked, sorted_findings, *ports, builder.weights[1])


def inventory_view(model: Model) -> View:
    """Return the view of a model for an inventory, with local functions inlined.

    Raise ModelError if a graph cannot run or a function cannot be inlined.
    """
    return View.of(inlined(model))


@lru_cache(maxsize=64)  # called for each row, mostly with the same list file
def _last_part(path: str) -> str:
    return PureWindowsPath(PurePosixPath(path).name).name


@dataclass(frozen=True)
class _ReportBuilder:
    """Builder of the parts of a report. `plan` is empty for an inventory."""

    view: View
    coloring: Coloring | None
    plan: Plan

    # -- types -------------------------------------------------------------------------------------

    @cached_property
    def _produced(self) -> Sequence[ValueType | None]:
        """Type of each value at its producer after the conversion."""
        types = list(self.view.types)
        baked = {bake.value: bake.to for bake in self.plan.bakes if not bake.keeps_original}
        for value, dtype in (*self.plan.retype.items(), *baked.items()):
            types[value] = _retyped(self.view.types[value], dtype)
        return types

    def _input_type(self, op: Op, slot: int) -> ValueType | None:
        value = op.inputs[slot]
        if value is None or op.kind == "Cast":
            return None if value is None else self._produced[value]
        variable = input_variable(op, slot)
        dtype = self.coloring.dtype(variable) if self.coloring is not None and variable is not None else None
        return _retyped(self.view.types[value], dtype)

    def _output_types(self, op: Op) -> tuple[ValueType | None, ...]:
        return tuple([None if value is None else self._produced[value] for value in op.outputs])

    def _variables(
        self, op: Op, inputs: Sequence[ValueType | None], outputs: Sequence[ValueType | None]
    ) -> dict[str, DType]:
        dtypes = {}
        for variable in self.view.variables[op.id]:
            ports = (*(inputs[i] for i in variable.inputs), *(outputs[o] for o in variable.outputs))
            dtype = next((port.dtype for port in ports if port is not None and port.dtype is not None), None)
            if dtype is not None and dtype.floating:
                dtypes[variable.name] = dtype
        free = {name: dtype for name, dtype in dtypes.items() if "(" not in name}
        return free or dtypes  # drop ports of one fixed type, "tensor(float)", if there are others

    # -- lineage -----------------------------------------------------------------------------------

    @cached_property
    def _source(self) -> Sequence[ValueId]:
        """Origin of each value, past copies and Casts between floats; usually the value itself."""
        source = [value.id for value in self.view.values]
        for op in self.view.ops:
            copies = op.kind == "Identity" or op.id in self.plan.identities
            copies = copies or (op.kind in CASTS and (casts_floats(self.view, op) or keeps_type(self.view, op)))
            if copies and op.inputs[0] is not None and op.outputs[0] is not None:
                source[op.outputs[0]] = source[op.inputs[0]]
        return source

    @cached_property
    def _source_rows(self) -> Sequence[int]:
        """Source of each value, as in `Row.reads`."""
        rows = []
        inputs = {value: FIRST_INPUT - i for i, value in enumerate(self._inputs)}
        for source in self._source:
            producer = self.view.producer(source)
            row = inputs.get(source, NO_ROW) if producer is None else producer.id
            rows.append(NO_ROW if producer is not None and producer.kind == "Constant" else row)
        return rows

    @cached_property
    def _inputs(self) -> Sequence[ValueId]:
        """Inputs of the model, except those with an initializer as default."""
        return [v for v in self.view.scopes[MAIN].inputs if self.view.values[v].tensor is None]

    # -- rows --------------------------------------------------------------------------------------

    def row(self, op: Op) -> Row:
        paint = self.coloring.of(op.id) if self.coloring else None
        entry = self.coloring.entries[op.id] if self.coloring else None
        cause = self.view.ops[paint.because] if paint and paint.because is not None else None
        inputs, outputs = tuple([self._input_type(op, slot) for slot in range(len(op.inputs))]), self._output_types(op)
        variables = self._variables(op, inputs, outputs)
        reason = entry.because if entry else ""
        return Row(  # one per op, and keyword arguments take three times as long
            op.name,
            "Identity" if op.id in self.plan.identities else op.kind,
            _main_dtype(op, variables, outputs, inputs),
            self.view.scopes[op.scope].path,
            bool(op.node.name),
            {name: dtype.spelling for name, dtype in variables.items()},
            entry.color.value if entry else None,
            paint.rule if paint else None,
            cause.name if cause else None,
            cause.id if cause else NO_ROW,
            paint.note if paint and paint.note != reason else "",
            _last_part(entry.source) if entry else "",
            reason,
            tuple(map(_text, inputs)),
            tuple(map(_text, outputs)),
            *self._traits(op),
        )

    def _traits(self, op: Op) -> tuple[tuple[int, ...], Mapping[str, str], str]:
        reads, names = list[int](), ""
        for value in op.inputs:
            reads.append(NO_ROW if value is None else self._source_rows[value])
            if value is not None and self.view.values[source := self._source[value]].tensor is not None:
                names += f"{self.view.values[source].name}\0"
        reads += [self._source_rows[value] for body in op.bodies for value in self.view.scopes[body].outputs]
        while reads and reads[-1] == NO_ROW:
            reads.pop()
        protos = () if op.id in self.plan.identities else op.node.attribute
        attributes = attributes_of(op.domain, op.signature, protos) if protos else _NONE
        if attributes and op.id in self.plan.raised:
            attributes = {name: "float32" if name in INNER_DTYPE_ATTRIBUTES else a for name, a in attributes.items()}
        return tuple(reads), attributes, f"{zlib.crc32(names.encode('utf-8', 'replace')):08x}" if names else ""

    # -- inputs and outputs ------------------------------------------------------------------------

    def inputs(self) -> Iterator[PortRow]:
        declared = {formal.name: formal.type for formal in self.view.model.proto.graph.input}
        for value in self._inputs:
            name = self.view.values[value].name
            yield PortRow(name, _port(self._produced[value], declared.get(name)))

    def outputs(self) -> Iterator[PortRow]:
        """Yield the outputs of the model. A conversion preserves their types unless told to change them."""
        declared = self.view.model.proto.graph.output
        for value, formal in zip(self.view.scopes[MAIN].outputs, declared, strict=True):
            dtype = _port(_retyped(self.view.types[value], self.plan.io.get(value)), formal.type)
            yield PortRow(formal.name, dtype, self._source_rows[value], self._slot(value))

    def _slot(self, value: ValueId) -> int:
        """Return the position of a value among the outputs of its row."""
        source = self._source[value]
        producer = self.view.producer(source)
        return producer.outputs.index(source) if producer else 0

    # -- casts and weights -------------------------------------------------------------------------

    def casts(self) -> Iterator[CastRow]:
        """Yield the model's own casts in the order of its ops, then the inserted ones in the order of the plan."""
        folded = self.plan.drop | self.plan.identities
        for op in self.view.ops:
            if op.id not in folded and not casts_floats(self.view, op):
                continue
            value, result = op.inputs[0], op.outputs[0]
            before, (after, *_) = self._input_type(op, 0), self._output_types(op)
            if value is not None and result is not None and before and after:
                origin = "folded" if op.id in folded else "existing"
                readers = self._readers(result)
                yield self._cast(value, before.dtype, after.dtype, origin, f"the op {op.name!r}", readers)
        readers_of = Counter(name for use, name in self.plan.rewire.items() if use.op in self._live)
        for cast in self.plan.casts:
            readers = readers_of[cast.name]
            if cast.name == self.view.value_name(cast.value):  # the cast restores the name of a public value
                readers += self._readers(cast.value, self.plan.rewire)
            produced = self._produced[cast.value]
            dtype = produced.dtype if produced is not None else None
            yield self._cast(cast.value, dtype, cast.to, "inserted", cast.reason, readers)

    def _readers(self, value: ValueId, excluded: Container[Use] = ()) -> int:
        read = sum(use.op in self._live and use not in excluded for use in self.view.uses[value])
        return read + (value in self.view.yielded)

    @cached_property
    def _live(self) -> Collection[OpId]:
        """Ops with an effect on an output of the model."""
        live = {self.view.values[value].producer for value in self.view.scopes[MAIN].outputs}
        for op in reversed(self.view.ops):
            if op.id in live:
                yielded = (value for body in op.bodies for value in self.view.scopes[body].outputs)
                live.update(self.view.values[value].producer for value in (*op.inputs, *yielded) if value is not None)
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
            to.nbytes(min(sizes.size(self.view, value), _MAX_COUNT)) if to else None,
            self._source_rows[value],
            self._slot(value),
        )

    def bakes(self) -> Iterator[BakeRow]:
        for bake in self.plan.bakes:
            value = self.view.values[bake.value]
            elements = prod(value.tensor.dims) if value.tensor is not None else 0
            dtype = self.view.dtype(bake.value) or DType.FLOAT
            scope = self.view.scopes[value.scope].path
            sizes = (dtype.nbytes(elements), bake.to.nbytes(elements))
            yield BakeRow(value.name, bake.to.spelling, *sizes, scope, bake.keeps_original)

    @cached_property
    def weights(self) -> tuple[int, Mapping[str, int]]:
        """Bytes of the model's weights, and bytes by type after the conversion."""
        stored: Counter[str] = Counter()
        for value in self.view.values:
            if value.tensor is not None and (dtype := self.view.dtype(value.id)) is not None:
                stored[dtype.spelling] += dtype.nbytes(prod(value.tensor.dims))
        before = stored.total()
        for bake in self.plan.bakes:
            tensor, dtype = self.view.values[bake.value].tensor, self.view.dtype(bake.value)
            if tensor is not None and dtype is not None:
                stored[bake.to.spelling] += bake.to.nbytes(prod(tensor.dims))
                if not bake.keeps_original:
                    stored[dtype.spelling] -= dtype.nbytes(prod(tensor.dims))
        return before, {dtype: size for dtype, size in sorted(stored.items()) if size}

    def totals(
        self,
        rows: tuple[Row, ...],
        casts: tuple[CastRow, ...],
        baked: tuple[BakeRow, ...],
        findings: tuple[Finding, ...],
    ) -> Totals:
        between_quantizers = {at for at in integer_ops(self.view) if rows[at].dtype not in LOW}
        integer = between_quantizers | {OpId(at) for at, row in enumerate(rows) if row.op in INTEGER}
        floats = [at for at, row in enumerate(rows) if _is_floating(row)]
        heavy = (at for at in floats if (rows[at].color == "allow" if rows[at].color else rows[at].op in HEAVY))
        computing = [at for at in heavy if at not in integer]
        compute = [rows[at] for at in computing]
        flops = [min(round(work.flops(self.view, self.view.ops[at])), _MAX_COUNT) for at in computing]
        origins = Counter(cast.origin for cast in casts)
        inserted = Counter(cast.to in LOW for cast in casts if cast.origin == "inserted")
        kinds = Counter(finding.kind for finding in findings)
        before, stored = self.weights
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
            weights_before=before,
            weights_after=sum(stored.values()),
        )


_MAX_COUNT = 1 << 48
"""Maximum count of an op's operations or a value's elements; larger counts come from hostile dimensions."""


def _is_floating(row: Row) -> bool:
    return bool(row.variables) or row.dtype in FLOATING or row.rule == reasons.UNKNOWN_TYPE


def _retyped(type_: ValueType | None, dtype: DType | None) -> ValueType | None:
    return type_ if type_ is None or dtype is None or type_.dtype is dtype else type_.of(dtype)


def _text(type_: ValueType | None) -> str:
    return str(type_) if type_ is not None else ""


def _port(type_: ValueType | None, declared: TypeProto | None) -> str:
    return spell_type(declared) if declared is not None and (type_ is None or type_.dtype is None) else _text(type_)


def _main_dtype(
    op: Op, variables: Mapping[str, DType], outputs: Sequence[ValueType | None], inputs: Sequence[ValueType | None]
) -> str:
    written = next((t for t in outputs if t is not None), None)
    if op.kind in CASTS and written is not None:
        return str(written)
    floating = list(variables.values()) or [
        t.dtype for t in (*outputs, *inputs) if t is not None and t.dtype is not None and t.dtype.floating
    ]
    chosen = next((d for d in floating if d.low), floating[0] if floating else None)
    return chosen.spelling if chosen is not None else _text(written) or "unknown"


# -- attributes -------------------------------------------------------------------------------------------------


_NONE: Mapping[str, str] = {}
_PLACING = """
allowzero auto_pad axes axis batch_axis batch_dims blocksize broadcast ceil_mode channels_last consumed_inputs dilation
dilations end ends exclusive gather_axis group groups height_scale hidden_size input_as_shape is_test k keepdims
kernel_shape kv_num_heads layout max min K N new_axis noop_with_empty_axes num_groups num_heads num_outputs
num_scan_inputs output_height output_padding output_shape output_width paddings pads perm q_num_heads ratio reverse
scales scan_input_axes scan_output_axes seed select_last_index shape spatial split start starts storage_order strides
time_axis transA transB transBatchA transBatchB upper width_scale
"""
PLACING = frozenset(_PLACING.split())
"""Attributes of known operators for the placement of elements, or moved to inputs or removed in a later opset."""
_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_MAX_ITEMS = 8


def attributes_of(domain: str, signature: Signature | None, attributes: Iterable[AttributeProto]) -> Mapping[str, str]:
    """Return the formatted non-default attributes with an effect on a node's results."""
    defaults = _defaults(signature) if signature is not None else _NONE
    relevant = {}
    for a in attributes:
        name = a.name
        if a.type in _GRAPHS or (signature is not None and (name in PLACING or _specifies_type(signature, name))):
            continue
        if (spelling := _format(domain, a)) != defaults.get(name):
            relevant[name] = spelling
    return relevant or _NONE


def _specifies_type(signature: Signature, name: str) -> bool:
    if signature.op_type in ("Constant", "ConstantOfShape") and not signature.domain:
        return True
    return DTYPE_ATTRIBUTES.get((signature.domain, signature.op_type)) == name


@cache
def _defaults(signature: Signature) -> Mapping[str, str]:
    defaults = default_attributes(signature).values()
    return {**dict.fromkeys(INNER_DTYPE_ATTRIBUTES, "0"), **{a.name: _format(signature.domain, a) for a in defaults}}


# -- formatting ----------------------------------------------------------------------------------------


def _format(domain: str, a: AttributeProto) -> str:
    """Format the value of an attribute: numbers and strings in full, tensors by type, long lists by digest."""
    if a.type not in _TYPES:
        return "unknown"
    value = get_attribute_value(a)
    if a.type == AttributeProto.INT and a.name in INNER_DTYPE_ATTRIBUTES:
        return _element(value)
    if isinstance(value, TensorProto):
        return _element(value.data_type)
    if isinstance(value, TypeProto):
        return spell_type(value)
    if a.type in _LISTS:
        return _list(domain, [_number(item) for item in value])
    return _number(value) if a.type in _SIMPLE else AttributeProto.AttributeType.Name(a.type).lower()


_TYPES = frozenset(AttributeProto.AttributeType.values()) - {AttributeProto.UNDEFINED}
_SIMPLE = (AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING)
_LISTS = (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS)


def _list(domain: str, items: list[str]) -> str:
    if domain == "ai.onnx.ml":  # weights; their number depends on the training data
        return "a list" if items else "empty"
    if len(items) > _MAX_ITEMS:
        return f"{len(items)} items {zlib.crc32(chr(0).join(items).encode()):08x}"
    return ", ".join(items)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _element(code: int) -> str:
    dtype = DType.of(code)
    return dtype.spelling if dtype is not None else f"type {code}"


def spell_type(proto: TypeProto) -> str:
    """Format a type in full: "float16", "map(int64, float32)", "seq(map(string, float32))"."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return _element(proto.tensor_type.elem_type)
    if kind == "sparse_tensor_type":
        return f"sparse_tensor({_element(proto.sparse_tensor_type.elem_type)})"
    if kind == "map_type":
        return f"map({_element(proto.map_type.key_type)}, {spell_type(proto.map_type.value_type)})"
    if kind == "sequence_type":
        return f"seq({spell_type(proto.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({spell_type(proto.optional_type.elem_type)})"
    return "unknown"
