"""Positions: in angles, on grids, in biases of attention scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.flops import summed_length
from amp_rewrite.decide.hazards.counts import counted
from amp_rewrite.decide.hazards.fill_reach import ATTENTION_MASKS
from amp_rewrite.decide.hazards.mask_fills import CARRIES, to_softmax
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import described, first_inputs, operands_at, results_of
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import equation
from amp_rewrite.ir.dataflow import Flow, first_input_of, float32, float32_ops, makers, origin, trail
from amp_rewrite.ir.op_classes import (
    COPIES,
    ELEMENTLESS,
    LAYERS,
    PAIR_SUMS,
    PERIODIC,
    PRODUCTS,
    RECURRENT,
    SCALINGS,
    SELECTIONS,
    SOFTMAXES,
    SUMS,
    TENSOR_CORE_STEP,
    Slots,
)
from amp_rewrite.ir.patterns.activations import snakes
from amp_rewrite.ir.patterns.grids import LEAST, MOST, is_grid
from amp_rewrite.ir.patterns.scores import FAR, FILL, counts_far, scored_rows
from amp_rewrite.ir.shapes.onnx_shapes import Shape, declared_dims, fixed
from amp_rewrite.ir.view import Op, OpId, ValueId, View, once

_SOURCES = ELEMENTLESS | {"Constant", "ConstantOfShape", "Range", "EyeLike"}
_LEARNED = LAYERS | RECURRENT - {"RNN"} | {"Einsum"}
_ELEMENTWISE = {**COPIES, **SELECTIONS, **dict.fromkeys(PAIR_SUMS | SCALINGS, range(2))}
_SAMPLES: Slots = {
    "NonMaxSuppression": (0,),
    **dict.fromkeys(("GridSample", "RoiAlign", "com.microsoft::CropAndResize", "com.microsoft::GridSample"), (1,)),
}
"""Ops that read positions in this input."""


@rule(
    reasons.POSITION,
    "Positions, and what is computed from them, keep the digits of float32.",
    cases=("angle", "places", "position_bias"),
)
def positions(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops from positions to the sine, sampler or softmax that reads them. O(nodes + uses).

    Angles are followed up through copies, arithmetic, and products of positions and frequencies. Unlike a layer, such a
    product sums fewer than 8 terms (tensor cores multiply in steps of 8), is an outer product, or has an operand
    computed from integers. Results of layers are held only if they feed a single op, or sines alone.

    What it protects: Rotary and sinusoidal positions; the sine of a snake activation is left alone. Positions in pixels
        that a network predicts relative to a grid, which is a constant or counted by Range, and what GridSample,
        RoiAlign or NonMaxSuppression read. Attention with linear biases whose constant or counted grid reaches beyond
        ±64 in float16, ±8 in bfloat16, or has an unknown length; learned and bucketed biases are left alone, and so is
        a constant that is within this reach at the best key of every row. Another constant is moved there beforehand: a
        softmax does not see what is subtracted from a whole row. The mask of an attention operator counts as a bias.
    Why: Above 2048 the float16 spacing is 2, a third of a turn: the phase is lost. At 640 it is half a pixel, that of
        bfloat16 four pixels. At 1000 it is 0.5, which the differences between scores do not survive.
    Example: sin(position · frequency) in a rotary embedding at position 8191; anchor boxes of detectors, keypoints,
        optical flow; scores + slope · position, as in BLOOM and MPT.
    How to override: Biases relative to the query in the model, so that near positions have small ones.
    Source: Su et al. 2021, "RoFormer"; Vaswani et al. 2017; Press et al. 2022, "Train Short, Test Long"; far_rotary
        among the hard models of this project; IEEE 754 binary16 has 11 significant bits, bfloat16 has 8.
    """
    yield from angles(view)
    yield from places(view)
    yield from biases(view, to)


@once
def _learned(view: View) -> Collection[ValueId]:
    """Return the values that are computed from results of layers."""
    return Flow.of(view).forth(results_of(view, _LEARNED), float32(view))


