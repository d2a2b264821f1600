"""The Cast behind a CastLike."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.passes.copied import nodes_of


def spell_out_casts(view: View) -> View:
    """A view in which each CastLike is the Cast that it amounts to, so that its model tensor is not read.

    No runtime of note has a kernel for CastLike: it runs as this very Cast.
    """
    wanted = {op.id: dtype for op in view.ops if op.kind == "CastLike" and (dtype := _like(view, op)) is not None}
    if not wanted:
        return view
    proto = clone(view.model.proto)
    copies = nodes_of(view, proto.graph)
    for op, dtype in wanted.items():
        node = copies[op]
        del node.input[1:]
        if view.dtype(_input(view.ops[op])) is dtype:
            node.op_type = "Identity"
            del node.attribute[:]
        else:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", dtype.code))
    return View.of(replace(view.model, proto=proto))


def _input(op: Op) -> ValueId:
    assert op.inputs[0] is not None
    return op.inputs[0]


def _like(view: View, op: Op) -> DType | None:
    return view.dtype(op.inputs[1]) if len(op.inputs) > 1 and op.inputs[1] is not None else None
