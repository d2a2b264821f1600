"""What small integer values hold: the shapes, bounds and axes that a model computes, in sizes with names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx.numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.reading import Contents, Reading
from amp_rewrite.ir.shapes.symbolic import Dim, countable, minus, over, plus, product, times
from amp_rewrite.ir.view import ValueId, View

_LONGEST = 16  # more axes than any shape has
_WHOLE = frozenset((DType.INT32, DType.INT64, DType.BOOL))


def held(view: View, value: ValueId) -> Contents | None:
    """What a small integer constant holds."""
    tensor = view.constant(value)
    if tensor is None or len(tensor.dims) > 1 or math.prod(tensor.dims) > _LONGEST or view.dtype(value) not in _WHOLE:
        return None
    return tuple(int(number) for number in view.model.array(tensor).reshape(-1))


def _shape(reading: Reading) -> Contents | None:
    (x,) = reading.dims
    if x is None:
        return None
    return x[reading.stated("start", 0) : reading.stated("end", len(x))]


def _same(reading: Reading) -> Contents | None:
    """Casts between integers, and moves from and to one axis."""
    return reading.contents[0]


def _cast(reading: Reading) -> Contents | None:
    whole = {dtype.code for dtype in _WHOLE if dtype is not DType.BOOL}
    return reading.contents[0] if reading.stated("to", 0) in whole else None


def _expanded(reading: Reading) -> Contents | None:
    x, shape = reading.contents[:2]
    count = shape[0] if shape is not None and len(shape) == 1 else None
    return x * count if x is not None and len(x) == 1 and isinstance(count, int) and 0 <= count <= _LONGEST else None


def _gathered(reading: Reading) -> Contents | None:
    x, chosen = reading.contents[0], reading.whole(1)
    if x is None or chosen is None or not all(-len(x) <= at < len(x) for at in chosen):
        return None
    return tuple(x[at] for at in chosen)


def _sliced(reading: Reading) -> Contents | None:
    x, bounds = reading.contents[0], [reading.whole(slot) for slot in (1, 2)]  # axis 0 is the only one
    steps = reading.whole(4) if len(reading.contents) > 4 else (1,)
    if x is None or steps is None or bounds[0] is None or bounds[1] is None:
        return None
    return x[slice(bounds[0][0], bounds[1][0], steps[0])]


def _concatenated(reading: Reading) -> Contents | None:
    made: list[Dim] = []
    for x in reading.contents:
        if x is None:
            return None
        made.extend(x)
    return tuple(made) if len(made) <= _LONGEST else None


def _filled(reading: Reading) -> Contents | None:
    shape, fill = reading.whole(0), attribute(reading.op.node, "value")
    if shape is None or len(shape) > 1 or math.prod(shape) > _LONGEST or fill is None:
        return None
    number = onnx.numpy_helper.to_array(fill.t).item()
    return (int(number),) * math.prod(shape) if isinstance(number, int) else None


def _pairwise(rule: Callable[[Dim, Dim], Dim]) -> Callable[[Reading], Contents | None]:
    def made(reading: Reading) -> Contents | None:
        pairs = _aligned(reading.contents)
        return None if pairs is None else tuple(rule(a, b) for a, b in pairs)

    return made


def _aligned(contents: Sequence[Contents | None]) -> list[tuple[Dim, ...]] | None:
    known = [x for x in contents if x is not None]
    longest = max(map(len, known), default=0)
    if len(known) < len(contents) or any(len(x) not in (1, longest) for x in known):
        return None
    return list(zip(*(x if len(x) == longest else x * longest for x in known), strict=True))


def _equal(a: Dim, b: Dim) -> Dim:
    """Sizes are at least 0, so a negative number is none of them."""
    if a is None or b is None:
        return None
    if (isinstance(a, int) and isinstance(b, int)) or a == b:
        return int(a == b)
    signs = [(x, y) for x, y in ((a, b), (b, a)) if isinstance(x, int) and x < 0 and countable(y)]
    return 0 if signs else None


def _quotient(a: Dim, b: Dim) -> Dim:
    """Integers divide towards zero; of what is at least 0 that is downwards."""
    if isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0:
        return a // b
    return over(a, b)


def _chosen(reading: Reading) -> Contents | None:
    rows = _aligned(reading.contents)
    if rows is None:
        return None
    return tuple((a if which else b) if isinstance(which, int) else None for which, a, b in rows)


def _multiplied(reading: Reading) -> Contents | None:
    x = reading.contents[0]
    return None if x is None else (product(x),)


CONTENTS: Mapping[str, Callable[[Reading], Contents | None]] = {
    "Add": _pairwise(plus),
    "Cast": _cast,
    "Concat": _concatenated,
    "ConstantOfShape": _filled,
    "Div": _pairwise(_quotient),
    "Equal": _pairwise(_equal),
    "Expand": _expanded,
    "Gather": _gathered,
    "Identity": _same,
    "Mul": _pairwise(times),
    "ReduceProd": _multiplied,
    "Reshape": _same,
    "Shape": _shape,
    "Slice": _sliced,
    "Squeeze": _same,
    "Sub": _pairwise(minus),
    "Unsqueeze": _same,
    "Where": _chosen,
}
"""By op. What an op reads is known only where it is whole and of at most one axis, so nothing else gets here."""
