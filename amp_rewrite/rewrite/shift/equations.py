"""The shift equations of a model: values that share one exponent, and relations between these classes.

A constant operand takes any power of two, so a law with one does not constrain the others. The rest are laws about
computed values: of two terms with the same factor they make one class of both, others are relations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from networkx.utils import UnionFind

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.shift.laws import Law, OpPort, laws_of

ClassId = int
"""A class of values that share one exponent: one of them."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A law between classes: `factor` times the exponent of `result` is the sum of factor times exponent of `terms`."""

    factor: int
    result: ClassId
    terms: tuple[tuple[int, ClassId], ...]


@dataclass(frozen=True)
class Equations:
    """The laws of each op, and the classes of its computed values.

    `joints` counts, for each class, the Muls that a shift of it needs: values made without one, and values that ops
    read at exponent 0. `heavy` counts the products that read or make its values.
    """

    view: View
    laws: Mapping[OpId, Sequence[Law]]
    classes: Mapping[ValueId, ClassId]
    relations: tuple[Relation, ...]
    joints: Counter[ClassId] = field(default_factory=Counter)
    heavy: Counter[ClassId] = field(default_factory=Counter)

    @classmethod
    def of(cls, view: View) -> Equations:
        """Return the equations of a view. O(nodes + uses)."""
        laws = {op.id: laws_of(view, op) for op in view.ops if op.kind != "Constant"}
        shiftable = [value.id for value in view.values if is_shiftable(view, value.id)]
        union = UnionFind(shiftable)
        pending: list[list[tuple[int, ValueId]]] = []
        for op_id, known in laws.items():
            for law in known:
                terms = _computed(view, view.ops[op_id], law)
                if terms is None:
                    continue
                if len(terms) == 2 and terms[0][0] == -terms[1][0]:
                    union.union(*(value for _, value in terms if value in union.parents))
                elif len(terms) > 1:
                    pending.append(terms)
        classes = {value: union[value] for value in shiftable}
        relations = dict.fromkeys(relation for terms in pending if (relation := _relation(classes, terms)) is not None)
        equations = cls(view, laws, classes, tuple(relations))
        equations._count()
        return equations

    def members(self) -> Mapping[ClassId, Sequence[ValueId]]:
        """Return the values of each class."""
        members: dict[ClassId, list[ValueId]] = {}
        for value, root in self.classes.items():
            members.setdefault(root, []).append(value)
        return members

    def _count(self) -> None:
        view = self.view
        ended = dict.fromkeys(v for scope in view.scopes for v in scope.outputs if v in self.classes)
        started = dict.fromkeys(v for v in self.classes if view.producer(v) is None)
        for op_id, known in self.laws.items():
            op = view.ops[op_id]
            for law in known:
                value = value_at(op, law[0][1]) if len(law) == 1 else None
                if value is not None and value in self.classes:
                    (ended if law[0][1].side == "x" else started)[value] = None
            if op.kind in HEAVY:
                self.heavy.update({self.classes[v] for v in op.ports if v in self.classes})
        self.joints.update(self.classes[value] for value in (*ended, *started))


def is_shiftable(view: View, value: ValueId) -> bool:
    """True for computed or fed float32 tensors, not for constants."""
    return view.tensor_dtype(value) is DType.FLOAT and view.constant(value) is None


def value_at(op: Op, port: OpPort) -> ValueId | None:
    """Return the value at a port; None for an attribute."""
    if port.is_attribute:
        return None
    return (op.inputs if port.side == "x" else op.outputs)[port.slot]


def _computed(view: View, op: Op, law: Law) -> list[tuple[int, ValueId]] | None:
    terms = []
    for factor, port in law:
        value = value_at(op, port)
        if value is None or view.constant(value) is not None:
            return None
        terms.append((factor, value))
    return terms


def _relation(classes: Mapping[ValueId, ClassId], terms: Sequence[tuple[int, ValueId]]) -> Relation | None:
    """Return the relation of a law of three terms or of unequal factors; None if it does not constrain its result."""
    if any(value not in classes for _, value in terms):
        return None
    total: Counter[ClassId] = Counter()
    for factor, value in terms:
        total[classes[value]] -= factor
    result = classes[terms[0][1]]
    head = -total.pop(result)
    kept = tuple((factor, root) for root, factor in total.items() if factor)
    return Relation(head, result, kept) if kept and head > 0 else None
