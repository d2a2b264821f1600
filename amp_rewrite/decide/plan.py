"""From colors to a list of changes: retypes, casts, baked weights, rewired uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import exposed
from amp_rewrite.ir.names import numbered
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, IMPLIED_BY_INPUT, INNER_DTYPE_ATTRIBUTES, TENSOR, attribute
from amp_rewrite.ir.view import Op, OpId, Role, ScopeId, Use, ValueId, View


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
    """A constant stored in another type; under its own name, unless someone reads the original too."""

    value: ValueId
    to: DType
    name: str
    keeps_original: bool


@dataclass(frozen=True)
class Plan:
    """Everything that `apply` does, as data; the values and ops are those of one View.

    `retype`: values whose element type changes where they are made. `rename`: of those, the ones whose
    name must stay with the other type (`casts` then gives it back). `attributes`: ops whose type-stating
    attribute becomes this type; `widened`: ops whose attributes that choose the type of a computation inside
    become float32. `drop`: the folded Casts; `identities`: Casts that became
    copies but make a public value.
    """

    to: DType
    retype: Mapping[ValueId, DType] = field(default_factory=dict)
    rename: Mapping[ValueId, str] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    bakes: tuple[Bake, ...] = ()
    rewire: Mapping[Use, str] = field(default_factory=dict)
    attributes: Mapping[OpId, DType] = field(default_factory=dict)
    widened: frozenset[OpId] = frozenset()
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
    if not (coloring.lowers or coloring.raises or io):
        return Plan(coloring.to, findings=tuple(_unraised(view, coloring)))
    return _Planner(view, coloring, dict(io or {}), saturate).plan()


plan = plan_casts

_TYPES = (DType.FLOAT, *(dtype for dtype in DType if dtype.low))
"""The types that the pass moves values between."""
_Needs = dict[ValueId, dict[DType, list[Use]]]
"""Who reads a value in which type."""


def _unraised(view: View, coloring: Coloring) -> Iterator[Finding]:
    """What was to be raised and could not be."""
    for op, paint in coloring.unraised.items():
        yield Finding(reasons.UNRAISED, view.ops[op].name, paint.note)


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
        self.origins: dict[ValueId, ValueId] = {}
        """Of results of folded casts that go, what they are casts of."""
        self.versions: dict[ValueId, dict[DType, str]] = {}

    def plan(self) -> Plan:
        homes = {v.id: home for v in self.view.values if (home := self._home(v.id)) is not None}
        needs: _Needs = {}
        for value, home in homes.items():
            by_type = needs[value] = {}
            for use in self.view.uses[value]:
                needed = self._needed(use, home)
                if needed in by_type:
                    by_type[needed].append(use)
                else:
                    by_type[needed] = [use]
        self._fold(homes, needs)
        made = {v: home for v, home in homes.items() if not self._dropped(self.view.values[v].producer)}
        for value, home in made.items():
            self._provide(value, home, needs[value])
        rewire = dict(self._rewired(needs))
        identities = {op for op in self.folds if not self._dropped(op)}
        return Plan(
            self.to,
            retype={v: home for v, home in made.items() if home is not self.view.dtype(v)},
            rename=self.rename,
            casts=tuple(self.casts),
            bakes=tuple(self.bakes),
            rewire=rewire,
            attributes=dict(self._attributes(homes)),
            widened=frozenset(self._widened()),
            drop=frozenset(self.folds.keys() - identities),
            identities=frozenset(identities),
            io=self.io,
            findings=(*self._findings(self.bakes), *_unraised(self.view, self.coloring)),
        )

    def _provide(self, value: ValueId, home: DType, needs: dict[DType, list[Use]]) -> None:
        """Give a value a version of each type that is wanted of it, by a bake or a Cast."""
        fixed = self._fixed(value)
        if (fixed is None or fixed is home) and needs.keys() <= {home}:
            return  # as of most values
        name = self.view.value_name(value)
        if home is not fixed is not None:
            self.rename[value] = self._fresh(name, home)
        own = self.versions[value] = {home: self.rename.get(value, name)}
        wanted = [d for d in _TYPES if d in needs or d is fixed]
        for dtype in wanted:
            if dtype is home:
                continue
            if fixed is not dtype and (source := self._cast_from(value, dtype)) is not None:
                own[dtype] = self._name(source, dtype)
            elif self._bakes(value):
                keeps = wanted != [dtype]
                own[dtype] = self._fresh(name, dtype) if keeps else name
                self.bakes.append(Bake(value, dtype, own[dtype], keeps))
            else:
                own[dtype] = name if dtype is fixed else self._fresh(name, dtype)
                reason = self._reason(value, dtype, needs.get(dtype, []))
                clamps = dtype is self.to and value in self.saturate
                self.casts.append(Cast(value, dtype, own[dtype], reason, clamps))

    # -- what a value is and what its readers want -------------------------------------------------

    def _home(self, value: ValueId) -> DType | None:
        """The type in which a float32 or low value is made; None for values that the pass has no say in."""
        dtype = self.view.dtype(value)
        if dtype not in _TYPES:
            return None
        found = self.view.values[value]
        if found.role is Role.INPUT or found.overridable:
            return self.io.get(value, dtype) if found.public else dtype
        op = self.view.ops[found.producer] if found.producer is not None else None
        if op is None or op.signature is None or op.bodies:
            return dtype
        return self.coloring.dtype(op.id, op.signature.output_variable(op.outputs.index(value))) or dtype

    def _needed(self, use: Use, home: DType) -> DType:
        op = self.view.ops[use.op]
        if op.kind == "Cast":
            return home  # widening first would change no bit of what a Cast gives
        named = op.signature.input_variable(use.slot) if op.signature is not None and not op.bodies else None
        return self.coloring.dtype(use.op, named) or self._own(op.inputs[use.slot])

    def _own(self, value: ValueId | None) -> DType:
        """The type that a value has in the model."""
        found = self.view.dtype(value) if value is not None else None
        assert found is not None
        return found

    def _fixed(self, value: ValueId) -> DType | None:
        """The type that the value's own name must keep, since an edge of a graph states it."""
        found = self.view.values[value]
        if found.public and (found.role is Role.INPUT or found.overridable or value in self.view.yielded):
            return self.io.get(value, self._own(value))
        return self._own(value) if found.public or value in self.view.yielded else None

    def _bakes(self, value: ValueId) -> bool:
        found = self.view.types[value]
        return self.view.constant(value) is not None and found is not None and found.container == TENSOR

    # -- casts that the model has already ------------------------------------------------------------

    def _fold(self, homes: Mapping[ValueId, DType], needs: _Needs) -> None:
        """Find the model's own Casts that do nothing, or that changes around them made superfluous, and read past them.

        A Cast whose source is made in its type already, of whatever type, would round what is rounded, or copy: its
        readers read the source. So they do where the source is that type widened to float32. Two Casts of the same
        source are one too many.
        """
        alike: dict[tuple[ValueId, DType], list[Op]] = {}
        roots: dict[ValueId, ValueId] = {}  # of results of folded Casts
        past: list[OpId] = []
        for op in self.view.ops:
            source, result = (op.inputs[0], op.outputs[0]) if _is_cast(op) else (None, None)
            if source is None or result is None:
                continue
            made = homes.get(result) or self.view.dtype(result)
            if made is not None and (homes.get(source) or self.view.dtype(source)) is made:
                self.folds[op.id] = source
                roots[result] = roots.get(source, source)
                needs.setdefault(result, {made: list(self.view.uses[result])})
            elif made in _TYPES and not self._outlives(op):
                if (before := self._widened_from(roots.get(source, source), made)) is not None:
                    self.folds[op.id] = before
                    roots[result] = roots.get(source, source)
                    past.append(op.id)
                else:
                    alike.setdefault((source, made), []).append(op)
        self._fold_unread(past, needs)
        self._trace()
        for op_id, source in self.folds.items():
            origin = self.origins.get(source, source)
            if origin in needs:
                self._hand_on(needs, op_id, origin)
        for (source, made), ops in alike.items():
            changed = [op for op in ops if op.outputs[0] is not None and self._changed(homes, op.outputs[0])]
            if source not in homes:
                self._fold_repeated(source, made, changed)
            elif len(changed) > 1 or made in needs[source]:
                self._move(needs[source], [Use(op.id, 0) for op in ops], homes[source], made)
                for op in ops:
                    self.folds[op.id] = source
                    self._hand_on(needs, op.id, source, but=made)
        self._trace()

    def _widened_from(self, value: ValueId, low: DType) -> ValueId | None:
        """What a Cast of the model's own widened to float32 to make a value, if that is of this low type."""
        return self._cast_from(value, low) if low.low and self._home(value) is DType.FLOAT else None

    def _fold_unread(self, past: Sequence[OpId], needs: _Needs) -> None:
        """Casts to float32 go of whose result nobody reads but Casts that read past it. O(Casts)."""
        queue, read_past = list(past), Counter[ValueId]()
        for op_id in queue:
            value = self.view.ops[op_id].inputs[0]
            op = self.view.producer(value)
            if value is None or op is None or self._outlives(op) or self._home(value) is not DType.FLOAT:
                continue
            read_past[value] += 1
            if read_past[value] == len(self.view.uses[value]) and op.inputs[0] is not None:
                needs[value].clear()
                self.folds.setdefault(op.id, op.inputs[0])
                queue.append(op.id)

    def _trace(self) -> None:
        """Follow chains of folded casts to where they begin."""
        for op_id in sorted(self.folds):  # what an op reads is made before it
            result, source = self.view.ops[op_id].outputs[0], self.folds[op_id]
            if result is not None and self._dropped(op_id):
                self.origins[result] = self.origins.get(source, source)

    def _changed(self, homes: Mapping[ValueId, DType], value: ValueId) -> bool:
        return homes[value] is not self.view.dtype(value)

    def _hand_on(self, needs: _Needs, op: OpId, source: ValueId, but: DType | None = None) -> None:
        """Whoever reads the result of a Cast that goes needs that version of its source."""
        result = self.view.ops[op].outputs[0]
        if result is not None and self._dropped(op):
            for dtype, uses in needs[result].items():
                if dtype is not but:
                    needs[source].setdefault(dtype, []).extend(uses)

    def _fold_repeated(self, source: ValueId, made: DType, ops: list[Op]) -> None:
        """Of several Casts of one value that the pass has no say in, the later ones read what the first gave."""
        for op in ops[1:]:
            if self._sees(op.scope, ops[0].scope) and ops[0].outputs[0] is not None:
                self.versions[source] = {made: self.view.value_name(ops[0].outputs[0])}
                self.folds[op.id] = source

    def _sees(self, inner: ScopeId, outer: ScopeId) -> bool:
        """Whether a graph is another one or lies inside it."""
        scope: ScopeId | None = inner
        while scope is not None and scope != outer:
            scope = self.view.scopes[scope].parent
        return scope == outer

    def _move(self, needs: dict[DType, list[Use]], uses: list[Use], before: DType, to: DType) -> None:
        moved = frozenset(uses)
        needs[before] = [use for use in needs[before] if use not in moved]
        if not needs[before]:
            del needs[before]
        needs.setdefault(to, []).extend(uses)

    def _outlives(self, op: Op) -> bool:
        """Whether the op's first result is named by an edge of a graph, so that the op cannot go."""
        result = op.outputs[0]
        return result is not None and exposed(self.view, result)

    def _dropped(self, op: OpId | None) -> bool:
        return op is not None and op in self.folds and not self._outlives(self.view.ops[op])

    def _cast_from(self, value: ValueId, dtype: DType) -> ValueId | None:
        """What the model's own Cast made the value from, if that is of this type: there is no need to cast it back."""
        op = self.view.producer(value)
        source = op.inputs[0] if op is not None and _is_cast(op) else None
        return source if source is not None and self._home(source) is dtype else None

    # -- names ---------------------------------------------------------------------------------------

    def _fresh(self, name: str, dtype: DType) -> str:
        return numbered(f"{name}_{dtype.spelling}", self.names)

    def _rewired(self, needs: _Needs) -> Iterator[tuple[Use, str]]:
        for value, by_type in needs.items():
            if value not in self.versions and value not in self.origins:
                continue  # it has one name
            for dtype, uses in by_type.items():
                name = self._name(value, dtype)
                if name != self.view.value_name(value):
                    yield from ((use, name) for use in uses)

    def _name(self, value: ValueId, dtype: DType) -> str:
        """The name of one version of a value, past folded casts."""
        origin = self.origins.get(value, value)
        return self.versions.get(origin, {}).get(dtype, self.view.value_name(origin))

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
            if homes[result] is not (self.view.dtype(result) if present or stated is None else self._implied(op)):
                yield op.id, homes[result]

    def _implied(self, op: Op) -> DType | None:
        """The type that a result gets now where no attribute states one; None where that is unknown."""
        slot = IMPLIED_BY_INPUT.get(op.op_type)
        if slot is None or slot >= len(op.inputs) or op.signature is None:
            return DType.FLOAT
        painted, value = self.coloring.dtype(op.id, op.signature.input_variable(slot)), op.inputs[slot]
        return painted or (self.view.dtype(value) if value is not None else None)

    def _widened(self) -> Iterator[OpId]:
        """Raised ops that choose a low type for what they compute inside."""
        for (op, _), paint in self.coloring.paints.items():
            if paint.rule == reasons.RAISED:
                inner = (DType.of(a.i) for a in self.view.ops[op].node.attribute if a.name in INNER_DTYPE_ATTRIBUTES)
                if any(dtype is not None and dtype.low for dtype in inner):
                    yield op

    def _findings(self, bakes: list[Bake]) -> Iterator[Finding]:
        for bake in bakes:
            if not bake.to.low:
                continue  # float32 holds all that a low type does
            fit = self.view.fit(bake.value, bake.to)
            name = self.view.value_name(bake.value)
            if fit.overflow:
                note = f"{fit.overflow} of {fit.count} values beyond {bake.to.max:g} become ±{bake.to.max:g}"
                yield Finding("saturated", name, note)
            if fit.flushed:
                yield Finding("flushed", name, f"{fit.flushed} of {fit.count} nonzero values become 0")


def _is_cast(op: Op) -> bool:
    return op.kind == "Cast"
