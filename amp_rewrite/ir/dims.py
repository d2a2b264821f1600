"""Symbolic dimensions: products of names and numbers, and the inputs read by shape rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import numpy as np
from onnx.numpy_helper import to_array

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.op_classes import RELABELS
from amp_rewrite.ir.view import Op, ValueId, View


class Size(NamedTuple):
    """A product of a number and sorted names; a plain number or name is an int or a str instead."""

    factor: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return "*".join((str(self.factor), *self.names))


Dim = int | str | Size | None
"""The length of an axis: a number, a name, or a product of these; None if unknown. Equal names mean equal lengths."""
Dims = tuple[Dim, ...]
INVENTED_PREFIX = "unk__"
"""Prefix of names made up by inference; the same size may get another name in the next run."""
MAX_AXES: int = getattr(np, "MAXDIMS", 64)
"""Maximum number of axes of a numpy array: 64, or 32 before version 2."""


def plus(a: Dim, b: Dim) -> Dim:
    """Return a + b; None if either is unknown, or if their names differ."""
    if a is None or b is None or a == 0 or b == 0:
        return b if a == 0 else a if b == 0 else None
    (n, left), (m, right) = _parts(a), _parts(b)
    return _dim(n + m, left) if left == right else None


def times(a: Dim, b: Dim) -> Dim:
    if a is None or b is None:
        return None
    (n, left), (m, right) = _parts(a), _parts(b)
    return _dim(n * m, (*left, *right))


def minus(a: Dim, b: Dim) -> Dim:
    return plus(a, times(b, -1))


def product(dims: Iterable[Dim]) -> Dim:
    one: Dim = 1
    return reduce(times, dims, one)


def over(a: Dim, b: Dim) -> Dim:
    """Return a / b if it is an integer for all values of the names; None otherwise."""
    if a is None or b is None or b == 0:
        return None
    (n, whole), (divisor, names) = _parts(a), _parts(b)
    rest = Counter(whole)
    rest.subtract(names)
    return None if n % divisor or min(rest.values(), default=0) < 0 else _dim(n // divisor, tuple(rest.elements()))


def is_nonnegative(dim: Dim) -> bool:
    """True if a size is at least 0 for all values of its names."""
    return dim is not None and _parts(dim).factor >= 0


def names_in(dim: Dim) -> tuple[str, ...]:
    return () if dim is None else _parts(dim).names


def renamed(dim: Dim, dims: Mapping[str, Dim]) -> Dim:
    if dim is None or dims.keys().isdisjoint(names_in(dim)):
        return dim
    factor, names = _parts(dim)
    return product((factor, *(dims.get(name, name) for name in names)))


def _parts(dim: int | str | Size) -> Size:
    return dim if isinstance(dim, Size) else Size(1, (dim,)) if isinstance(dim, str) else Size(dim, ())


def _dim(factor: int, names: tuple[str, ...]) -> int | str | Size:
    if not names or not factor:
        return factor
    return names[0] if factor == 1 and len(names) == 1 else Size(factor, tuple(sorted(names)))


Contents = tuple[Dim, ...]
"""The elements of a value with at most one axis; a bool is 0 or 1."""


@dataclass(slots=True)
class InventedNames:
    """Made-up names for sizes, the same for equal formulas, and upper bounds of these sizes."""

    names: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, set[Dim]] = field(default_factory=dict)

    def name(self, formula: str, *bounds: Dim) -> str:
        name = self.names.setdefault(formula, f"{INVENTED_PREFIX}~{len(self.names)}")
        self.bounds.setdefault(name, set()).update(b for b in bounds if b is not None)
        return name

    def total(self, dims: Sequence[Dim]) -> Dim:
        """Return the sum of sizes, under a new name if their names differ; None if one is unknown."""
        zero: Dim = 0
        total = reduce(plus, dims, zero)
        return total if total is not None or None in dims else self.name(" + ".join(sorted(map(str, dims))))

    def is_at_most(self, small: Dim, large: Dim) -> bool:
        """True if the first size is known not to exceed the second."""
        return isinstance(small, str) and large in self.bounds.get(small, ())


@dataclass(slots=True)
class OpInputs:
    """The inputs of an op: their dimensions, and the elements of small integer tensors."""

    op: Op
    dims: Sequence[Dims | None]
    contents: Sequence[Contents | None]
    invented: InventedNames

    def shape(self, slot: int) -> Dims:
        """Return the dimensions of an input; ValueError if they are unknown."""
        return _entry(self.dims, slot)

    def elements(self, slot: int) -> Contents:
        """Return the elements of an input; ValueError if they are unknown."""
        return _entry(self.contents, slot)

    def attribute(self, name: str, default: int) -> int:
        return int_attribute(self.op.node, name, default)

    def integers(self, slot: int) -> tuple[int, ...]:
        """Return the elements of an input; ValueError unless all are known numbers."""
        contents = self.elements(slot)
        numbers = tuple(d for d in contents if isinstance(d, int))
        if len(numbers) < len(contents):
            raise ValueError("a number is unknown")
        return numbers

    def broadcast_dim(self, a: Dim, b: Dim) -> Dim:
        """Return the size to which two sizes broadcast; they are equal unless one is 1."""
        if a is None or b is None:
            return a if b == 1 else b if a == 1 else next((d for d in (a, b) if isinstance(d, int) and d > 1), None)
        if a in (b, 1) or self.invented.is_at_most(a, b):
            return b
        if b == 1 or self.invented.is_at_most(b, a) or isinstance(a, int):
            return a
        return b if isinstance(b, int) else self.invented.name(" or ".join(sorted((str(a), str(b)))))

    def broadcast(self, shapes: Sequence[Dims | None]) -> Dims | None:
        ranked = [shape for shape in shapes if shape is not None]
        if not ranked or len(ranked) < len(shapes):
            return None
        rank = max(map(len, ranked))
        result: Dims = (1,) * rank
        for shape in ranked:
            result = tuple(map(self.broadcast_dim, result, (1,) * (rank - len(shape)) + tuple(shape)))
        return result


def _entry(rows: Sequence[tuple[Dim, ...] | None], slot: int) -> tuple[Dim, ...]:
    row = rows[slot] if slot < len(rows) else None
    if row is None:
        raise ValueError("an input is unknown")
    return row


# -- contents of small integer values: shapes, bounds and axes computed by the model -------------------

_MAX_LENGTH = 16  # more axes than any shape has
INTEGERS = frozenset((DType.INT32, DType.INT64, DType.BOOL))
"""The types of values with `Contents`."""
_NUMBERS = INTEGERS - {DType.BOOL}


def integer_contents(view: View, value: ValueId | None) -> Contents | None:
    """Return the elements of a small integer constant; None for other values."""
    tensor = view.constant(value) if view.dtype(value) in INTEGERS else None
    if tensor is None or len(tensor.dims) > 1 or math.prod(tensor.dims) > _MAX_LENGTH:
        return None
    return tuple(int(number) for number in view.model.array(tensor).reshape(-1))


def _sliced(inputs: OpInputs) -> Contents:
    start, end = (inputs.integers(slot)[0] for slot in (1, 2))  # axis 0 is the only one
    step = inputs.integers(4)[0] if len(inputs.contents) > 4 else 1
    return inputs.elements(0)[start:end:step]


def _concatenated(inputs: OpInputs) -> Contents | None:
    elements = [x for slot in range(len(inputs.contents)) for x in inputs.elements(slot)]
    return tuple(elements) if len(elements) <= _MAX_LENGTH else None


def _filled(inputs: OpInputs) -> Contents | None:
    shape, fill = inputs.integers(0), attribute(inputs.op.node, "value")
    if len(shape) > 1 or math.prod(shape) > _MAX_LENGTH or fill is None:
        return None
    number = to_array(fill.t).item()
    return (int(number),) * math.prod(shape) if isinstance(number, int) else None


def _elementwise(rule: Callable[..., Dim]) -> Callable[[OpInputs], Contents]:

    def apply(inputs: OpInputs) -> Contents:
        operands = [inputs.elements(slot) for slot in range(len(inputs.contents))]
        length = max(map(len, operands))
        aligned = (x if len(x) == length else x * length for x in operands)
        return tuple(rule(*row) for row in zip(*aligned, strict=True))

    return apply


def _equal(a: Dim, b: Dim) -> Dim:
    """Compare sizes; a negative number differs from every size."""
    if a is None or b is None:
        return None
    if (isinstance(a, int) and isinstance(b, int)) or a == b:
        return int(a == b)
    differ = any(isinstance(x, int) and x < 0 and is_nonnegative(y) for x, y in ((a, b), (b, a)))
    return 0 if differ else None


def _quotient(a: Dim, b: Dim) -> Dim:
    """Divide as ONNX divides nonnegative integers."""
    if isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0:
        return a // b
    return over(a, b)


CONTENTS: Mapping[str, Callable[[OpInputs], Contents | None]] = {
    **dict.fromkeys(RELABELS - {"Flatten"}, lambda inputs: inputs.elements(0)),
    "Add": _elementwise(plus),
    "Cast": lambda inputs: inputs.elements(0) if DType.of(inputs.attribute("to", 0)) in _NUMBERS else None,
    "Concat": _concatenated,
    "ConstantOfShape": _filled,
    "Div": _elementwise(_quotient),
    "Equal": _elementwise(_equal),
    "Gather": lambda inputs: tuple(inputs.elements(0)[at] for at in inputs.integers(1)),
    "Mul": _elementwise(times),
    "Shape": lambda inputs: inputs.shape(0)[inputs.attribute("start", 0) : inputs.attribute("end", MAX_AXES)],
    "Slice": _sliced,
    "Sub": _elementwise(minus),
    "Where": _elementwise(lambda test, a, b: (a if test else b) if isinstance(test, int) else None),
}
"""Rules for the elements of an op's result, by op."""
