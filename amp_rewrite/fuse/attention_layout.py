"""Where the keys and values of an attention lie before they are transposed, and before heads are repeated for it.

Ops that only move numbers are run on numbers that are all different: what they give shows where each came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from amp_rewrite.files.tensors import Array
from amp_rewrite.fuse.cone import computed, cone, moves_behind
from amp_rewrite.fuse.shapes import Dims
from amp_rewrite.schema import attribute
from amp_rewrite.view import Op, OpId, ScopeId, ValueId, View

AllDims = Mapping[tuple[ScopeId, str], Dims]

_FREE = (2, 3, 5, 7, 11, 13, 17, 19, 23)  # sizes that stand for free dimensions: no two alike, no product one of them
_LARGEST = 1 << 24  # elements that are moved to see where they go
RANK = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A value of four axes from which an operand is made by moving: transpose it by `perm`, repeat each head `groups`
    times. `ops` are what moves it."""

    value: ValueId
    perm: tuple[int, ...] = (0, 1, 2, 3)
    groups: int = 1
    ops: tuple[OpId, ...] = ()


def solved(view: View, dims: AllDims) -> AllDims:
    """The dimensions with those that a Reshape leaves to be counted: [a, b, 32] as [a, b, n, 16] is n = 2."""
    found: dict[str, int] = {}
    for op in view.ops:
        if op.kind == "Reshape" and op.inputs[0] is not None and op.outputs[0] is not None:
            ends = [dims_at(view, dims, value) for value in (op.inputs[0], op.outputs[0])]
            if ends[0] is not None and ends[1] is not None:
                found.update(_counted(*([found.get(str(d), d) for d in end] for end in ends if end is not None)))
    return {key: tuple(found.get(str(d), d) for d in known) for key, known in dims.items()} if found else dims


def _counted(before: list[int | str | None], after: list[int | str | None]) -> dict[str, int]:
    """The one name among the dimensions of the same elements after that those before tell the number of."""
    for d in list(before):
        if isinstance(d, str) and d in after:
            before.remove(d)
            after.remove(d)
    names = [d for d in after if not isinstance(d, int)]
    if len(names) != 1 or names[0] is None or not all(isinstance(d, int) for d in before):
        return {}
    whole, part = (math.prod(d for d in end if isinstance(d, int)) for end in (before, after))
    return {names[0]: whole // part} if part and whole % part == 0 else {}


def dims_at(view: View, dims: AllDims, value: ValueId) -> Dims | None:
    """The dimensions of a value, as far as they are known."""
    return dims.get((view.values[value].scope, view.value_name(value)))


def keys_source(view: View, dims: AllDims, transposed: ValueId) -> Source:
    """Where keys come from whose last axis counts them: themselves, transposed, if nothing better is found."""
    for entry, ops, made in _sources(view, dims, transposed):
        for perm in ((0, 1, 2, 3), (0, 2, 1, 3)):
            if made == _Made(tuple(perm[axis] for axis in (0, 1, 3, 2))):
                return Source(entry, perm, 1, ops)
    return Source(transposed, (0, 1, 3, 2))


def ungrouped(view: View, dims: AllDims, source: Source) -> Source:
    """Where keys or values come from before their heads are repeated for those of the queries; else the source."""
    if source.perm != (0, 1, 2, 3):
        return source
    for entry, ops, made in _sources(view, dims, source.value):
        if made is not None and made.groups > 1 and made.perm == source.perm:
            return Source(entry, groups=made.groups, ops=(*ops, *source.ops))
    return source


@dataclass(frozen=True, slots=True)
class _Made:
    """What moves make of four axes: they transpose them, then repeat each of the second axis."""

    perm: tuple[int, ...]
    groups: int = 1


def _sources(view: View, dims: AllDims, value: ValueId) -> Iterator[tuple[ValueId, tuple[OpId, ...], _Made | None]]:
    """The values of four axes behind moves, nearest first, with the moves and what these make of them."""
    moves = list[Op]()
    for move, entry in moves_behind(view, value):
        moves.insert(0, move)
        known = dims_at(view, dims, entry)
        if known is not None and len(known) == RANK:
            steps = tuple(_step(view, dims, op) for op in moves)
            made = _carried(known, steps)
            if made is None and (ops := cone(view, value, (entry,))) is not None:
                x = _marked(known, _sizes((known,)))
                result = computed(view, ops, value, {view.value_name(entry): x}) if x is not None else None
                made = _made(x, result) if x is not None and result is not None else None
            yield entry, tuple(op.id for op in moves), made


_Step = tuple[str, tuple[int, ...], Dims | None]
"""The kind of a move, the permutation of a Transpose, and the dimensions of the result."""


def _step(view: View, dims: AllDims, op: Op) -> _Step:
    perm = attribute(op.node, "perm")
    result = dims_at(view, dims, op.outputs[0]) if op.outputs[0] is not None else None
    return op.kind, tuple(perm.ints) if perm is not None else (), result


@cache
def _carried(entry: Dims, steps: tuple[_Step, ...]) -> _Made | None:
    """What moves make of an entry, by the dimensions of their results; None where these are not known.

    Where they are, it does not matter what a shape is computed from. Layers are alike, so each is seen once.
    """
    ends = [end for _, _, end in steps]
    sizes = _sizes((entry, *(end for end in ends if end is not None)))
    x = _marked(entry, sizes)
    moved: Array | None = x
    for kind, perm, end in steps:
        if moved is None or end is None or sizes is None or None in end:
            return None
        moved = _move(kind, perm, moved, tuple(d if isinstance(d, int) else sizes[str(d)] for d in end))
    return _made(x, moved) if x is not None and moved is not None else None


def _made(x: Array, result: Array) -> _Made | None:
    """How a result of moves comes from an array of which no two elements are alike."""
    for perm in permutations(range(RANK)):
        turned = x.transpose(perm)
        if result.ndim != RANK or result.shape[0] != turned.shape[0] or result.shape[2:] != turned.shape[2:]:
            continue
        groups, rest = divmod(result.shape[1], turned.shape[1])
        if rest == 0 and np.array_equal(result, np.repeat(turned, groups, axis=1) if groups > 1 else turned):
            return _Made(perm, groups)
    return None


def _sizes(ends: Sequence[Dims]) -> dict[str, int] | None:
    """Sizes that stand for free dimensions by name, no two alike; None where there are too many."""
    names = dict.fromkeys(d for end in ends for d in end if isinstance(d, str))
    return dict(zip(names, _FREE, strict=False)) if len(names) + RANK <= len(_FREE) else None


def _marked(dims: Dims, sizes: Mapping[str, int] | None) -> Array | None:
    """An array of these dimensions, no two elements alike."""
    if sizes is None:
        return None
    free = iter(_FREE[len(sizes) :])
    shape = [d if isinstance(d, int) else sizes[d] if d is not None else next(free) for d in dims]
    size = math.prod(shape)
    return np.arange(size, dtype=np.float64).reshape(shape) if 0 < size <= _LARGEST else None


def _move(kind: str, perm: tuple[int, ...], x: Array, shape: tuple[int, ...]) -> Array | None:
    """What a move makes of an array if its result has this shape; None if it can not have."""
    if kind == "Transpose":
        moved: Array = x.transpose(perm or None)
        return moved if moved.shape == shape else None
    if kind == "Expand":
        return np.broadcast_to(x, shape) if _broadcasts(x.shape, shape) else None
    return x.reshape(shape) if kind in _RESHAPES and math.prod(shape) == x.size else None


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, other) for size, other in pairs)


_RESHAPES = ("Identity", "Reshape", "Squeeze", "Unsqueeze")
