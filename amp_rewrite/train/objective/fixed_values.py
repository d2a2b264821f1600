"""Initializers besides weights: statistics, states, buffers, tables, masks, and merged weights."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.nodes import Use, Value
from amp_rewrite.ir.op_classes import COPIES, LAYERS, RECURRENT
from amp_rewrite.ir.view import Op, View

WEIGHTED = LAYERS | RECURRENT | {"Einsum", "PRelu", "LayerNormalization", "RMSNormalization"}
"""Ops that compute with weights: for them even a single number is a weight."""
_STATISTICS = (3, 4)
_STATES = {**dict.fromkeys(RECURRENT, (5, 6))}
"""Inputs for initial states; exporters write them as zeros."""
_LARGEST = 1e4
"""Magnitude above which a float32 initializer is a mask, not a weight."""
_NAMES = re.compile(
    r"(?:^|[./_])(?:\w*inv_freq|freqs_cis|(?:cos|sin)_cached|running_(?:mean|var)|moving_(?:mean|variance)"
    r"|(?:\w+_)?(?:attn|attention|causal)_mask|masked_bias|alibi|relative_coords_table|relative_position_index"
    r"|position_ids|(?:pixel|image)_(?:mean|std)|mel_filters)$"
)
"""Names of buffers in PyTorch and Keras, at the end of a path."""
_ROWS = 4096  # of a table that is examined
_LEAST_ROWS, _LEAST_EQUATIONS = 4, 8
_CLOSE = 1e-3
_TURN = 0.1
"""Least difference from 2 of the factor of some column: 0 is that of a line."""


def reason(view: View, value: Value, readers: Collection[str]) -> str | None:
    """Return why an initializer is not a weight; None if it is one. `readers`: kinds of ops with a gradient for it."""
    assert value.tensor is not None
    uses = view.uses[value.id]
    if any(view.ops[u.op].kind == "BatchNormalization" and u.slot in _STATISTICS for u in uses):
        return "running statistics"
    if all(_is_state(view, use) for use in uses):
        return "the initial state of a recurrence"
    if _NAMES.search(value.name):
        return "a buffer by its name"
    array = view.model.array(value.tensor)
    if array.size <= 1:
        return None if set(readers) & WEIGHTED else "a single number that no product or norm reads"
    if np.abs(array).max() > _LARGEST:
        return f"a mask, with numbers above {_LARGEST:g}"
    if set(readers) == {"Mul"} and array.ndim > 1 and not _equal(array) and np.isin(array, (0, 1)).all():
        return "a mask of zeros and ones"
    squeezed = array.squeeze()
    if squeezed.ndim > 1 and is_sinusoids(squeezed.reshape(len(squeezed), -1)):
        return "a table of sinusoids"
    return None


def _equal(array: Array) -> bool:
    return bool(array.min() == array.max())


# -- states ------------------------------------------------------------------------------------------


def _is_state(view: View, use: Use) -> bool:
    """True if a use only hands a value on to the initial state of a recurrence, perhaps moved or repeated."""
    op = view.ops[use.op]
    if op.kind in _STATES:
        return use.slot in _STATES[op.kind]
    if op.kind in ("Loop", "Scan"):
        return use.slot in _carried(op)
    if op.kind not in COPIES or use.slot != 0:
        return False
    inner = [u for out in op.outputs if out is not None for u in view.uses[out]]
    return bool(inner) and all(_is_state(view, u) for u in inner)


def _carried(op: Op) -> range:
    if op.kind == "Loop":
        return range(2, len(op.inputs))
    scanned = attribute(op.node, "num_scan_inputs")
    return range(len(op.inputs) - (scanned.i if scanned is not None else 0))


# -- tables ------------------------------------------------------------------------------------------


def is_sinusoids(table: Array) -> bool:
    """True for a table [positions, features] of sinusoids of the position.

    Such a column x obeys x(p + 1) + x(p - 1) = 2 cos(w) x(p), for sine and cosine alike. First rows up to one of zeros,
    that of padding, are left out.
    """
    padding = np.flatnonzero(~table[:_LEAST_ROWS].any(axis=1))
    table = table[padding[-1] + 1 :] if padding.size else table
    if len(table) < _LEAST_ROWS or (len(table) - _LEAST_ROWS + 1) * table.shape[1] < _LEAST_EQUATIONS:
        return False
    few = table[:_LEAST_ROWS]  # rejects most weights without a copy of all
    for rows in (few, table[:_ROWS]):
        size = np.abs(rows).max()
        if not 0 < size < np.inf or _equal(rows):
            return False
        x = rows.astype(np.float64) / size
        sums, middle = x[2:] + x[:-2], x[1:-1]
        square = (middle * middle).sum(0)
        factor = np.where(square > 0, (sums * middle).sum(0) / np.where(square > 0, square, 1), 0)
        turns = np.abs(factor).max() <= 2 + _CLOSE and factor.min() < 2 - _TURN
        if not turns or np.abs(sums - factor * middle).max() > _CLOSE:
            return False
    return bool(np.ptp(table[:_ROWS], axis=0).max() > _CLOSE * np.abs(table[:_ROWS]).max())


# -- merged weights ------------------------------------------------------------------------------------


def merged(view: View, value: Value) -> bool:
    """True if an initializer may stand for several equal weights: several ops read it, and it is constant.

    Weights that are tied on purpose have numbers of their own.
    """
    assert value.tensor is not None
    if len({use.op for use in view.uses[value.id]}) < 2:
        return False
    array = view.model.array(value.tensor)
    return array.size > 1 and _equal(array)
