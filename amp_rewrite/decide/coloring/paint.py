"""The painter: may by TensorFlow's rules, must not by needs, and the border between the types by a cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.affine import scales_follow
from amp_rewrite.decide.coloring.coloring import Coloring, Paint
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.placement import placed, unplaced
from amp_rewrite.decide.coloring.problem import PaintOptions, Problem, Vertices, entries_of
from amp_rewrite.decide.coloring.raising import Raised
from amp_rewrite.decide.coloring.spread import Spread
from amp_rewrite.decide.needs.find import Needs
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed
from amp_rewrite.ir.schema import unknown
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.op_lists import OpLists


def paint(
    view: View,
    lists: OpLists,
    to: DType,
    options: PaintOptions | None = None,
    needs: Needs | None = None,
) -> Coloring:
    """Return a color for every float32 type variable of a model, with the rule and the op behind each.

    The gate wins over `options.keep` and `options.lower`, they win over pins, and pins over the lists. Low ops that
    `keep`, and pins with `raises`, name become float32 (`raising`). O(nodes + uses), the cut apart.

    Args:
        view: the model's index.
        lists: the lists in force.
        to: float16 or bfloat16.
        options: level, target, patterns, pins and placement.
        needs: pins of safety rules.

    Returns:
        The coloring.
    """
    options, needs = options or PaintOptions(), needs or Needs()
    gate = Gate(options.target, to)
    entries = entries_of(view, lists.at_level(options.level))
    problem = Problem(view, Vertices.build(view, entries, gate), to, options, needs)
    raised = Raised.of(problem, gate)
    problem = replace(problem, raised=raised.paints)
    spread = Spread.of(problem)
    low, high = (placed if options.place else unplaced)(problem, spread)
    idle = {v for v, paint in high.items() if paint.rule == reasons.NO_GAIN}
    low = scales_follow(problem, _follow_casts(problem, low), idle)
    paints: dict[tuple[OpId, str], Paint] = dict(raised.paints)
    for v, vertex in enumerate(problem.vertices.all):
        decided = low.get(v) or _reason(problem, v, high.get(v) or spread.denied.get(v))
        paints.update(((vertex.op, name), decided) for name in vertex.variables)
    decided_ops = {op for op, _ in paints}
    for op in view.ops:
        if op.id not in decided_ops and (edge := _edge(problem, op)) is not None:
            paints[op.id, ""] = edge
    return Coloring(to, paints, entries, raised.refused)


def _follow_casts(problem: Problem, low: Mapping[int, Paint]) -> dict[int, Paint]:
    """Lower the result of a Cast to float32 with lowered readers alone."""
    p, low = problem, dict(low)
    for v in p.of_kinds(("Cast",)):
        vertex, out = p.vertices.all[v], p.op(v).outputs[0]
        if v in low or vertex.refusal is not None or "T2" not in vertex.variables or out is None:
            continue
        uses = p.view.uses[out]
        if p.view.dtype(out) is not DType.FLOAT or exposed(p.view, out) or not uses:
            continue
        if all(p.reader(use) in low for use in uses):
            low[v] = Paint(p.to, reasons.EXISTING_CAST, uses[0].op)
    return low


def _reason(problem: Problem, v: int, found: Paint | None) -> Paint:
    vertex, color = problem.vertices.all[v], problem.colors[v]
    if vertex.op in problem.pinned or found is not None:
        return problem.pinned.get(vertex.op) or found or Paint.float32(reasons.UNPAINTED, None)
    if vertex.refusal is not None and (color is not Color.UNLISTED or vertex.op in problem.options.lower):
        return Paint.float32(*vertex.refusal)
    if color is Color.UNLISTED:
        return Paint.float32(reasons.UNLISTED, None, vertex.entry.because)
    return Paint.float32(reasons.UNPAINTED, None, _UNPAINTED[color].format(low=problem.to.spelling))


def _edge(problem: Problem, op: Op) -> Paint | None:
    view = problem.view
    untyped = next((v for v in op.ports if unknown(view.types[v])), None)
    if untyped is not None:
        made_by = view.values[untyped].producer
        note = f"the element type of {view.value_name(untyped)!r} is unknown"
        return Paint.float32(reasons.UNKNOWN_TYPE, made_by if made_by != op.id else None, note)
    if not any(view.dtype(v) is DType.FLOAT for v in op.ports):
        return None
    note = "the edges of bodies keep their type" if op.bodies else f"{op.kind} is not a known operator"
    return Paint.float32(reasons.BOUNDARY, None, note)


_UNPAINTED: Mapping[Color, str] = {
    Color.ALLOW: "not lowered",
    Color.GRAY: "gray: not between two {low} ops",
    Color.CLEAR: "clear: no {low} op beside it",
    Color.DENY: "on the deny list",
    Color.UNLISTED: "on no list",
}
