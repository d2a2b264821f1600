"""The state of one painting: which vertices are low, which are denied, which are frozen, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring, Paint
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.vertices import Vertices
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.schema import unknown
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import Color, Entry


@dataclass
class Canvas:
    """What the rules read and write. `low` and `denied` hold the paint of vertices, `frozen` that of ops.

    `raised` is the paint of variables that have a low type in the model and become float32, `unraised` that of ops
    of which that was asked in vain. They have no vertices: nothing spreads from them.
    `pins` are ops that stay float32, `clusters` groups that share one color; `norms` are those that
    the runtime fuses (see `unit`). `low_inputs` are graph inputs that the caller will feed in the low type, `numbers`
    ops that compute with shapes and constants alone, whose denial does not spread. `benign` are ops on the deny list
    or on none that count as gray, and why; with `spare_casts` the rules hold that TensorFlow does not have.
    """

    view: View
    vertices: Vertices
    gate: Gate
    to: DType
    level: Level
    gray_follows_allow: bool
    keep: Mapping[OpId, str]
    lower: Mapping[OpId, str]
    pins: Sequence[Pin]
    clusters: Sequence[Cluster]
    norms: Sequence[Cluster]
    low_inputs: Collection[ValueId]
    shapes_follow: bool
    numbers: Collection[OpId]
    benign: Mapping[OpId, str]
    spare_casts: bool
    low: dict[int, Paint] = field(default_factory=dict)
    denied: dict[int, Paint] = field(default_factory=dict)
    frozen: dict[OpId, Paint] = field(default_factory=dict)
    raised: dict[tuple[OpId, str], Paint] = field(default_factory=dict)
    unraised: dict[OpId, Paint] = field(default_factory=dict)

    # -- facts -------------------------------------------------------------------------------------

    def color(self, v: int) -> Color:
        """The list a vertex stands on; an op that the user lowers counts as allowed, a benign one as gray."""
        return self.colors[v]

    @cached_property
    def colors(self) -> Sequence[Color]:
        """The colours of all vertices."""
        colors = [vertex.entry.color for vertex in self.vertices.all]
        known = (Color.DENY, Color.UNLISTED) if self.level in (Level.DEFAULT, Level.LOWER_ALL) else (Color.DENY,)
        for op in self.benign:
            for v in self.vertices.by_op.get(op, ()):
                colors[v] = Color.GRAY if colors[v] in known else colors[v]
        for op in self.lower:
            for v in self.vertices.by_op.get(op, ()):
                colors[v] = Color.ALLOW
        return colors

    def can(self, v: int) -> bool:
        """Neither frozen nor refused by the gate."""
        vertex = self.vertices.all[v]
        return vertex.op not in self.frozen and vertex.refusal is None

    def free(self, v: int) -> bool:
        return v not in self.low and v not in self.denied and self.can(v)

    def clear(self, v: int) -> bool:
        return self.color(v) is Color.CLEAR

    def op(self, v: int) -> Op:
        """The op that a vertex belongs to."""
        return self.view.ops[self.vertices.all[v].op]

    def lowered(self, op: OpId) -> bool:
        """Whether any variable of an op is low; an op without float32 counts as lowered."""
        mine = self.vertices.by_op.get(op, ())
        return not mine or any(v in self.low for v in mine)

    def reads_low(self, op_id: OpId, slot: int) -> bool:
        """Whether an op reads one of its inputs in the low type."""
        op = self.view.ops[op_id]
        name = op.signature.input_variable(slot) if op.signature is not None and not op.bodies else None
        return name is not None and self.vertices.of.get((op_id, name), -1) in self.low

    def made_raised(self, value: ValueId) -> bool:
        """Whether a value has a low type in the model, and is made in float32 now."""
        op = self.view.producer(value)
        name = op.signature.output_variable(op.outputs.index(value)) if op is not None and op.signature else None
        return op is not None and name is not None and (op.id, name) in self.raised

    def reads_raised(self, op_id: OpId, slot: int) -> bool:
        """Whether an op reads one of its inputs in float32 now, and in a low type in the model."""
        op = self.view.ops[op_id]
        name = op.signature.input_variable(slot) if op.signature is not None else None
        return name is not None and (op_id, name) in self.raised

    # -- changes -----------------------------------------------------------------------------------

    def high(self, rule: str, because: OpId | None, note: str = "") -> Paint:
        """The paint of what stays float32."""
        return Paint(DType.FLOAT, rule, because, note)

    def raise_ops(self, ops: Iterable[OpId], why: Paint) -> None:
        """Take ops back to float32."""
        for op in ops:
            for v in self.vertices.by_op.get(op, ()):
                if self.low.pop(v, None) is not None:
                    self.denied[v] = why if why.because != op else self.high(reasons.UNPAINTED, None)

    def walk(
        self, starts: Iterable[int], near: Callable[[int], Iterable[int]], enter: Callable[[int], bool]
    ) -> dict[int, OpId]:
        """Everything reached from `starts` through vertices that may be entered, with the op before each."""
        queue = list(starts)
        seen = set(queue)
        reached: dict[int, OpId] = {}
        for v in queue:
            for w in near(v):
                if w not in seen and enter(w):
                    seen.add(w)
                    reached[w] = self.vertices.all[v].op
                    queue.append(w)
        return reached

    # -- the result --------------------------------------------------------------------------------

    def coloring(self, entries: tuple[Entry, ...]) -> Coloring:
        """The paint of raised variables and of every float32 one, the reason of those that no rule lowered included."""
        paints: dict[tuple[OpId, str], Paint] = dict(self.raised)
        by_op: dict[OpId, tuple[str, ...]] = {}
        for op_id, name in self.raised:
            by_op[op_id] = (*by_op.get(op_id, ()), name)
        for v, vertex in enumerate(self.vertices.all):
            paint = self.low.get(v) or self._reason(v)
            for name in vertex.variables:
                paints[vertex.op, name] = paint
            by_op[vertex.op] = (*by_op[vertex.op], *vertex.variables) if vertex.op in by_op else vertex.variables
        for op in self.view.ops:
            if op.id not in by_op and (edge := self._edge(op)) is not None:
                paints[op.id, ""] = edge
                by_op[op.id] = ("",)
        return Coloring(self.to, paints, entries, by_op, self.unraised)

    def _reason(self, v: int) -> Paint:
        """Why a vertex is not low, the strongest reason first."""
        vertex = self.vertices.all[v]
        if vertex.op in self.frozen:
            return self.frozen[vertex.op]
        if v in self.denied:
            return self.denied[v]
        if vertex.refusal is not None and (self.color(v) is not Color.UNLISTED or vertex.op in self.lower):
            return self.high(vertex.refusal.rule, None, vertex.refusal.note)
        if self.color(v) is Color.UNLISTED:
            return self.high(reasons.UNLISTED, None, vertex.entry.because)
        return self.high(reasons.UNPAINTED, None, _UNPAINTED[self.color(v)].format(low=self.to.spelling))

    def _edge(self, op: Op) -> Paint | None:
        """Of an op without a vertex: why it stays as it is; None where floats have no part in it."""
        values = [v for v in (*op.inputs, *op.outputs) if v is not None]
        strange = next((v for v in values if unknown(self.view.types[v])), None)
        if strange is not None:
            made_by = self.view.values[strange].producer
            because = made_by if made_by != op.id else None
            note = f"the element type of {self.view.value_name(strange)!r} is unknown"
            return self.high(reasons.UNKNOWN_TYPE, because, note)
        if not any(self.view.dtype(v) is DType.FLOAT for v in values):
            return None
        note = "the edges of bodies keep their type" if op.bodies else f"{op.kind} is no known operator"
        return self.high(reasons.BOUNDARY, None, note)


_UNPAINTED = {
    Color.ALLOW: "not lowered",
    Color.GRAY: "gray: not between two {low} ops",
    Color.CLEAR: "clear: no {low} op beside it",
    Color.DENY: "on the deny list",
    Color.UNLISTED: "on no list",
}
