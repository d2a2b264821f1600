"""Selection of the initializers that a step trains."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.ir.nodes import MAIN, Role, Use, Value
from amp_rewrite.ir.op_classes import LAYERS, RECURRENT
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.vjp.paths import Paths, paths
from amp_rewrite.rewrite.autodiff.vjp.row import Refuse, Stop
from amp_rewrite.rewrite.autodiff.vjp.table import VJPS
from amp_rewrite.train.objective.losses import type_name
from amp_rewrite.train.update.loss_scale import Array

_SCORES = 4  # axes of attention scores: batch, heads, rows, columns
_LARGEST = 1e4
"""Magnitude above which a float32 initializer is a mask, not a weight."""

_HALF = (DType.FLOAT16, DType.BFLOAT16)

# Ops that compute with weights: for them even a single number is a weight.
_WEIGHTED = LAYERS | RECURRENT | {"Einsum", "PRelu", "LayerNormalization", "RMSNormalization"}
_STATE = {"BatchNormalization": (3, 4), **dict.fromkeys(RECURRENT, (5, 6))}
"""Inputs for running statistics or initial states; exporters write the latter as zeros."""


def trained(
    view: View, loss: str, parameters: str | Sequence[str] | None, freeze: str | Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the trained float32 initializers, in the model's order.

    `parameters`: globs on names. The default is every initializer that the loss depends on through gradients, except
    running statistics, initial states of recurrent layers, masks (`_is_mask`), and single numbers (an epsilon, a
    scale) that are not a weight of a product, convolution or normalization. `freeze`: globs on names to exclude.

    TrainingError for a glob without a match, for an initializer in `parameters` that is not float32, and for an empty
    result; by default also for half-precision weights, which could not be trained. O(nodes + uses); reads the values
    of every candidate.
    """
    initializers = [v for v in view.values if v.scope == MAIN and v.role is Role.INITIALIZER]
    names = {v.name: v for v in initializers}
    excluded = _matched(names, freeze)
    if parameters is not None:
        candidates = [names[name] for name in _matched(names, parameters)]
        other = next((v for v in candidates if view.dtype(v.id) is not DType.FLOAT), None)
        if other is not None:
            kind = type_name(view.dtype(other.id))
            raise TrainingError(f"parameter {other.name!r} is {kind}, but trained weights must be float32; cast it")
    else:
        candidates = [v for v in initializers if view.dtype(v.id) is DType.FLOAT]
        _check_not_half(view, loss, [v for v in initializers if view.dtype(v.id) in _HALF and v.name not in excluded])
        routes = _routes(view, loss, candidates)
        candidates = [v for v in candidates if _is_weight(view, v, routes)]
    left = {v.name for v in candidates} - set(excluded)
    if candidates and not left:
        raise TrainingError("every parameter is frozen, so there is nothing to train; freeze fewer")
    if not left:
        raise TrainingError(
            f"the loss {loss!r} does not depend on a trainable float32 initializer; export the model with its weights"
            " as initializers, or name them in `parameters`"
        )
    return tuple(v.name for v in initializers if v.name in left)


def _matched(names: dict[str, Value], globs: str | Sequence[str]) -> list[str]:
    selected: dict[str, None] = {}
    for glob in (globs,) if isinstance(globs, str) else globs:
        matched = [name for name in names if name == glob or fnmatch.fnmatchcase(name, glob)]
        if not matched:
            hint = advice(glob, names, f"it has {_some(list(names))}")
            raise TrainingError(f"parameter {glob!r} is not an initializer of the model; {hint}")
        selected.update(dict.fromkeys(matched))
    return list(selected)


def _some(names: list[str]) -> str:
    if not names:
        return "none at all"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_not_half(view: View, loss: str, half: Sequence[Value]) -> None:
    """Raise TrainingError if a loss depends on half-precision weights: a converted model, or a half export."""
    readers = _routes(view, loss, half).readers if half else ()
    weights = (v for v in half if any(view.ops[use.op].kind in _WEIGHTED for use in view.uses[v.id]))
    if left := [v.name for v in weights if v.id in readers]:
        raise TrainingError(
            f"{_some(left)} of the model {'is' if len(left) == 1 else 'are'} in half precision, but trained weights"
            " must be float32; pass the float32 model (training_step lowers it), widen this one with"
            " convert(model, keep=['*']), or name the trained initializers in `parameters`"
        )


def _routes(view: View, loss: str, candidates: Sequence[Value]) -> Paths:
    target = next(v.id for v in view.values if v.scope == MAIN and v.name == loss)
    return paths(view, MAIN, [target], [v.id for v in candidates], VJPS)


def _is_weight(view: View, value: Value, routes: Paths) -> bool:
    """True if the loss has a gradient with respect to the initializer, and the initializer looks like a weight."""
    passed = [u for u in view.uses[value.id] if value.id in routes.readers and _passes(view, value, u, routes)]
    ops = {view.ops[u.op].kind for u in passed}
    if not passed or any(u.slot in _STATE.get(view.ops[u.op].kind, ()) for u in view.uses[value.id]):
        return False
    assert value.tensor is not None
    array = view.model.array(value.tensor)
    if array.size <= 1 and not ops & _WEIGHTED:
        return False
    return not array.size or not _is_mask(array, ops)


def _is_mask(array: Array, ops: set[str]) -> bool:
    """True if an initializer is a mask: huge values, or a constant array added to attention scores.

    Scores have four axes. A learned bias added to them is gathered from a table and not constant.
    """
    if np.abs(array).max() > _LARGEST:
        return True
    return array.ndim >= _SCORES and ops == {"Add"} and bool(array.min() == array.max())


def _passes(view: View, value: Value, use: Use, routes: Paths) -> bool:
    """True if a gradient arrives from a use, directly or as a capture of an op whose body contains the use."""
    op = view.ops[use.op]
    row = VJPS.get((op.domain, op.op_type))
    if row is not None and isinstance(row.entry(use.slot), (Refuse, Stop)):
        return False
    if op.scope == MAIN:
        return use.slot in routes.slots.get(op.id, ())
    return any(value.id in captured for captured in routes.captured.values())
