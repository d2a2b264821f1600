"""The inputs of an op as shape rules see them: dimensions, and small integer contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amp_rewrite.ir.schema import attribute, int_attribute
from amp_rewrite.ir.shapes.inference import MADE_UP
from amp_rewrite.ir.shapes.onnx_shapes import Dims
from amp_rewrite.ir.shapes.symbolic import Dim
from amp_rewrite.ir.view import Op

Contents = tuple[Dim, ...]
"""The elements of a value of at most one axis; a bool is 0 or 1."""


@dataclass(slots=True)
class InventedNames:
    """Names for sizes without a better one, equal for equal words, and upper bounds of these sizes."""

    names: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, set[Dim]] = field(default_factory=dict)

    def name(self, words: str, *bounds: Dim) -> str:
        name = self.names.setdefault(words, f"{MADE_UP}~{len(self.names)}")
        self.bounds.setdefault(name, set()).update(b for b in bounds if b is not None)
        return name

    def fits(self, small: Dim, large: Dim) -> bool:
        """True if the first is known not to exceed the second."""
        return isinstance(small, str) and large in self.bounds.get(small, ())


class Unknown(ValueError):
    """An input of a rule is not known."""


@dataclass(slots=True)
class Reading:
    """The inputs of an op: dimensions, and contents of shapes. `inferred`: the dimensions of its result by onnx."""

    op: Op
    dims: Sequence[Dims | None]
    contents: Sequence[Contents | None]
    inferred: Dims | None
    invented: InventedNames

    def shape(self, slot: int) -> Dims:
        """Return the dimensions of an input. Unknown if there are none."""
        return _known(self.dims, slot)

    def elements(self, slot: int) -> Contents:
        """Return the contents of an input. Unknown if there are none."""
        return _known(self.contents, slot)

    def stated(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        return int_attribute(self.op.node, name, default)

    def integers(self, slot: int) -> tuple[int, ...]:
        """Return the contents of an input that are all numbers. Unknown for others."""
        contents = self.elements(slot)
        numbers = tuple(d for d in contents if isinstance(d, int))
        if len(numbers) < len(contents):
            raise Unknown
        return numbers

    def axes(self) -> tuple[int, ...]:
        """Return the axes that an attribute or an input states. Unknown if they are not known."""
        stated = attribute(self.op.node, "axes")
        return tuple(stated.ints) if stated is not None else self.integers(1)

    def widest(self, a: Dim, b: Dim) -> Dim:
        """Return the size that two broadcast to: they are equal, or one is 1."""
        if a is None or b is None:
            return a if b == 1 else b if a == 1 else next((d for d in (a, b) if isinstance(d, int) and d > 1), None)
        if a in (b, 1) or self.invented.fits(a, b):
            return b
        if b == 1 or self.invented.fits(b, a) or isinstance(a, int):
            return a
        return b if isinstance(b, int) else self.invented.name(" or ".join(sorted((str(a), str(b)))))

    def broadcast(self, shapes: Sequence[Dims | None]) -> Dims | None:
        """Return the dimensions that several shapes broadcast to; None if one is not known."""
        known = [shape for shape in shapes if shape is not None]
        if not known or len(known) < len(shapes):
            return None
        rank = max(map(len, known))
        result: Dims = (1,) * rank
        for shape in known:
            result = tuple(map(self.widest, result, (1,) * (rank - len(shape)) + tuple(shape)))
        return result


def _known(inputs: Sequence[tuple[Dim, ...] | None], slot: int) -> tuple[Dim, ...]:
    held = inputs[slot] if slot < len(inputs) else None
    if held is None:
        raise Unknown
    return held
