"""The inputs of an op as shape rules see them: dimensions, and small integer contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amp_rewrite.ir.schema import attribute, int_attribute
from amp_rewrite.ir.shapes.onnx_shapes import MADE_UP, Dims
from amp_rewrite.ir.shapes.symbolic import Dim
from amp_rewrite.ir.view import Op

Contents = tuple[Dim, ...]
"""The elements of a value of at most one axis; a bool is 0 or 1."""


@dataclass(slots=True)
class InventedNames:
    """Names for sizes of which nothing better is known, the same for the same words, and what each does not exceed."""

    names: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, set[Dim]] = field(default_factory=dict)

    def name(self, words: str, *bounds: Dim) -> str:
        name = self.names.setdefault(words, f"{MADE_UP}~{len(self.names)}")
        self.bounds.setdefault(name, set()).update(b for b in bounds if b is not None)
        return name

    def fits(self, small: Dim, large: Dim) -> bool:
        """Whether the first is known not to exceed the second."""
        return isinstance(small, str) and large in self.bounds.get(small, ())


@dataclass(slots=True)
class Reading:
    """What an op reads: dimensions, and what it holds where that is a shape; `told`: what onnx says of its result."""

    op: Op
    dims: Sequence[Dims | None]
    contents: Sequence[Contents | None]
    told: Dims | None
    invented: InventedNames

    def stated(self, name: str, default: int) -> int:
        """A whole number among the attributes."""
        return int_attribute(self.op.node, name, default)

    def whole(self, slot: int) -> tuple[int, ...] | None:
        """The whole numbers that an input holds, if all are known."""
        found = self.contents[slot] if slot < len(self.contents) else None
        numbers = tuple(d for d in found or () if isinstance(d, int))
        return numbers if found is not None and len(numbers) == len(found) else None

    def axes(self, slot: int = 1) -> tuple[int, ...] | None:
        """The axes that an attribute or an input states."""
        found = attribute(self.op.node, "axes")
        return tuple(found.ints) if found is not None else self.whole(slot)

    def widest(self, a: Dim, b: Dim) -> Dim:
        """What two sizes broadcast to: they are equal, or one is 1."""
        if a is None or b is None:
            return a if b == 1 else b if a == 1 else next((d for d in (a, b) if isinstance(d, int) and d > 1), None)
        if a in (b, 1) or self.invented.fits(a, b):
            return b
        if b == 1 or self.invented.fits(b, a) or isinstance(a, int):
            return a
        return b if isinstance(b, int) else self.invented.name(" or ".join(sorted((str(a), str(b)))))

    def broadcast(self, shapes: Sequence[Dims | None]) -> Dims | None:
        """What several shapes broadcast to."""
        known = [shape for shape in shapes if shape is not None]
        if not known or len(known) < len(shapes):
            return None
        rank = max(map(len, known))
        result: Dims = (1,) * rank
        for shape in known:
            result = tuple(map(self.widest, result, (1,) * (rank - len(shape)) + tuple(shape)))
        return result
