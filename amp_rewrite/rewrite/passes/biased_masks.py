"""Masks that carry a bias, as a T5's relative positions do: the bias is added, and the mask then selects.

Where(shown, bias, −3.4e38) added to scores leaves the range of a low type, and so holds scores and softmax in float32.
Where(shown, scores + bias, −3.4e38) gives the same numbers in float32, and fits any type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx
from onnx import NodeProto

from amp_rewrite.errors import Finding
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.dataflow import exposed, number
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.passes.copied import graphs_of
from amp_rewrite.rewrite.passes.scores import LOST, scored


@dataclass(frozen=True, slots=True)
class _Biased:
    """The operand `slot` of a sum, made by `where`: `bias` where its condition holds, else the fill.

    Not `shows`: the other way round.
    """

    where: Op
    slot: int
    bias: ValueId
    shows: bool


def select_biased(view: View) -> tuple[View, tuple[Finding, ...]]:
    """A view in which a bias under a mask is added to scores before the mask selects, and one finding for each mask.

    For a sum that a softmax reads. In float32 nothing changes: what is masked was the fill, whatever the score.
    O(nodes + uses).
    """
    sums = {op.id: mask for op in scored(view) if (mask := _biased(view, op)) is not None}
    if not sums:
        return view, ()
    proto = clone(view.model.proto)
    unread = {mask.where.id for mask in sums.values() if _read_by(view, mask.where, sums)}
    gone = {view.ops[where].node.output[0] for where in unread}
    for scope, graph in reversed(graphs_of(view, proto.graph)):  # what is spelled anew takes its bodies along
        ops = [view.ops[op] for op in view.scopes[scope].ops]
        if any(op.id in sums or op.id in unread for op in ops):
            nodes = [new for op, node in zip(ops, graph.node, strict=True) for new in _spelled(view, op, node, sums)]
            refill(graph, "node", [node for node in nodes if node.output[0] not in gone])
    masks = {mask.where.id: view.value_name(_result(mask.where)) for mask in sums.values()}
    note = "is added to scores before a softmax: its bias is, and it selects, which gives the same numbers in any type"
    return View.of(replace(view.model, proto=proto)), tuple(Finding("selected", name, note) for name in masks.values())


def _biased(view: View, op: Op) -> _Biased | None:
    """The mask with a bias among the operands of a scored sum."""
    for slot, value in enumerate(op.inputs):
        where = view.producer(value)
        if where is None or where.kind != "Where" or where.scope != op.scope or value == op.inputs[1 - slot]:
            continue
        for at, shows in ((2, True), (1, False)):
            bias = where.inputs[3 - at]
            if bias is not None and _hides(view, where.inputs[at]) and view.constant(bias) is None:
                return _Biased(where, slot, bias, shows)
    return None


def _spelled(view: View, op: Op, node: NodeProto, sums: Mapping[OpId, _Biased]) -> Iterator[NodeProto]:
    """A node, or in place of a sum the sum with the bias and the selection."""
    mask = sums.get(op.id)
    if mask is None:
        yield node
        return
    condition, bias = mask.where.node.input[0], view.value_name(mask.bias)
    fill = mask.where.node.input[2 if mask.shows else 1]
    summed = unused(f"{node.output[0]}_biased", view.names)
    name = f"{node.name}_biased" if node.name else ""
    yield onnx.helper.make_node("Add", [node.input[1 - mask.slot], bias], [summed], name)
    chosen = clone(node)
    chosen.op_type = "Where"
    del chosen.input[:]
    chosen.input.extend((condition, summed, fill) if mask.shows else (condition, fill, summed))
    yield chosen


def _read_by(view: View, where: Op, sums: Mapping[OpId, _Biased]) -> bool:
    """Whether the sums alone read what a Where gives, so that it may go."""
    value = _result(where)
    mine = not exposed(view, value)
    return mine and all(use.op in sums and sums[use.op].where.id == where.id for use in view.uses[value])


def _result(op: Op) -> ValueId:
    assert op.outputs[0] is not None
    return op.outputs[0]


def _hides(view: View, value: ValueId | None) -> bool:
    """Whether a value is one finite number beside which scores are lost."""
    fill = number(view, value, axes=1)
    return fill is not None and -math.inf < fill <= LOST
