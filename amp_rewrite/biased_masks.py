"""Masks that carry a bias, as a T5's relative positions do: the bias is added, and the mask then selects.

Where(shown, bias, −3.4e38) added to scores leaves the range of a low type, and so holds scores and softmax in float32.
Where(shown, scores + bias, −3.4e38) gives the same numbers in float32, and fits any type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx
from onnx import GraphProto, NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.finding import Finding
from amp_rewrite.index import bodies
from amp_rewrite.safety.flow import COPIES, Flow
from amp_rewrite.safety.mask import fills
from amp_rewrite.view import MAIN, Op, OpId, ValueId, View

_FIRST_WHERE = 9
_CARRY = {**COPIES, "Where": (1, 2), **dict.fromkeys(("Add", "Div", "Mul", "Sub"), (0, 1)), "Neg": (0,)}
_LOST = -1e30
"""At or below it a float32 number swallows whatever it is added to, as far as that is below 1e22."""


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
    if view.opsets.get("", 1) < _FIRST_WHERE:
        return view, ()
    sums = {op.id: mask for op in scored(view) if (mask := _biased(view, op)) is not None}
    if not sums:
        return view, ()
    proto = onnx.ModelProto()
    proto.CopyFrom(view.model.proto)
    unread = {mask.where.id for mask in sums.values() if _read_by(view, mask.where, sums)}
    gone = {view.ops[where].node.output[0] for where in unread}
    for scope, graph in list(_graphs(view, proto.graph)):
        ops = [view.ops[op] for op in view.scopes[scope].ops]
        if any(op.id in sums or op.id in unread for op in ops):
            nodes = [new for op, node in zip(ops, graph.node, strict=True) for new in _spelled(view, op, node, sums)]
            kept = [node for node in nodes if node.output[0] not in gone]
            del graph.node[:]
            graph.node.extend(kept)
    masks = {mask.where.id: view.value_name(_result(mask.where)) for mask in sums.values()}
    note = "is added to scores before a softmax: its bias is, and it selects, which gives the same numbers in any type"
    return View.of(replace(view.model, proto=proto)), tuple(Finding("selected", name, note) for name in masks.values())


def scored(view: View) -> list[Op]:
    """The float32 Adds whose result a softmax reads, but for those of scores that hold another mask's fill already.

    What both masks hide is −inf there, and less than what one hides: that shows in a row that is masked throughout.
    """
    read = {value for op in view.ops if op.kind in ("Softmax", "LogSoftmax") for value in op.inputs}
    found = (op for op in view.ops if op.kind == "Add" and op.outputs[0] in read) if read else ()
    sums = [op for op in found if (result := op.outputs[0]) is not None and view.dtype(result) is DType.FLOAT]
    filled = _filled(view) if sums else frozenset()
    return [op for op in sums if not filled.issuperset(op.inputs)]


def _filled(view: View) -> frozenset[ValueId | None]:
    """The values that a fill beside which scores are lost has entered, through copies, selections and arithmetic."""
    levels = fills(view, DType.FLOAT16).items()
    return frozenset(Flow.of(view, _CARRY).forth({value: value for value, fill in levels if fill.absmax >= -_LOST}))


def _biased(view: View, op: Op) -> _Biased | None:
    """The mask with a bias among the operands of a scored sum."""
    for slot, value in enumerate(op.inputs):
        where = view.producer(value)
        if where is None or where.kind != "Where" or where.scope != op.scope or value == op.inputs[1 - slot]:
            continue
        for at, shows in ((2, True), (1, False)):
            bias = where.inputs[3 - at]
            if bias is not None and _fills(view, where.inputs[at]) and view.constant(bias) is None:
                return _Biased(where, slot, bias, shows)
    return None


def _fills(view: View, value: ValueId | None) -> bool:
    """Whether a value is one finite number beside which scores are lost."""
    tensor = view.constant(value)
    if tensor is None or list(tensor.dims) not in ([], [1]):
        return False
    return -math.inf < float(view.model.array(tensor).item()) <= _LOST


def _spelled(view: View, op: Op, node: NodeProto, sums: Mapping[OpId, _Biased]) -> Iterator[NodeProto]:
    """A node, or in place of a sum the sum with the bias and the selection."""
    mask = sums.get(op.id)
    if mask is None:
        yield node
        return
    condition, bias = mask.where.node.input[0], view.value_name(mask.bias)
    fill = mask.where.node.input[2 if mask.shows else 1]
    summed = f"{node.output[0]}_biased"
    while summed in view.names:
        summed += "_"
    name = f"{node.name}_biased" if node.name else ""
    yield onnx.helper.make_node("Add", [node.input[1 - mask.slot], bias], [summed], name)
    chosen = NodeProto()
    chosen.CopyFrom(node)
    chosen.op_type = "Where"
    del chosen.input[:]
    chosen.input.extend((condition, summed, fill) if mask.shows else (condition, fill, summed))
    yield chosen


def _read_by(view: View, where: Op, sums: Mapping[OpId, _Biased]) -> bool:
    """Whether the sums alone read what a Where gives, so that it may go."""
    value = _result(where)
    mine = not view.values[value].public and value not in view.yielded
    return mine and all(use.op in sums and sums[use.op].where.id == where.id for use in view.uses[value])


def _result(op: Op) -> ValueId:
    assert op.outputs[0] is not None
    return op.outputs[0]


def _graphs(view: View, main: GraphProto) -> Iterator[tuple[int, GraphProto]]:
    """The graphs of a copied model with their scopes, inner ones first: what is spelled anew takes its bodies along."""
    pending = [(MAIN, main)]
    found = []
    while pending:
        scope, graph = pending.pop()
        found.append((scope, graph))
        for op_id, node in zip(view.scopes[scope].ops, graph.node, strict=True):
            pending.extend(zip(view.ops[op_id].bodies, (body for _, body in bodies(node)), strict=True))
    return reversed(found)
