"""Contents of small integer values: the shapes, bounds and axes that a model computes, as named sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from amp_rewrite.dtypes import DType
from amp_rewrite.files.arrays import to_array
from amp_rewrite.ir.op_classes import RELABELS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.reading import Contents, Reading
from amp_rewrite.ir.shapes.symbolic import Dim, countable, minus, over, plus, product, times
from amp_rewrite.ir.view import ValueId, View

_LONGEST = 16  # more axes than any shape has
_INTEGERS = frozenset((DType.INT32, DType.INT64, DType.BOOL))


def held(view: View, value: ValueId | None) -> Contents | None:
    """Return the elements of a small integer constant; None for other values."""
    tensor = view.constant(value) if view.dtype(value) in _INTEGERS else None
    if tensor is None or len(tensor.dims) > 1 or math.prod(tensor.dims) > _LONGEST:
        return None
    return tuple(int(number) for number in view.model.array(tensor).reshape(-1))


def _shape(reading: Reading) -> Contents:
    x = reading.shape(0)
    return x[reading.stated("start", 0) : reading.stated("end", len(x))]


def _same(reading: Reading) -> Contents:
    """Contents of a move from and to one axis."""
    return reading.elements(0)


def _cast(reading: Reading) -> Contents | None:
    to = DType.of(reading.stated("to", 0))
    return reading.elements(0) if to in _INTEGERS and to is not DType.BOOL else None


def _expanded(reading: Reading) -> Contents | None:
    x, shape = reading.elements(0), reading.elements(1)
    count = shape[0] if len(shape) == 1 else None
    return x * count if len(x) == 1 and isinstance(count, int) and 0 <= count <= _LONGEST else None


def _gathered(reading: Reading) -> Contents:
    x = reading.elements(0)
    return tuple(x[at] for at in reading.integers(1))


def _sliced(reading: Reading) -> Contents:
    start, end = (reading.integers(slot)[0] for slot in (1, 2))  # axis 0 is the only one
    step = reading.integers(4)[0] if len(reading.contents) > 4 else 1
    return reading.elements(0)[start:end:step]


def _concatenated(reading: Reading) -> Contents | None:
    elements = [x for slot in range(len(reading.contents)) for x in reading.elements(slot)]
    return tuple(elements) if len(elements) <= _LONGEST else None


def _filled(reading: Reading) -> Contents | None:
    shape, fill = reading.integers(0), attribute(reading.op.node, "value")
    if len(shape) > 1 or math.prod(shape) > _LONGEST or fill is None:
        return None
    number = to_array(fill.t).item()
    return (int(number),) * math.prod(shape) if isinstance(number, int) else None


def _elementwise(rule: Callable[..., Dim]) -> Callable[[Reading], Contents]:
    """Return the rule of an op that applies a function to each element of its operands."""

    def apply(reading: Reading) -> Contents:
        operands = [reading.elements(slot) for slot in range(len(reading.contents))]
        longest = max(map(len, operands))
        aligned = (x if len(x) == longest else x * longest for x in operands)
        return tuple(rule(*row) for row in zip(*aligned, strict=True))

    return apply


def _equal(a: Dim, b: Dim) -> Dim:
    """Compare sizes, which are at least 0: a negative number differs from all."""
    if a is None or b is None:
        return None
    if (isinstance(a, int) and isinstance(b, int)) or a == b:
        return int(a == b)
    signs = [(x, y) for x, y in ((a, b), (b, a)) if isinstance(x, int) and x < 0 and countable(y)]
    return 0 if signs else None


def _quotient(a: Dim, b: Dim) -> Dim:
    """Divide towards zero, as integers do; that is downwards for what is at least 0."""
    if isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0:
        return a // b
    return over(a, b)


def _chosen(condition: Dim, a: Dim, b: Dim) -> Dim:
    return (a if condition else b) if isinstance(condition, int) else None


CONTENTS: Mapping[str, Callable[[Reading], Contents | None]] = {
    **dict.fromkeys(RELABELS - {"Flatten"}, _same),
    "Add": _elementwise(plus),
    "Cast": _cast,
    "Concat": _concatenated,
    "ConstantOfShape": _filled,
    "Div": _elementwise(_quotient),
    "Equal": _elementwise(_equal),
    "Expand": _expanded,
    "Gather": _gathered,
    "Mul": _elementwise(times),
    "ReduceProd": lambda reading: (product(reading.elements(0)),),
    "Shape": _shape,
    "Slice": _sliced,
    "Sub": _elementwise(minus),
    "Where": _elementwise(_chosen),
}
"""By op. An op has known contents only if those of its inputs are whole and of at most one axis."""
