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
from amp_rewrite.ir.op_classes import RELABELS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.onnx_shapes import AllDims, Dims
from amp_rewrite.ir.shapes.symbolic import names_in, over, renamed
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.const_eval import computed, moves_behind, ops_behind

_FREE = (2, 3, 5, 7, 11, 13, 17, 19, 23)  # sizes that stand for free dimensions: no two alike, no product one of them
_LARGEST = 1 << 24  # elements that are moved to see where they go
RANK = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A value of four axes from which an operand is made by moving: transpose it by `perm`, repeat each head `groups`
    times. `ops` are what moves it.

    `heads`: the value has three axes, the first of which counts so many heads of each batch; 0 where it has four.
    """

    value: ValueId
    perm: tuple[int, ...] = (0, 1, 2, 3)
    groups: int = 1
    ops: tuple[OpId, ...] = ()
    heads: int = 0

    def dims(self, view: View, dims: AllDims) -> Dims:
        """The four axes of the operand but for repeated heads, as far as they are known; none where its rank is not."""
        found = dims_at(view, dims, self.value)
        parted = split(found, self.heads) if found is not None and self.heads else found
        return tuple(parted[axis] for axis in self.perm) if parted is not None and len(parted) == RANK else ()


def split(dims: Dims, heads: int) -> Dims | None:
    """Three dimensions as four, the first as batch and heads."""
    return (over(dims[0], heads), heads, *dims[1:]) if len(dims) == RANK - 1 else None


def dims_at(view: View, dims: AllDims, value: ValueId) -> Dims | None:
    """The dimensions of a value, as far as they are known."""
    return dims.get((view.values[value].scope, view.value_name(value)))


def source(view: View, dims: AllDims, value: ValueId, heads: int) -> Source:
    """Return the source of an operand; of three axes, the four axes that it was made of."""
    for entry, ops, made in _sources(view, dims, value, heads) if heads else ():
        if made == _Made((0, 1, 2, 3)) and _rank(view, dims, entry) == RANK:
            return Source(entry, ops=ops)
    return Source(value, heads=heads)


def keys_source(view: View, dims: AllDims, transposed: ValueId, heads: int) -> Source:
    """Return the source of keys whose last axis counts them; by default themselves, transposed."""
    best = Source(transposed, (0, 1, 3, 2), heads=heads)
    for entry, ops, made in _sources(view, dims, transposed, heads):
        for perm in ((0, 1, 2, 3), (0, 2, 1, 3)):
            if made == _Made(tuple(perm[axis] for axis in (0, 1, 3, 2))):
                if _rank(view, dims, entry) == RANK:
                    return Source(entry, perm, 1, ops)
                best = Source(entry, perm, 1, ops, heads) if best.value == transposed else best
    return best


def _rank(view: View, dims: AllDims, value: ValueId) -> int:
    return len(dims_at(view, dims, value) or ())


def ungrouped(view: View, dims: AllDims, source: Source) -> Source:
    """Return the source of keys or values before their heads are repeated for those of the queries; else the source."""
    if source.perm != (0, 1, 2, 3):
        return source
    for entry, ops, made in _sources(view, dims, source.value, source.heads):
        fits = made is not None and made.perm == source.perm and _rank(view, dims, entry) == RANK
        if made is not None and made.groups > 1 and fits:
            return Source(entry, groups=made.groups, ops=(*ops, *source.ops))
    return source


@dataclass(frozen=True, slots=True)
class _Made:
    """The effect of moves on four axes: they transpose them, then repeat each of the second axis."""

    perm: tuple[int, ...]
    groups: int = 1


def _sources(
    view: View, dims: AllDims, value: ValueId, heads: int
) -> Iterator[tuple[ValueId, tuple[OpId, ...], _Made | None]]:
    """The values of four axes behind moves, nearest first, with the moves and what these make of them.

    With `heads` also those of three, the first split in batch and heads.
    """
    moves = list[Op]()
    for move, entry in moves_behind(view, value):
        moves.insert(0, move)
        known = dims_at(view, dims, entry)
        if known is not None and len(known) in ((RANK, RANK - 1) if heads else (RANK,)):
            steps = tuple(_step(view, dims, op) for op in moves)
            made = _carried(known, steps, heads)
            if made is None and (ops := ops_behind(view, value, (entry,))) is not None:
                x = _marked(known, _sizes((known,)))
                result = computed(view, ops, value, {view.value_name(entry): x}) if x is not None else None
                made = _made(x, result, heads) if x is not None and result is not None else None
            yield entry, tuple(op.id for op in moves), made


_Step = tuple[str, tuple[int, ...], Dims | None]
"""The kind of a move, the permutation of a Transpose, and the dimensions of the result."""


def _step(view: View, dims: AllDims, op: Op) -> _Step:
    perm = attribute(op.node, "perm")
    result = dims_at(view, dims, op.outputs[0]) if op.outputs[0] is not None else None
    return op.kind, tuple(perm.ints) if perm is not None else (), result


@cache
def _carried(entry: Dims, steps: tuple[_Step, ...], heads: int) -> _Made | None:
    """The result of moves of an entry, by the dimensions of their results; None where these are not known.

    Where they are, it does not matter what a shape is computed from. Layers are alike, so each is seen once.
    """
    ends = [end for _, _, end in steps]
    sizes = _sizes((entry, *(end for end in ends if end is not None)))
    x = _marked(entry, sizes)
    moved: Array | None = x
    for kind, perm, end in steps:
        shape = _sized(end, sizes) if end is not None and sizes is not None else None
        if moved is None or shape is None:
            return None
        moved = _move(kind, perm, moved, shape)
    return _made(x, moved, heads) if x is not None and moved is not None else None


def _made(entry: Array, moved: Array, heads: int) -> _Made | None:
    """Return how a result of moves comes from an array of distinct elements."""
    x, result = (_split(array, heads) for array in (entry, moved))
    if x is None or result is None:
        return None
    for perm in permutations(range(RANK)):
        turned = x.transpose(perm)
        if result.shape[0] != turned.shape[0] or result.shape[2:] != turned.shape[2:]:
            continue
        groups, rest = divmod(result.shape[1], turned.shape[1])
        if rest == 0 and np.array_equal(result, np.repeat(turned, groups, axis=1) if groups > 1 else turned):
            return _Made(perm, groups)
    return None


def _split(array: Array, heads: int) -> Array | None:
    """An array of four axes as it is; one of three with its first split in batch and heads."""
    if array.ndim == RANK - 1 and heads and array.shape[0] % heads == 0:
        return array.reshape(-1, heads, *array.shape[1:])
    return array if array.ndim == RANK else None


def _sizes(ends: Sequence[Dims]) -> dict[str, int] | None:
    """Sizes that stand for free dimensions by name, no two alike; None where there are too many."""
    names = dict.fromkeys(name for end in ends for d in end for name in sorted(names_in(d)))
    return dict(zip(names, _FREE, strict=False)) if len(names) + RANK <= len(_FREE) else None


def _sized(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The dimensions with sizes for their names; None where one is not known."""
    sized = tuple(renamed(d, sizes) for d in dims)
    return tuple(d for d in sized if isinstance(d, int)) if all(isinstance(d, int) for d in sized) else None


def _marked(dims: Dims, sizes: Mapping[str, int] | None) -> Array | None:
    """An array of these dimensions, no two elements alike."""
    if sizes is None:
        return None
    free = iter(_FREE[len(sizes) :])
    shape = _sized(tuple(next(free) if d is None else d for d in dims), sizes) or (0,)
    size = math.prod(shape)
    return np.arange(size, dtype=np.float64).reshape(shape) if 0 < size <= _LARGEST else None


def _move(kind: str, perm: tuple[int, ...], x: Array, shape: tuple[int, ...]) -> Array | None:
    """Move an array to a result of this shape; None if it cannot have that shape."""
    if kind == "Transpose":
        if perm and len(perm) != x.ndim:
            return None
        moved: Array = x.transpose(perm or None)
        return moved if moved.shape == shape else None
    if kind == "Expand":
        return np.broadcast_to(x, shape) if _broadcasts(x.shape, shape) else None
    return x.reshape(shape) if kind in RELABELS and math.prod(shape) == x.size else None


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, other) for size, other in pairs)
