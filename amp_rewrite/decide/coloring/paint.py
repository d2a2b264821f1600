"""Painter: TensorFlow's rules lower ops, needs keep ops in float32, and a cut draws the border between the types."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.free import scale_is_tied
from amp_rewrite.decide.coloring.placement import place, place_without_cut
from amp_rewrite.decide.coloring.problem import Problem, Spread
from amp_rewrite.decide.reasons import Paint, float32
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import exposed, first_input, input_variable, output_variable, trail
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS, LOW_ONLY
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.schema import unknown
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View
from amp_rewrite.settings.list_entry import Color, Entry


@dataclass(frozen=True, repr=False)
class Coloring:
    """The paint of every float32 type variable, by op and name; ops without a variable (If, Loop, custom ops …) use "".

    Type variables that are low in the model are included only if they are raised. `entries`: the list entry of each op.
    `unraised`: ops of the model that keep their low type despite a request for float32, with the reason.
    """

    to: DType
    paints: Mapping[tuple[OpId, str], Paint]
    entries: tuple[Entry, ...]
    unraised: Mapping[OpId, Paint]
    findings: tuple[Finding, ...]

    def of(self, op: OpId) -> Paint | None:
        """Return the paint of an op's first lowered variable, or of its first variable; None for an undecided op."""
        paints = self._by_op.get(op, ())
        return next((p for p in paints if p.dtype is self.to), paints[0] if paints else self.unraised.get(op))

    @cached_property
    def _by_op(self) -> Mapping[OpId, Sequence[Paint]]:
        known: dict[OpId, list[Paint]] = {}
        for (op, _), paint in self.paints.items():
            known.setdefault(op, []).append(paint)
        return known

    def dtype(self, variable: tuple[OpId, str] | None) -> DType | None:
        """Return the new type of a variable; None if it keeps its own."""
        paint = self.paints.get(variable) if variable is not None else None
        return paint.dtype if paint is not None else None

    @property
    def low(self) -> frozenset[tuple[OpId, str]]:
        """Lowered variables, by op and name."""
        return frozenset(variable for variable, paint in self.paints.items() if paint.dtype is self.to)

    def is_loadable(self, view: View) -> bool:
        """True if every op with kernels only for low types is low."""
        return {op.id for op in view.of_kinds(LOW_ONLY)} <= {op for op, _ in self.low}

    @property
    def float32_ops(self) -> int:
        return len({op for op, _ in self.paints} - {op for op, _ in self.low})


def paint(problem: Problem) -> Coloring:
    """Return a type for every float32 type variable of a model, with its rule and the deciding op.

    The gate takes precedence over `keep` and `lower`, these over pins, and pins over the lists. Low ops of the model
    become float32 if `keep` or a pin with `raises` names them. O(nodes + uses), not counting the cut.
    """
    view, types, spread = problem.view, _Types(problem), Spread(problem)
    types.low, high = (place if problem.request.places else place_without_cut)(problem, spread)
    types.follow_casts()
    types.scales_follow({v for v, paint in high.items() if paint.rule == reasons.NO_GAIN})
    paints = dict(types.raised)
    for v, vertex in enumerate(problem.vertices):
        decided = types.low.get(v) or _reason(problem, v, high.get(v) or spread.denied.get(v))
        paints.update(((vertex.op, name), decided) for name in vertex.variables)
    decided_ops = {op for op, _ in paints}
    for op in view.ops:
        if op.id not in decided_ops and (edge := _edge(problem, op)) is not None:
            paints[op.id, ""] = edge
    refused = (Finding(reasons.UNRAISED, view.ops[op].name, paint.note) for op, paint in types.refused.items())
    return Coloring(problem.to, paints, problem.entries, types.refused, tuple(refused))


def _reason(problem: Problem, v: int, found: Paint | None) -> Paint:
    vertex, color = problem.vertices[v], problem.colors[v]
    if (decided := problem.pinned.get(vertex.op) or found) is not None:
        return decided
    if vertex.refusal is not None and (color is not Color.UNLISTED or vertex.op in problem.lower):
        return vertex.refusal
    if color is Color.UNLISTED:
        return float32(reasons.UNLISTED, None, vertex.entry.because)
    return float32(reasons.UNPAINTED, None, _UNPAINTED[color].format(low=problem.to.spelling))


def _edge(problem: Problem, op: Op) -> Paint | None:
    view = problem.view
    untyped = next((v for v in op.ports if unknown(view.types[v])), None)
    if untyped is not None:
        producer = view.values[untyped].producer
        note = f"the element type of {view.value_name(untyped)!r} is unknown"
        return float32(reasons.UNKNOWN_TYPE, producer if producer != op.id else None, note)
    if not any(view.dtype(v) is DType.FLOAT for v in op.ports):
        return None
    note = "the edges of bodies keep their type" if op.bodies else f"{op.kind} is not a known operator"
    return float32(reasons.BOUNDARY, None, note)


_UNPAINTED: Mapping[Color, str] = {
    Color.ALLOW: "not lowered",
    Color.GRAY: "gray: not between two {low} ops",
    Color.CLEAR: "clear: not next to a {low} op",
    Color.DENY: "on the deny list",
}


