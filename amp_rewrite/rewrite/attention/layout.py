"""The sources of attention operands, before they are transposed and before their heads are repeated.

Ops that only move numbers are run on distinct numbers, so the result shows where each number came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dims import Dims, names_in, renamed
from amp_rewrite.ir.op_classes import RELABELS
from amp_rewrite.ir.shapes import dims_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.const_eval import moves_before, permutation

_FREE = (2, 3, 5, 7, 11, 13, 17, 19, 23)
"""Sizes for free dimensions: distinct primes, so no product of them equals another."""
_MAX_ELEMENTS = 1 << 24
"""Maximum size of an array of numbers to move."""
RANK = 4
SWAP = (0, 2, 1, 3)
"""The permutation to move heads before tokens, and its own inverse."""


@dataclass(frozen=True, slots=True)
class OperandSource:
    """A value with four axes; `ops` transpose it by `perm` and repeat its heads `groups` times to make an operand."""

    value: ValueId
    perm: tuple[int, ...] = (0, 1, 2, 3)
    groups: int = 1
    ops: tuple[OpId, ...] = ()

    def dims(self, view: View) -> Dims:
        """Return the four dimensions of the operand before its heads are repeated; () if the rank is unknown."""
        dims = dims_of(view, self.value)
        return tuple(dims[axis] for axis in self.perm) if len(dims) == RANK else ()


def head_split(view: View, value: ValueId) -> Op | None:
    """Return the Reshape to separate heads, if a Transpose then moves them before the tokens."""
    op = view.producer(value, "Transpose")
    return view.producer(op.inputs[0], "Reshape") if op is not None and permutation(op) == SWAP else None


def keys_source(view: View, transposed: ValueId) -> OperandSource:
    """Return the source of keys with the tokens on their last axis; the keys themselves if none is found."""
    for origin, ops, move in _sources(view, transposed):
        for perm in ((0, 1, 2, 3), (0, 2, 1, 3)):
            if move == (tuple(perm[axis] for axis in (0, 1, 3, 2)), 1):
                return OperandSource(origin, perm, 1, ops)
    return OperandSource(transposed, (0, 1, 3, 2))


def ungrouped(view: View, source: OperandSource) -> OperandSource:
    """Return the source of keys or values before their heads are repeated; the same source if they are not."""
    if source.perm not in ((0, 1, 2, 3), (0, 1, 3, 2)):
        return source
    for origin, ops, move in _sources(view, source.value):
        if move is not None and move[0] == source.perm and move[1] > 1:
            return OperandSource(origin, groups=move[1], ops=(*ops, *source.ops))
    return source


_Move = tuple[tuple[int, ...], int]
"""The effect of ops on four axes: a permutation, and how often each entry of the second axis is then repeated."""


def _sources(view: View, value: ValueId) -> Iterator[tuple[ValueId, tuple[OpId, ...], _Move | None]]:
    """Yield the sources of a value with four axes, nearest first, with the moves in between and their effect."""
    moves = list[Op]()
    for op, origin in moves_before(view, value):
        moves.insert(0, op)
        dims = dims_of(view, origin)
        if len(dims) == RANK:
            steps = tuple((each.kind, permutation(each), dims_of(view, each.outputs[0])) for each in moves)
            yield origin, tuple(each.id for each in moves), _effect(dims, steps)


_Step = tuple[str, tuple[int, ...], Dims]
"""The kind of a move, the permutation of a Transpose, and the dimensions of the result."""


@cache
def _effect(origin: Dims, steps: tuple[_Step, ...]) -> _Move | None:
    """Return the effect of moves, given the dimensions of their results; None if the dimensions are unknown.

    With known dimensions it does not matter how a shape is computed. Caching pays off because layers tend to be alike.
    """
    sizes = _sizes((origin, *(dims for _, _, dims in steps)))
    x = _distinct_numbers(origin, sizes)
    result = None if x is None or sizes is None else _after_moves(x, steps, sizes)
    if x is None or result is None or x.ndim != RANK or result.ndim != RANK:
        return None
    for perm in permutations(range(RANK)):
        transposed = x.transpose(perm)
        if result.shape[0] != transposed.shape[0] or result.shape[2:] != transposed.shape[2:]:
            continue
        groups, remainder = divmod(result.shape[1], transposed.shape[1])
        if remainder == 0 and np.array_equal(result, np.repeat(transposed, groups, axis=1)):
            return perm, groups
    return None


def _after_moves(x: Array, steps: Sequence[_Step], sizes: Mapping[str, int]) -> Array | None:
    moved: Array | None = x
    for kind, perm, dims in steps:
        shape = _concrete(dims, sizes)
        moved = _apply_move(kind, perm, moved, shape) if moved is not None and shape is not None else None
    return moved


def moved_marks(view: View, origin: ValueId, marks: Array, moves: Sequence[Op], axes: tuple[int, ...]) -> Array | None:
    """Broadcast `marks`, one integer per element, to the shape of `origin`, apply the moves, and return the result.

    None if the result varies along axes other than `axes`.
    """
    steps = tuple((op.kind, permutation(op), dims_of(view, op.outputs[0])) for op in moves)
    return _moved_marks(dims_of(view, origin), steps, marks.tobytes(), marks.shape, axes)


@cache
def _moved_marks(
    origin: Dims, steps: tuple[_Step, ...], marks: bytes, shape: tuple[int, ...], axes: tuple[int, ...]
) -> Array | None:
    sizes = _sizes((origin, *(dims for _, _, dims in steps)))
    whole = _concrete(origin, sizes) if sizes is not None else None
    array = np.frombuffer(marks, np.int64).reshape(shape)
    if sizes is None or not whole or math.prod(whole) > _MAX_ELEMENTS or not broadcasts(shape, whole):
        return None
    moved = _after_moves(np.broadcast_to(array, whole), steps, sizes)
    if moved is None or not moved.size or max(axes) >= moved.ndim:
        return None
    first = moved[tuple(slice(None) if axis in axes else slice(1) for axis in range(moved.ndim))]
    return np.ascontiguousarray(first) if bool((moved == first).all()) else None


def _sizes(shapes: Sequence[Dims]) -> dict[str, int] | None:
    names = dict.fromkeys(name for shape in shapes for d in shape for name in sorted(names_in(d)))
    return dict(zip(names, _FREE, strict=False)) if len(names) + RANK <= len(_FREE) else None


def _concrete(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    sized = tuple(renamed(d, sizes) for d in dims)
    return tuple(d for d in sized if isinstance(d, int)) if all(isinstance(d, int) for d in sized) else None


def _distinct_numbers(dims: Dims, sizes: Mapping[str, int] | None) -> Array | None:
    if sizes is None:
        return None
    free = iter(_FREE[len(sizes) :])
    shape = _concrete(tuple(next(free) if d is None else d for d in dims), sizes) or (0,)
    size = math.prod(shape)
    return np.arange(size, dtype=np.float64).reshape(shape) if 0 < size <= _MAX_ELEMENTS else None


def _apply_move(kind: str, perm: tuple[int, ...], x: Array, shape: tuple[int, ...]) -> Array | None:
    if kind == "Transpose":
        if perm and len(perm) != x.ndim:
            return None
        moved: Array = x.transpose(perm or None)
        return moved if moved.shape == shape else None
    if kind == "Expand":
        fits = len(x.shape) <= len(shape) and broadcasts(x.shape, shape)
        return np.broadcast_to(x, shape) if fits else None
    return x.reshape(shape) if kind in RELABELS and math.prod(shape) == x.size else None


def broadcasts(shape: Dims, whole: Dims) -> bool:
    """True if a shape broadcasts to the last dimensions of another.

    Each of its dimensions must be known, and either 1 or equal to the other's.
    """
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return all(size is not None and size in (1, other) for size, other in pairs)
