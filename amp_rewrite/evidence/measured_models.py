"""Models under measurement: their names, their low types, and whether they draw random numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.passes.inline import inlined


def name_of(model: object, default: str) -> str:
    """Return the file name of a model, or the default."""
    path = model.path if isinstance(model, Model) else model if isinstance(model, (str, os.PathLike)) else None
    return Path(path).name if path is not None else default


def low_types(model: Model) -> tuple[str, ...]:
    """Return the names of the low types in a model and in its local functions."""
    return tuple(sorted(dtype.spelling for dtype in View.of(inlined(model)).low_types))


def drawing(model: Model, name: str) -> Iterator[str]:
    """Yield a note if ops draw random numbers without a seed, because comparing their outputs is meaningless."""
    view = View.of(model)
    drawn = [op for op in view.ops if _draws(view, op) and all(a.name != "seed" for a in op.node.attribute)]
    if drawn:
        more = f" and {len(drawn) - 1} more" if drawn[1:] else ""
        yield (
            f"{drawn[0].name!r} ({drawn[0].kind}){more} in {name} draws random numbers without a seed, others in each"
            " run; give it the attribute seed"
        )


def _draws(view: View, op: Op) -> bool:
    """True if an op gives different numbers in each run; Dropout does if its third input, training mode, is true."""
    if op.op_type != "Dropout":
        return op.op_type in RANDOM
    mode = op.inputs[2] if len(op.inputs) > 2 else None
    tensor = view.constant(mode)
    return mode is not None and (tensor is None or bool(view.model.array(tensor).any()))