# -- types decided outside the cut -------------------------------------------------------------------

_ANY_TYPE = ELEMENTLESS | {"Cast"}
"""Ops with the same results for any type of their inputs."""
_SEEN_THROUGH = frozenset(("Cast", "Dropout", "Identity"))
"""Ops ignored by onnxruntime when it fuses a normalization."""
_AFFINE_NOTE = "scale and bias take the type of the normalized input: onnxruntime fuses them into one node"


@dataclass
class _Types:
    """Types decided so far: lowered vertices, raised variables, and refused requests for float32.

    Low ops of the model are raised if a pattern or data names them, together with the ops that must have the same type:
    the rest of a written-out norm, softmax or activation, and the scale and bias that the runtime fuses with it.
    """

    problem: Problem
    low: dict[int, Paint] = field(default_factory=dict)
    raised: dict[tuple[OpId, str], Paint] = field(default_factory=dict)
    refused: dict[OpId, Paint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.view = self.problem.view
        self._raise_requested()

    def type_at_producer(self, value: ValueId) -> DType | None:
        """Return the type of a value at its producer."""
        if self.problem.maker(value) in self.low:
            return self.problem.to
        return DType.FLOAT if output_variable(self.view, value) in self.raised else self.view.dtype(value)

    def type_at_reader(self, value: ValueId, use: Use) -> DType | None:
        """Return the type of a value at a reader."""
        v, kind = self.problem.reader(use), self.view.ops[use.op].kind
        if v in self.low:
            return self.problem.to
        if kind == "Cast" or (v is None and kind in _ANY_TYPE):
            return self.type_at_producer(value)
        return DType.FLOAT if v is not None or self._reads_raised(use) else self.view.dtype(value)

    def _reads_raised(self, use: Use) -> bool:
        return input_variable(self.view.ops[use.op], use.slot) in self.raised

    # -- low ops of the model, raised --------------------------------------------------------------

    def _raise_requested(self) -> None:
        p, requests = self.problem, dict[OpId, Paint]()
        for op_id, pattern in p.keep.items():
            by = "the check" if pattern in p.request.found else repr(pattern)
            requests[op_id] = float32(reasons.RAISED, None, f"kept by {by}")
        for pin in p.pins:
            if pin.raises and pin.op not in p.lower:
                requests.setdefault(pin.op, float32(reasons.RAISED, pin.because, f"{pin.rule}: {pin.note}"))
        requests = {op_id: requests[op_id] for op_id in sorted(requests) if self._low_type(op_id) is not None}
        for op_id, why in requests.items():
            self._raise(op_id, why)
        groups = clusters(self.view, LOW_TYPES) if self.raised else ()
        for cluster in groups:
            if (first := next(filter(self._is_raised, cluster.ops), None)) is not None:
                note = f"{cluster.kind} is raised as a whole, because {self.view.ops[first].name!r} is"
                for op_id in cluster.ops:
                    if self._low_type(op_id) is not None and op_id not in p.lower:
                        self._raise(op_id, float32(reasons.RAISED, first, note))
        for cluster in groups:
            self._affine(cluster)
        for op in reversed(self.view.ops) if requests else ():
            if op.id not in p.lower:
                self._raise_copy(op)
                self._raise_cast(op, requests)
        for op in self.view.of_kinds(ELEMENTLESS):  # these read no elements
            source = op.inputs[0]
            if source is not None and output_variable(self.view, source) in self.raised:
                self.raised[op.id, "T"] = float32(reasons.SHAPE_FOLLOWS, self.view.values[source].producer)

    def _low_type(self, op: OpId) -> DType | None:
        types = (v.type.dtype for v in self.view.variables[op] if v.type is not None)
        return next((dtype for dtype in types if dtype in LOW_TYPES), None)

    def _is_raised(self, op: OpId) -> bool:
        return any((op, variable.name) in self.raised for variable in self.view.variables[op])

    def _raise(self, op_id: OpId, paint: Paint, *, requested: bool = True) -> None:
        """Raise an op as far as the gate allows; constants are instead stored in float32 for their readers."""
        op = self.view.ops[op_id]
        if op.kind in _ANY_TYPE or op.kind == "Constant":
            return
        names = self.problem.gate.raisable(self.view, op)
        if not isinstance(names, Paint):
            for name in names:
                self.raised.setdefault((op_id, name), paint)
        elif requested:
            self._refuse(op_id, f"{paint.note}; {names.rule}: {names.note}")

    def _refuse(self, op: OpId, note: str) -> None:
        for variable in self.view.variables[op]:
            self.raised.pop((op, variable.name), None)
        self.refused[op] = Paint(self._low_type(op) or self.problem.to, reasons.UNRAISED, None, note)

    def _affine(self, cluster: Cluster) -> None:
        low = next((dtype for op in cluster.tail if (dtype := self._low_type(op)) is not None), None)
        dtype = self._input_type(cluster, low) if low is not None else None
        for op in cluster.tail if low is not None and dtype is not None else ():
            if self.view.ops[op].kind == "Cast" or self._is_raised(op) is (dtype is DType.FLOAT):
                continue
            if dtype is DType.FLOAT:
                self._raise(op, float32(reasons.RAISED, cluster.ops[0], _AFFINE_NOTE))
            elif low is not None:
                self._refuse(op, f"the input of {cluster.kind} is {low.spelling}, and onnxruntime fuses the two")

    def _raise_copy(self, op: Op) -> None:
        """Raise a copy of a Cast's low result, if only raised ops read it.

        The Cast would round away the digits for which its readers are raised.
        """
        if self._copied(op) is None or any(exposed(self.view, value) for value in op.results):
            return
        uses = [use for value in op.results for use in self.view.uses[value]]
        source = self.view.producer(trail(self.view, op.outputs[0], self._copied)[1], "Cast")
        before = self.view.dtype(source.inputs[0]) if source is not None else None
        if uses and before is not None and not before.low and all(map(self._reads_raised, uses)):
            note = "moves the result of a Cast, and only float32 ops read it"
            self._raise(op.id, float32(reasons.RAISED, uses[0].op, note), requested=False)

    def _copied(self, op: Op) -> ValueId | None:
        """Return the input copied by an op with a low type; None for other ops."""
        moves = COPIES.get(op.kind) == (0,) and op.kind not in CASTS and self._low_type(op.id) is not None
        return op.inputs[0] if moves else None

    def _raise_cast(self, op: Op, requests: Mapping[OpId, Paint]) -> None:
        result = op.outputs[0] if op.kind == "Cast" else None
        if result is None or self.view.dtype(result) not in LOW_TYPES or exposed(self.view, result):
            return
        uses = self.view.uses[result]
        raised = [use for use in uses if self._reads_raised(use)]
        free = [use for use in uses if self.view.ops[use.op].kind in _ANY_TYPE]
        through = op.id in requests and any(self.view.ops[use.op].kind == "Cast" for use in uses)
        if len(raised) + len(free) < len(uses):
            return
        if (raised or through) and (op.id in requests or len(raised) == len(uses)):
            paint = float32(reasons.EXISTING_CAST, raised[0].op if raised else None)
            self.raised[op.id, "T2"] = requests.get(op.id, paint)

    # -- types that follow others ------------------------------------------------------------------

    def follow_casts(self) -> None:
        """Lower the result of a Cast to float32 if all its readers are low."""
        p = self.problem
        for v in p.of_kinds(("Cast",)):
            vertex, out = p.vertices[v], p.op(v).outputs[0]
            if v in self.low or vertex.refusal is not None or "T2" not in vertex.variables or out is None:
                continue
            uses = p.view.uses[out]
            inner = p.view.dtype(out) is DType.FLOAT and not exposed(p.view, out)
            if inner and uses and all(p.reader(use) in self.low for use in uses):
                self.low[v] = Paint(p.to, reasons.EXISTING_CAST, uses[0].op)

    def scales_follow(self, must_stay: Collection[int]) -> None:
        """Give scale and bias of a written-out norm the type of its input if onnxruntime requires it."""
        p = self.problem
        for cluster in p.clusters:
            if (dtype := self._input_type(cluster, p.to)) is None:
                continue
            tail = [v for v in p.of_ops(cluster.tail) if p.op(v).kind != "Cast"]
            high = [v for v in tail if p.vertices[v].op not in p.lower] if dtype is not p.to else []
            if dtype is p.to and all(p.can_be_low(v) and v not in must_stay for v in tail):
                for v in tail:
                    self.low.setdefault(v, Paint(p.to, reasons.NORM_TAIL, cluster.ops[0], _AFFINE_NOTE))
            elif dtype is p.to:  # the input, and the copies upstream of it, must be float32
                passed, source = trail(p.view, cluster.entry, first_input(_SEEN_THROUGH))
                maker = p.view.producer(source)
                high = p.of_ops(op.id for op in (*passed, maker) if op is not None)
            for v in high:
                self.low.pop(v, None)

    def _input_type(self, cluster: Cluster, low: DType) -> DType | None:
        """Return the required type of a norm's input, scale and bias; None if their types may differ."""
        if not cluster.tail or not scale_is_tied(self.view, cluster, low):
            return None
        return self._seen_type(cluster.entry, cluster.ops)

    def _seen_type(self, value: ValueId, readers: Collection[OpId]) -> DType | None:
        """Return a value's type as the runtime sees it when it fuses `readers`, without Casts read only by them."""
        view, dtype, uses = self.view, self.type_at_producer(value), self.view.uses[value]
        needed = next((self.type_at_reader(value, use) for use in uses if use.op in readers), dtype)
        others, edge = [use for use in uses if use.op not in readers], exposed(view, value)
        if dtype is not needed and (
            (edge and view.dtype(value) is needed) or any(self.type_at_reader(value, u) is needed for u in others)
        ):
            return needed
        op = view.producer(value)
        if op is None or op.kind not in _SEEN_THROUGH or op.inputs[0] is None or others or edge:
            return dtype
        return self._seen_type(op.inputs[0], (op.id,))
