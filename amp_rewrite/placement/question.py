"""A painted canvas as a labelling: who is free, what each label costs, what must agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.dtypes import DType
from amp_rewrite.entry import Color
from amp_rewrite.painting.canvas import Canvas
from amp_rewrite.painting.unit import fuses
from amp_rewrite.placement.labelling import HIGH, LOW, Conversion, Labelling, Pair
from amp_rewrite.placement.work import Work
from amp_rewrite.schema import TENSOR
from amp_rewrite.view import Op, Role, Use, ValueId

FORCED = ("lower", "lower_all", "force_all")
"""The rules of what is low because someone asked for it."""

_ELEMENTLESS = ("Shape", "Size")
_ANY, _CONSTANT = False, True
# (op, the op that reads it, whether one of the sum's or product's two must be a constant): pairs that onnxruntime
# 1.31.1 runs as one node on CUDA if both have one type, and not with a Cast between.
_PAIRS: Mapping[tuple[str, str], bool] = {
    ("Add", "LayerNormalization"): _ANY,
    ("Add", "Softmax"): _ANY,
    ("Add", "Gelu"): _CONSTANT,
    ("MatMul", "Add"): _CONSTANT,
    ("Mul", "MatMul"): _CONSTANT,
    ("Conv", "BatchNormalization"): _ANY,
}


@dataclass(frozen=True)
class Question:
    """What is asked about a canvas on which TensorFlow's rules have painted. O(nodes + uses).

    Free are vertices of the allow list that nobody asked for, those that the rules lowered, and gray and clear ones
    that are safe: on no list of denials, and behind lowered ops and the model's inputs alone, through such as are
    safe themselves. All others keep the label that they have.
    """

    canvas: Canvas
    work: Work

    @cached_property
    def free(self) -> frozenset[int]:
        """The vertices that may become low or high."""
        canvas = self.canvas
        found: set[int] = set()
        for v in range(len(canvas.vertices.all)):
            if canvas.op(v).kind in _ELEMENTLESS and canvas.shapes_follow:
                continue
            if v in canvas.low:
                if canvas.low[v].rule not in FORCED:
                    found.add(v)
            elif self._may_fall(v, found):
                found.add(v)
        return frozenset(found)

    def _may_fall(self, v: int, before: set[int]) -> bool:
        """Whether a vertex that the rules left float32 is as safe as those that they lowered."""
        canvas = self.canvas
        op = canvas.op(v)
        if not canvas.free(v) or canvas.color(v) not in (Color.GRAY, Color.CLEAR) or op.id in canvas.numbers:
            return False
        for value in op.inputs:
            if value is None or canvas.view.dtype(value) is not DType.FLOAT or canvas.view.constant(value) is not None:
                continue
            source = self._maker(value)
            if canvas.view.producer(value) is None:
                safe = canvas.view.values[value].public
            else:  # behind a Cast of the model itself someone wanted float32
                safe = not self._cast(value) and (source in before or source in canvas.low)
            if not safe:
                return False
        return True

    def labelling(self) -> Labelling:
        """The question in numbers."""
        vertices = self.canvas.vertices
        fixed = {v: v in self.canvas.low for v in range(len(vertices.all)) if v not in self.free}
        return Labelling(
            loss=tuple(self._losses()),
            conversions=tuple(self._conversions()),
            pairs=tuple(self._pairs()),
            fixed={v: label for v, label in fixed.items() if not self._retargets(v)},
            tied=tuple(self._tied()),
        )

    # -- costs ---------------------------------------------------------------------------------------

    def _losses(self) -> Iterator[int]:
        """What each vertex loses in float32: the bytes of its ports, and at its op's largest one its operations."""
        canvas = self.canvas
        for v, vertex in enumerate(canvas.vertices.all):
            op = canvas.op(v)
            ports = [self._ports(op, w) for w in canvas.vertices.by_op[vertex.op]]
            mine = self._ports(op, v)
            largest = max(ports, key=lambda values: sum(map(self.work.size, values)))
            yield 0 if op.kind == "Cast" else self.work.loss(op, mine, main=mine == largest)

    def _ports(self, op: Op, v: int) -> list[ValueId]:
        names = self.canvas.vertices.all[v].variables
        found = []
        for variable in self.canvas.view.variables[op.id]:
            if variable.name in names:
                found += [op.inputs[i] for i in variable.inputs] + [op.outputs[o] for o in variable.outputs]
        return [value for value in found if value is not None]

    def _conversions(self) -> Iterator[Conversion]:
        """Every float32 tensor that is made and read; constants are stored in the type that is wanted."""
        view = self.canvas.view
        for value in view.values:
            found = view.types[value.id]
            if found is None or found.dtype is not DType.FLOAT or found.container != TENSOR:
                continue
            if view.constant(value.id) is not None:
                continue
            readers = tuple(r for use in view.uses[value.id] if (r := self._reader(use)) is not None)
            readers += self._edges(value.id)
            home = self._maker(value.id)
            if any(reader != home for reader in readers):
                yield Conversion(home, readers, self.work.cast(value.id))

    def _maker(self, value: ValueId) -> int:
        """Who makes a value: a vertex, or something that has its type."""
        canvas = self.canvas
        op = canvas.view.producer(value)
        if op is None or op.signature is None or op.bodies:
            return LOW if value in canvas.low_inputs and canvas.view.values[value].role is Role.INPUT else HIGH
        if op.kind == "Cast" and op.inputs[0] is not None:
            before = canvas.view.dtype(op.inputs[0])
            if before is canvas.to:
                return LOW  # the Cast stands there already, and is left out where nobody needs it
            if before is DType.FLOAT:
                return self._maker(op.inputs[0])  # it becomes one where that is made low
        name = op.signature.output_variable(op.outputs.index(value))
        return canvas.vertices.of.get((op.id, name), HIGH) if name is not None else HIGH

    def _cast(self, value: ValueId) -> bool:
        op = self.canvas.view.producer(value)
        return op is not None and op.kind == "Cast"

    def _reader(self, use: Use) -> int | None:
        """Who reads a value there, or None if that takes it in either type."""
        canvas = self.canvas
        op = canvas.view.ops[use.op]
        if op.kind == "Cast":
            made = canvas.view.dtype(op.outputs[0]) if op.outputs[0] is not None else None
            return LOW if made is canvas.to else None
        if op.signature is None or op.bodies:
            return HIGH
        if op.kind in _ELEMENTLESS and canvas.shapes_follow:
            return None
        name = op.signature.input_variable(use.slot)
        return canvas.vertices.of.get((op.id, name), HIGH) if name is not None else HIGH

    def _edges(self, value: ValueId) -> tuple[int, ...]:
        """What an edge of a graph that hands a value out wants it as."""
        view = self.canvas.view
        found = view.values[value]
        if value not in view.yielded and (not found.public or found.role is Role.INPUT):
            return ()
        return (LOW,) if found.public and value in self.canvas.low_inputs else (HIGH,)

    def _pairs(self) -> Iterator[Pair]:
        view = self.canvas.view
        for op in view.ops:
            for value in op.outputs[:1]:
                uses = view.uses[value] if value is not None else ()
                if value is None or len(uses) != 1 or view.values[value].public or value in view.yielded:
                    continue
                reader = view.ops[uses[0].op]
                summed = _PAIRS.get((op.kind, reader.kind))
                if summed is None or (summed and not self._with_constant(op if op.kind != "MatMul" else reader)):
                    continue
                first, second = self._maker(value), self._reader(uses[0])
                if second is not None and first >= 0 and second >= 0:
                    yield Pair(first, second, self.work.trip(value))

    def _with_constant(self, op: Op) -> bool:
        return any(self.canvas.view.constant(value) is not None for value in op.inputs)

    # -- what must agree -----------------------------------------------------------------------------

    def _retargets(self, v: int) -> bool:
        """Whether a vertex is the result of one of the model's own Casts, which can give either type for nothing."""
        op = self.canvas.op(v)
        if op.kind != "Cast" or op.outputs[0] is None or op.inputs[0] is None:
            return False
        view, out = self.canvas.view, op.outputs[0]
        source = view.dtype(op.inputs[0])
        if source is None or source is DType.FLOAT or source.low or view.dtype(out) is not DType.FLOAT:
            return False
        named = view.values[out].public or out in view.yielded
        return not named and self.canvas.vertices.all[v].refusal is None and bool(view.uses[out])

    def _tied(self) -> Iterator[tuple[int, ...]]:
        """Sequences, clusters, and scale and bias of a norm with what is normalised."""
        canvas = self.canvas
        yield from canvas.vertices.clusters
        for cluster in canvas.clusters:
            yield tuple(v for op in cluster.ops for v in canvas.vertices.by_op.get(op, ()) if self._counts(v))
        for cluster in canvas.norms:
            if cluster.entry is not None and cluster.tail and fuses(canvas.view, cluster, canvas.to):
                maker = self._maker(cluster.entry)
                tail = [v for op in cluster.tail for v in canvas.vertices.by_op.get(op, ()) if self._counts(v)]
                if maker >= 0 and tail:
                    yield (maker, *tail)

    def _counts(self, v: int) -> bool:
        """Whether a member of a cluster decides with it: Casts take any type, kept variables are float32 anyhow."""
        refusal = self.canvas.vertices.all[v].refusal
        kept = refusal is not None and refusal.rule == "kept_variable"
        return not kept and self.canvas.op(v).kind != "Cast"
