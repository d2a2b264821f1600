"""Dimensions of values, followed through what exporters compute shapes by: where onnx's inference makes up a new name.

A name stands for one size wherever it occurs. No input is taken to be empty: where one is, a model gives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from amp_rewrite.ir.op_classes import BROADCASTS, REDUCTIONS, SAME_SHAPE
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.onnx_shapes import MADE_UP, AllDims, Dims, dims_of
from amp_rewrite.ir.shapes.reading import Contents, InventedNames, Reading
from amp_rewrite.ir.shapes.shape_values import CONTENTS, held
from amp_rewrite.ir.shapes.symbolic import Dim, countable, minus, names_in, over, plus, product, renamed, times
from amp_rewrite.ir.view import MAIN, Op, ValueId, View


def known_dims(view: View) -> AllDims:
    """The dimensions of each value whose rank is known, by scope and name. O(nodes)."""
    return _Walk(view, dims_of(view)).dims()


@dataclass(slots=True)
class _Walk:
    view: View
    told: AllDims
    found: dict[ValueId, Dims] = field(default_factory=dict)
    contents: dict[ValueId, Contents] = field(default_factory=dict)
    same: dict[str, Dim] = field(default_factory=dict)
    invented: InventedNames = field(default_factory=InventedNames)

    def dims(self) -> AllDims:
        for op in self.view.ops:
            self.follow(op)
        values = {(self.view.values[v].scope, self.view.value_name(v)): dims for v, dims in self.found.items()}
        return {key: tuple(renamed(d, self.same) for d in dims) for key, dims in {**self.told, **values}.items()}

    def at(self, value: ValueId | None) -> Dims | None:
        if value is None:
            return None
        found = self.found.get(value)
        return self.stated(value) if found is None else found

    def stated(self, value: ValueId) -> Dims | None:
        told = self.told.get((self.view.values[value].scope, self.view.value_name(value)))
        return None if told is None else tuple(renamed(d, self.same) for d in told)

    def holds(self, value: ValueId | None) -> Contents | None:
        if value is None:
            return None
        return self.contents[value] if value in self.contents else held(self.view, value)

    def follow(self, op: Op) -> None:
        if op.kind not in RULES and op.kind not in CONTENTS:
            return
        dims, contents = [self.at(v) for v in op.inputs], [self.holds(v) for v in op.inputs]
        for result in op.outputs if op.kind == "Split" else op.outputs[:1]:
            if result is not None:
                self.result(Reading(op, dims, contents, self.stated(result), self.invented), result)

    def result(self, reading: Reading, result: ValueId) -> None:
        op, told = reading.op, reading.told
        made = _ruled(RULES, reading)
        if made is not None and (told is None or len(told) == len(made)):
            self.found[result] = tuple(map(self.settled, made, told or (None,) * len(made)))
            if op.scope == MAIN:
                self.learn(self.found[result], told or ())
        contents, rank = _ruled(CONTENTS, reading), self.at(result)
        if contents is not None and rank is not None and len(rank) <= 1:
            self.contents[result] = contents

    def settled(self, made: Dim, told: Dim) -> Dim:
        """The better of what was followed and what onnx says."""
        if not countable(made) or isinstance(told, int):
            return told
        vague = any(name.startswith(MADE_UP) for name in names_in(made))
        return told if vague and isinstance(told, str) and not told.startswith(MADE_UP) else made

    def learn(self, found: Dims, told: Dims) -> None:
        """Names that the model states for what is known by another: equal from here on."""
        for mine, other in zip(found, told, strict=False):
            if isinstance(other, str) and mine is not None and mine != other and other not in names_in(mine):
                self.same.setdefault(other, mine)


# -- rules: the dimensions of an op's first result --------------------------------------------------


# What the rules raise for ranks, axes, bounds and steps that do not go together.
_FAULTS = (ValueError, IndexError, ArithmeticError)


def _ruled(rules: Mapping[str, Callable[[Reading], tuple[Dim, ...] | None]], reading: Reading) -> Dims | None:
    """What the rule of the op says, if there is one; None where what it reads does not go together."""
    rule = rules.get(reading.op.kind)
    try:
        return rule(reading) if rule is not None else None
    except _FAULTS:
        return None


def _same(reading: Reading) -> Dims | None:
    return reading.dims[0]


def _broadcast(reading: Reading) -> Dims | None:
    return reading.broadcast(reading.dims)


def _expand(reading: Reading) -> Dims | None:
    return reading.broadcast((reading.dims[0], reading.contents[1]))


def _filled(reading: Reading) -> Dims | None:
    return reading.contents[0]


def _product(reading: Reading) -> Dims | None:
    a, b = reading.dims
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    outer = reading.broadcast((a[:-2], b[:-2]))
    return None if outer is None else (*outer, a[-2], b[-1])


def _transposed(reading: Reading) -> Dims | None:
    (x,), perm = reading.dims, attribute(reading.op.node, "perm")
    if x is None or (perm is not None and len(perm.ints) != len(x)):
        return None
    return tuple(x[axis] for axis in perm.ints) if perm is not None else tuple(reversed(x))


def _reshaped(reading: Reading) -> Dims | None:
    x, shape = reading.dims[0], reading.contents[1] if len(reading.contents) > 1 else None
    if shape is None:
        return None
    copies = not reading.stated("allowzero", 0)
    made = [x[i] if d == 0 and copies and x is not None and i < len(x) else d for i, d in enumerate(shape)]
    if -1 in made:
        rest = product(d for d in made if d != -1)
        made[made.index(-1)] = over(product(x), rest) if x is not None else None
    return tuple(made)


def _unsqueezed(reading: Reading) -> Dims | None:
    x, axes = reading.dims[0], reading.axes()
    if x is None or axes is None:
        return None
    made, rank = list(x), len(x) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        made.insert(axis, 1)
    return tuple(made)


def _squeezed(reading: Reading) -> Dims | None:
    x, axes = reading.dims[0], reading.axes()
    if x is None or axes is None:
        return None
    gone = {axis % len(x) for axis in axes}
    return tuple(d for i, d in enumerate(x) if i not in gone)


def _reduced(reading: Reading) -> Dims | None:
    x, axes = reading.dims[0], reading.axes()
    if x is None or axes is None:
        return None
    gone = {axis % len(x) for axis in axes}
    if reading.stated("keepdims", 1):
        return tuple(1 if i in gone else d for i, d in enumerate(x))
    return tuple(d for i, d in enumerate(x) if i not in gone)


def _concatenated(reading: Reading) -> Dims | None:
    known = [x for x in reading.dims if x is not None]
    if len(known) < len(reading.dims) or not known:
        return None
    axis = reading.stated("axis", 0) % len(known[0])
    made: list[Dim] = [next((d for d in column if d is not None), None) for column in zip(*known, strict=True)]
    total: Dim = 0
    for x in known:
        total = plus(total, x[axis])
    made[axis] = total
    return tuple(made)


def _split(reading: Reading) -> Dims | None:
    x, told = reading.dims[0], reading.told
    if x is None:
        return None
    axis = reading.stated("axis", 0) % len(x)
    return tuple((told[i] if told is not None else None) if i == axis else d for i, d in enumerate(x))


def _sliced(reading: Reading) -> Dims | None:
    x = reading.dims[0]
    if len(reading.contents) < 3:
        return None
    starts, ends, *more = (reading.contents[slot] for slot in range(1, len(reading.contents)))
    axes, steps = (*more, None, None)[:2]
    if x is None or starts is None or ends is None or (len(more) and more[0] is None):
        return None
    made, rank = list(x), len(x)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[i] if axes is not None else i
        step = steps[i] if steps is not None else 1 if len(more) < 2 else None
        if not isinstance(axis, int):
            return None
        made[axis % rank] = _cut(reading, x[axis % rank], start, end) if step == 1 else None
    return tuple(made)


_TO_THE_END = 2**31 - 1  # exporters write this, or what int64 holds at most


def _cut(reading: Reading, whole: Dim, start: Dim, end: Dim) -> Dim:
    """How many are left of an axis between a start and an end, by step 1."""
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


def _gathered(reading: Reading) -> Dims | None:
    x, chosen = reading.dims
    if x is None or chosen is None:
        return None
    axis = reading.stated("axis", 0) % len(x)
    return (*x[:axis], *chosen, *x[axis + 1 :])


def _chosen(reading: Reading) -> Dims | None:
    return reading.dims[1]


def _looked_up(reading: Reading) -> Dims | None:
    x, chosen = reading.dims
    if x is None or not chosen or not isinstance(chosen[-1], int) or reading.stated("batch_dims", 0):
        return None
    return (*chosen[:-1], *x[chosen[-1] :])


def _counted(reading: Reading) -> Dims | None:
    (start,), (limit,), (step,) = (found if found is not None else (None,) for found in reading.contents)
    length = minus(limit, start)
    return (length,) if step == 1 and countable(length) else None


def _tiled(reading: Reading) -> Dims | None:
    x, often = reading.dims[0], reading.contents[1]
    return tuple(map(times, x, often)) if x is not None and often is not None else None


def _outer(reading: Reading) -> Dims | None:
    """A convolution: the batch, the rows of its weight, and what onnx says of the rest."""
    x, weight, told = reading.dims[0], reading.dims[1], reading.told
    if not x or not weight or told is None or len(told) != len(x):
        return None
    return (x[0], weight[0], *told[2:])


def _attended(reading: Reading) -> Dims | None:
    queries, values = reading.dims[0], reading.dims[2]
    if queries is None or values is None or len(queries) != 4 or len(values) != 4:
        return None
    return (*queries[:3], values[3])


RULES: Mapping[str, Callable[[Reading], Dims | None]] = {
    **dict.fromkeys(SAME_SHAPE, _same),
    **dict.fromkeys(BROADCASTS, _broadcast),
    **dict.fromkeys(REDUCTIONS.keys() - {"CumSum"} | {"ReduceL2"}, _reduced),
    "Attention": _attended,
    "Concat": _concatenated,
    "ConstantOfShape": _filled,
    "Conv": _outer,
    "Expand": _expand,
    "Gather": _gathered,
    "GatherElements": _chosen,
    "GatherND": _looked_up,
    "MatMul": _product,
    "Range": _counted,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Split": _split,
    "Squeeze": _squeezed,
    "Tile": _tiled,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}
"""By op: its first result, in the opsets in which axes are attributes and in those in which they are inputs."""
