"""How numbers travel: through copies, arithmetic and small reductions, and across the edges of bodies.

What a value is computed from is asked of tables that name, for each operator, the inputs whose numbers its
result is made of. An operator on no table stops every walk: products over a long axis, attention,
normalization, recurrent cells, and whatever gives an index or a truth value (ArgMax, TopK, NonZero,
comparisons, Shape).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import CARRIERS, Slots
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN
from amp_rewrite.ir.view import Op, OpId, Scope, ValueId, View

Cause = TypeVar("Cause")

INTEGERS = frozenset(d for d in DType if d.name.startswith(("INT", "UINT")))


@dataclass(frozen=True, slots=True)
class Flow:
    """Walks over a view along one table of operators. Each walk is O(values touched + their uses)."""

    view: View
    slots: Slots
    _origins: Mapping[ValueId, tuple[ValueId, ...]]
    _fates: Mapping[ValueId, tuple[ValueId, ...]]

    @classmethod
    def of(cls, view: View, slots: Slots = CARRIERS) -> Flow:
        """The walker for one table; bodies of If, Loop, Scan and SequenceMap are walked into and out of."""
        origins: dict[ValueId, tuple[ValueId, ...]] = {}
        fates: dict[ValueId, tuple[ValueId, ...]] = {}
        for into, source in _seams(view):
            origins[into] = (*origins.get(into, ()), source)
            fates[source] = (*fates.get(source, ()), into)
        return cls(view, slots, origins, fates)

    def through(self, op: Op) -> Sequence[int]:
        """The inputs whose numbers the op's result is made of; none for an op that stops the walk."""
        return self.slots.get(op.kind, ())

    def sources(self, value: ValueId) -> Iterator[ValueId]:
        """What a value is made of, one step up."""
        made_by = self.view.producer(value)
        if made_by is not None:
            for slot in self.through(made_by):
                if slot >= len(made_by.inputs):
                    break
                read = made_by.inputs[slot]
                if read is not None:
                    yield read
        yield from self._origins.get(value, ())

    def results(self, value: ValueId) -> Iterator[ValueId]:
        """What is made of a value, one step down."""
        for use in self.view.uses[value]:
            op = self.view.ops[use.op]
            if use.slot in self.through(op):
                yield from (v for v in op.outputs if v is not None)
        yield from self._fates.get(value, ())

    def back(
        self, starts: Mapping[ValueId, Cause], enter: Callable[[ValueId], bool] = lambda _: True
    ) -> dict[ValueId, Cause]:
        """Every value that the starts are made of, the starts with them, each with the cause of its nearest start."""
        return _reach(starts, self.sources, enter)

    def forth(
        self, starts: Mapping[ValueId, Cause], enter: Callable[[ValueId], bool] = lambda _: True
    ) -> dict[ValueId, Cause]:
        """Every value that is made of a start, the starts with them, each with the cause of its nearest start."""
        return _reach(starts, self.results, enter)


def float32(view: View) -> Callable[[ValueId], bool]:
    """The test for values of float32, in any container."""
    return lambda value: view.dtype(value) is DType.FLOAT


def computes_float32(view: View, op: Op) -> bool:
    """Whether an op has a float32 type variable, so that a pin on it means something."""
    return computes(view, op, (DType.FLOAT,))


def computes(view: View, op: Op, dtypes: Collection[DType]) -> bool:
    """Whether an op has a type variable of one of these types."""
    return any(v.type is not None and v.type.dtype in dtypes for v in view.variables[op.id])


def makers(view: View, marked: Mapping[ValueId, Cause]) -> dict[OpId, Cause]:
    """The ops that make marked values, in order of the ops, each with the cause of its first marked result."""
    found: dict[OpId, Cause] = {}
    for value, cause in marked.items():
        made_by = view.values[value].producer
        if made_by is not None:
            found.setdefault(made_by, cause)
    return dict(sorted(found.items()))


def _reach(
    starts: Mapping[ValueId, Cause],
    near: Callable[[ValueId], Iterable[ValueId]],
    enter: Callable[[ValueId], bool],
) -> dict[ValueId, Cause]:
    seen = {value: cause for value, cause in starts.items() if enter(value)}
    queue = deque(seen)
    while queue:
        value = queue.popleft()
        for other in near(value):
            if other not in seen and enter(other):
                seen[other] = seen[value]
                queue.append(other)
    return seen


def _seams(view: View) -> Iterator[tuple[ValueId, ValueId]]:
    """Pairs (value, what it is a copy of) at the edges of bodies, carried state included."""
    yield from ((body_input, body_output) for body_output, body_input in view.carried)
    for scope in view.scopes:
        if scope.owner is None:
            continue
        op = view.ops[scope.owner]
        into, out = _edges(view, op, scope)
        yield from ((a, b) for a, b in into if b is not None)
        yield from ((a, b) for a, b in out if a is not None)


def _edges(
    view: View, op: Op, scope: Scope
) -> tuple[Iterable[tuple[ValueId, ValueId | None]], Iterable[tuple[ValueId | None, ValueId]]]:
    """(body input, owner's input) and (owner's output, body output), as the operator pairs them."""
    if op.kind == "If":
        return (), zip(op.outputs, scope.outputs, strict=False)
    if op.kind == "Loop":
        # The body's first two inputs are the iteration number and the condition; its first output the condition.
        return zip(scope.inputs[2:], op.inputs[2:], strict=False), zip(op.outputs, scope.outputs[1:], strict=False)
    if op.kind in ("Scan", "SequenceMap"):
        skip = 1 if op.kind == "Scan" and view.opsets.get("", 1) < FIRST_UNBATCHED_SCAN else 0
        return zip(scope.inputs, op.inputs[skip:], strict=False), zip(op.outputs, scope.outputs, strict=False)
    return (), ()
