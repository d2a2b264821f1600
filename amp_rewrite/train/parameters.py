"""Which initializers of a model are trained."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.ir.nodes import MAIN, Role, Use, Value
from amp_rewrite.ir.op_classes import LAYERS, RECURRENT
from amp_rewrite.ir.view import View
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.paths import Paths, paths
from amp_rewrite.train.vjp.row import Refuse, Stop
from amp_rewrite.train.vjp.table import VJPS

_SCORES = 4  # axes of attention scores: batch, heads, rows, columns
_LARGEST = 1e4
"""Beyond this a float32 initializer is a mask, not a weight."""

_HALF = (DType.FLOAT16, DType.BFLOAT16)

# What computes with weights: here even a single number is one.
_WEIGHTED = LAYERS | RECURRENT | {"Einsum", "PRelu", "LayerNormalization", "RMSNormalization"}
_STATE = {"BatchNormalization": (3, 4), **dict.fromkeys(RECURRENT, (5, 6))}
"""Inputs that hold running statistics, or what a layer begins with: zeros for each row, as exporters write."""


def trained(view: View, loss: str, chosen: str | Sequence[str] | None, frozen: str | Sequence[str]) -> tuple[str, ...]:
    """The names of the float32 initializers that are trained, in the model's order.

    `chosen`: one glob or more on their names. Without it all on which the loss depends through gradients, but for
    running statistics, initial states of recurrent layers, single numbers (an epsilon, a scale) that are no weight of a
    product, convolution or normalization, and masks (`_is_mask`). `frozen` are left out of either.

    TrainingError for a glob that matches no initializer, one that is chosen and no float32, if none is left, and
    where the loss depends on half weights, which would stay as they are, and nothing says which are trained.
    O(nodes + uses), and every candidate's values are read.
    """
    found = [v for v in view.values if v.scope == MAIN and v.role is Role.INITIALIZER]
    names = {v.name: v for v in found}
    kept_out = _matched(names, frozen)
    if chosen is not None:
        wanted = [names[name] for name in _matched(names, chosen)]
        for value in wanted:
            _check_float32(view, value)
    else:
        wanted = [v for v in found if view.dtype(v.id) is DType.FLOAT]
        _check_not_half(view, loss, [v for v in found if view.dtype(v.id) in _HALF and v.name not in kept_out])
        ways = _ways(view, loss, wanted)
        wanted = [v for v in wanted if _is_weight(view, v, ways)]
    left = {v.name for v in wanted} - set(kept_out)
    if wanted and not left:
        raise TrainingError("every parameter is frozen, so nothing is left to train; freeze fewer")
    if not left:
        raise TrainingError(
            f"the loss {loss!r} depends on no float32 initializer that could be trained; a model exported with its"
            " weights as initializers has some, and `parameters` names them"
        )
    return tuple(v.name for v in found if v.name in left)


def _matched(names: dict[str, Value], globs: str | Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for glob in (globs,) if isinstance(globs, str) else globs:
        matched = [name for name in names if name == glob or fnmatch.fnmatchcase(name, glob)]
        if not matched:
            near = difflib.get_close_matches(glob, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {_some(list(names))}"
            raise TrainingError(f"parameter {glob!r} is no initializer of the model; {hint}")
        found.update(dict.fromkeys(matched))
    return list(found)


def _some(names: list[str]) -> str:
    if not names:
        return "none at all"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_float32(view: View, value: Value) -> None:
    dtype = view.dtype(value.id)
    if dtype is not DType.FLOAT:
        spelled = dtype.spelling if dtype else "of unknown type"
        raise TrainingError(f"parameter {value.name!r} is {spelled}; trained weights are kept in float32, cast it")


def _check_not_half(view: View, loss: str, half: Sequence[Value]) -> None:
    """TrainingError where a loss depends on half weights of a product: the model was converted, or exported so."""
    ways = _ways(view, loss, half) if half else None
    left = [v.name for v in half if ways is not None and v.id in ways.readers and _weighted(view, v)]
    if left:
        raise TrainingError(
            f"{_some(left)} of the model {'is' if len(left) == 1 else 'are'} in half precision, and trained weights are"
            " kept in float32; give the float32 model (training_step lowers it), widen this one with"
            " convert(model, keep=['*']), or name what is trained: `parameters`"
        )


def _weighted(view: View, value: Value) -> bool:
    """Whether an op that computes with weights reads the value as it is."""
    return any(view.ops[use.op].kind in _WEIGHTED for use in view.uses[value.id])


def _ways(view: View, loss: str, wanted: Sequence[Value]) -> Paths:
    target = next(v.id for v in view.values if v.scope == MAIN and v.name == loss)
    return paths(view, MAIN, [target], [v.id for v in wanted], VJPS)


def _is_weight(view: View, value: Value, ways: Paths) -> bool:
    """Whether the loss has a gradient by the initializer, and the initializer looks like a weight."""
    passed = [u for u in view.uses[value.id] if value.id in ways.readers and _passes(view, value, u, ways)]
    ops = {view.ops[u.op].kind for u in passed}
    if not passed or any(u.slot in _STATE.get(view.ops[u.op].kind, ()) for u in view.uses[value.id]):
        return False
    assert value.tensor is not None
    array = view.model.array(value.tensor)
    if array.size <= 1 and not ops & _WEIGHTED:
        return False
    return not array.size or not _is_mask(array, ops)


def _is_mask(array: Array, ops: set[str]) -> bool:
    """Whether an initializer masks: has values that are out of all proportion, or is added to scores and masks nothing.

    Scores have four axes; what is learned and added to them is gathered from a table, not one number throughout.
    """
    if np.abs(array).max() > _LARGEST:
        return True
    return array.ndim >= _SCORES and ops == {"Add"} and bool(array.min() == array.max())


def _passes(view: View, value: Value, use: Use, ways: Paths) -> bool:
    """Whether a gradient comes back from a use, be it in a body of an op on the way, to which it comes as a capture."""
    op = view.ops[use.op]
    row = VJPS.get((op.domain, op.op_type))
    if row is not None and isinstance(row.entry(use.slot), (Refuse, Stop)):
        return False
    if op.scope == MAIN:
        return use.slot in ways.slots.get(op.id, ())
    return any(value.id in captured for captured in ways.captured.values())
