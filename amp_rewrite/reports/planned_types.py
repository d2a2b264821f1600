"""Types of ops and values once a plan is carried out, or as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import made_variable, read_variable
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.schema import Signature, ValueType
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_Types = tuple[ValueType | None, ...]
_Alike = tuple[Signature | None, str, bool, _Types, _Types, tuple[DType | None, ...]]


class RowTypes(NamedTuple):
    """Types in a row."""

    dtype: str
    variables: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class PlannedTypes:
    """Types in a view that a coloring and a plan change; those of the model itself without them."""

    view: View
    coloring: Coloring | None
    plan: Plan | None

    def look_of(self, op: Op) -> RowTypes:
        """Return the types in the row of an op. They depend on the types of its values and its paint alone."""
        types = self.made if op.kind == "Cast" else self.view.types  # a Cast reads whatever its source is made as
        inputs = tuple([types[v] if v is not None else None for v in op.inputs])
        outputs = tuple([self.made[v] if v is not None else None for v in op.outputs])
        painted = tuple([self._painted((op.id, variable.name)) for variable in self.view.variables[op.id]])
        alike = op.signature, op.kind, bool(op.bodies), inputs, outputs, painted
        looks = self._looks.get(alike)
        if looks is None:
            looks = self._looks[alike] = self._look(op)
        return looks

    @cached_property
    def _looks(self) -> dict[_Alike, RowTypes]:
        """Types of rows, shared: most ops of a model are like many others."""
        return {}

    @cached_property
    def made(self) -> Sequence[ValueType | None]:
        """Type of each value at its producer, once the plan is carried out."""
        made = list(self.view.types)
        for changed in (self.plan.retype, self._baked) if self.plan else ():
            for value, dtype in changed.items():
                made[value] = retyped(self.view.types[value], dtype)
        return made

    def _look(self, op: Op) -> RowTypes:
        inputs = tuple([self.read(op, slot) for slot in range(len(op.inputs))])
        outputs = tuple([self.written(op, slot) for slot in range(len(op.outputs))])
        variables = self._variables(op, inputs, outputs)
        return RowTypes(
            _main_dtype(op, variables, outputs, inputs),
            {name: dtype.spelling for name, dtype in variables.items()},
            tuple(spell(t) for t in inputs),
            tuple(spell(t) for t in outputs),
        )

    def _painted(self, variable: tuple[OpId, str] | None) -> DType | None:
        """Return the type that the painter gave a variable; None for one that it left alone."""
        return self.coloring.dtype(*variable) if self.coloring is not None and variable is not None else None

    def _variables(
        self, op: Op, inputs: tuple[ValueType | None, ...], outputs: tuple[ValueType | None, ...]
    ) -> dict[str, DType]:
        dtypes = {}
        for variable in self.view.variables[op.id]:
            ports = (*(inputs[i] for i in variable.inputs), *(outputs[o] for o in variable.outputs))
            dtype = next((port.dtype for port in ports if port is not None and port.dtype is not None), None)
            if dtype is not None and dtype.floating:
                dtypes[variable.name] = dtype
        free = {name: dtype for name, dtype in dtypes.items() if "(" not in name}
        return free or dtypes  # without ports of one fixed type, "tensor(float)", if there are others

    def read(self, op: Op, slot: int) -> ValueType | None:
        """Return the type of an input as the op reads it."""
        value = op.inputs[slot]
        if value is None:
            return None
        if self.plan and op.kind == "Cast":
            return self.made[value]
        return retyped(self.view.types[value], self._painted(read_variable(op, slot)))

    def written(self, op: Op, slot: int) -> ValueType | None:
        """Return the type of a result as the op writes it."""
        value = op.outputs[slot]
        if value is None:
            return None
        if self.plan:
            return self.made[value]
        return retyped(self.view.types[value], self._painted(made_variable(self.view, value)))

    @cached_property
    def _baked(self) -> Mapping[ValueId, DType]:
        bakes = self.plan.bakes if self.plan else ()
        return {bake.value: bake.to for bake in bakes if not bake.keeps_original}


def retyped(known: ValueType | None, dtype: DType | None) -> ValueType | None:
    """Return a type with another element type; the same for None."""
    return known if known is None or dtype is None or known.dtype is dtype else known.of(dtype)


def spell(known: ValueType | None) -> str:
    """Return a type as rows spell it; empty for an unknown one."""
    return str(known) if known is not None else ""


def _main_dtype(
    op: Op, variables: Mapping[str, DType], outputs: tuple[ValueType | None, ...], inputs: tuple[ValueType | None, ...]
) -> str:
    written = next((t for t in outputs if t is not None), None)
    if op.kind in CASTS and written is not None:
        return str(written)
    floating = list(variables.values()) or [
        t.dtype for t in (*outputs, *inputs) if t is not None and t.dtype is not None and t.dtype.floating
    ]
    chosen = next((d for d in floating if d.low), floating[0] if floating else None)
    if chosen is not None:
        return chosen.spelling
    return str(written) if written is not None else "unknown"
