"""An independent count of the casts that a colouring needs, directly from the definition."""

from dataclasses import dataclass

from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import Op, OpId, Role, ValueId, View


@dataclass(frozen=True)
class Crossings:
    """Names of float32 tensors with readers in the other type; `constants` are the initializers among them."""

    to_low: tuple[str, ...]
    to_float: tuple[str, ...]
    constants: tuple[str, ...]

    @property
    def casts(self) -> int:
        return len(self.to_low) + len(self.to_float)


def lowered_ops(view: View, coloring: Coloring) -> tuple[str, ...]:
    """Return the sorted names of ops with at least one lowered type variable."""
    low = {op for (op, _), paint in coloring.paints.items() if paint.dtype is coloring.to}
    return tuple(sorted(view.ops[op].name for op in low))


def crossings(view: View, coloring: Coloring) -> Crossings:
    """Return one entry per tensor and direction. Model outputs, body edges and ops without a schema read float32."""
    to_low, to_float, constants = [], [], []
    for value in view.values:
        if view.dtype(value.id) is not DType.FLOAT:
            continue
        written_low = value.producer is not None and _writes_low(view, coloring, value.producer, value.id)
        read_low = [_reads_low(view, coloring, use.op, use.slot) for use in view.uses[value.id]]
        if (value.public and value.role is Role.RESULT) or value.id in view.yielded:
            read_low.append(False)
        if written_low and not all(read_low):
            to_float.append(value.name)
        if not written_low and any(read_low):
            to_low.append(value.name)
            if value.role is Role.INITIALIZER:
                constants.append(value.name)
    return Crossings(tuple(sorted(to_low)), tuple(sorted(to_float)), tuple(sorted(constants)))


def _writes_low(view: View, coloring: Coloring, op_id: OpId, value: ValueId) -> bool:
    op = view.ops[op_id]
    return _low(
        coloring,
        op,
        None if op.bodies or op.signature is None else op.signature.output_variable(op.outputs.index(value)),
    )


def _reads_low(view: View, coloring: Coloring, op_id: OpId, slot: int) -> bool:
    op = view.ops[op_id]
    return _low(coloring, op, None if op.bodies or op.signature is None else op.signature.input_variable(slot))


def _low(coloring: Coloring, op: Op, variable: str | None) -> bool:
    found = coloring.paints.get((op.id, variable)) if variable is not None else None
    return found is not None and found.dtype is coloring.to
