"""Arguments of sine and cosine."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.integers import counted
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.snake import snakes
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, float32, makers
from amp_rewrite.ir.op_classes import ELEMENTLESS, PERIODIC, PRODUCTS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.view import Op, OpId, ValueId, View

Shape = tuple[int | None, ...]

_TENSOR_CORE_STEP = 8
_SOURCES = ELEMENTLESS | {"Constant", "ConstantOfShape", "Range", "EyeLike"}


@rule(reasons.ANGLE, "The argument of a sine or cosine is computed in float32.")
def angle(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops that compute the argument of Sin and Cos. O(nodes + uses).

    The walk goes up through copies, arithmetic and products of positions and frequencies. Such a product differs from a
    layer by one of three marks: it sums fewer than 8 terms (too few for tensor cores, which multiply in steps of 8),
    it is an outer product, or an operand is an integer by birth. An activation is pinned no further than to values
    that only the sine reads.

    What it protects: Rotary and sinusoidal positions. The sine of a snake activation is left alone.
    Why: Above 2048 neighbouring float16 numbers are 2 apart, a third of a turn: no phase survives.
    Example: sin(position · frequency) in a rotary embedding at position 8191.
    Source: Su et al. 2021, "RoFormer"; Vaswani et al. 2017; far_rotary among the hard models of this project.
    """
    activations = snakes(view)
    starts = {
        op.inputs[0]: op.id
        for op in reversed(view.ops)
        if op.kind in PERIODIC
        and op.id not in activations
        and op.inputs[0] is not None
        and view.dtype(op.inputs[0]) is DType.FLOAT
    }
    if not starts:
        return
    plain = Flow.of(view)
    positions = plain.forth(_positions(view), float32(view))
    lengths = _input_shapes(view)
    products = {op.id for op in view.ops if op.kind in PRODUCTS and _angular(view, op, positions, lengths)}
    learned = plain.forth(dict.fromkeys(_learned(view, plain, products)), float32(view))
    marked: dict[ValueId, OpId] = {}

    def enter(value: ValueId) -> bool:
        return view.dtype(value) is DType.FLOAT and (value not in learned or _private(view, value))

    # A product is crossed as a whole; a walk resumes above it until there is no more to cross.
    while starts:
        found = plain.back(starts, lambda value: value not in marked and enter(value))
        marked.update(found)
        starts = {
            read: cause
            for op_id, cause in makers(view, found).items()
            if op_id in products
            for read in view.ops[op_id].inputs
            if read is not None
        }
    for op_id, cause in makers(view, marked).items():
        op = view.ops[op_id]
        if (plain.through(op) or op_id in products) and computes_float32(view, op):
            sine = view.ops[cause]
            yield Pin(op_id, reasons.ANGLE, cause, f"computes the angle of {sine.name!r} ({sine.kind})")


def _positions(view: View) -> dict[ValueId, OpId]:
    made = counted(view)
    for op in view.ops:
        if op.kind in ("Range", "CumSum") and op.outputs[0] is not None:
            made.setdefault(op.outputs[0], op.id)
    return made


def _learned(view: View, flow: Flow, products: set[OpId]) -> Iterator[ValueId]:
    """What layers give: the results of every op that is neither crossed nor a source of constants."""
    for op in view.ops:
        if op.id in products or op.op_type in _SOURCES or op.bodies or flow.through(op) or op.kind in PERIODIC:
            continue
        yield from (v for v in op.outputs if v is not None)


def _private(view: View, value: ValueId) -> bool:
    """Whether sines alone read a value, or one op alone."""
    readers = {op.id: op.kind in PERIODIC for op in view.readers(value)}
    return value not in view.yielded and (all(readers.values()) or len(readers) == 1)


def _angular(view: View, op: Op, positions: dict[ValueId, OpId], lengths: dict[ValueId, Shape]) -> bool:
    if any(v in positions for v in op.inputs[:2] if v is not None):
        return True
    if op.kind == "Einsum":
        return _outer(op)
    terms = _terms(view, op, lengths)
    return terms is not None and terms < _TENSOR_CORE_STEP


def _outer(op: Op) -> bool:
    """Whether an Einsum sums nothing: every label of its inputs stands in its output."""
    equation = attribute(op.node, "equation")
    spelled = equation.s.decode().replace(" ", "") if equation is not None else ""
    given, arrow, result = spelled.partition("->")
    return bool(arrow) and "," in given and set(given) - {",", "."} <= set(result)


def _terms(view: View, op: Op, lengths: dict[ValueId, Shape]) -> int | None:
    """How many products each element of a MatMul or Gemm sums, where a constant or an input's shape says it."""
    for slot, value in enumerate(op.inputs[:2]):
        tensor = view.constant(value)
        shape: Shape = tuple(tensor.dims) if tensor is not None else lengths.get(value, ()) if value is not None else ()
        if not shape:
            continue
        turned = attribute(op.node, "transA" if slot == 0 else "transB")
        last = (slot == 0) is not bool(turned is not None and turned.i)
        axis = shape[-1] if last or len(shape) == 1 else shape[-2]
        if axis is not None:
            return axis
    return None


def _input_shapes(view: View) -> dict[ValueId, Shape]:
    """The shapes of formal inputs; None where a length is not fixed."""
    found: dict[ValueId, Shape] = {}
    for scope in view.scopes:
        formal = {i.name: i.type.tensor_type for i in scope.graph.input if i.type.tensor_type.HasField("shape")}
        for value in scope.inputs:
            if (stated := formal.get(view.value_name(value))) is not None:
                found[value] = tuple(d.dim_value if d.HasField("dim_value") else None for d in stated.shape.dim)
    return found
