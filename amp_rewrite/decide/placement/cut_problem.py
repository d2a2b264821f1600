"""A painted canvas as a labelling: who is free, what each label costs, what must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.groups import fuses
from amp_rewrite.decide.coloring.state import Canvas
from amp_rewrite.decide.placement.cost_model import Work
from amp_rewrite.decide.placement.labelling import HIGH, LOW, Conversion, Labelling, Pair
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed
from amp_rewrite.ir.op_classes import ELEMENTLESS, MAGNIFIES
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Role, Use, ValueId
from amp_rewrite.settings.list_entry import Color

FORCED = (reasons.LOWER, reasons.LOWER_ALL, reasons.FORCE_ALL)
"""The rules of what is low because someone asked for it."""

_GROWING = MAGNIFIES.keys() - {"Sqrt"}
"""Gray ops of one operand whose result may be far larger; the root of a small number is small."""
_End = Callable[[int], int]
"""A vertex as it stands in the labelling: its place there, or the label that it keeps."""
_ANY, _CONSTANT = False, True
# (op, the op that reads it, whether one of the sum's or product's two must be a constant): pairs that onnxruntime
# 1.31.1 runs as one node on CUDA if both have one type, and not with a Cast between.
PAIRS: Mapping[tuple[str, str], bool] = {
    ("Add", "LayerNormalization"): _ANY,
    ("Add", "Softmax"): _ANY,
    ("Add", "Gelu"): _CONSTANT,
    ("MatMul", "Add"): _CONSTANT,
    ("Mul", "MatMul"): _CONSTANT,
    ("Conv", "BatchNormalization"): _ANY,
}


@dataclass(frozen=True)
class Question:
    """What is asked about a canvas on which TensorFlow's rules have painted.

    Free are vertices that the rules lowered, and gray and clear ones that are safe (`_may_fall`); those of the allow
    list if `islands` are asked about, and nobody asked for them. All others keep the label that they have. Asked about
    are only free vertices that something float32 reaches through free ones: all others are low among low ones, which
    costs nothing. O(nodes) for all that is low, O(nodes + uses) for the rest.
    """

    canvas: Canvas
    work: Work
    islands: bool = True

    def free(self, v: int) -> bool:
        """Whether a vertex may become low or high."""
        canvas = self.canvas
        if v not in canvas.low:
            return v in self._falling
        if canvas.low[v].rule in FORCED or self._elementless(v):
            return False
        return self.islands or canvas.color(v) is not Color.ALLOW

    @cached_property
    def _falling(self) -> frozenset[int]:
        """The vertices that the rules left float32 and that are as safe as those that they lowered."""
        found: set[int] = set()
        for v in self._high:
            if not self._elementless(v) and self._may_fall(v, found):
                found.add(v)
        return frozenset(found)

    @cached_property
    def _high(self) -> list[int]:
        """The vertices that the rules left float32."""
        return [v for v in range(len(self.canvas.vertices.all)) if v not in self.canvas.low]

    def _elementless(self, v: int) -> bool:
        return self.canvas.shapes_follow and self.canvas.op(v).kind in ELEMENTLESS

    def _may_fall(self, v: int, before: set[int]) -> bool:
        """Whether a gray or clear vertex reads nothing but constants, inputs of the model and what is lowered itself.

        If islands are not asked about, nothing is lowered that TensorFlow would not lower and that could outgrow what
        it reads: no gray op with two operands, such as the sums of a residual stream, and none on the model's inputs;
        nor what feeds an op that someone keeps, or data pins: it would get one more rounding than by spreading.
        """
        canvas = self.canvas
        op = canvas.op(v)
        if not canvas.can(v) or canvas.color(v) not in (Color.GRAY, Color.CLEAR) or op.id in canvas.numbers:
            return False
        if v in canvas.denied and canvas.denied[v].rule != reasons.DENY_FORWARD:
            return False
        if not self.islands and any(
            use.op in self._wanted for out in op.outputs if out is not None for use in canvas.view.uses[out]
        ):
            return False
        read = {value for value in op.inputs if value is not None and self._varies(value)}
        careful = not self.islands and canvas.color(v) is Color.GRAY
        if careful and (len(read) > 1 or op.kind in _GROWING):
            return False
        for value in read:
            if canvas.view.producer(value) is None:
                safe = canvas.view.values[value].public and not careful
            else:  # behind a Cast of the model itself someone wanted float32
                source = self._maker(value)
                safe = not self._cast(value) and (source in before or source in canvas.low or self._normalized(value))
            if not safe:
                return False
        return True

    @cached_property
    def _wanted(self) -> frozenset[OpId]:
        """The ops that someone keeps in float32, or that data pins there."""
        return frozenset({*self.canvas.keep, *(pin.op for pin in self.canvas.pins if pin.raises)})

    def _varies(self, value: ValueId) -> bool:
        """Whether a value is float32 and no constant."""
        view = self.canvas.view
        return view.dtype(value) is DType.FLOAT and view.constant(value) is None

    def _normalized(self, value: ValueId) -> bool:
        """Whether a value is the result of a norm or softmax that is written out: no larger than the root of a width,
        times its scale."""
        return self.canvas.view.values[value].producer in self._norms

    @cached_property
    def _norms(self) -> frozenset[OpId]:
        """The last op of each norm and softmax that is written out."""
        kinds = (cluster for cluster in self.canvas.norms if cluster.kind.endswith(("_normalization", "softmax")))
        return frozenset(cluster.ops[-1] for cluster in kinds)

    # -- what is asked about --------------------------------------------------------------------------

    @cached_property
    def vertices(self) -> tuple[int, ...]:
        """The vertices that are asked about, in order: free ones, and Casts of the model that can give either type."""
        partners: dict[int, list[int]] = {}
        for group in self._groups:
            for v in group:
                partners.setdefault(v, []).extend(w for w in group if w != v)
        ends = self.canvas.vertices

        def near(v: int) -> tuple[int, ...]:
            return (*ends.sources[v], *ends.readers[v], *partners.get(v, ()))

        starts = {*self._high, *self._at_edges()}
        reached = self.canvas.walk(sorted(starts), near, self._asked)
        return tuple(sorted({*reached, *filter(self._asked, starts)}))

    def _asked(self, v: int) -> bool:
        return self.free(v) or self._retargets(v)

    def _at_edges(self) -> Iterator[int]:
        """Vertices that make or read a float32 value of an input, an output, a body, or an op that nobody knows."""
        view, of = self.canvas.view, self.canvas.vertices
        for value in view.values:
            outside = value.producer is None or value.producer not in of.by_op
            if not (outside or exposed(view, value.id)) or not self._varies(value.id):
                continue
            ends = (self._maker(value.id), *self._readers(value.id))
            yield from (v for v in ends if v >= 0)
        for op in view.ops:
            if op.id not in of.by_op:
                read = (value for value in op.inputs if value is not None and self._varies(value))
                yield from (v for value in read if (v := self._maker(value)) >= 0)

    def labelling(self) -> Labelling:
        """The question in numbers; its vertices are positions in `vertices`."""
        asked = {v: at for at, v in enumerate(self.vertices)}

        def end(v: int) -> int:
            return asked.get(v, v if v < 0 else LOW if v in self.canvas.low else HIGH)

        fixed: dict[int, bool] = {}
        tied = []
        for group in self._groups:
            ends = [end(v) for v in group]
            mine = tuple(at for at in ends if at >= 0)
            if mine:
                tied.append(mine)
                labels = {at == LOW for at in ends if at < 0}
                fixed.update({mine[0]: labels == {True} and fixed.get(mine[0], True)} if labels else {})
        values = self._values()
        return Labelling(
            loss=tuple(map(self._loss, self.vertices)),
            conversions=tuple(self._conversions(values, end)),
            pairs=tuple(self._pairs(values, end)),
            fixed=fixed,
            tied=tuple(tied),
        )

    # -- costs ---------------------------------------------------------------------------------------

    def _loss(self, v: int) -> int:
        """What a vertex loses in float32: the bytes of its ports, and at its op's largest one its operations.

        If islands are not asked about, nothing where TensorFlow's rules left it float32: such an op is lowered to spare
        a Cast or to save a fusion, not for its own sake.
        """
        op, mine = self.canvas.op(v), self._asked_ports[v]
        if op.kind == "Cast" or not (self.islands or v in self.canvas.low):
            return 0
        others = self.canvas.vertices.by_op[op.id]
        if len(others) == 1:
            return self.work.loss(op, mine, main=True)
        largest = max(map(self._ports, others), key=lambda values: sum(map(self.work.size, values)))
        return self.work.loss(op, mine, main=mine == largest)

    @cached_property
    def _asked_ports(self) -> Mapping[int, list[ValueId]]:
        """The ports of each vertex that is asked about."""
        return {v: self._ports(v) for v in self.vertices}

    def _ports(self, v: int) -> list[ValueId]:
        vertex = self.canvas.vertices.all[v]
        op = self.canvas.view.ops[vertex.op]
        found = []
        for variable in self.canvas.view.variables[op.id]:
            if variable.name in vertex.variables:
                found += [op.inputs[i] for i in variable.inputs] + [op.outputs[o] for o in variable.outputs]
        return [value for value in found if value is not None]

    def _values(self) -> tuple[ValueId, ...]:
        """Every float32 tensor that a vertex asked about makes or reads; constants are stored in either type."""
        view = self.canvas.view
        ports = dict.fromkeys(value for found in self._asked_ports.values() for value in found)
        pending = list(ports)
        for value in pending:  # behind a Cast that does nothing it is still the same value
            for use in view.uses[value]:
                op = view.ops[use.op]
                if op.kind == "Cast" and (out := op.outputs[0]) is not None and out not in ports:
                    ports[out] = None
                    pending.append(out)
        return tuple(v for v in sorted(ports) if (t := view.types[v]) and t.container == TENSOR and self._varies(v))

    def _conversions(self, values: Iterable[ValueId], end: _End) -> Iterator[Conversion]:
        """What Casts of values cost; those of the model itself are no new ones."""
        uses = self.canvas.view.uses
        for value in values:
            home, cost = end(self._maker(value)), self.work.cast(value)
            if home != LOW and any(self._lowers(use) for use in uses[value]):
                yield Conversion(home, (LOW,), cost, casts=0)
            readers = tuple(dict.fromkeys(map(end, self._readers(value))))
            if readers and readers != (home,):
                new = not self._cast(value) or len(uses[value]) > 1
                yield Conversion(home, readers, cost, int(new))

    def _readers(self, value: ValueId) -> tuple[int, ...]:
        """Who wants a value in one type, Casts of the model itself apart."""
        found = [self._reader(use) for use in self.canvas.view.uses[value]]
        return (*[r for r in found if r is not None], *self._edges(value))

    def _lowers(self, use: Use) -> bool:
        """Whether a value is read by a Cast of the model to the low type."""
        view = self.canvas.view
        op = view.ops[use.op]
        return op.kind == "Cast" and op.outputs[0] is not None and view.dtype(op.outputs[0]) is self.canvas.to

    def _maker(self, value: ValueId) -> int:
        """Who makes a value: a vertex, or something that has its type."""
        canvas = self.canvas
        op = canvas.view.producer(value)
        while op is not None and op.kind == "Cast" and op.inputs[0] is not None:
            before = canvas.view.dtype(op.inputs[0])
            if before is canvas.to:
                return LOW  # the Cast stands there already, and is left out where nobody needs it
            if before is not DType.FLOAT:
                break
            value = op.inputs[0]  # it becomes one where that is made low
            op = canvas.view.producer(value)
        if op is None or op.signature is None or op.bodies:
            return LOW if value in canvas.low_inputs and canvas.view.values[value].role is Role.INPUT else HIGH
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
            return None
        if op.signature is None or op.bodies:
            return HIGH
        if op.kind in ELEMENTLESS and canvas.shapes_follow:
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

    def _pairs(self, values: Iterable[ValueId], end: _End) -> Iterator[Pair]:
        view = self.canvas.view
        for value in values:
            op, uses = view.producer(value), view.uses[value]
            if op is None or op.outputs[0] != value or len(uses) != 1:
                continue
            reader = view.ops[uses[0].op]
            summed = PAIRS.get((op.kind, reader.kind))
            if summed is None or exposed(view, value):
                continue
            if summed and not self._with_constant(op if op.kind != "MatMul" else reader):
                continue
            first, second = self._maker(value), self._reader(uses[0])
            if second is not None and first >= 0 and second >= 0 and end(first) != end(second):
                yield Pair(end(first), end(second), self.work.trip(value))

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
        named = exposed(view, out)
        return not named and self.canvas.vertices.all[v].refusal is None and bool(view.uses[out])

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """Sequences, clusters, and scale and bias of a norm with what is normalized."""
        return tuple(self._tied())

    def _tied(self) -> Iterator[tuple[int, ...]]:
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
        kept = refusal is not None and refusal.rule == reasons.KEPT_VARIABLE
        return not kept and self.canvas.op(v).kind != "Cast"
