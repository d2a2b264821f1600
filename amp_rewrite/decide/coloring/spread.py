"""Spread: the rules of TensorFlow's auto_mixed_precision pass, for spreading the colors of the lists along the graph.

Roots from the allow list, deny paint forward, gray ops between two lowered ones, clear ops beside them. Paint is a
closed union, so no rule depends on the order of ops; `gray_after_allow` alone is one sweep in topological order, as in
TensorFlow. The reason for a variable is the op before it on the walk.

Source: TensorFlow 2.20, tensorflow/core/grappler/optimizers/auto_mixed_precision.cc.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import GENERATORS, LABEL_LOSSES, RANDOM
from amp_rewrite.settings.list_entry import Color

_NEVER_FORCED = LABEL_LOSSES | RANDOM | GENERATORS


@dataclass
class Spread:
    """Paint of lowered and of denied vertices; the rules run in this order.

    `roots`: vertices that the lists, the level or the user lowers, whatever is beside them.
    """

    problem: Problem
    low: dict[int, Paint] = field(default_factory=dict)
    denied: dict[int, Paint] = field(default_factory=dict)
    roots: frozenset[int] = frozenset()

    @classmethod
    def of(cls, problem: Problem) -> Spread:
        """Apply the rules to a problem. O(nodes + uses)."""
        spread = cls(problem)
        spread.allow_roots()
        spread.deny_forward()
        spread.deny_sequences()
        spread.between_allow()
        spread.gray_after_allow()
        spread.allow_through_clear()
        spread.allow_sequences()
        return spread

    def allow_roots(self) -> None:
        """Lower every vertex of an op on the allow list, and the roots of the level and the user."""
        p, to = self.problem, self.problem.to
        for v, (op, _, entry, _) in enumerate(p.vertices.all):
            if not p.can(v) or p.widens(p.view.ops[op]):
                continue
            if op in p.options.lower:
                self.low[v] = Paint(to, reasons.LOWER, None, f"lowered by {p.options.lower[op]!r}")
            elif entry.color is Color.ALLOW:
                self.low[v] = Paint(to, reasons.ALLOW_ROOT, None, entry.because)
            elif p.options.level == "lower-all" and entry.color in (Color.GRAY, Color.CLEAR):
                self.low[v] = Paint(to, reasons.LOWER_ALL, None, f"{entry.color.value} list")
            elif p.options.level == "unsafe-force-all" and p.op(v).op_type not in _NEVER_FORCED:
                self.low[v] = Paint(to, reasons.FORCE_ALL, None, "forced by the level")
        self.roots = frozenset(self.low)

    def deny_forward(self) -> None:
        """Deny the ops on the deny list, and every path from one through clear and gray ops to its last deny or gray
        op."""
        p, graph = self.problem, self.problem.vertices.graph
        if p.options.level == "unsafe-force-all":
            return
        denied = [v for v, color in enumerate(p.colors) if color is Color.DENY]
        for v in denied:
            self.denied[v] = Paint.float32(reasons.DENY, None, p.vertices.all[v].entry.because)
        if p.options.level == "lower-all":
            return
        ends = [v for v, color in enumerate(p.colors) if color in (Color.DENY, Color.GRAY)]
        conductors = {*ends, *p.walk(ends, graph.predecessors, self._clear)}
        for v, due in p.walk(denied, graph.successors, conductors.__contains__).items():
            self.denied.setdefault(v, Paint.float32(reasons.DENY_FORWARD, due))

    def deny_sequences(self) -> None:
        """Deny a whole sequence if one of its vertices is denied or cannot be low."""
        p = self.problem
        for v, group in p.vertices.tied.items():
            due = next((w for w in group if w in self.denied or not p.can(w)), None)
            if due is not None:
                self.low.pop(v, None)
                note = "a sequence that other ops share stays float32"
                self.denied.setdefault(v, Paint.float32(reasons.SEQUENCE_CLUSTER, p.vertices.all[due].op, note))

    def allow_sequences(self) -> None:
        """Lower a whole sequence if one of its vertices is low."""
        p = self.problem
        for v, group in p.vertices.tied.items():
            due = next((w for w in group if w in self.low), None)
            if due is not None:
                self.low.setdefault(v, Paint(p.to, reasons.SEQUENCE_CLUSTER, p.vertices.all[due].op))

    def between_allow(self) -> None:
        """Lower gray and clear ops on a path between two allowed ops with no denied op on it."""
        p, graph = self.problem, self.problem.vertices.graph
        roots = [v for v in self.low if p.colors[v] is Color.ALLOW]
        soft = (Color.GRAY, Color.CLEAR)
        downstream = p.walk(roots, graph.successors, lambda v: p.colors[v] in soft and self._free(v))
        for v, due in p.walk(roots, graph.predecessors, downstream.__contains__).items():
            note = p.why_unneeded(v)
            self.low.setdefault(v, Paint(p.to, reasons.BETWEEN_ALLOW, due, note))

    def gray_after_allow(self) -> None:
        """Lower a gray op right after a lowered op and no denied one, as TensorFlow 2.20 does."""
        p, follows = self.problem, self.problem.options.gray_follows_allow
        if not (p.to is DType.BFLOAT16 if follows is None else follows):
            return
        for v, color in enumerate(p.colors):
            if color is not Color.GRAY or v in self.low or not self._free(v):
                continue
            sources = list(p.vertices.graph.predecessors(v))
            due = next((s for s in sources if s in self.low), None)
            if due is not None and self.denied.keys().isdisjoint(sources):
                self.low[v] = Paint(p.to, reasons.GRAY_FOLLOWS_ALLOW, p.vertices.all[due].op)

    def allow_through_clear(self) -> None:
        """Lower clear ops beside a lowered op, upstream or downstream, transitively."""
        p, graph = self.problem, self.problem.vertices.graph

        def near(v: int) -> Iterable[int]:
            return (*graph.predecessors(v), *graph.successors(v))

        for v, due in p.walk(list(self.low), near, lambda v: self._clear(v) and self._free(v)).items():
            self.low[v] = Paint(p.to, reasons.ALLOW_THROUGH_CLEAR, due)

    def _clear(self, v: int) -> bool:
        return self.problem.colors[v] is Color.CLEAR

    def _free(self, v: int) -> bool:
        return v not in self.denied and self.problem.can(v)
