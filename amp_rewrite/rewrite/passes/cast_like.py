"""The Cast behind a CastLike."""

from __future__ import annotations

from collections.abc import Iterator

import onnx.helper

from amp_rewrite.files.protos import clone
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.replacement import Context, Replacement


def spell_out_casts(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each CastLike by the Cast that it amounts to, which does not read the model tensor.

    No runtime of note has a kernel for CastLike: it runs as this very Cast.
    """
    for op in view.ops:
        like = op.inputs[1] if op.kind == "CastLike" else None
        dtype = view.dtype(like)
        if dtype is None or op.inputs[0] is None:
            continue
        node = clone(op.node)
        del node.input[1:]
        if view.dtype(op.inputs[0]) is dtype:
            node.op_type = "Identity"
            del node.attribute[:]
        else:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", dtype.code))
        yield Replacement("cast_like", (op.id,), op.id, node, frees=False, findings=())
