"""The problem that painting and placement solve: type variables, their colors, and what must stay float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.vertices import Vertices
from amp_rewrite.decide.needs.find import Hazards
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.decide.sizes import Sizes
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import made_variable, read_variable
from amp_rewrite.ir.op_classes import PRODUCTS, QUANTIZERS
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.list_entry import Color

AFFINE_NOTE = "scale and bias have the type of what is normalized: onnxruntime fuses them into one node"


@dataclass(frozen=True, slots=True)
class PaintOptions:
    """Options of painting, resolved to the ops of one view.

    Args:
        level: how far to go.
        target: the runtime of the result.
        gray_follows_allow: lower a gray op right after an allow op; by default off for float16, on for bfloat16.
        keep: ops that stay float32, with the pattern that named each.
        lower: ops to lower, with the pattern that named each.
        pins: types of ops, on top of the hazards'; a pin holds the whole cluster of its op.
        clusters: written-out norms, softmaxes and activations.
        low_inputs: inputs and outputs of the model that are low.
        place: move the border between the types to where it takes the fewest Casts.
        rescale: quantizers are clear.
    """

    level: Level = Level.DEFAULT
    target: Target = Target.ORT_CUDA
    gray_follows_allow: bool | None = None
    keep: Mapping[OpId, str] = field(default_factory=dict)
    lower: Mapping[OpId, str] = field(default_factory=dict)
    pins: Sequence[Pin] = ()
    clusters: Sequence[Cluster] = ()
    low_inputs: Collection[ValueId] = ()
    place: bool = False
    rescale: bool = False


@dataclass(frozen=True)
class Problem:
    """Type variables of a view, by vertex, with their colors and neighbours.

    `raised`: paint of variables that are low in the model and become float32. They have no vertex, so no color spreads
    from them.
    """

    view: View
    vertices: Vertices
    to: DType
    options: PaintOptions
    hazards: Hazards
    raised: Mapping[tuple[OpId, str], Paint] = field(default_factory=dict)

    # -- what is asked -----------------------------------------------------------------------------

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins of the hazards, then those of the options."""
        return (*self.hazards.pins, *self.options.pins)

    @cached_property
    def colors(self) -> Sequence[Color]:
        """The lists of all vertices. What the user lowers counts as allowed, and an entry's need without a reader as
        gray."""
        colors = [vertex.entry.color for vertex in self.vertices.all]
        for op, (needs, _) in self.hazards.unneeded.items():
            for v in self.vertices.by_op.get(op, ()):
                if self.vertices.all[v].entry.need in needs:
                    colors[v] = Color.GRAY
        for v, vertex in enumerate(self.vertices.all if self.options.rescale else ()):
            if self.view.ops[vertex.op].kind in QUANTIZERS:
                colors[v] = Color.CLEAR
        for v in self.of_ops(self.options.lower):
            colors[v] = Color.ALLOW
        return colors

    @cached_property
    def held(self) -> Mapping[OpId, Paint]:
        """Ops that the user, a safety rule or data holds in float32; they still conduct deny paint."""
        held = {op: self.high(reasons.KEEP, None, f"kept by {p!r}") for op, p in sorted(self.options.keep.items())}
        groups = {op: cluster for cluster in self.options.clusters for op in cluster.ops} if self.options.pins else {}
        for pin in self.pins:
            if pin.op not in self.options.lower:
                held.setdefault(pin.op, self.high(pin.rule, pin.because, pin.note))
        for pin in self.options.pins:
            cluster = groups.get(pin.op)
            if cluster is None:
                continue
            note = f"{cluster.kind} stays float32 as a whole, because {self.view.ops[pin.op].name!r} does"
            for op in cluster.ops:
                if op not in self.options.lower:
                    held.setdefault(op, self.high(reasons.CLUSTER, pin.op, note))
        return held

    def can(self, v: int) -> bool:
        """True if neither the gate nor a user, rule or pin holds a vertex in float32."""
        vertex = self.vertices.all[v]
        return vertex.refusal is None and vertex.op not in self.held

    @property
    def gains(self) -> bool:
        """True if only what a lowered product gains from is worth a low type; False where the user asks for more."""
        return self.hazards.guarded and self.options.level not in (Level.LOWER_ALL, Level.UNSAFE_FORCE_ALL)

    def unneeded(self, v: int) -> str:
        """Return why no reader has the need of the op's entry; "" without one."""
        unneeded = self.hazards.unneeded.get(self.vertices.all[v].op)
        return unneeded.because if unneeded is not None else ""

    # -- vertices ----------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of values."""
        return Sizes(self.view)

    @cached_property
    def tiny(self) -> frozenset[int]:
        """Products that are known to sum fewer terms than tensor cores multiply in a step."""
        return frozenset(v for v in self.of_kinds(PRODUCTS) if self.sizes.is_tiny(self.op(v)))

    def op(self, v: int) -> Op:
        """Return the op of a vertex."""
        return self.view.ops[self.vertices.all[v].op]

    def of_ops(self, ops: Iterable[OpId]) -> list[int]:
        """Return the vertices of ops, in order."""
        return [v for op in ops for v in self.vertices.by_op.get(op, ())]

    def of_kinds(self, kinds: Container[str]) -> list[int]:
        """Return the vertices of ops of some kinds, in order."""
        return self.of_ops(op.id for op in self.view.of_kinds(kinds))

    def maker(self, value: ValueId) -> int | None:
        """Return the vertex that makes a value; None for an op without one."""
        port = made_variable(self.view, value)
        return self.vertices.of.get(port) if port is not None else None

    def reader(self, use: Use) -> int | None:
        """Return the vertex that reads a value there; None for an op without one."""
        port = read_variable(self.view.ops[use.op], use.slot)
        return self.vertices.of.get(port) if port is not None else None

    def made_raised(self, value: ValueId) -> bool:
        """True if a value is low in the model and now made in float32."""
        return made_variable(self.view, value) in self.raised

    def ports(self, v: int) -> tuple[list[ValueId], list[ValueId]]:
        """Return the values that a vertex reads, and those that it makes."""
        op, names = self.op(v), self.vertices.all[v].variables
        variables = [variable for variable in self.view.variables[op.id] if variable.name in names]
        read = (op.inputs[slot] for variable in variables for slot in variable.inputs)
        made = (op.outputs[slot] for variable in variables for slot in variable.outputs)
        return [value for value in read if value is not None], [value for value in made if value is not None]

    def widens(self, op: Op) -> bool:
        """True for a Cast from a low type: lowered, it would be a copy or round, with another Cast after it."""
        return op.kind == "Cast" and self.view.dtype(op.inputs[0]) in LOW_TYPES

    def varies(self, value: ValueId) -> bool:
        """True if a value is float32 and not a constant."""
        return self.view.dtype(value) is DType.FLOAT and self.view.constant(value) is None

    def high(self, rule: str, because: OpId | None, note: str = "") -> Paint:
        """Return the paint of a variable or op that stays or becomes float32."""
        return Paint(DType.FLOAT, rule, because, note)

    def walk(
        self, starts: Iterable[int], near: Callable[[int], Iterable[int]], enter: Callable[[int], bool]
    ) -> dict[int, OpId]:
        """Return the vertices that are reached from `starts` through vertices that `enter` admits, each with the op
        before it.

        networkx's walks want a copy of the subgraph for each: 11 s at 49 500 ops, this one takes 0.1.
        """
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


def fuses(view: View, cluster: Cluster, low: DType) -> bool:
    """True if onnxruntime fuses a written-out norm and then wants scale and bias in the type of its input.

    It fuses from optimization level BASIC on and looks past a Cast that only the norm reads, so the fused node takes
    the type before that Cast, and the runtime refuses the model when scale and bias have another. The types of the ops
    in between do not matter. Source: some 360 small models opened with onnxruntime 1.31.1.
    """
    if cluster.kind == "layer_normalization":
        return low is DType.BFLOAT16 or view.opset >= FIRST_FUSED["LayerNormalization"]
    return cluster.kind == "rms_normalization" and low is DType.BFLOAT16
