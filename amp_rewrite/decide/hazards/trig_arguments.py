"""Arguments of sine and cosine."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.integers import counted
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.snake import snakes
from amp_rewrite.decide.hazards.steps import described, first_inputs, in_float32, results_of, summed_length
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, float32, makers
from amp_rewrite.ir.op_classes import ELEMENTLESS, PERIODIC, PRODUCTS, TENSOR_CORE_STEP
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shape, declared_dims, fixed
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_SOURCES = ELEMENTLESS | {"Constant", "ConstantOfShape", "Range", "EyeLike"}


@rule(reasons.ANGLE, "The argument of a sine or cosine is computed in float32.")
def angle(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops that compute the argument of Sin and Cos. O(nodes + uses).

    The walk goes up through copies, arithmetic, and products of positions and frequencies. Unlike a layer, such a
    product sums fewer than 8 terms (tensor cores multiply in steps of 8), is an outer product, or has an operand
    computed from integers. Results of layers are pinned only if they feed a single op, or sines alone.

    What it protects: Rotary and sinusoidal positions. The sine of a snake activation is left alone.
    Why: Above 2048 the float16 spacing is 2, a third of a turn: the phase is lost.
    Example: sin(position · frequency) in a rotary embedding at position 8191.
    Source: Su et al. 2021, "RoFormer"; Vaswani et al. 2017; far_rotary among the hard models of this project.
    """
    starts = first_inputs(view, PERIODIC, but=snakes(view))
    if not starts:
        return
    flow, lengths = Flow.of(view), _input_shapes(view)
    positions = flow.forth({**counted(view), **results_of(view, ("Range", "CumSum"))}, float32(view))
    products = {op.id for op in view.ops if op.kind in PRODUCTS and _angular(view, op, positions, lengths)}
    learned = flow.forth(dict.fromkeys(_learned(view, flow, products)), float32(view))
    marked: dict[ValueId, OpId] = {}

    def enter(value: ValueId) -> bool:
        if value in marked or view.dtype(value) is not DType.FLOAT:
            return False
        return value not in learned or _private(view, value)

    # A product is crossed as a whole; a walk resumes above it until nothing is left to cross.
    while starts:
        reached = flow.back(starts, enter)
        marked.update(reached)
        crossed = {op_id: cause for op_id, cause in makers(view, reached).items() if op_id in products}
        starts = {v: cause for op_id, cause in crossed.items() for v in view.ops[op_id].operands}
    for op_id, cause in in_float32(view, makers(view, marked)).items():
        if op_id in products or flow.through(view.ops[op_id]):
            yield Pin(op_id, reasons.ANGLE, cause, f"computes the angle of {described(view, cause)}")


def _learned(view: View, flow: Flow, products: set[OpId]) -> Iterator[ValueId]:
    """Yield the results of layers: of every op that the walk does not cross and that does not generate constants."""
    for op in view.ops:
        if op.id in products or op.op_type in _SOURCES or op.bodies or flow.through(op) or op.kind in PERIODIC:
            continue
        yield from op.results


def _private(view: View, value: ValueId) -> bool:
    """True if only sines, or only one op, read a value."""
    readers = {op.id: op.kind in PERIODIC for op in view.readers(value)}
    return value not in view.yielded and (all(readers.values()) or len(readers) == 1)


def _angular(view: View, op: Op, positions: dict[ValueId, OpId], lengths: dict[ValueId, Shape]) -> bool:
    """True for a product of positions and frequencies, by the marks that `angle` describes."""
    if any(v in positions for v in op.inputs[:2] if v is not None):
        return True
    if op.kind == "Einsum":
        return _outer(op)
    for slot, value in enumerate(op.inputs[:2]):
        tensor = view.constant(value)
        shape: Shape = tuple(tensor.dims) if tensor is not None else lengths.get(value, ()) if value is not None else ()
        terms = summed_length(op, slot, shape)
        if terms is not None:
            return terms < TENSOR_CORE_STEP
    return False


def _outer(op: Op) -> bool:
    """True for an Einsum without a sum: every label of its inputs is in its output."""
    equation = attribute(op.node, "equation")
    spelled = equation.s.decode().replace(" ", "") if equation is not None else ""
    operands, arrow, result = spelled.partition("->")
    return bool(arrow) and "," in operands and set(operands) - {",", "."} <= set(result)


def _input_shapes(view: View) -> dict[ValueId, Shape]:
    """Return the shapes of formal inputs; None stands for a length that is not fixed."""
    shapes: dict[ValueId, Shape] = {}
    for scope in view.scopes:
        stated = {formal.name: dims for formal in scope.graph.input if (dims := declared_dims(formal)) is not None}
        shapes.update((v, fixed(stated[name])) for v in scope.inputs if (name := view.value_name(v)) in stated)
    return shapes
