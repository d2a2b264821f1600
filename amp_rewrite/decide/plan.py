"""Plan for a coloring: Casts to insert, and Casts of the model to remove."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from onnx import AttributeProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import Finding, count
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import exposed, input_variable, is_external, output_variable
from amp_rewrite.ir.names import numbered
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, IMPLIED_BY_INPUT, INNER_DTYPE_ATTRIBUTES
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View


@dataclass(frozen=True, slots=True)
class Cast:
    """A Cast to insert right after the producer of `value`; `name` is its result.

    `saturates`: values beyond the range of the type become its largest number instead of infinity.
    """

    value: ValueId
    to: DType
    name: str
    reason: str
    saturates: bool = False


@dataclass(frozen=True, slots=True)
class Bake:
    """A constant to store in another type, under its own name unless the original still has readers."""

    value: ValueId
    to: DType
    name: str
    keeps_original: bool


@dataclass(frozen=True, repr=False)
class Plan:
    """Changes for `apply` to make, as data. Values and ops belong to one View.

    Attributes:
        retype: values whose element type changes at their producer.
        rename: new names of retyped values whose old name must keep the old type; one of `casts` then makes that value.
        rewire: inputs to connect to another value, each with its name.
        attributes: ops whose attribute for the result type changes, with the new type.
        raised: ops whose attributes for the type of inner computations become float32.
        drop: folded Casts.
        identities: folded Casts that become an Identity, because they produce a public value.
        parted: Transposes to enclose in two Reshapes, which separate them from their readers.
        io: new types of public values.
    """

    to: DType
    retype: Mapping[ValueId, DType] = field(default_factory=dict)
    rename: Mapping[ValueId, str] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    bakes: tuple[Bake, ...] = ()
    rewire: Mapping[Use, str] = field(default_factory=dict)
    attributes: Mapping[OpId, DType] = field(default_factory=dict)
    raised: frozenset[OpId] = frozenset()
    drop: frozenset[OpId] = frozenset()
    identities: frozenset[OpId] = frozenset()
    parted: frozenset[OpId] = frozenset()
    io: Mapping[ValueId, DType] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.retype or self.casts or self.bakes or self.rewire or self.drop or self.identities)


def plan_casts(
    view: View, coloring: Coloring, io: Mapping[ValueId, DType] | None = None, saturate: Collection[ValueId] = ()
) -> Plan:
    """Return the plan for a coloring: at most one Cast per value and type, and none for baked constants.

    `io`: public values with their new types. `saturate`: values whose Cast clamps. O(nodes + uses).
    """
    changes = any(p.dtype is coloring.to or p.rule == reasons.RAISED for p in coloring.paints.values())
    if not (changes or io):
        return Plan(coloring.to)
    return _Planner(view, coloring, io or {}, saturate).plan()


_TYPES = (DType.FLOAT, *LOW_TYPES)
"""Types of the sources and results of inserted Casts."""


def sets_low_inside(attribute: AttributeProto) -> bool:
    """True for an attribute that sets a low type for the computation inside an operator."""
    return attribute.name in INNER_DTYPE_ATTRIBUTES and DType.of(attribute.i) in LOW_TYPES


@dataclass
class _Planner:
    """Planner of the Casts for a coloring.

    `homes`: the type of each value at its producer. `uses_by_type`: the uses of each value, by the type that they read.
    `folds`: Casts of the model to bypass, each with the value that its readers take instead. `origins`: the sources of
    the results of dropped Casts.
    """

    view: View
    coloring: Coloring
    io: Mapping[ValueId, DType]
    saturate: Collection[ValueId]
    casts: list[Cast] = field(default_factory=list)
    bakes: list[Bake] = field(default_factory=list)
    rename: dict[ValueId, str] = field(default_factory=dict)
    homes: dict[ValueId, DType] = field(default_factory=dict)
    uses_by_type: dict[ValueId, dict[DType, list[Use]]] = field(default_factory=dict)
    folds: dict[OpId, ValueId] = field(default_factory=dict)
    origins: dict[ValueId, ValueId] = field(default_factory=dict)
    versions: dict[ValueId, dict[DType, str]] = field(default_factory=dict)

    def plan(self) -> Plan:
        self.names, view = set(self.view.names), self.view
        self.homes = {v.id: home for v in view.values if (home := self._home(v.id)) is not None}
        for value, home in self.homes.items():
            by_type = self.uses_by_type[value] = {}
            for use in view.uses[value]:
                by_type.setdefault(self._needed(use, home), []).append(use)
        self._fold()
        kept = {v: home for v, home in self.homes.items() if not self._dropped(view.values[v].producer)}
        for value, home in kept.items():
            self._provide(value, home, self.uses_by_type[value])
        identities = {op for op in self.folds if not self._dropped(op)}
        raised = {op: view.ops[op].node for (op, _), p in self.coloring.paints.items() if p.rule == reasons.RAISED}
        return Plan(
            self.coloring.to,
            retype={v: home for v, home in kept.items() if home is not view.dtype(v)},
            rename=self.rename,
            casts=tuple(self.casts),
            bakes=tuple(self.bakes),
            rewire=dict(self._rewired()),
            attributes=dict(self._attributes()),
            raised=frozenset(op for op, node in raised.items() if any(map(sets_low_inside, node.attribute))),
            drop=frozenset(self.folds.keys() - identities),
            identities=frozenset(identities),
            io=self.io,
            findings=tuple(self._findings()),
        )

    def _provide(self, value: ValueId, home: DType, uses_by_type: dict[DType, list[Use]]) -> None:
        # At the edge of a graph, the value's own name has a fixed type.
        fixed = self.io.get(value) or self.view.dtype(value) if exposed(self.view, value) else None
        if (fixed is None or fixed is home) and uses_by_type.keys() <= {home}:
            return  # the common case
        name = self.view.value_name(value)
        if home is not fixed is not None:
            self.rename[value] = self._fresh(name, home)
        versions = self.versions[value] = {home: self.rename.get(value, name)}
        dtypes = [d for d in _TYPES if d in uses_by_type or d is fixed]
        for dtype in dtypes:
            if dtype is home:
                continue
            if fixed is not dtype and (source := self._cast_from(value, dtype)) is not None:
                versions[dtype] = self._name(source, dtype)
            elif self.view.constant(value) is not None and self.view.tensor_dtype(value) is not None:
                keeps = dtypes != [dtype]
                versions[dtype] = self._fresh(name, dtype) if keeps else name
                self.bakes.append(Bake(value, dtype, versions[dtype], keeps))
            else:
                versions[dtype] = name if dtype is fixed else self._fresh(name, dtype)
                reason = self._reason(value, dtype, uses_by_type.get(dtype, []))
                clamps = dtype is self.coloring.to and value in self.saturate
                self.casts.append(Cast(value, dtype, versions[dtype], reason, clamps))

    # -- types of values and of their readers ------------------------------------------------------

    def _home(self, value: ValueId) -> DType | None:
        dtype = self.view.dtype(value)
        if dtype not in _TYPES:
            return None
        if is_external(self.view, value):
            return self.io.get(value, dtype)
        return self.coloring.dtype(output_variable(self.view, value)) or dtype

    def _needed(self, use: Use, home: DType) -> DType:
        op = self.view.ops[use.op]
        if op.kind == "Cast":
            return home  # a Cast to float32 before it would not change its result
        dtype = self.coloring.dtype(input_variable(op, use.slot)) or self.view.dtype(op.inputs[use.slot])
        assert dtype is not None
        return dtype

    # -- the model's own Casts -----------------------------------------------------------------------

    def _fold(self) -> None:
        """Bypass redundant Casts of the model.

        A Cast to the type of its source is a copy, so its readers take the source. A Cast back to the type from which
        its source was widened undoes the widening, so its readers take the value before both Casts. Of two equal Casts
        of one source, the second is redundant.
        """
        homes, uses_by_type = self.homes, self.uses_by_type
        ends = ((op, op.inputs[0], op.outputs[0]) for op in self.view.of_kinds(("Cast",)))
        casts = [(op, source, result) for op, source, result in ends if source is not None and result is not None]
        roots: dict[ValueId, ValueId] = {}  # sources of results of folded Casts
        duplicates: dict[tuple[ValueId, DType], list[tuple[Op, ValueId]]] = {}
        for op, source, result in casts:
            dtype = homes.get(result) or self.view.dtype(result)
            root = roots.get(source, source)
            if dtype is not None and (homes.get(source) or self.view.dtype(source)) is dtype:
                self.folds[op.id], roots[result] = source, root
                uses_by_type.setdefault(result, {dtype: list(self.view.uses[result])})
            elif dtype in _TYPES and not self._is_exposed(op):
                before = self._cast_from(root, dtype) if dtype.low and self._home(root) is DType.FLOAT else None
                if before is not None:
                    self.folds[op.id], roots[result] = before, root
                else:
                    duplicates.setdefault((source, dtype), []).append((op, result))
        for op, source, result in reversed(casts):  # drop a Cast that all readers bypass
            readers = [self.folds.get(use.op, result) for use in self.view.uses[result]]
            bypassed = op.id not in self.folds and result in uses_by_type and readers and result not in readers
            if bypassed and not self._is_exposed(op):
                self.folds[op.id] = source
                uses_by_type[result].clear()
        for op, _, result in casts:
            if self._dropped(op.id):
                source = self.folds[op.id]
                origin = self.origins[result] = self.origins.get(source, source)
                for dtype, uses in uses_by_type[result].items() if origin in uses_by_type else ():
                    uses_by_type[origin].setdefault(dtype, []).extend(uses)
        for (source, dtype), equal in duplicates.items():
            changed = [op for op, result in equal if homes[result] is not self.view.dtype(result)]
            if source in homes and (len(changed) > 1 or dtype in uses_by_type[source]):
                self._join(source, dtype, equal)

    def _join(self, source: ValueId, dtype: DType, equal: list[tuple[Op, ValueId]]) -> None:
        """Replace equal Casts of the model with a single one."""
        uses_by_type, home = self.uses_by_type[source], self.homes[source]
        uses = dict.fromkeys(Use(op.id, 0) for op, _ in equal)
        kept = [use for use in uses_by_type.pop(home, ()) if use not in uses]
        uses_by_type.update({home: kept} if kept else {})
        uses_by_type.setdefault(dtype, []).extend(uses)
        for op, result in equal:
            self.folds[op.id] = self.origins[result] = source
            for read, readers in self.uses_by_type[result].items():
                if read is not dtype:
                    uses_by_type.setdefault(read, []).extend(readers)

    def _is_exposed(self, op: Op) -> bool:
        result = op.outputs[0]
        return result is not None and exposed(self.view, result)

    def _dropped(self, op: OpId | None) -> bool:
        return op is not None and op in self.folds and not self._is_exposed(self.view.ops[op])

    def _cast_from(self, value: ValueId, dtype: DType) -> ValueId | None:
        """Return the input of the model's Cast to a value, if that input has this type; otherwise None."""
        op = self.view.producer(value, "Cast")
        source = op.inputs[0] if op is not None else None
        return source if source is not None and self._home(source) is dtype else None

    # -- names ---------------------------------------------------------------------------------------

    def _fresh(self, name: str, dtype: DType) -> str:
        return numbered(f"{name}_{dtype.spelling}", self.names)

    def _rewired(self) -> Iterator[tuple[Use, str]]:
        for value, by_type in self.uses_by_type.items():
            if value not in self.versions and value not in self.origins:
                continue  # all its readers use the same name
            for dtype, uses in by_type.items():
                name = self._name(value, dtype)
                if name != self.view.value_name(value):
                    yield from ((use, name) for use in uses)

    def _name(self, value: ValueId, dtype: DType) -> str:
        origin = value
        while origin in self.origins:  # a Cast that replaces others may be the source of folded Casts
            origin = self.origins[origin]
        return self.versions.get(origin, {}).get(dtype, self.view.value_name(origin))

    # -- reasons, attributes and findings ------------------------------------------------------------

    def _reason(self, value: ValueId, dtype: DType, uses: list[Use]) -> str:
        if not uses:
            if value in self.io:
                return f"the model's output is requested as {dtype.spelling}"
            return f"the {'model' if self.view.values[value].public else 'body'}'s output stays {dtype.spelling}"
        readers = sorted({use.op for use in uses})
        more = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
        return f"read in {dtype.spelling} by {self.view.ops[readers[0]].name!r}{more}"

    def _attributes(self) -> Iterator[tuple[OpId, DType]]:
        for op in self.view.ops:
            stated = DTYPE_ATTRIBUTES.get((op.domain, op.op_type))
            if op.id in self.folds or (stated is None and op.kind != "ConstantOfShape"):
                continue
            result = op.outputs[0] if op.outputs else None
            home = self.homes.get(result) if result is not None else None
            now, slot = self.view.dtype(result), IMPLIED_BY_INPUT.get(op.op_type)
            if stated is not None and attribute(op.node, stated) is None:  # the type is implied
                now = DType.FLOAT
                if slot is not None and slot < len(op.inputs) and op.signature is not None:
                    now = self.coloring.dtype(input_variable(op, slot)) or self.view.dtype(op.inputs[slot])
            if home is not None and home is not now:
                yield op.id, home

    def _findings(self) -> Iterator[Finding]:
        for bake in self.bakes:
            if not bake.to.low:
                continue  # float32 represents all values of a low type
            fit = self.view.fit(bake.value, bake.to)
            name = self.view.value_name(bake.value)
            if fit.overflow:
                limit = f"{bake.to.max:g}"
                note = f"{fit.overflow} of {count(fit.count, 'value')} beyond {limit}, stored as ±{limit}"
                yield Finding("saturated", name, note)
            if fit.flushed:
                lost, rounding = fit.flushed * bake.to.smallest_subnormal, fit.absmax * bake.to.eps  # bounds, doubled
                harmless = fit.flushed < fit.count / 100 or lost < rounding
                remark = f" · {reasons.HARMLESS} beside larger weights" if harmless else ""
                note = f"{fit.flushed} of {count(fit.count, 'nonzero value')} stored as 0{remark}"
                yield Finding("flushed", name, note)
