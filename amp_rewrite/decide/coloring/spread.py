"""Spread: the rules of TensorFlow's auto_mixed_precision pass, for spreading the colors of the lists along the graph.

Roots from the allow list, deny paint forward, gray ops between two lowered ones, clear ops beside them. Paint is a
closed union, so no rule depends on the order of ops; `gray_after_allow` alone is one sweep in topological order, as in
TensorFlow. The reason for a variable is the op before it on the walk.

Source: TensorFlow 2.20, tensorflow/core/grappler/optimizers/auto_mixed_precision.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.reasons import Paint, float32
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import GENERATORS, LABEL_LOSSES, RANDOM
from amp_rewrite.ir.view import OpId
from amp_rewrite.settings.list_entry import Color

_NEVER_FORCED = LABEL_LOSSES | RANDOM | GENERATORS


@dataclass
class Spread:
    """Paint of lowered and of denied vertices; the rules run in this order. O(nodes + uses).

    `roots`: vertices that the lists, the level or the user lowers, whatever is beside them.
    """

    problem: Problem
    low: dict[int, Paint] = field(default_factory=dict)
    denied: dict[int, Paint] = field(default_factory=dict)
    roots: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.allow_roots()
        self.deny_forward()
        self.deny_sequences()
        self.between_allow()
        self.gray_after_allow()
        self.allow_through_clear()
        self.allow_sequences()

    def allow_roots(self) -> None:
        """Lower every vertex of an op on the allow list, and the roots of the level and the user."""
        p, to, level = self.problem, self.problem.to, self.problem.level
        for v, (op, _, entry, _) in enumerate(p.vertices):
            if not p.can(v) or p.widens(p.view.ops[op]):
                continue
            if op in p.lower:
                self.low[v] = Paint(to, reasons.LOWER, None, f"lowered by {p.lower[op]!r}")
            elif entry.color is Color.ALLOW:
                self.low[v] = Paint(to, reasons.ALLOW_ROOT, None, entry.because)
            elif level == "lower-all" and entry.color in (Color.GRAY, Color.CLEAR):
                self.low[v] = Paint(to, reasons.LOWER_ALL, None, f"{entry.color.value} list")
            elif level == "unsafe-force-all" and p.op(v).op_type not in _NEVER_FORCED:
                self.low[v] = Paint(to, reasons.FORCE_ALL, None, "forced by the level")
        self.roots = frozenset(self.low)

    def deny_forward(self) -> None:
        """Deny the ops on the deny list, and every path from one through clear and gray ops to its last deny or gray
        op."""
        p, graph = self.problem, self.problem.graph
        if p.level == "unsafe-force-all":
            return
        denied = [v for v, color in enumerate(p.colors) if color is Color.DENY]
        self.denied = {v: float32(reasons.DENY, None, p.vertices[v].entry.because) for v in denied}
        if p.level == "lower-all":
            return
        ends = [v for v, color in enumerate(p.colors) if color in (Color.DENY, Color.GRAY)]
        conductors = {*ends, *self._walk(ends, graph.predecessors, self._clear)}
        for v, due in self._walk(denied, graph.successors, conductors.__contains__).items():
            self.denied.setdefault(v, float32(reasons.DENY_FORWARD, due))

    def deny_sequences(self) -> None:
        """Deny a whole sequence if one of its vertices is denied or cannot be low."""
        for v, due in self._shared(lambda w: w in self.denied or not self.problem.can(w)):
            self.low.pop(v, None)
            note = "a sequence that other ops share stays float32"
            self.denied.setdefault(v, float32(reasons.SEQUENCE_CLUSTER, due, note))

    def allow_sequences(self) -> None:
        """Lower a whole sequence if one of its vertices is low."""
        for v, due in self._shared(self.low.__contains__):
            self.low.setdefault(v, Paint(self.problem.to, reasons.SEQUENCE_CLUSTER, due))

    def _shared(self, decides: Callable[[int], bool]) -> Iterator[tuple[int, OpId]]:
        for v, group in self.problem.tied.items():
            if (due := next(filter(decides, group), None)) is not None:
                yield v, self.problem.vertices[due].op

    def between_allow(self) -> None:
        """Lower gray and clear ops on a path between two allowed ops with no denied op on it."""
        p, graph = self.problem, self.problem.graph
        roots = [v for v in self.low if p.colors[v] is Color.ALLOW]
        soft = (Color.GRAY, Color.CLEAR)
        downstream = self._walk(roots, graph.successors, lambda v: p.colors[v] in soft and self._free(v))
        for v, due in self._walk(roots, graph.predecessors, downstream.__contains__).items():
            self.low.setdefault(v, Paint(p.to, reasons.BETWEEN_ALLOW, due, p.why_unneeded(v)))

    def gray_after_allow(self) -> None:
        """Lower a gray op right after a lowered op and no denied one, as TensorFlow 2.20 does."""
        p, follows = self.problem, self.problem.gray_follows_allow
        if not (p.to is DType.BFLOAT16 if follows is None else follows):
            return
        for v, color in enumerate(p.colors):
            if color is not Color.GRAY or v in self.low or not self._free(v):
                continue
            sources = list(p.graph.predecessors(v))
            due = next((s for s in sources if s in self.low), None)
            if due is not None and self.denied.keys().isdisjoint(sources):
                self.low[v] = Paint(p.to, reasons.GRAY_FOLLOWS_ALLOW, p.vertices[due].op)

    def allow_through_clear(self) -> None:
        """Lower clear ops beside a lowered op, upstream or downstream, transitively."""
        p, graph = self.problem, self.problem.graph

        def near(v: int) -> Iterable[int]:
            return (*graph.predecessors(v), *graph.successors(v))

        for v, due in self._walk(list(self.low), near, lambda v: self._clear(v) and self._free(v)).items():
            self.low[v] = Paint(p.to, reasons.ALLOW_THROUGH_CLEAR, due)

    def _clear(self, v: int) -> bool:
        return self.problem.colors[v] is Color.CLEAR

    def _free(self, v: int) -> bool:
        return v not in self.denied and self.problem.can(v)

    def _walk(
        self, starts: Iterable[int], near: Callable[[int], Iterable[int]], enter: Callable[[int], bool]
    ) -> dict[int, OpId]:
        """Return the vertices reached from `starts` through those admitted by `enter`, each with the op before it.

        networkx's walks want a copy of the subgraph for each: 11 s at 49 500 ops, this one takes 0.1.
        """
        queue = list(starts)
        seen = set(queue)
        reached: dict[int, OpId] = {}
        for v in queue:
            for w in near(v):
                if w not in seen and enter(w):
                    seen.add(w)
                    reached[w] = self.problem.vertices[v].op
                    queue.append(w)
        return reached
