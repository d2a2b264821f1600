"""The cut problem of a painted state: free vertices, the cost of each label, vertices that must agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.groups import affine_may_fall, fuses
from amp_rewrite.decide.coloring.paint_state import PaintState
from amp_rewrite.decide.placement.cost_model import CostModel
from amp_rewrite.decide.placement.labelling import HIGH, LOW, Conversion, Labelling, Pair
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed
from amp_rewrite.ir.op_classes import ELEMENTLESS, MAGNIFIES
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.view import OpId, Role, Use, ValueId
from amp_rewrite.settings.list_entry import Color

FORCED = (reasons.LOWER, reasons.LOWER_ALL, reasons.FORCE_ALL)
"""The rules of vertices that the user or the level makes low."""

_GROWING = MAGNIFIES.keys() - {"Sqrt"}
"""Gray ops of one operand whose result may be far larger; the root of a small number is small."""
_End = Callable[[int], int]
"""Maps a vertex to its position in the labelling, or to the label that it keeps."""
_ANY, _CONSTANT = False, True
# (op, its reader): True if one operand of the sum or product must be a constant. onnxruntime 1.31.1 runs these pairs
# as one node on CUDA if both have one type, and not with a Cast between.
PAIRS: Mapping[tuple[str, str], bool] = {
    ("Add", "LayerNormalization"): _ANY,
    ("Add", "Softmax"): _ANY,
    ("Add", "Gelu"): _CONSTANT,
    ("MatMul", "Add"): _CONSTANT,
    ("Mul", "MatMul"): _CONSTANT,
    ("Conv", "BatchNormalization"): _ANY,
}


@dataclass(frozen=True)
class CutProblem:
    """The minimum cut problem of a state on which TensorFlow's rules have painted.

    Free vertices are those that the rules lowered, and gray and clear ones that are safe (`_may_fall`). Vertices of the
    allow list are free only with `islands`, and only if the user did not name them. All others keep their label. The
    problem contains free vertices that a float32 value reaches through free ones. The others are low among low ones,
    which costs nothing. O(nodes) for all low vertices, O(nodes + uses) for the rest.
    """

    state: PaintState
    costs: CostModel
    islands: bool = True

    def free(self, v: int) -> bool:
        """True if a vertex may become low or high."""
        state = self.state
        if v not in state.low:
            return v in self._falling
        if state.low[v].rule in FORCED or self._elementless(v):
            return False
        return self.islands or state.colors[v] is not Color.ALLOW

    @cached_property
    def _falling(self) -> frozenset[int]:
        """Vertices that the rules left float32 and that are as safe as those that they lowered."""
        falling: set[int] = set()
        for v in self._high:
            if not self._elementless(v) and self._may_fall(v, falling):
                falling.add(v)
        return frozenset(falling)

    @cached_property
    def _high(self) -> list[int]:
        """Vertices that the rules left float32."""
        return [v for v in range(len(self.state.vertices.all)) if v not in self.state.low]

    def _elementless(self, v: int) -> bool:
        return self.state.options.shapes_follow and self.state.op(v).kind in ELEMENTLESS

    def _may_fall(self, v: int, before: set[int]) -> bool:
        """True if a gray or clear vertex reads only constants, inputs of the model and low values, `before` included.

        Without islands two kinds of ops stay float32 where TensorFlow leaves them so. Results of gray ops with two
        operands (sums of a residual stream) or on the model's inputs could outgrow their operands. Inputs of ops that
        the user keeps or data pins would get one more rounding than by spreading.
        """
        state = self.state
        op = state.op(v)
        if not state.can(v) or state.colors[v] not in (Color.GRAY, Color.CLEAR) or op.id in state.hazards.numbers:
            return False
        if v in state.denied and state.denied[v].rule != reasons.DENY_FORWARD:
            return False
        if not self.islands and any(use.op in self._float32_ops for out in op.results for use in state.view.uses[out]):
            return False
        read = {value for value in op.operands if self.state.varies(value)}
        careful = not self.islands and state.colors[v] is Color.GRAY
        if careful and (len(read) > 1 or op.kind in _GROWING):
            return False
        for value in read:
            if state.view.producer(value) is None:
                safe = state.view.values[value].public and not careful
            else:  # a Cast of the model itself asks for float32
                source = self._maker(value)
                cast = state.view.producer(value, "Cast") is not None
                safe = not cast and (source in before or source in state.low or self._normalized(value))
            if not safe:
                return False
        return True

    @cached_property
    def _float32_ops(self) -> frozenset[OpId]:
        """Ops that the user keeps in float32, or that data pins there."""
        return frozenset({*self.state.options.keep, *(pin.op for pin in self.state.pins if pin.raises)})

    def _normalized(self, value: ValueId) -> bool:
        """True for the result of a decomposed norm or softmax: at most the root of a width, times its scale."""
        return self.state.view.values[value].producer in self._norms

    @cached_property
    def _norms(self) -> frozenset[OpId]:
        """The last op of each decomposed norm and softmax."""
        kinds = ("_normalization", "softmax")
        return frozenset(norm.ops[-1] for norm in self.state.options.norms if norm.kind.endswith(kinds))

    # -- vertices of the problem ----------------------------------------------------------------------

    @cached_property
    def vertices(self) -> tuple[int, ...]:
        """Vertices of the problem in order: free ones, and Casts of the model that can give either type."""
        partners: dict[int, list[int]] = {}
        for group in self._groups:
            for v in group:
                partners.setdefault(v, []).extend(w for w in group if w != v)
        ends = self.state.vertices

        def near(v: int) -> tuple[int, ...]:
            return (*ends.sources[v], *ends.readers[v], *partners.get(v, ()))

        starts = {*self._high, *self._at_edges()}
        reached = self.state.walk(sorted(starts), near, self._takes_part)
        return tuple(sorted({*reached, *filter(self._takes_part, starts)}))

    def _takes_part(self, v: int) -> bool:
        return self.free(v) or self._retargets(v)

    def _at_edges(self) -> Iterator[int]:
        """Yield vertices at a float32 value of an input, an output, a body, or an unknown op."""
        view, of = self.state.view, self.state.vertices
        for value in view.values:
            outside = value.producer is None or value.producer not in of.by_op
            if not (outside or exposed(view, value.id)) or not self.state.varies(value.id):
                continue
            yield from (v for v in (self._maker(value.id), *self._readers(value.id)) if v >= 0)
        for op in view.ops:
            if op.id not in of.by_op:
                read = (value for value in op.operands if self.state.varies(value))
                yield from (v for value in read if (v := self._maker(value)) >= 0)

    def labelling(self) -> Labelling:
        """Return the problem in numbers; its vertices are positions in `vertices`."""
        positions = {v: at for at, v in enumerate(self.vertices)}

        def end(v: int) -> int:
            v = self._followed.get(v, v)
            return positions.get(v, v if v < 0 else LOW if v in self.state.low else HIGH)

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
        """Return the time that a vertex loses in float32: for the bytes of its ports, and for the operations of its op
        if it is the largest vertex there.

        Without islands, 0 for vertices that TensorFlow's rules left float32: the problem lowers such an op to spare a
        Cast or to save a fusion, not for its own sake.
        """
        op, mine = self.state.op(v), self._ports_by_vertex[v]
        if op.kind == "Cast" or not (self.islands or v in self.state.low):
            return 0
        others = self.state.vertices.by_op[op.id]
        if len(others) == 1:
            return self.costs.loss(op, mine, main=True)
        largest = max(map(self._ports, others), key=lambda values: sum(map(self.costs.size, values)))
        return self.costs.loss(op, mine, main=mine == largest)

    @cached_property
    def _ports_by_vertex(self) -> Mapping[int, list[ValueId]]:
        """The ports of each vertex of the problem."""
        return {v: self._ports(v) for v in self.vertices}

    def _ports(self, v: int) -> list[ValueId]:
        read, made = self.state.ports(v)
        return [*read, *made]

    def _values(self) -> tuple[ValueId, ...]:
        """Return the float32 tensors at the vertices of the problem; constants are stored in either type."""
        view = self.state.view
        ports = dict.fromkeys(value for values in self._ports_by_vertex.values() for value in values)
        pending = list(ports)
        for value in pending:  # a Cast to its own type gives the same value
            for use in view.uses[value]:
                op = view.ops[use.op]
                if op.kind == "Cast" and (out := op.outputs[0]) is not None and out not in ports:
                    ports[out] = None
                    pending.append(out)
        return tuple(v for v in sorted(ports) if view.tensor_dtype(v) is not None and self.state.varies(v))

    def _conversions(self, values: Iterable[ValueId], end: _End) -> Iterator[Conversion]:
        """Yield the costs of Casts of values; a Cast of the model itself does not count as a new one."""
        uses = self.state.view.uses
        for value in values:
            home, cost = end(self._maker(value)), self.costs.cast(value)
            if home != LOW and any(self._lowers(use) for use in uses[value]):
                yield Conversion(home, (LOW,), cost, casts=0)
            readers = tuple(dict.fromkeys(map(end, self._readers(value))))
            if readers and readers != (home,):
                new = self.state.view.producer(value, "Cast") is None or len(uses[value]) > 1
                yield Conversion(home, readers, cost, int(new))

    def _readers(self, value: ValueId) -> tuple[int, ...]:
        """Return the vertices or labels that need a value in one type, without Casts of the model itself."""
        readers = [self._reader(use) for use in self.state.view.uses[value]]
        return (*[r for r in readers if r is not None], *self._edges(value))

    def _lowers(self, use: Use) -> bool:
        """True if a use is a Cast of the model to the low type."""
        view = self.state.view
        op = view.ops[use.op]
        return op.kind == "Cast" and view.dtype(op.outputs[0]) is self.state.to

    def _maker(self, value: ValueId) -> int:
        """Return the vertex that makes a value, or the label of an op without vertex."""
        state = self.state
        while (op := state.view.producer(value, "Cast")) is not None and op.inputs[0] is not None:
            before = state.view.dtype(op.inputs[0])
            if before is state.to:
                return LOW  # the model has the Cast already; the plan folds it if it is unused
            if before is not DType.FLOAT:
                break
            value = op.inputs[0]  # the Cast becomes one to the low type if its source is made low
        if value in state.options.low_inputs and state.view.values[value].role is Role.INPUT:
            return LOW
        return HIGH if (maker := state.maker(value)) is None else maker

    def _reader(self, use: Use) -> int | None:
        """Return the vertex or label that reads a value there; None if the op takes it in either type."""
        state = self.state
        op = state.view.ops[use.op]
        follows = op.kind in ELEMENTLESS and op.signature is not None and state.options.shapes_follow
        if op.id in self._fused or op.kind == "Cast" or follows:
            return None
        return HIGH if (reader := state.reader(*use)) is None else reader

    def _edges(self, value: ValueId) -> tuple[int, ...]:
        """Return the label that an edge of a graph needs for a value that it hands out."""
        public, role = self.state.view.values[value].public, self.state.view.values[value].role
        if value not in self.state.view.yielded and (not public or role is Role.INPUT):
            return ()
        return (LOW,) if public and value in self.state.options.low_inputs else (HIGH,)

    def _pairs(self, values: Iterable[ValueId], end: _End) -> Iterator[Pair]:
        view = self.state.view
        for value in values:
            op, uses = view.producer(value), view.uses[value]
            if op is None or op.outputs[0] != value or len(uses) != 1:
                continue
            reader = view.ops[uses[0].op]
            needs_constant = PAIRS.get((op.kind, reader.kind))
            if needs_constant is None or exposed(view, value):
                continue
            combined = op if op.kind != "MatMul" else reader
            if needs_constant and all(view.constant(operand) is None for operand in combined.inputs):
                continue
            first, second = self._maker(value), self._reader(uses[0])
            if second is not None and first >= 0 and second >= 0 and end(first) != end(second):
                yield Pair(end(first), end(second), self.costs.trip(value))

    # -- vertices that must agree --------------------------------------------------------------------

    def _retargets(self, v: int) -> bool:
        """True if a vertex is the result of one of the model's own Casts, which can give either type for free."""
        op = self.state.op(v)
        view, out = self.state.view, op.outputs[0] if op.kind == "Cast" else None
        if out is None or view.dtype(out) is not DType.FLOAT:
            return False
        if view.dtype(op.inputs[0]) in (None, DType.FLOAT, *LOW_TYPES):
            return False
        return not exposed(view, out) and self.state.vertices.all[v].refusal is None and bool(view.uses[out])

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """Sequences, clusters, and scale and bias of a norm with its input."""
        state, groups = self.state, list(self.state.vertices.clusters)
        for cluster in state.hazards.clusters:
            groups.append(tuple(filter(self._counts, state.of_ops(cluster.ops))))
        for maker, norm in self._fusing:
            tail = tuple(v for v in state.of_ops(norm.tail) if self._counts(v) and v not in self._followed)
            if tail:
                groups.append((maker, *tail))
        return tuple(groups)

    @cached_property
    def _fusing(self) -> Sequence[tuple[int, Cluster]]:
        """Norms that the runtime fuses only with scale and bias in the type of the input, after the maker of that."""
        fusing = (norm for norm in self.state.options.norms if norm.tail and fuses(self.state, norm, self.state.to))
        makers = ((self._maker(norm.entry), norm) for norm in fusing if norm.entry is not None)
        return [(maker, norm) for maker, norm in makers if maker >= 0]

    @cached_property
    def _followed(self) -> Mapping[int, int]:
        """Scales of float32 norms that get the type of the norm's input in the end, with the maker of that."""
        fusing = ((maker, norm) for maker, norm in self._fusing if self._may_read_low(norm.entry, norm.ops))
        free = ((v, maker) for maker, norm in fusing for v in self.state.of_ops(norm.tail) if not self.free(v))
        return {v: maker for v, maker in free if v not in self.state.low and affine_may_fall(self.state, v)}

    def _may_read_low(self, value: ValueId | None, but: Collection[OpId]) -> bool:
        """True if all readers of a value, `but` some ops, are low or free: a Cast for another reader parts a norm."""
        state = self.state
        uses = [use for use in state.element_uses(value) if use.op not in but] if value is not None else []
        readers = [state.reader(*use) for use in uses]
        return all(v is not None and (v in state.low or self.free(v)) for v in readers)

    @cached_property
    def _fused(self) -> frozenset[OpId]:
        """The ops of norms whose scale follows their input: in one node, they read it in either type."""
        followed = {self.state.vertices.all[v].op for v in self._followed}
        return frozenset(op for _, norm in self._fusing if not followed.isdisjoint(norm.tail) for op in norm.ops)

    def _counts(self, v: int) -> bool:
        """True if a member of a cluster decides with it: Casts take any type, kept variables stay float32."""
        refusal = self.state.vertices.all[v].refusal
        kept = refusal is not None and refusal.rule == reasons.KEPT_VARIABLE
        return not kept and self.state.op(v).kind != "Cast"
