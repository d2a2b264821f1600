"""Initializers that are not weights (statistics, states, buffers, tables, masks), and those that are several or one."""

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
_SCORES = 4  # axes of attention scores: batch, heads, rows, columns
_HEADS = -3
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
_FEW = 0.6
"""Share of pairs of positions with numbers of their own in an expanded table, at most: 9 of 16 for windows of 2 x 2."""
_FREQUENCIES = 4


def reason(view: View, value: Value, readers: Collection[str]) -> str | None:
    """Return why an initializer is not a weight; None if it is one. `readers`: kinds of ops that give it a gradient."""
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
    if set(readers) == {"Add"} and array.ndim >= _SCORES and array.shape[_HEADS] == 1 and _equal(array):
        return "a mask that masks nothing"
    if set(readers) == {"Mul"} and _scales_tokens(view, value, array):
        return "a mask of tokens that masks nothing"
    if set(readers) == {"Mul"} and array.ndim > 1 and not _equal(array) and np.isin(array, (0, 1)).all():
        return "a mask of zeros and ones"
    if set(readers) == {"Add"} and is_expanded(array):
        return "a table that an exporter expanded from fewer numbers, which would part"
    if _expanded_row(view, value, array):
        return "one row that an exporter expanded, whose copies would part; export by from_torch to train it"
    return _computed_table(array)


def _scales_tokens(view: View, value: Value, array: Array) -> bool:
    """True for ones that multiply each token [batch, tokens, 1] of a batch, or behind a normalization of features."""
    if array.ndim < 3 or array.shape[-1] != 1 or array.shape[-2] == 1 or not (array == 1).all():
        return False
    others = [v for use in view.uses[value.id] for v in view.ops[use.op].inputs if v is not None and v != value.id]
    return bool(array.shape[0] > 1) or all(view.producer(v, "LayerNormalization") is not None for v in others)


def is_expanded(array: Array) -> bool:
    """True for biases of scores [..., n, n] where few of the n² pairs of positions have numbers of their own.

    Such a table holds that of relative positions, or a mask of windows, once for each pair.
    """
    rows = array.shape[-1]
    if array.ndim < 3 or rows < _LEAST_ROWS or array.shape[-2] != rows or _equal(array):
        return False
    pairs, most = array.reshape(-1, rows * rows), _FEW * rows * rows
    return bool(len(np.unique(pairs[0])) <= most and len(np.unique(pairs.T, axis=0)) <= most)


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
    """Inputs of a Loop or Scan that are carried from step to step."""
    if op.kind == "Loop":
        return range(2, len(op.inputs))
    scanned = attribute(op.node, "num_scan_inputs")
    return range(len(op.inputs) - (scanned.i if scanned is not None else 0))


# -- tables ------------------------------------------------------------------------------------------


def _computed_table(array: Array) -> str | None:
    """Return the name of a table that a formula gives: sinusoids of positions, or inverse frequencies."""
    squeezed = array.squeeze()
    if squeezed.ndim == 1:
        return "a row of inverse frequencies" if is_frequencies(squeezed) else None
    return "a table of sinusoids" if is_sinusoids(squeezed.reshape(len(squeezed), -1)) else None


def is_frequencies(row: Array) -> bool:
    """True for falling powers of one number, as 10000^(-2i/d): each is the same part of the one before."""
    if len(row) < _FREQUENCIES or not (row > 0).all() or not np.isfinite(row).all():
        return False
    ratios = row[1:].astype(np.float64) / row[:-1]
    return bool(ratios.max() < 1 - _CLOSE and ratios.max() - ratios.min() < _CLOSE * ratios.max())


def is_sinusoids(table: Array) -> bool:
    """True for a table [positions, features] whose columns are sinusoids of the position.

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


# -- expanded and merged weights -----------------------------------------------------------------------


def merged(view: View, value: Value) -> bool:
    """True if an initializer may stand for several weights that were equal: several ops read it, and it is constant.

    Weights that are tied on purpose have numbers of their own.
    """
    assert value.tensor is not None
    if len({use.op for use in view.uses[value.id]}) < 2:
        return False
    array = view.model.array(value.tensor)
    return array.size > 1 and _equal(array)


def _expanded_row(view: View, value: Value, array: Array) -> bool:
    """True if all rows along an axis are copies of one row, as of a token expanded to the batch by an exporter.

    A constant initializer is one if it is expanded along the first axis and concatenated along another, as tokens are.
    """
    if array.ndim < 2 or max(array.shape[:-1]) < 2:
        return False
    ops = [view.ops[use.op] for use in view.uses[value.id]]
    if any(op.kind in WEIGHTED or op.kind.startswith("Gather") or op.scope != value.scope for op in ops):
        return False
    if _equal(array):
        return array.ndim > 2 and array.shape[0] > 1 and all(_concatenates(op) for op in ops)
    return any(size > 1 and (array == array.take([0], a)).all() for a, size in enumerate(array.shape[:-1]))


def _concatenates(op: Op) -> bool:
    axis = attribute(op.node, "axis")
    return op.kind == "Concat" and axis is not None and axis.i != 0
