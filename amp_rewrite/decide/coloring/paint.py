"""The painter: what may be low by TensorFlow's rules, what must not, and where the border between the types lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring, Paint
from amp_rewrite.decide.coloring.follow import follow_casts, scales_follow
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.may import May
from amp_rewrite.decide.coloring.problem import PaintOptions, Problem
from amp_rewrite.decide.coloring.upcast import upcast_low
from amp_rewrite.decide.coloring.vertices import Vertices, entries_of
from amp_rewrite.decide.coloring.where import spread, where
from amp_rewrite.decide.needs.find import Hazards
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.schema import unknown
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.op_lists import OpLists


def paint(
    view: View,
    lists: OpLists,
    to: DType,
    options: PaintOptions | None = None,
    hazards: Hazards | None = None,
) -> Coloring:
    """Return a color for every float32 type variable of a model, with the rule and the op behind each.

    The gate wins over `options.keep` and `options.lower`, they win over pins, and pins over the lists. Low ops that
    `keep`, and pins with `raises`, name become float32 (`upcast`). O(nodes + uses), the cut apart.

    Args:
        view: the model's index.
        lists: the lists in force.
        to: float16 or bfloat16.
        options: level, target, patterns, pins and placement.
        hazards: pins of safety rules.

    Returns:
        The coloring.
    """
    options, hazards = options or PaintOptions(), hazards or Hazards()
    gate = Gate(options.target, to)
    entries = entries_of(view, lists.at_level(options.level))
    problem = Problem(view, Vertices.build(view, entries, gate), to, options, hazards)
    raised = upcast_low(problem, gate)
    problem = replace(problem, raised=raised.upcast)
    may = May.of(problem)
    low, high = (where if options.place else spread)(problem, may)
    idle = {v for v, paint in high.items() if paint.rule == reasons.NO_GAIN}
    low = scales_follow(problem, follow_casts(problem, low), idle)
    paints: dict[tuple[OpId, str], Paint] = dict(raised.upcast)
    by_op: dict[OpId, tuple[str, ...]] = {}
    for op_id, name in raised.upcast:
        by_op[op_id] = (*by_op.get(op_id, ()), name)
    for v, vertex in enumerate(problem.vertices.all):
        decided = low.get(v) or _reason(problem, v, high.get(v) or may.denied.get(v))
        for name in vertex.variables:
            paints[vertex.op, name] = decided
        by_op[vertex.op] = (*by_op[vertex.op], *vertex.variables) if vertex.op in by_op else vertex.variables
    for op in view.ops:
        if op.id not in by_op and (edge := _edge(problem, op)) is not None:
            paints[op.id, ""] = edge
            by_op[op.id] = ("",)
    return Coloring(to, paints, entries, by_op, raised.refused)


def _reason(problem: Problem, v: int, found: Paint | None) -> Paint:
    """Return the strongest reason for which a vertex is not low."""
    vertex, color = problem.vertices.all[v], problem.colors[v]
    if vertex.op in problem.held or found is not None:
        return problem.held.get(vertex.op) or found or problem.high(reasons.UNPAINTED, None)
    if vertex.refusal is not None and (color is not Color.UNLISTED or vertex.op in problem.options.lower):
        return problem.high(vertex.refusal.rule, None, vertex.refusal.note)
    if color is Color.UNLISTED:
        return problem.high(reasons.UNLISTED, None, vertex.entry.because)
    return problem.high(reasons.UNPAINTED, None, _UNPAINTED[color].format(low=problem.to.spelling))


def _edge(problem: Problem, op: Op) -> Paint | None:
    """Return the reason for which an op without a vertex stays as it is; None for an op without float32."""
    view = problem.view
    untyped = next((v for v in op.ports if unknown(view.types[v])), None)
    if untyped is not None:
        made_by = view.values[untyped].producer
        note = f"the element type of {view.value_name(untyped)!r} is unknown"
        return problem.high(reasons.UNKNOWN_TYPE, made_by if made_by != op.id else None, note)
    if not any(view.dtype(v) is DType.FLOAT for v in op.ports):
        return None
    note = "the edges of bodies keep their type" if op.bodies else f"{op.kind} is not a known operator"
    return problem.high(reasons.BOUNDARY, None, note)


_UNPAINTED: Mapping[Color, str] = {
    Color.ALLOW: "not lowered",
    Color.GRAY: "gray: not between two {low} ops",
    Color.CLEAR: "clear: no {low} op beside it",
    Color.DENY: "on the deny list",
    Color.UNLISTED: "on no list",
}
