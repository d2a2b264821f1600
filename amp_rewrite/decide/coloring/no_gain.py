"""What a low type is for: ops that no lowered product needs in it become float32 again.

It runs between the spreading of colors and the placement of the border, since it depends on both sides of an op; facts
and needs depend on the model alone.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import networkx as nx

from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.needs.limits import Limits
from amp_rewrite.ir.dataflow import first_input_of, only_reader, orders, origin
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.op_classes import (
    CASTS,
    COPIES,
    ELEMENTLESS,
    HEAVY,
    PAIR_SUMS,
    POOLS,
    REDUCTIONS,
    SCALINGS,
    SOFTMAXES,
    SUMS,
    TENSOR_CORE_STEP,
)
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.view import Op, OpId, ValueId
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import Color

_SPREAD_LEVELS = (Level.LOWER_ALL, Level.UNSAFE_FORCE_ALL)
"""Levels at which the user asks for low ops wherever the type has a kernel."""

_copied = first_input_of(COPIES)


@dataclass
class Border:
    """The border that the spread of colors leaves: low vertices, and a note for each that becomes float32 again."""

    problem: Problem
    low: set[int]
    raised: dict[int, str] = field(default_factory=dict)

    # -- facts -------------------------------------------------------------------------------------

    @cached_property
    def held(self) -> frozenset[int]:
        """Vertices that stay low in the end: those in sequences, of ops that the user lowers, and elementless ones."""
        p = self.problem
        return frozenset(
            (*chain(*p.vertices.sequences), *p.of_ops(p.options.lower), *p.of_kinds(ELEMENTLESS)),
        )

    @property
    def movable(self) -> list[int]:
        """The low vertices that may become float32, in order."""
        return sorted(self.low - self.held)

    @property
    def products(self) -> list[int]:
        """The low products, in order."""
        return [v for v in self.problem.of_kinds(HEAVY) if v in self.low]

    @cached_property
    def groups(self) -> Mapping[OpId, Cluster]:
        """The written-out norm, softmax or activation of each op that is part of one."""
        return {op: cluster for cluster in self.problem.options.clusters for op in cluster.ops}

    def varying(self, v: int) -> list[ValueId]:
        """Return the values that a vertex reads, without constants and copies of these."""
        read, view = dict.fromkeys(self.problem.ports(v)[0]), self.problem.view
        return [value for value in read if view.constant(origin(view, value, _copied)) is None]

    def is_low(self, value: ValueId) -> bool:
        """True if a value is made, or fed, in the low type."""
        if value in self.problem.options.low_inputs or self.problem.maker(value) in self.low:
            return True
        dtype = self.problem.view.dtype(value)
        return dtype is not None and dtype.low and not self.problem.made_raised(value)

    def read_in_float32(self, value: ValueId) -> bool:
        """True if a value leaves its graph in float32, or an op reads its elements in float32."""
        p = self.problem
        if value in p.view.yielded and value not in p.options.low_inputs:
            return True
        return any(p.reader(use) not in self.low for use in p.element_uses(value))

    def raise_(self, v: int, note: str) -> None:
        """Make a vertex float32."""
        self.low.remove(v)
        self.raised[v] = note

    # -- tiny products -----------------------------------------------------------------------------

    def tiny_products(self) -> None:
        """Keep connected low ops in float32 if all their products sum fewer than 8 terms."""
        p, products = self.problem, self.products
        tiny = p.tiny & self.low
        if not tiny:
            return
        clustered = (op for cluster in p.options.clusters if cluster.kind == "softmax" for op in cluster.ops)
        softmaxes = [*p.of_ops(clustered), *p.of_kinds(SOFTMAXES)]
        others = {*(v for v in products if v not in tiny), *softmaxes, *chain(*p.vertices.sequences)}
        for part in list(nx.weakly_connected_components(p.vertices.graph.subgraph(self.low))):
            if not part.isdisjoint(tiny) and part.isdisjoint(others):
                for v in part - self.held:
                    note = f"its products sum fewer than {TENSOR_CORE_STEP} terms, and float32 spares the Casts"
                    self.raise_(v, note)

    # -- values that no product made ---------------------------------------------------------------

    def raw_values(self) -> None:
        """Keep clear ops, sums and products of raw values in float32 where a reader needs float32."""
        p, raw, made = self.problem, set[int](), set(self.low)
        for v in self.movable:
            op = p.op(v)
            if (op.kind != "Concat" and not made.isdisjoint(p.vertices.graph.pred[v])) or op.kind in HEAVY:
                continue
            if p.colors[v] is not Color.CLEAR and op.kind not in PAIR_SUMS | {"Mul"}:
                continue
            of_raw = [p.maker(r) in raw or not (self.is_low(r) or r in self.behind) for r in self.varying(v)]
            if of_raw and (any(of_raw) if op.kind == "Concat" else all(of_raw)):
                raw.add(v)
                made.remove(v)
        for v in sorted(raw, reverse=True):
            if self._leaves_floats(p.op(v)) or any(map(self.read_in_float32, p.ports(v)[1])):
                self.raise_(v, "no product made what it reads, and not all its readers are low")

    @cached_property
    def behind(self) -> set[ValueId]:
        """The values that are computed from the result of a low product, in either type."""
        p = self.problem
        behind = p.view.after({p.vertices.all[v].op for v in self.products})
        return {value for op_id in behind for value in p.view.ops[op_id].results}

    def _leaves_floats(self, op: Op) -> bool:
        """True for a Cast to a type that is not floating."""
        dtype = self.problem.view.dtype(op.outputs[0]) if op.kind in CASTS else None
        return dtype is not None and not dtype.floating

    # -- behind the last product -------------------------------------------------------------------

    def last_product(self) -> None:
        """Keep ops behind the last lowered product in float32, unless they are exact or spare a Cast."""
        before, rounded = before_products(self.problem, self.low), dict[int, int]()
        for v in self.movable:
            op, read = self.problem.op(v), self.varying(v)
            if op.id in before or not read:
                continue
            low = [value for value in read if self.is_low(value)]
            makers = (self.problem.maker(value) for value in low)
            steps = max((rounded.get(maker, 0) for maker in makers if maker is not None), default=0)
            group = self.groups.get(op.id)
            high = len(read) - len(low)  # as many Casts in front of a low op, and one behind it
            follows = len(low) > high + 1 if high else bool(low)
            if op.kind in HEAVY or (follows and (exact(op) or op.kind in COPIES or self._is_bias(op))):
                rounded[v] = steps
            elif group is not None and group.entry not in read and low:
                rounded[v] = steps  # the first op decides for all
            elif low and steps == 0 and self._on_a_branch(group.ops[-1] if group is not None else op.id):
                rounded[v] = steps
            elif low and self._spares_casts(op, group, len(low), steps):
                rounded[v] = steps + 1
            else:
                self.raise_(v, "no lowered product reads what it computes")

    def _is_bias(self, op: Op) -> bool:
        """True if an op adds a moderate constant to the result of a low product: its bias."""
        view, to = self.problem.view, self.problem.to
        for value, constant in orders(op) if op.kind in PAIR_SUMS else ():
            constant = origin(view, constant, _copied)
            if view.constant(constant) is not None:
                maker, fit = view.producer(origin(view, value, _copied)), view.fit(constant, to)
                moderate = fit.absmax <= Limits.of(to).beside and not fit.nonfinite
                return maker is not None and maker.kind in HEAVY and moderate
        return False

    def _spares_casts(self, op: Op, group: Cluster | None, operands: int, steps: int) -> bool:
        """True if an op would take more Casts, or larger ones, in float32; or is the norm behind such a sum."""
        view = self.problem.view
        if steps == 0 and group is None and (operands > 1 or op.kind in REDUCTIONS or op.kind in POOLS):
            return True
        if not any((dtype := view.dtype(value)) is not None and dtype.floating for value in op.results):
            return True
        norm = group.kind.endswith("normalization") if group is not None else op.kind.endswith("Normalization")
        summed = view.producer(group.entry if group is not None else op.inputs[0])
        return norm and steps == 1 and summed is not None and summed.kind in SUMS

    def _on_a_branch(self, op_id: OpId) -> bool:
        """True if an op scales or normalizes a branch: its result is for the sum of two low values alone."""
        view = self.problem.view
        op = view.ops[op_id]
        total = only_reader(view, op.outputs[0], *PAIR_SUMS)
        scales = op.kind in SCALINGS or op.kind.endswith("Normalization")
        return scales and total is not None and all(map(self.is_low, total.operands))


def before_products(problem: Problem, low: Container[int]) -> set[OpId]:
    """Return the ops that a low product depends on, and ops whose bodies contain such a product.

    What the user lowers, ops and outputs, counts as a product.
    """
    view = problem.view
    products = {problem.vertices.all[v].op for v in problem.of_kinds(HEAVY) if v in low} | problem.options.lower.keys()
    owners = {owner for op in products for owner in view.owners(op)}
    made = {made_by.id for value in problem.options.low_inputs if (made_by := view.producer(value)) is not None}
    sources = {source for op in (*products, *owners) for source in view.flow.predecessors(op)}
    return view.before(owners | made | sources)


def no_gain(problem: Problem, low: Collection[int]) -> Mapping[int, str]:
    """Return a note for each low vertex that no lowered product needs in the low type. O(nodes + uses)."""
    if not problem.hazards.guarded or problem.options.level in _SPREAD_LEVELS:
        return {}
    border = Border(problem, set(low))
    border.tiny_products()
    border.raw_values()
    border.last_product()
    return border.raised
