"""Paths from parameters to a loss: the ops on them, and a text form for messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.ir.nodes import Op, OpId, ScopeId, ValueId
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.vjp.rule import Rows, Stop

STOP = "amp_rewrite.stop_gradient"
"""Metadata of a node that passes no gradient, as `detach` of PyTorch."""


@dataclass(frozen=True)
class Paths:
    """Ops of one scope that gradients pass, and the values that receive them.

    `slots`: input slots of each op that need a gradient. `captured`: values that its bodies read from outside.
    """

    view: View
    slots: Mapping[OpId, tuple[int, ...]]
    captured: Mapping[OpId, tuple[ValueId, ...]]
    reached: Mapping[ValueId, OpId | None]
    """Values that depend on a parameter, each with its producer on the path; None for the parameters."""
    readers: Mapping[ValueId, OpId | None]
    """Values that the loss depends on, each with its next op on the path; None for the loss."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops on the paths, in topological order."""
        return tuple(self.view.ops[op] for op in sorted(self.slots))

    def through(self, op: Op) -> str:
        """Text of a path from a parameter to the loss through the op."""
        start = self._end(op, self.received, self.reached)
        end = self._end(op, lambda op: op.outputs, self.readers)
        return f"{start} → … → {op.kind} {op.name!r} → … → {end}"

    def received(self, op: Op) -> list[ValueId | None]:
        """Values that receive a gradient from the op."""
        return [*[op.inputs[s] for s in self.slots[op.id]], *self.captured[op.id]]

    def _end(
        self, op: Op, ways: Callable[[Op], Iterable[ValueId | None]], next_op: Mapping[ValueId, OpId | None]
    ) -> str:
        """Name of a parameter or of the loss at the end of a walk."""
        while True:
            value = next(v for v in ways(op) if v is not None and v in next_op)
            op_id = next_op[value]
            if op_id is None:
                return str(self.view.value_name(value))
            op = self.view.ops[op_id]


def paths(view: View, scope: ScopeId, losses: Sequence[ValueId], wrt: Sequence[ValueId], rows: Rows) -> Paths:
    """Return the paths of gradients from `losses` to `wrt` inside one scope. O(nodes + uses).

    A path never crosses a `Stop` entry, a node marked by `STOP`, or a value that is not floating. An op without a row
    passes everything.
    """
    reached: dict[ValueId, OpId | None] = dict.fromkeys(wrt)
    slots: dict[OpId, tuple[int, ...]] = {}
    captured: dict[OpId, tuple[ValueId, ...]] = {}
    for op_id in view.scopes[scope].ops:
        op = view.ops[op_id]
        row = rows.get((op.domain, op.op_type))
        open_ = tuple(
            i for i, v in enumerate(op.inputs) if v in reached and not (row and isinstance(row.entry(i), Stop))
        )
        inside = tuple(v for v in captures(view, op) if v in reached) if op.bodies else ()
        if any(entry.key == STOP for entry in op.node.metadata_props):
            continue
        results = [v for v in op.outputs if v is not None and floating(view, v)]
        if (open_ or inside) and results:
            slots[op_id], captured[op_id] = open_, inside
            for result in results:
                reached.setdefault(result, op_id)
    readers: dict[ValueId, OpId | None] = dict.fromkeys(losses)
    route = Paths(view, slots, captured, reached, readers)
    for op_id in reversed(view.scopes[scope].ops):
        op = view.ops[op_id]
        if op_id in slots and any(v in readers for v in op.outputs):
            for value in route.received(op):
                assert value is not None
                readers.setdefault(value, op_id)
        elif op_id in slots:
            del slots[op_id], captured[op_id]
    return route


def floating(view: View, value: ValueId) -> bool:
    """True if gradients may pass the value: its type is floating or unknown."""
    dtype = view.dtype(value)
    return dtype is None or dtype.floating


def nested(view: View, scopes: Iterable[ScopeId]) -> Iterator[ScopeId]:
    """These bodies and the bodies inside them, level by level."""
    pending = list(scopes)
    for scope in pending:
        yield scope
        pending.extend(body for op in view.scopes[scope].ops for body in view.ops[op].bodies)


def captures(view: View, op: Op) -> Iterator[ValueId]:
    """Values that the bodies of an op read from outside, each once, in order of first use."""
    inner = list(nested(view, op.bodies))
    seen: dict[ValueId | None, None] = {}
    for scope in inner:
        for op_id in view.scopes[scope].ops:
            seen.update(dict.fromkeys(view.ops[op_id].inputs))
        seen.update(dict.fromkeys(view.scopes[scope].outputs))
    return (v for v in seen if v is not None and view.values[v].scope not in inner)
