"""From colours to a list of changes: retypes, casts, baked weights, rewired uses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from amp_rewrite.dtypes import DType
from amp_rewrite.finding import Finding
from amp_rewrite.painting.color import Coloring
from amp_rewrite.schema import DTYPE_ATTRIBUTES, IMPLIED_BY_INPUT, TENSOR, attribute
from amp_rewrite.view import Op, OpId, Role, ScopeId, Use, ValueId, View


@dataclass(frozen=True, slots=True)
class Cast:
    """One inserted Cast: it reads `value` as its producer makes it and writes `name`, right after the producer.

    `saturates`: values beyond the type's range become its largest, not infinity.
    """

    value: ValueId
    to: DType
    name: str
    reason: str
    saturates: bool = False


@dataclass(frozen=True, slots=True)
class Bake:
    """A constant stored in the low type; under its own name, unless a float32 reader keeps the original."""

    value: ValueId
    to: DType
    name: str
    keeps_original: bool


@dataclass(frozen=True)
class Plan:
    """Everything that `apply` does, as data; the values and ops are those of one View.

    `retype`: values whose element type changes where they are made. `rename`: of those, the ones whose
    name must stay with the other type (`casts` then gives it back). `attributes`: ops whose type-stating
    attribute becomes this type. `drop`: the folded Casts; `identities`: Casts that became
    copies but make a public value.
    """

    to: DType
    retype: Mapping[ValueId, DType] = field(default_factory=dict)
    rename: Mapping[ValueId, str] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    bakes: tuple[Bake, ...] = ()
    rewire: Mapping[Use, str] = field(default_factory=dict)
    attributes: Mapping[OpId, DType] = field(default_factory=dict)
    drop: frozenset[OpId] = frozenset()
    identities: frozenset[OpId] = frozenset()
    io: Mapping[ValueId, DType] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether applying the plan changes nothing."""
        return not (self.retype or self.casts or self.bakes or self.rewire or self.drop or self.identities)


def plan_casts(
    view: View,
    coloring: Coloring,
    io: Mapping[ValueId, DType] | None = None,
    saturate: Collection[ValueId] = (),
) -> Plan:
    """The plan behind a coloring: at most one Cast per (value, type), and none where a constant can be baked.

    `io` maps public values to the type that they get; the others keep theirs. `saturate` are values whose
    Cast clamps. O(nodes + uses).
    """
    if not coloring.lowers and not io:
        return Plan(coloring.to)
    return _Planner(view, coloring, dict(io or {}), saturate).plan()


