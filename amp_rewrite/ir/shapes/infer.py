"""Dimensions of values, followed through the shape computations of exporters beyond onnx's inference.

Equal names are equal sizes. No input is taken to be empty: on an empty one, a model gives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from amp_rewrite.ir.attributes import ints_attribute
from amp_rewrite.ir.op_classes import BROADCASTS, SAME_SHAPE
from amp_rewrite.ir.shapes.onnx_shapes import MADE_UP, MOST_AXES, AllDims, Dims, dims_of, shape_at
from amp_rewrite.ir.shapes.reading import CONTENTS, Contents, InventedNames, Reading, held
from amp_rewrite.ir.shapes.symbolic import Dim, countable, minus, names_in, over, plus, product, renamed
from amp_rewrite.ir.view import MAIN, Op, ValueId, View


def known_dims(view: View) -> AllDims:
    """Return the dimensions of each value of known rank, by scope and name. O(nodes)."""
    return _ShapeWalk(view, dims_of(view)).dims()


@dataclass(slots=True)
class _ShapeWalk:
    view: View
    inferred: AllDims
    followed: dict[ValueId, Dims] = field(default_factory=dict)
    contents: dict[ValueId, Contents] = field(default_factory=dict)
    same: dict[str, Dim] = field(default_factory=dict)
    """Sizes by another name for them."""
    invented: InventedNames = field(default_factory=InventedNames)

    def dims(self) -> AllDims:
        for op in self.view.ops:
            if op.kind in RULES or op.kind in CONTENTS:
                self.follow(op)
        values = {(self.view.values[v].scope, self.view.value_name(v)): dims for v, dims in self.followed.items()}
        return {key: tuple(renamed(d, self.same) for d in dims) for key, dims in {**self.inferred, **values}.items()}

    def at(self, value: ValueId | None) -> Dims | None:
        return self.followed[value] if value in self.followed else self.by_onnx(value)

    def by_onnx(self, value: ValueId | None) -> Dims | None:
        dims = shape_at(self.inferred, self.view, value)
        return None if dims is None else tuple(renamed(d, self.same) for d in dims)

    def holds(self, value: ValueId | None) -> Contents | None:
        return self.contents[value] if value in self.contents else held(self.view, value)

    def follow(self, op: Op) -> None:
        dims, contents = [self.at(v) for v in op.inputs], [self.holds(v) for v in op.inputs]
        if (result := op.outputs[0]) is not None:
            self.result(Reading(op, dims, contents, self.by_onnx(result), self.invented), result)

    def result(self, reading: Reading, result: ValueId) -> None:
        inferred = reading.inferred
        dims = _ruled(RULES, reading)
        if dims is not None and (inferred is None or len(inferred) == len(dims)):
            dims = self.followed[result] = tuple(map(_better, dims, inferred or (None,) * len(dims)))
            if reading.op.scope == MAIN:
                self.learn(dims, inferred or ())
        contents, rank = _ruled(CONTENTS, reading), self.at(result)
        if contents is not None and rank is not None and len(rank) <= 1:
            self.contents[result] = contents

    def learn(self, followed: Dims, inferred: Dims) -> None:
        """Note the model's names for sizes known by another name."""
        for mine, other in zip(followed, inferred, strict=False):
            if isinstance(other, str) and mine is not None and mine != other and other not in names_in(mine):
                self.same.setdefault(other, mine)


def _better(followed: Dim, inferred: Dim) -> Dim:
    if not countable(followed) or isinstance(inferred, int):
        return inferred
    vague = any(name.startswith(MADE_UP) for name in names_in(followed))
    return inferred if vague and isinstance(inferred, str) and not inferred.startswith(MADE_UP) else followed


# -- rules: the dimensions of an op's first result --------------------------------------------------


# Errors of a rule: a size is not known, or ranks, axes, bounds and steps do not go together.
_FAULTS = (ValueError, IndexError, ArithmeticError)


def _ruled(rules: Mapping[str, Callable[[Reading], tuple[Dim, ...] | None]], reading: Reading) -> Dims | None:
    rule = rules.get(reading.op.kind)
    try:
        return rule(reading) if rule is not None else None
    except _FAULTS:
        return None


