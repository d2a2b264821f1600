"""Masks that are added to scores, as selections; those that never change, with a fill that stays in range."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import GraphProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import number
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS, FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View
from amp_rewrite.rewrite.passes.copied import nodes_of
from amp_rewrite.rewrite.passes.scores import LOST, scored


def select_masks(view: View) -> tuple[View, tuple[Finding, ...]]:
    """A view in which scores to which a mask of 0 and −3.4e38 is added are selected by that mask instead.

    In float32 both give the same: beside 1e30 scores are lost, whatever they are. In the low type a sum leaves the
    range once more, to −inf, and makes NaN of a row that is masked throughout; a selection keeps every score finite.
    For a sum that a softmax reads whose mask is made by a Where between two scalars, or is a constant. One that never
    changes and masks no row throughout is still added, with a fill that stays in range: runtimes fuse such a sum with
    the softmax.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return view, ()
    sums = {op.id: mask for op in scored(view) if (mask := _mask_of(view, op)) is not None}
    if not sums:
        return view, ()
    proto = clone(view.model.proto)
    copies = nodes_of(view, proto.graph)
    chosen: dict[ValueId, tuple[str, str]] = {}
    bounded: dict[ValueId, str] = {}
    for op_id, mask in sums.items():
        node = copies[op_id]
        if mask.added:
            if mask.value not in bounded:
                bounded[mask.value] = _bounded(view, mask, proto.graph)
            node.input[mask.slot] = bounded[mask.value]
            continue
        if mask.value not in chosen:
            chosen[mask.value] = _condition(view, mask, proto.graph)
        condition, fill = chosen[mask.value]
        scores = node.input[1 - mask.slot]
        del node.input[:]
        node.input.extend((condition, scores, fill) if mask.shows else (condition, fill, scores))
        node.op_type = "Where"
    _drop_unread(view, {**chosen, **bounded}, sums.keys(), proto.graph)
    notes = [(value, "it selects them instead, which gives the same numbers in any type") for value in chosen]
    notes += [
        (value, f"{_BOUNDED_FILL:g} in place of its fill gives the same numbers in any type") for value in bounded
    ]
    told = ((view.value_name(value), f"is added to scores before a softmax: {note}") for value, note in notes)
    return View.of(replace(view.model, proto=proto)), tuple(Finding("selected", *words) for words in told)


_LARGEST_MASK = 1 << 24  # elements of a constant mask that is looked at
_BOUNDED_FILL = -DType.FLOAT16.max / 2
"""A sum with it stays in range if the score does, and its exponential is 0 beside any score in that range."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """The operand `slot` of a sum: 0 where the condition holds and the fill elsewhere, or (not `shows`) the reverse.

    `added`: it may stay a summand, since no row is masked throughout.
    """

    value: ValueId
    slot: int
    shows: bool
    added: bool


def _mask_of(view: View, op: Op) -> _Mask | None:
    """The mask among the operands of a scored sum."""
    for slot, value in enumerate(op.inputs):
        shows = _shows(view, value) if value is not None and value != op.inputs[1 - slot] else None
        if value is not None and shows is not None:
            return _Mask(value, slot, shows, _in_each_row(view, op, value, shows))
    return None


def _in_each_row(view: View, op: Op, value: ValueId, shows: bool) -> bool:
    """Whether a mask never changes and shows something in each row of every softmax that reads the sum."""
    shown, result = _shown(view, value, shows), op.outputs[0]
    if shown is None or result is None:
        return False
    for reader in view.readers(result):
        axis = attribute(reader.node, "axis")
        last = axis is None or axis.i == -1
        if reader.kind != "Softmax" or view.opsets.get("", 1) < FIRST_ROW_SOFTMAX or not last:
            return False
    return bool(shown.any(axis=-1).all())


def _shown(view: View, value: ValueId, shows: bool) -> Array | None:
    """Where a mask is 0, if it never changes: a constant, or a Where by a constant condition."""
    made_by = view.producer(value)
    chosen = made_by is not None and made_by.kind == "Where"
    tensor = view.constant(made_by.inputs[0] if made_by is not None and chosen else value)
    if tensor is None or len(tensor.dims) == 0 or not 0 < math.prod(tensor.dims) <= _LARGEST_MASK:
        return None
    shown: Array = view.model.array(tensor) == (shows if chosen else 0)
    return shown


def _shows(view: View, value: ValueId) -> bool | None:
    """Whether a mask is 0 where its condition holds; None for what is no such mask."""
    made_by = view.producer(value)
    if made_by is not None and made_by.kind == "Where":
        branches = [n for v in made_by.inputs[1:] if (n := number(view, v, axes=1)) is not None and math.isfinite(n)]
        two = len(branches) == 2 and 0 in branches and min(branches) <= LOST
        return branches[0] == 0 if two else None
    tensor = view.constant(value)
    if tensor is None or not 0 < math.prod(tensor.dims) <= _LARGEST_MASK or len(tensor.dims) == 0:
        return None
    values = view.model.array(tensor)
    least = float(values.min())
    return True if -math.inf < least <= LOST and bool(((values == 0) | (values == least)).all()) else None


def _condition(view: View, mask: _Mask, main: GraphProto) -> tuple[str, str]:
    """The names of a mask's condition and of its fill, made if the mask is a constant."""
    made_by = view.producer(mask.value)
    if made_by is not None and made_by.kind == "Where":
        return made_by.node.input[0], made_by.node.input[2 if mask.shows else 1]
    tensor = view.constant(mask.value)
    assert tensor is not None
    values = view.model.array(tensor)
    names = [unused(f"{view.value_name(mask.value)}_{part}", view.names) for part in ("shown", "fill")]
    for name, array in zip(names, (values == 0, values.min()), strict=True):
        main.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return names[0], names[1]


def _bounded(view: View, mask: _Mask, main: GraphProto) -> str:
    """The name of a constant mask whose fill stays in range, made here."""
    shown = _shown(view, mask.value, mask.shows)
    assert shown is not None
    name = unused(f"{view.value_name(mask.value)}_bounded", view.names)
    values = np.where(shown, np.float32(0), np.float32(_BOUNDED_FILL))
    main.initializer.append(onnx.numpy_helper.from_array(values, name))
    return name


def _fresh(view: View, name: str) -> str:
    return unused(name, view.names)


def _drop_unread(view: View, masks: Iterable[ValueId], sums: Collection[OpId], main: GraphProto) -> None:
    """Remove from the main graph the nodes and initializers of masks that nothing reads any more."""
    mine = [value for value in masks if _inner(view, value) and all(use.op in sums for use in view.uses[value])]
    gone = {view.value_name(value) for value in mine}
    makers = [op for value in mine if (op := view.producer(value)) is not None]
    last = {op.id for op in makers}
    for value in {v: None for op in makers for v in op.inputs if v is not None}:
        if view.constant(value) is not None and _inner(view, value) and all(u.op in last for u in view.uses[value]):
            gone.add(view.value_name(value))
    stay = (node for node in nodes_of(view, main).values() if not gone.intersection(node.output))
    gone -= {name for node in stay for name in node.input}
    for at in reversed([i for i, node in enumerate(main.node) if gone.intersection(node.output)]):
        del main.node[at]
    for named in (main.initializer, main.value_info):
        for at in reversed([i for i, held in enumerate(named) if held.name in gone]):
            del named[at]


def _inner(view: View, value: ValueId) -> bool:
    """Whether a value of the main graph is nobody's outside of its nodes."""
    held = view.values[value]
    return held.scope == MAIN and not held.public and not held.overridable and value not in view.yielded