class _Planner:
    def __init__(self, view: View, coloring: Coloring, io: dict[ValueId, DType], saturate: Collection[ValueId]) -> None:
        self.view = view
        self.coloring = coloring
        self.to = coloring.to
        self.io = io
        self.saturate = saturate
        self.casts: list[Cast] = []
        self.bakes: list[Bake] = []
        self.rename: dict[ValueId, str] = {}
        self.names = set(view.names)
        self.folds: dict[OpId, ValueId] = {}
        self.versions: dict[ValueId, dict[DType, str]] = {}

    def plan(self) -> Plan:
        homes = {v.id: home for v in self.view.values if (home := self._home(v.id)) is not None}
        needs = {v: dict[DType, list[Use]]() for v in homes}
        for value in homes:
            for use in self.view.uses[value]:
                needed = self._needed(use, homes[value])
                needs[value].setdefault(needed, []).append(use)
        self._fold(homes, needs)
        made = {v: home for v, home in homes.items() if not self._dropped(self.view.values[v].producer)}
        for value, home in made.items():
            self._provide(value, home, needs[value])
        rewire = dict(self._rewired(needs))
        identities = {op for op in self.folds if not self._dropped(op)}
        return Plan(
            self.to,
            retype={v: home for v, home in made.items() if home is not DType.FLOAT},
            rename=self.rename,
            casts=tuple(self.casts),
            bakes=tuple(self.bakes),
            rewire=rewire,
            attributes=dict(self._attributes(homes)),
            drop=frozenset(self.folds.keys() - identities),
            identities=frozenset(identities),
            io=self.io,
            findings=tuple(self._findings(self.bakes)),
        )

    def _provide(self, value: ValueId, home: DType, needs: dict[DType, list[Use]]) -> None:
        """Give a value a version of each type that is wanted of it, by a bake or a Cast."""
        fixed = self._fixed(value)
        name = self.view.value_name(value)
        if home is not fixed is not None:
            self.rename[value] = self._fresh(name, home)
        own = self.versions[value] = {home: self.rename.get(value, name)}
        wanted = [d for d in (DType.FLOAT, self.to) if d in needs or d is fixed]
        for dtype in wanted:
            if dtype is home:
                continue
            if dtype is self.to and fixed is not dtype and (source := self._widened(value, home)) is not None:
                own[dtype] = self._name(source, dtype)
            elif dtype is self.to and self._bakes(value):
                keeps = DType.FLOAT in wanted
                own[dtype] = self._fresh(name, dtype) if keeps else name
                self.bakes.append(Bake(value, dtype, own[dtype], keeps))
            else:
                own[dtype] = name if dtype is fixed else self._fresh(name, dtype)
                reason = self._reason(value, dtype, needs.get(dtype, []))
                clamps = dtype is self.to and value in self.saturate
                self.casts.append(Cast(value, dtype, own[dtype], reason, clamps))

    # -- what a value is and what its readers want -------------------------------------------------

    def _home(self, value: ValueId) -> DType | None:
        """The type in which a float32 value is made; None for values that the pass has no say in."""
        if self.view.dtype(value) is not DType.FLOAT:
            return None
        found = self.view.values[value]
        if found.role is Role.INPUT or found.overridable:
            return self.io.get(value, DType.FLOAT) if found.public else DType.FLOAT
        op = self.view.producer(value)
        if op is None or op.signature is None or op.bodies:
            return DType.FLOAT
        lowered = self.coloring.lowered(op.id, op.signature.output_variable(op.outputs.index(value)))
        return self.to if lowered else DType.FLOAT

    def _needed(self, use: Use, home: DType) -> DType:
        op = self.view.ops[use.op]
        if _is_cast(op):
            return home  # widening first would change no bit of what a Cast gives
        if op.signature is None or op.bodies:
            return DType.FLOAT
        return self.to if self.coloring.lowered(op.id, op.signature.input_variable(use.slot)) else DType.FLOAT

    def _fixed(self, value: ValueId) -> DType | None:
        """The type that the value's own name must keep, since an edge of a graph states it."""
        found = self.view.values[value]
        if found.public and (found.role is Role.INPUT or found.overridable):
            return self.io.get(value, DType.FLOAT)
        if value not in self.view.yielded:
            return DType.FLOAT if found.public else None
        return self.io.get(value, DType.FLOAT) if found.public else DType.FLOAT

    def _bakes(self, value: ValueId) -> bool:
        found = self.view.types[value]
        return self.view.constant(value) is not None and found is not None and found.container == TENSOR

    # -- casts that the model has already ------------------------------------------------------------

    def _fold(self, homes: dict[ValueId, DType], needs: dict[ValueId, dict[DType, list[Use]]]) -> None:
        """Find the model's own Casts to the low type whose source is there in that type already.

        Such a Cast would round what is rounded: its readers read the source's low version instead. Two of
        the same source are one too many.
        """
        alike: dict[ValueId, list[Op]] = {}
        for op in self.view.ops:
            source, result = (op.inputs[0], op.outputs[0]) if _is_cast(op) else (None, None)
            if source is None or result is None or homes.get(result, self.view.dtype(result)) is not self.to:
                continue
            if self.view.dtype(source) is self.to or homes.get(source) is self.to:
                self.folds[op.id] = source
                if source in homes:  # whoever reads the result in float32 needs that version of the source
                    for dtype, uses in needs.get(result, {}).items():
                        needs[source].setdefault(dtype, []).extend(uses)
            elif not self._outlives(op):
                alike.setdefault(source, []).append(op)
        for source, ops in alike.items():
            retargeted = [op for op in ops if op.outputs[0] in homes]
            if source not in homes:
                self._fold_repeated(source, retargeted)
            elif len(retargeted) > 1 or self.to in needs[source]:
                for op in ops:
                    self.folds[op.id] = source
                    self._move(needs[source], Use(op.id, 0))

    def _fold_repeated(self, source: ValueId, ops: list[Op]) -> None:
        """Of several Casts of one value that is not float32, the later ones read what the first gave."""
        for op in ops[1:]:
            if self._sees(op.scope, ops[0].scope) and ops[0].outputs[0] is not None:
                self.versions[source] = {self.to: self.view.value_name(ops[0].outputs[0])}
                self.folds[op.id] = source

    def _sees(self, inner: ScopeId, outer: ScopeId) -> bool:
        """Whether a graph is another one or lies inside it."""
        scope: ScopeId | None = inner
        while scope is not None and scope != outer:
            scope = self.view.scopes[scope].parent
        return scope == outer

    def _move(self, needs: dict[DType, list[Use]], use: Use) -> None:
        needs[DType.FLOAT].remove(use)
        if not needs[DType.FLOAT]:
            del needs[DType.FLOAT]
        needs.setdefault(self.to, []).append(use)

    def _outlives(self, op: Op) -> bool:
        """Whether the op's first result is named by an edge of a graph, so that the op can not go."""
        result = op.outputs[0]
        return result is not None and (self.view.values[result].public or result in self.view.yielded)

    def _dropped(self, op: OpId | None) -> bool:
        return op is not None and op in self.folds and not self._outlives(self.view.ops[op])

    def _widened(self, value: ValueId, home: DType) -> ValueId | None:
        """The low value of which a float32 one is only the wider copy."""
        op = self.view.producer(value)
        source = op.inputs[0] if op is not None and _is_cast(op) and home is DType.FLOAT else None
        if source is None:
            return None
        return source if self.view.dtype(source) is self.to or self._home(source) is self.to else None

    # -- names ---------------------------------------------------------------------------------------

    def _fresh(self, name: str, dtype: DType) -> str:
        wanted = f"{name}_{dtype.spelling}"
        count = 1
        found = wanted
        while found in self.names:
            count += 1
            found = f"{wanted}_{count}"
        self.names.add(found)
        return found

    def _rewired(self, needs: dict[ValueId, dict[DType, list[Use]]]) -> Iterator[tuple[Use, str]]:
        for value, by_type in needs.items():
            for dtype, uses in by_type.items():
                name = self._name(value, dtype)
                if name != self.view.value_name(value):
                    yield from ((use, name) for use in uses)
        for op_id, source in self.folds.items():
            result = self.view.ops[op_id].outputs[0]
            assert result is not None
            if result not in needs and self._dropped(op_id):
                name = self._name(source, self.to)
                yield from ((use, name) for use in self.view.uses[result])

    def _name(self, value: ValueId, dtype: DType) -> str:
        """The name of one version of a value, past folded casts."""
        made_by = self.view.values[value].producer
        if made_by is not None and self._dropped(made_by):
            return self._name(self.folds[made_by], dtype)
        return self.versions.get(value, {}).get(dtype, self.view.value_name(value))

    # -- words ---------------------------------------------------------------------------------------

    def _reason(self, value: ValueId, dtype: DType, uses: list[Use]) -> str:
        if not uses:
            if value in self.io:
                return f"the model's output is asked to be {dtype.spelling}"
            what = "the model's output" if self.view.values[value].public else "the body's output"
            return f"{what} stays {dtype.spelling}"
        readers = sorted({use.op for use in uses})
        more = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
        return f"read in {dtype.spelling} by {self.view.ops[readers[0]].name!r}{more}"

    def _attributes(self, homes: dict[ValueId, DType]) -> Iterator[tuple[OpId, DType]]:
        """Ops that state the type of their result in an attribute, and the type that they now must state."""
        for op in self.view.ops:
            stated = DTYPE_ATTRIBUTES.get((op.domain, op.op_type))
            if op.id in self.folds or (stated is None and op.kind != "ConstantOfShape"):
                continue
            result = op.outputs[0] if op.outputs else None
            if result is None or result not in homes:
                continue
            present = stated is not None and attribute(op.node, stated) is not None
            if homes[result] is not (DType.FLOAT if present else self._implied(op)):
                yield op.id, homes[result]

    def _implied(self, op: Op) -> DType:
        """The type that a float32 result gets now where no attribute states one."""
        slot = IMPLIED_BY_INPUT.get(op.op_type)
        if slot is None or slot >= len(op.inputs) or op.signature is None:
            return DType.FLOAT
        return self.to if self.coloring.lowered(op.id, op.signature.input_variable(slot)) else DType.FLOAT

    def _findings(self, bakes: list[Bake]) -> Iterator[Finding]:
        for bake in bakes:
            fit = self.view.fit(bake.value, bake.to)
            name = self.view.value_name(bake.value)
            if fit.overflow:
                note = f"{fit.overflow} of {fit.count} values beyond {bake.to.max:g} become ±{bake.to.max:g}"
                yield Finding("saturated", name, note)
            if fit.flushed:
                yield Finding("flushed", name, f"{fit.flushed} of {fit.count} nonzero values become 0")


def _is_cast(op: Op) -> bool:
    return op.kind == "Cast"
