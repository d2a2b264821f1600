"""The state of one painting: options, hazards, and the low, denied and frozen vertices so far, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring, Paint
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.vertices import Vertices
from amp_rewrite.decide.hazards.find import Hazards
from amp_rewrite.decide.pin import Pin
from amp_rewrite.decide.placement.cost_model import CostModel
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import first_input_of, made_variable, read_variable, trail
from amp_rewrite.ir.op_classes import DEQUANTIZES, ELEMENTLESS, PRODUCTS, QUANTIZERS, QUANTIZES
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.schema import unknown
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View
from amp_rewrite.runtime.roofline import ROOFS
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.list_entry import Color, Entry


@dataclass(frozen=True, slots=True)
class PaintOptions:
    """Options of painting, resolved to the ops of one view.

    With `spare_casts` ops become low where that takes no Cast, or takes one away: tables of weights
    (`rules.between_allow`), quantized weights (`rules.weights_follow`) and ends (`rules.joins`).

    Args:
        level: how far to go.
        target: the runtime of the result.
        gray_follows_allow: lower a gray op right after an allow op; by default off for float16, on for bfloat16.
        keep: ops that stay float32, with the pattern that named each.
        lower: ops to lower, with the pattern that named each.
        pins: types of ops, on top of the hazards'.
        norms: clusters of which only scale and bias are treated apart.
        low_inputs: graph inputs that the caller feeds in the low type.
        shapes_follow: Shape and Size take their input as it is.
        spare_casts: lower ops where that spares Casts.
        rescale: quantizers are clear.
    """

    level: Level = Level.DEFAULT
    target: Target = Target.ORT_CUDA
    gray_follows_allow: bool | None = None
    keep: Mapping[OpId, str] = field(default_factory=dict)
    lower: Mapping[OpId, str] = field(default_factory=dict)
    pins: Sequence[Pin] = ()
    norms: Sequence[Cluster] = ()
    low_inputs: Collection[ValueId] = ()
    shapes_follow: bool = False
    spare_casts: bool = False
    rescale: bool = False


@dataclass
class PaintState:
    """The data that the rules read and write.

    `low` and `denied` hold the paint of vertices, `frozen` that of ops. `upcast` is the paint of variables that are low
    in the model and become float32, `upcast_refused` that of ops for which this was asked but is impossible. Neither
    has vertices, so no color spreads from them. `costs`: those of the placement, if there is one.
    `finished`: the last rules have run.
    """

    view: View
    vertices: Vertices
    gate: Gate
    to: DType
    options: PaintOptions
    hazards: Hazards
    low: dict[int, Paint] = field(default_factory=dict)
    denied: dict[int, Paint] = field(default_factory=dict)
    frozen: dict[OpId, Paint] = field(default_factory=dict)
    upcast: dict[tuple[OpId, str], Paint] = field(default_factory=dict)
    upcast_refused: dict[OpId, Paint] = field(default_factory=dict)
    costs: CostModel | None = None
    finished: bool = False

    @property
    def sizes(self) -> CostModel:
        """The sizes of values and operations of products, computed once."""
        if self.costs is None:
            self.costs = CostModel(self.view, ROOFS["A100"], self.to)
        return self.costs

    # -- facts -------------------------------------------------------------------------------------

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins of the hazards, then those of the options."""
        return (*self.hazards.pins, *self.options.pins)

    @cached_property
    def colors(self) -> Sequence[Color]:
        """The lists of all vertices; ops that the user lowers count as allowed, benign ones as gray."""
        colors = [vertex.entry.color for vertex in self.vertices.all]
        unlisted_too = self.options.level in (Level.DEFAULT, Level.LOWER_ALL)
        for v in self.of_ops(self.hazards.benign):
            if colors[v] is Color.DENY or (unlisted_too and colors[v] is Color.UNLISTED):
                colors[v] = Color.GRAY
        for v, vertex in enumerate(self.vertices.all if self.options.rescale else ()):
            if self.view.ops[vertex.op].kind in QUANTIZERS:
                colors[v] = Color.CLEAR
        for v in self.of_ops(self.options.lower):
            colors[v] = Color.ALLOW
        return colors

    @cached_property
    def held(self) -> frozenset[int]:
        """Vertices that stay low in the end: those in sequences, of ops that the user lowers, and elementless ones."""
        tied = chain(*self.vertices.clusters)
        return frozenset((*tied, *self.of_ops(self.options.lower), *self.of_kinds(ELEMENTLESS)))

    @cached_property
    def tiny(self) -> frozenset[int]:
        """Products that are known to sum fewer than 8 terms."""
        return frozenset(v for v in self.of_kinds(PRODUCTS) if self.sizes.is_tiny(self.op(v)))

    @cached_property
    def decoded_weights(self) -> Sequence[OpId]:
        """DequantizeLinear ops that read a constant or a quantized constant, in order."""
        view, quantized = self.view, first_input_of(QUANTIZES)
        decoded = ((op.id, trail(view, op.inputs[0], quantized, 1)[1]) for op in view.of_kinds(DEQUANTIZES))
        return [op for op, source in decoded if view.constant(source) is not None]

    def can(self, v: int) -> bool:
        """True if a vertex is neither frozen nor refused by the gate."""
        vertex = self.vertices.all[v]
        return vertex.op not in self.frozen and vertex.refusal is None

    def free(self, v: int) -> bool:
        return v not in self.low and v not in self.denied and self.can(v)

    def clear(self, v: int) -> bool:
        return self.colors[v] is Color.CLEAR

    def op(self, v: int) -> Op:
        """Return the op of a vertex."""
        return self.view.ops[self.vertices.all[v].op]

    def maker(self, value: ValueId) -> int | None:
        """Return the vertex that makes a value; None for an op without one."""
        port = made_variable(self.view, value)
        return self.vertices.of.get(port) if port is not None else None

    def reader(self, op: OpId, slot: int) -> int | None:
        """Return the vertex that reads an input of an op; None for an op without one."""
        port = read_variable(self.view.ops[op], slot)
        return self.vertices.of.get(port) if port is not None else None

    def ports(self, v: int) -> tuple[list[ValueId], list[ValueId]]:
        """Return the values that a vertex reads, and those that it makes."""
        op, names = self.op(v), self.vertices.all[v].variables
        variables = [variable for variable in self.view.variables[op.id] if variable.name in names]
        read = (op.inputs[slot] for variable in variables for slot in variable.inputs)
        made = (op.outputs[slot] for variable in variables for slot in variable.outputs)
        return [value for value in read if value is not None], [value for value in made if value is not None]

    def of_ops(self, ops: Iterable[OpId]) -> list[int]:
        """Return the vertices of ops, in order."""
        return [v for op in ops for v in self.vertices.by_op.get(op, ())]

    def of_kinds(self, kinds: Container[str]) -> list[int]:
        """Return the vertices of ops of some kinds, in order."""
        return self.of_ops(op.id for op in self.view.of_kinds(kinds))

    def without_casts(self, ops: Iterable[OpId]) -> list[OpId]:
        """Return those of the ops that are not Casts."""
        return [op for op in ops if self.view.ops[op].kind != "Cast"]

    def lowered(self, op: OpId) -> bool:
        """True if any variable of an op is low; an op without float32 counts as lowered."""
        vertices = self.vertices.by_op.get(op, ())
        return not vertices or any(v in self.low for v in vertices)

    def reads_low(self, op: OpId, slot: int) -> bool:
        """True if an op reads one of its inputs in the low type."""
        return self.reader(op, slot) in self.low

    def element_uses(self, value: ValueId) -> list[Use]:
        """Return the uses of a value that read its elements."""
        return [use for use in self.view.uses[value] if self.view.ops[use.op].kind not in ELEMENTLESS]

    def needed_in_float32(self, value: ValueId) -> bool:
        """True if a value leaves its graph in float32, or an op reads its elements in float32."""
        if value in self.view.yielded and value not in self.options.low_inputs:
            return True
        return any(not self.reads_low(use.op, use.slot) for use in self.element_uses(value))

    def made_upcast(self, value: ValueId) -> bool:
        """True if a value is low in the model and now made in float32."""
        return made_variable(self.view, value) in self.upcast

    def reads_upcast(self, op: OpId, slot: int) -> bool:
        """True if an op reads one of its inputs in float32 now and in a low type in the model."""
        return read_variable(self.view.ops[op], slot) in self.upcast

    def varies(self, value: ValueId) -> bool:
        """True if a value is float32 and not a constant."""
        return self.view.dtype(value) is DType.FLOAT and self.view.constant(value) is None

    # -- changes -----------------------------------------------------------------------------------

    def high(self, rule: str, because: OpId | None, note: str = "") -> Paint:
        """Return the paint of a variable or op that stays or becomes float32."""
        return Paint(DType.FLOAT, rule, because, note)

    def back_to_float32(self, ops: Iterable[OpId], paint: Paint) -> None:
        """Take ops back to float32."""
        for op in ops:
            for v in self.vertices.by_op.get(op, ()):
                if self.low.pop(v, None) is not None:
                    self.denied[v] = paint if paint.because != op else self.high(reasons.UNPAINTED, None)

    def walk(
        self, starts: Iterable[int], near: Callable[[int], Iterable[int]], enter: Callable[[int], bool]
    ) -> dict[int, OpId]:
        """Return the vertices that are reached from `starts` through vertices that `enter` admits, each with the op
        before it."""
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
        """Return the paint of all upcast and float32 variables, with reasons for those that no rule lowered."""
        paints: dict[tuple[OpId, str], Paint] = dict(self.upcast)
        by_op: dict[OpId, tuple[str, ...]] = {}
        for op_id, name in self.upcast:
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
        return Coloring(self.to, paints, entries, by_op, self.upcast_refused)

    def _reason(self, v: int) -> Paint:
        """Return the strongest reason for which a vertex is not low."""
        vertex = self.vertices.all[v]
        if vertex.op in self.frozen:
            return self.frozen[vertex.op]
        if v in self.denied:
            return self.denied[v]
        if vertex.refusal is not None and (self.colors[v] is not Color.UNLISTED or vertex.op in self.options.lower):
            return self.high(vertex.refusal.rule, None, vertex.refusal.note)
        if self.colors[v] is Color.UNLISTED:
            return self.high(reasons.UNLISTED, None, vertex.entry.because)
        return self.high(reasons.UNPAINTED, None, _UNPAINTED[self.colors[v]].format(low=self.to.spelling))

    def _edge(self, op: Op) -> Paint | None:
        """Return the reason for which an op without a vertex stays as it is; None for an op without float32."""
        values = op.ports
        untyped = next((v for v in values if unknown(self.view.types[v])), None)
        if untyped is not None:
            made_by = self.view.values[untyped].producer
            note = f"the element type of {self.view.value_name(untyped)!r} is unknown"
            return self.high(reasons.UNKNOWN_TYPE, made_by if made_by != op.id else None, note)
        if not any(self.view.dtype(v) is DType.FLOAT for v in values):
            return None
        note = "the edges of bodies keep their type" if op.bodies else f"{op.kind} is not a known operator"
        return self.high(reasons.BOUNDARY, None, note)


_UNPAINTED = {
    Color.ALLOW: "not lowered",
    Color.GRAY: "gray: not between two {low} ops",
    Color.CLEAR: "clear: no {low} op beside it",
    Color.DENY: "on the deny list",
    Color.UNLISTED: "on no list",
}
