"""The painter: may by TensorFlow's rules, must not by needs, and the border between the types by a cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.placement import place, place_without_cut
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.coloring.raising import AFFINE_NOTE, SEEN_THROUGH, Raised, input_type
from amp_rewrite.decide.coloring.spread import Spread
from amp_rewrite.decide.reasons import Paint, float32
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import exposed, first_input_of, trail
from amp_rewrite.ir.op_classes import LOW_ONLY
from amp_rewrite.ir.schema import unknown
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View
from amp_rewrite.settings.list_entry import Color, Entry


@dataclass(frozen=True, repr=False)
class Coloring:
    """The paint of every float32 type variable, by op and name; ops without a variable (If, Loop, custom ops …) use "".

    Type variables that are low in the model are included only if they are raised. `entries`: the list entry of each op.
    `unraised`: ops that keep their low type against a wish for float32, with the reason.
    """

    to: DType
    paints: Mapping[tuple[OpId, str], Paint]
    entries: tuple[Entry, ...]
    unraised: Mapping[OpId, Paint]
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        return f"<Coloring: {len(self.low)} of {len(self.paints)} type variables in {self.to.spelling}>"

    def of(self, op: OpId) -> Paint | None:
        """Return the paint of a lowered variable of an op, else of its first; None for an undecided op."""
        paints = self._by_op.get(op, ())
        return next((p for p in paints if p.dtype is self.to), paints[0] if paints else self.unraised.get(op))

    @cached_property
    def _by_op(self) -> Mapping[OpId, Sequence[Paint]]:
        known: dict[OpId, list[Paint]] = {}
        for (op, _), paint in self.paints.items():
            known.setdefault(op, []).append(paint)
        return known

    def dtype(self, op: OpId, variable: str | None) -> DType | None:
        """Return the new type of an op's variable; None if it keeps its own."""
        paint = self.paints.get((op, variable)) if variable is not None else None
        return paint.dtype if paint is not None else None

    @property
    def low(self) -> frozenset[tuple[OpId, str]]:
        """Lowered variables, by op and name."""
        return frozenset(variable for variable, paint in self.paints.items() if paint.dtype is self.to)

    def opens(self, view: View) -> bool:
        """True if every op with kernels for low types alone is low."""
        return {op.id for op in view.of_kinds(LOW_ONLY)} <= {op for op, _ in self.low}

    @property
    def float32_ops(self) -> int:
        return len({op for op, _ in self.paints} - {op for op, _ in self.low})

    @property
    def changes(self) -> bool:
        return any(p.dtype is self.to or p.rule == reasons.RAISED for p in self.paints.values())


def paint(problem: Problem) -> Coloring:
    """Return a color for every float32 type variable of a model, with the rule and the op behind each.

    The gate wins over `keep` and `lower`, they win over pins, and pins over the lists. Low ops that
    `keep`, and pins with `raises`, name become float32 (`raising`). O(nodes + uses), the cut apart.
    """
    view, raised, spread = problem.view, Raised(problem), Spread(problem)
    low, high = (place if problem.place else place_without_cut)(problem, spread)
    idle = {v for v, paint in high.items() if paint.rule == reasons.NO_GAIN}
    _follow_casts(problem, low)
    _scales_follow(problem, raised, low, idle)
    paints: dict[tuple[OpId, str], Paint] = dict(raised.paints)
    for v, vertex in enumerate(problem.vertices):
        decided = low.get(v) or _reason(problem, v, high.get(v) or spread.denied.get(v))
        paints.update(((vertex.op, name), decided) for name in vertex.variables)
    decided_ops = {op for op, _ in paints}
    for op in view.ops:
        if op.id not in decided_ops and (edge := _edge(problem, op)) is not None:
            paints[op.id, ""] = edge
    refused = (Finding(reasons.UNRAISED, view.ops[op].name, paint.note) for op, paint in raised.refused.items())
    return Coloring(problem.to, paints, problem.entries, raised.refused, tuple(refused))


def _follow_casts(p: Problem, low: dict[int, Paint]) -> None:
    """Lower the result of a Cast to float32 with lowered readers alone."""
    for v in p.of_kinds(("Cast",)):
        vertex, out = p.vertices[v], p.op(v).outputs[0]
        if v in low or vertex.refusal is not None or "T2" not in vertex.variables or out is None:
            continue
        uses = p.view.uses[out]
        inner = p.view.dtype(out) is DType.FLOAT and not exposed(p.view, out)
        if inner and uses and all(p.reader(use) in low for use in uses):
            low[v] = Paint(p.to, reasons.EXISTING_CAST, uses[0].op)


def _scales_follow(p: Problem, raised: Raised, low: dict[int, Paint], must: Collection[int]) -> None:
    """Give scale and bias of a written-out norm the type of its input if onnxruntime refuses another."""

    def made(value: ValueId) -> DType | None:
        return p.to if p.maker(value) in low else raised.made(value)

    def read(value: ValueId, use: Use) -> DType | None:
        unlowered = made(value) if p.view.ops[use.op].kind == "Cast" else DType.FLOAT
        return p.to if p.reader(use) in low else unlowered

    for cluster in p.clusters:
        if (dtype := input_type(p.view, cluster, p.to, made, read)) is None:
            continue
        tail = [v for v in p.of_ops(cluster.tail) if p.op(v).kind != "Cast"]
        high = [v for v in tail if p.vertices[v].op not in p.lower] if dtype is not p.to else []
        if dtype is p.to and all(p.can(v) and v not in must for v in tail):
            for v in tail:
                low.setdefault(v, Paint(p.to, reasons.NORM_TAIL, cluster.ops[0], AFFINE_NOTE))
        elif dtype is p.to:  # the input, and the copies before it, have to be float32
            passed, source = trail(p.view, cluster.entry, first_input_of(SEEN_THROUGH))
            maker = p.view.producer(source)
            high = p.of_ops(op.id for op in (*passed, maker) if op is not None)
        for v in high:
            low.pop(v, None)


def _reason(problem: Problem, v: int, found: Paint | None) -> Paint:
    vertex, color = problem.vertices[v], problem.colors[v]
    if vertex.op in problem.pinned or found is not None:
        return problem.pinned.get(vertex.op) or found or float32(reasons.UNPAINTED, None)
    if vertex.refusal is not None and (color is not Color.UNLISTED or vertex.op in problem.lower):
        return vertex.refusal
    if color is Color.UNLISTED:
        return float32(reasons.UNLISTED, None, vertex.entry.because)
    return float32(reasons.UNPAINTED, None, _UNPAINTED[color].format(low=problem.to.spelling))


def _edge(problem: Problem, op: Op) -> Paint | None:
    view = problem.view
    untyped = next((v for v in op.ports if unknown(view.types[v])), None)
    if untyped is not None:
        made_by = view.values[untyped].producer
        note = f"the element type of {view.value_name(untyped)!r} is unknown"
        return float32(reasons.UNKNOWN_TYPE, made_by if made_by != op.id else None, note)
    if not any(view.dtype(v) is DType.FLOAT for v in op.ports):
        return None
    note = "the edges of bodies keep their type" if op.bodies else f"{op.kind} is not a known operator"
    return float32(reasons.BOUNDARY, None, note)


_UNPAINTED: Mapping[Color, str] = {
    Color.ALLOW: "not lowered",
    Color.GRAY: "gray: not between two {low} ops",
    Color.CLEAR: "clear: no {low} op beside it",
    Color.DENY: "on the deny list",
    Color.UNLISTED: "on no list",
}