def _product(reading: Reading) -> Dims | None:
    a, b = reading.shape(0), reading.shape(1)
    outer = reading.broadcast((a[:-2], b[:-2]))
    return None if outer is None or len(a) < 2 or len(b) < 2 else (*outer, a[-2], b[-1])


def _transposed(reading: Reading) -> Dims | None:
    x, perm = reading.shape(0), ints_attribute(reading.op.node, "perm")
    return tuple(x[axis] for axis in perm) if len(perm) == len(x) else None if perm else x[::-1]


def _reshaped(reading: Reading) -> Dims | None:
    if reading.contents[1] is None:
        (rank,) = reading.shape(1)
        return (None,) * rank if isinstance(rank, int) and rank <= MOST_AXES else None
    x, shape = reading.dims[0], reading.elements(1)
    copies = not reading.stated("allowzero", 0)
    whole = x if x is not None else ()
    dims = [(whole[i] if i < len(whole) else None) if d == 0 and copies else d for i, d in enumerate(shape)]
    if -1 in dims:
        rest = product(d for d in dims if d != -1)
        dims[dims.index(-1)] = over(product(x), rest) if x is not None else None
    return tuple(dims)


def _unsqueezed(reading: Reading) -> Dims:
    dims, axes = list(reading.shape(0)), reading.axes()
    rank = len(dims) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        dims.insert(axis, 1)
    return tuple(dims)


def _concatenated(reading: Reading) -> Dims:
    shapes = [reading.shape(slot) for slot in range(len(reading.dims))]
    dims: list[Dim] = [next((d for d in column if d is not None), None) for column in zip(*shapes, strict=True)]
    axis = reading.stated("axis", 0) % len(dims)
    dims[axis] = reduce(plus, (x[axis] for x in shapes))
    return tuple(dims)


def _sliced(reading: Reading) -> Dims | None:
    x, starts, ends = reading.shape(0), reading.elements(1), reading.elements(2)
    axes = reading.elements(3) if len(reading.contents) > 3 else range(len(starts))
    steps = reading.contents[4] if len(reading.contents) > 4 else (1,) * len(starts)
    dims = list(x)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[i]
        if not isinstance(axis, int):
            return None
        axis %= len(x)
        dims[axis] = _cut(reading, x[axis], start, end) if steps is not None and steps[i] == 1 else None
    return tuple(dims)


_TO_THE_END = 2**31 - 1  # exporters write this, or the largest int64


def _cut(reading: Reading, whole: Dim, start: Dim, end: Dim) -> Dim:
    """Return the size of an axis between a start and an end, by step 1."""
    if whole is None or start is None or end is None:
        return None
    if isinstance(whole, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(*slice(start, end).indices(whole)))
    last = end == whole or (isinstance(end, int) and end >= _TO_THE_END)
    if last and countable(minus(whole, start)) and countable(start):
        return minus(whole, start)
    bounds: list[Dim] = [whole]
    if countable(start) and countable(end):
        bounds.append(minus(end, start))
    return reading.invented.name(f"{whole}[{start}:{end}]", *bounds)


def _gathered(reading: Reading) -> Dims:
    x, chosen = reading.shape(0), reading.shape(1)
    axis = reading.stated("axis", 0) % len(x)
    return (*x[:axis], *chosen, *x[axis + 1 :])


def _counted(reading: Reading) -> Dims | None:
    (start,), (limit,), (step,) = (x if x is not None else (None,) for x in reading.contents)
    length = minus(limit, start)
    return (length,) if step == 1 and countable(length) else None


RULES: Mapping[str, Callable[[Reading], Dims | None]] = {
    **dict.fromkeys(SAME_SHAPE, lambda reading: reading.shape(0)),
    **dict.fromkeys(BROADCASTS, lambda reading: reading.broadcast(reading.dims)),
    "Concat": _concatenated,
    "Expand": lambda reading: reading.broadcast((reading.dims[0], reading.contents[1])),
    "Gather": _gathered,
    "MatMul": _product,
    "Range": _counted,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}
"""Rules for the first result of an op, whether its axes are attributes or inputs."""