def angles(view: View) -> Iterator[HeldOp]:
    """Hold the ops that compute the argument of Sin and Cos."""
    starts = first_inputs(view, PERIODIC, but=snakes(view))
    if not starts:
        return
    flow, lengths = Flow.of(view), _input_shapes(view)
    counting = flow.forth({**counted(view), **results_of(view, ("Range", "CumSum"))}, float32(view))
    products = {op.id for op in view.of_kinds(PRODUCTS) if _angular(view, op, counting, lengths)}
    passed = [op.id in products or op.kind in PERIODIC | _SOURCES or op.bodies or flow.through(op) for op in view.ops]
    layers = (v for op in view.ops if not passed[op.id] for v in op.results)
    learned = flow.forth(dict.fromkeys(layers), float32(view))
    marked: dict[ValueId, OpId] = {}

    def enter(value: ValueId) -> bool:
        new = value not in marked and view.dtype(value) is DType.FLOAT
        return new and (value not in learned or _private(view, value))

    while starts:  # a product is crossed as a whole; the walk resumes above it
        reached = flow.back(starts, enter)
        marked.update(reached)
        crossed = ((view.ops[op_id], cause) for op_id, cause in makers(view, reached).items() if op_id in products)
        starts = {v: cause for op, cause in crossed for v in op.operands}
    for op_id, cause in makers(view, marked).items():
        if op_id in products or flow.through(view.ops[op_id]):
            yield HeldOp(op_id, cause, f"computes the angle of {described(view, cause)}")


def _private(view: View, value: ValueId) -> bool:
    """True if only sines, or only one op, read a value."""
    readers = {op.id: op.kind in PERIODIC for op in view.readers(value)}
    return value not in view.yielded and (all(readers.values()) or len(readers) == 1)


def _angular(view: View, op: Op, counting: Collection[ValueId], lengths: Mapping[ValueId, Shape]) -> bool:
    """True for a product of positions and frequencies, by the marks that `positions` describes."""
    read = [v for v in op.inputs[:2] if v is not None]
    if any(v in counting for v in read):
        return True
    if op.kind == "Einsum":
        operands, result = equation(op.node)
        return len(operands) > 1 and set("".join(operands)) - {"."} <= set(result)
    shapes = (tuple(t.dims) if (t := view.constant(v)) is not None else lengths.get(v, ()) for v in read)
    terms = (summed_length(op, slot, shape) for slot, shape in enumerate(shapes))
    return next((length < TENSOR_CORE_STEP for length in terms if length is not None), False)


def _input_shapes(view: View) -> dict[ValueId, Shape]:
    """Return the shapes of formal inputs; None stands for a length that is not fixed."""
    shapes: dict[ValueId, Shape] = {}
    for scope in view.scopes:
        stated = {formal.name: dims for formal in scope.graph.input if (dims := declared_dims(formal)) is not None}
        shapes.update((v, fixed(stated[name])) for v in scope.inputs if (name := view.value_name(v)) in stated)
    return shapes


@once
def _constant_terms(view: View) -> Mapping[OpId, Sequence[tuple[ValueId, ValueId]]]:
    """Return the operands of each float32 sum that are constants or copies of one, with the constant."""
    copied, sums = first_input_of(COPIES), float32_ops(view, PAIR_SUMS)
    read = {op.id: [(v, origin(view, v, copied)) for v in op.operands] for op in sums}
    return {op: [(v, held) for v, held in pairs if held in view.constants] for op, pairs in read.items()}


def places(view: View) -> Iterator[HeldOp]:
    """Hold what samplers read, up to the last layer, and sums of layer outputs and a grid that no softmax reads."""
    flow = Flow.of(view, _ELEMENTWISE)
    sampled = {value: op.id for op, _, value in operands_at(view, _SAMPLES)}
    for op_id, sampler in flow.path(sampled, float32(view)).items():
        if flow.through(view.ops[op_id]):
            yield HeldOp(op_id, sampler, f"computes the places that {described(view, sampler)} reads")
    terms = _constant_terms(view)
    grids = {op: value for op, read in terms.items() for value, held in read[::-1] if is_grid(view, held)}
    ranges = results_of(view, ("Range",))
    if not grids and not ranges:
        return
    counting = Flow.of(view).forth(ranges, float32(view))
    for op in map(view.ops.__getitem__, terms):
        counts = (v for v in op.operands if v in counting and v not in _learned(view))
        grid = grids.get(op.id, next(counts, None))
        if grid is None or not any(v in _learned(view) for v in op.operands if v != grid):
            continue
        reached = flow.forth(dict.fromkeys(op.results), float32(view))
        if not any(reader.kind in SOFTMAXES for reader in flow.readers(reached)):
            yield HeldOp(op.id, counting.get(grid), f"counts from places on the grid {view.value_name(grid)!r}")


