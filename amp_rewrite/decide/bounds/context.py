"""The context of a step of the proof: an op, the states of its operands, and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from amp_rewrite.decide.bounds.arithmetic import RoundingModel
from amp_rewrite.decide.bounds.state import Sizes, State, unknown
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute, float_attribute, int_attribute
from amp_rewrite.ir.dataflow import axes_of
from amp_rewrite.ir.view import Op, ValueId, View


@dataclass(frozen=True, slots=True)
class OpContext:
    """An op and what is known around it.

    `states`: of its inputs; None for one that is left out. `arithmetic`: the roundings of its results. `is_read`:
    an op reads the first result, so its norm may be needed. `spatial`: what differs from place to place is followed.
    `frugal`: of large weights only the largest magnitude is read, where no more than that would help.
    """

    view: View
    op: Op
    states: Sequence[State | None]
    dims: Callable[[ValueId | None], Sizes]
    arithmetic: RoundingModel
    is_read: bool = True
    spatial: bool = False
    frugal: bool = False

    def at(self, slot: int) -> State:
        """Return the state of an input; an unknown one if it is left out, or holds a mask's fill."""
        state = self.masked(slot)
        return unknown("a mask's fill") if state.fills else state

    def masked(self, slot: int) -> State:
        """Return the state of an input for a step that tells a mask's fill apart; an unknown one if it is left out."""
        state = self.states[slot] if slot < len(self.states) else None
        return state if state is not None else unknown("an input that is left out")

    def has(self, slot: int) -> bool:
        """True if an input is not left out."""
        return slot < len(self.states) and self.states[slot] is not None

    def shape(self, slot: int) -> Sizes:
        """Return the dimensions of an input."""
        return self.dims(self.op.inputs[slot] if slot < len(self.op.inputs) else None)

    def result(self, slot: int = 0) -> Sizes:
        """Return the dimensions of a result."""
        return self.dims(self.op.outputs[slot] if slot < len(self.op.outputs) else None)

    def numbers(self, slot: int) -> Array | None:
        """Return the numbers of a constant input."""
        return self.view.array(self.op.inputs[slot]) if slot < len(self.op.inputs) else None

    def number(self, name: str, default: float) -> float:
        """Return an attribute that is a float."""
        return float_attribute(self.op.node, name, default)

    def integer(self, name: str, default: int) -> int:
        """Return an attribute that is an integer."""
        return int_attribute(self.op.node, name, default)

    def integers(self, name: str) -> list[int] | None:
        """Return an attribute that is a list of integers; None if it is left out."""
        stated = attribute(self.op.node, name)
        return list(stated.ints) if stated is not None else None

    def axes(self) -> tuple[int, ...] | None:
        """Return the axes of a reduction, counted from the end; None if they or the rank are unknown."""
        dims = self.shape(0)
        if dims is None:
            return None
        if len(self.op.inputs) > 1 and self.op.inputs[1] is not None and self.numbers(1) is None:
            return None
        axes = axes_of(self.view, self.op)
        if not axes and self.integer("noop_with_empty_axes", 0):
            return None
        rank = len(dims)
        return tuple(sorted({axis % rank - rank for axis in axes})) if axes else tuple(range(-rank, 0))

    def axis(self, default: int) -> int | None:
        """Return the attribute `axis`, counted from the end; None if the rank is unknown."""
        axis, dims = self.integer("axis", default), self.shape(0)
        return axis if axis < 0 else (axis - len(dims) if dims is not None else None)

    @property
    def dtype(self) -> DType | None:
        """The type of the first result."""
        return self.view.dtype(self.op.outputs[0]) if self.op.outputs else None


Step: TypeAlias = "Callable[[OpContext], Sequence[State] | State]"
"""A step of the proof: from the states of operands to those of the results. ValueError and the like: unknown."""
Table: TypeAlias = "Mapping[str, Step]"
