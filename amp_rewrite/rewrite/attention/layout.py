"""The sources of an attention's operands: before they are transposed, and before heads are repeated for it.

Ops that only move numbers are run on numbers that are all different: what they give shows where each came from.
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
from amp_rewrite.rewrite.const_eval import moves_behind, permutation

_FREE = (2, 3, 5, 7, 11, 13, 17, 19, 23)  # sizes that stand for free dimensions: no two alike, no product one of them
_LARGEST = 1 << 24  # elements that are moved to see where they go
RANK = 4
SWAP = (0, 2, 1, 3)
"""Heads before tokens, and back."""


@dataclass(frozen=True, slots=True)
class OperandSource:
    """A value of four axes from which an operand is made by moving: transpose it by `perm`, repeat each head `groups`
    times. `ops` are what moves it.
    """

    value: ValueId
    perm: tuple[int, ...] = (0, 1, 2, 3)
    groups: int = 1
    ops: tuple[OpId, ...] = ()

    def dims(self, view: View) -> Dims:
        """Return the four axes of the operand without repeated heads, as far as known; () if its rank is not."""
        known = dims_of(view, self.value)
        return tuple(known[axis] for axis in self.perm) if len(known) == RANK else ()


def split_behind(view: View, value: ValueId) -> Op | None:
    """Return the Reshape that splits heads off, behind the Transpose that moves them before the tokens."""
    op = view.producer(value, "Transpose")
    return view.producer(op.inputs[0], "Reshape") if op is not None and permutation(op) == SWAP else None


def keys_source(view: View, transposed: ValueId) -> OperandSource:
    """Return the source of keys with the tokens on their last axis; by default themselves, transposed."""
    for entry, ops, move in _sources(view, transposed):
        for perm in ((0, 1, 2, 3), (0, 2, 1, 3)):
            if move == (tuple(perm[axis] for axis in (0, 1, 3, 2)), 1):
                return OperandSource(entry, perm, 1, ops)
    return OperandSource(transposed, (0, 1, 3, 2))


def ungrouped(view: View, source: OperandSource) -> OperandSource:
    """Return the source of keys or values before their heads are repeated for those of the queries; else the source."""
    if source.perm not in ((0, 1, 2, 3), (0, 1, 3, 2)):
        return source
    for entry, ops, move in _sources(view, source.value):
        if move is not None and move[0] == source.perm and move[1] > 1:
            return OperandSource(entry, groups=move[1], ops=(*ops, *source.ops))
    return source


_Move = tuple[tuple[int, ...], int]
"""The effect of ops on four axes: they transpose them, then repeat each of the second axis so many times."""


def _sources(view: View, value: ValueId) -> Iterator[tuple[ValueId, tuple[OpId, ...], _Move | None]]:
    """Yield the values of four axes behind moves, nearest first, with the moves and their effect."""
    moves = list[Op]()
    for op, entry in moves_behind(view, value):
        moves.insert(0, op)
        known = dims_of(view, entry)
        if len(known) == RANK:
            steps = tuple((each.kind, permutation(each), dims_of(view, each.outputs[0])) for each in moves)
            yield entry, tuple(each.id for each in moves), _carried(known, steps)


_Step = tuple[str, tuple[int, ...], Dims]
"""The kind of a move, the permutation of a Transpose, and the dimensions of the result."""


@cache
def _carried(entry: Dims, steps: tuple[_Step, ...]) -> _Move | None:
    """Return the effect of moves on an entry, by the dimensions of their results; None if these are not known.

    If they are, it does not matter what a shape is computed from. Layers are alike, so each is seen once.
    """
    sizes = _sizes((entry, *(end for _, _, end in steps)))
    x = _marked(entry, sizes)
    result = None if x is None or sizes is None else _behind(x, steps, sizes)
    if x is None or result is None or x.ndim != RANK or result.ndim != RANK:
        return None
    for perm in permutations(range(RANK)):
        turned = x.transpose(perm)
        if result.shape[0] != turned.shape[0] or result.shape[2:] != turned.shape[2:]:
            continue
        groups, rest = divmod(result.shape[1], turned.shape[1])
        if rest == 0 and np.array_equal(result, np.repeat(turned, groups, axis=1) if groups > 1 else turned):
            return perm, groups
    return None


def _behind(x: Array, steps: Sequence[_Step], sizes: Mapping[str, int]) -> Array | None:
    """Return numbers behind moves; None if they do not fit."""
    moved: Array | None = x
    for kind, perm, end in steps:
        shape = _sized(end, sizes)
        moved = _moved(kind, perm, moved, shape) if moved is not None and shape is not None else None
    return moved


def carried(view: View, entry: ValueId, marks: Array, moves: Sequence[Op], kept: tuple[int, ...]) -> Array | None:
    """Return marks of an entry, broadcast to it, behind moves, along the axes `kept`; None if others differ."""
    steps = tuple((op.kind, permutation(op), dims_of(view, op.outputs[0])) for op in moves)
    return _carried_marks(dims_of(view, entry), steps, marks.tobytes(), marks.shape, kept)


@cache
def _carried_marks(
    entry: Dims, steps: tuple[_Step, ...], marks: bytes, shape: tuple[int, ...], kept: tuple[int, ...]
) -> Array | None:
    sizes = _sizes((entry, *(end for _, _, end in steps)))
    whole = _sized(entry, sizes) if sizes is not None else None
    held = np.frombuffer(marks, np.int64).reshape(shape)
    if sizes is None or not whole or math.prod(whole) > _LARGEST or not broadcasts(shape, whole):
        return None
    moved = _behind(np.broadcast_to(held, whole), steps, sizes)
    if moved is None or not moved.size or max(kept) >= moved.ndim:
        return None
    first = moved[tuple(slice(None) if axis in kept else slice(1) for axis in range(moved.ndim))]
    return np.ascontiguousarray(first) if bool((moved == first).all()) else None


def _sizes(ends: Sequence[Dims]) -> dict[str, int] | None:
    names = dict.fromkeys(name for end in ends for d in end for name in sorted(names_in(d)))
    return dict(zip(names, _FREE, strict=False)) if len(names) + RANK <= len(_FREE) else None


def _sized(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    sized = tuple(renamed(d, sizes) for d in dims)
    return tuple(d for d in sized if isinstance(d, int)) if all(isinstance(d, int) for d in sized) else None


def _marked(dims: Dims, sizes: Mapping[str, int] | None) -> Array | None:
    if sizes is None:
        return None
    free = iter(_FREE[len(sizes) :])
    shape = _sized(tuple(next(free) if d is None else d for d in dims), sizes) or (0,)
    size = math.prod(shape)
    return np.arange(size, dtype=np.float64).reshape(shape) if 0 < size <= _LARGEST else None


def _moved(kind: str, perm: tuple[int, ...], x: Array, shape: tuple[int, ...]) -> Array | None:
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
    """True if the last dimensions of a shape are known and those of another one, or 1."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return all(size is not None and size in (1, other) for size, other in pairs)