def biases(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops from a bias that counts positions through its sum with scores to the softmax, or to attention."""
    counting, name = counting_biases(view, to), "a bias that grows with the position"
    carries = Flow.of(view, CARRIES)
    for op_id, (softmax, note) in to_softmax(carries, _of_scores(carries, counting), name).items():
        yield HeldOp(op_id, softmax, note)
    masks = [(op, value) for op, _, value in operands_at(view, ATTENTION_MASKS)]
    reached = carries.forth(dict.fromkeys(counting), float32(view)) if masks else {}
    far = cache(partial(_far_at_best, view, to))
    for op, mask in masks:
        if mask in reached or far(mask):
            yield HeldOp(op.id, None, f"its mask is {name}")


def _of_scores(carries: Flow, counting: Collection[ValueId]) -> Collection[ValueId]:
    """Return the values that count positions on the way to a sum with others: scores, or a mask."""
    view = carries.view
    if not counting:
        return ()
    learned = _learned(view)
    reached = carries.forth(dict.fromkeys(counting), lambda v: v not in learned and _counts(view, v))
    reads = (op.operands for op in view.ops if op.kind in SUMS)
    sums = (read for read in reads if any(v not in reached and view.constant(v) is None for v in read))
    return carries.back({v: None for read in sums for v in read if v in reached}, reached.__contains__)


def _counts(view: View, value: ValueId) -> bool:
    """True for a float32 value, except where a Where keeps only elements equal to a constant, as in shifted windows."""
    where = view.producer(value, "Where")
    if where is not None:
        passed, source = trail(view, where.inputs[0], first_input_of(("Cast", "Not")))
        equal, kept = (
            view.producer(source, "Equal"),
            where.inputs[2 if sum(op.kind == "Not" for op in passed) % 2 else 1],
        )
        if equal is not None and equal.inputs[0] == kept and view.constant(equal.inputs[1]) is not None:
            return False
    return view.dtype(value) is DType.FLOAT


def _far_at_best(view: View, to: DType, value: ValueId) -> bool:
    """True for a constant, or a copy of one, that counts, and is large at the best key that some row shows."""
    numbers = view.array(origin(view, value, first_input_of(COPIES)), MOST)
    if numbers is None or not counts_far(numbers, to):
        return False
    return bool((abs(np.where(numbers > -FILL, numbers, -np.inf).max(axis=-1)) > FAR[to]).any())


@once
def counting_biases(view: View, to: DType) -> Collection[ValueId]:
    """Return the float32 values that count positions, and as a bias of scores would cost these digits. O(nodes)."""
    terms = _constant_terms(view)
    far = {value for read in terms.values() for value, held in read if _counts_far(view, held, to)}
    rows = scored_rows(view, cache(partial(view.array, most=MOST))) if far else ()
    near = {term.op.id for row in rows if row.near(to) for term in row.terms}
    counting = {value for op, read in terms.items() if op not in near for value, _ in read if value in far}
    if ranges := results_of(view, ("CumSum", "Range")):
        reached = Flow.of(view, CARRIES).forth(dict.fromkeys((*ranges, *counted(view))), partial(_counts, view))
        counting.update(v for v in reached if v not in _learned(view))
    return counting


def _counts_far(view: View, value: ValueId, to: DType) -> bool:
    """True for a constant whose rows count in equal steps and reach far beyond the scores."""
    tensor = view.constant(value)
    if tensor is None or not tensor.dims or not LEAST <= tensor.dims[-1] <= math.prod(tensor.dims) <= MOST:
        return False
    return view.fit(value, to).absmax > FAR[to] and counts_far(view.model.array(tensor), to)
