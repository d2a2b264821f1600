"""Roundings on the way of a value: the types to which casts narrow it between its producer and a reader.

A cast to a type that holds all values of the one before does not round and does not count, so that float16 → float32 →
float16 is not a rounding, and float32 → float16 → float32 is one to float16. Casts to integers round, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.nodes import Role
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.schema import ValueType
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.reports.rows import DTYPES


class _Path(NamedTuple):
    """The type at the producer, and those that narrowed the value since. `stored`: the producer is a constant."""

    types: tuple[DType, ...]
    stored: bool


@dataclass(frozen=True)
class Roundings:
    """Roundings in a view. `made`: the type of each value at its producer; `home`: the type of an op's first result.

    `baked`: constants that are also stored in another type, with its spelling. O(Casts and Identities), at first use.
    """

    view: View
    made: Sequence[ValueType | None]
    home: Callable[[Op], DType | None]
    baked: Collection[tuple[ValueId, str]] = ()

    def via(self, value: ValueId, read: str) -> str:
        """Return the types that narrow a value before it is read in the type `read`, without that type itself.

        For a constant that is read in a wider type this is the type that it is stored in.
        """
        path = self.paths.get(value)
        if path is None:
            made = self.made[value]
            if made is None or made.dtype is None or made.dtype.spelling == read:
                return ""
            path = self._start(value)
        if path is None or (value, read) in self.baked:
            return ""
        narrowed = path.types[1:]
        if narrowed:
            return ", ".join(t.spelling for t in narrowed[: -1 if narrowed[-1].spelling == read else None])
        first, wide = path.types[0], DTYPES.get(read)
        widens = path.stored and wide is not None and wide is not first and _holds(wide, first)
        return first.spelling if widens else ""

    @cached_property
    def paths(self) -> Mapping[ValueId, _Path]:
        """Paths of the results of Casts and copies. Other values have none."""
        paths: dict[ValueId, _Path] = {}
        for op in self.view.ops:
            if op.kind not in _PASSED or op.inputs[0] is None or op.outputs[0] is None:
                continue
            path = paths.get(op.inputs[0]) or self._start(op.inputs[0])
            to = self.home(op)
            if path is not None and to is not None and to not in _NO_NUMBERS:
                narrows = not _holds(to, path.types[-1])
                paths[op.outputs[0]] = path._replace(types=(*path.types, to)) if narrows else path
        return paths

    def _start(self, value: ValueId) -> _Path | None:
        """Return the path of a value that is not the result of a Cast; None if its elements are not real numbers."""
        made = self.made[value]
        if made is None or made.dtype is None or made.dtype in _NO_NUMBERS:
            return None
        made_by = self.view.producer(value)
        constant = self.view.values[value].role is Role.INITIALIZER or (made_by and made_by.kind == "Constant")
        return _Path((made.dtype,), bool(constant))


_PASSED = CASTS | {"Identity"}
_NO_NUMBERS = (DType.STRING, DType.COMPLEX64, DType.COMPLEX128)

# Significant bits, largest exponent and exponent of the smallest positive number: IEEE 754-2019; OCP 8-bit Floating
# Point Specification 1.0; OCP Microscaling Formats 1.0. Of e8m0 only powers of two exist.
_FORMATS = {
    DType.DOUBLE: (53, 1023, -1074),
    DType.FLOAT: (24, 127, -149),
    DType.FLOAT16: (11, 15, -24),
    DType.BFLOAT16: (8, 127, -133),
    DType.FLOAT8E4M3FN: (4, 8, -9),
    DType.FLOAT8E4M3FNUZ: (4, 7, -10),
    DType.FLOAT8E5M2: (3, 15, -16),
    DType.FLOAT8E5M2FNUZ: (3, 15, -17),
    DType.FLOAT4E2M1: (2, 2, -1),
    DType.FLOAT8E8M0: (1, 127, -127),
}


@cache
def _holds(wide: DType, narrow: DType) -> bool:
    """True if each number of one type is one of the other."""
    if wide is narrow or narrow is DType.BOOL:
        return True
    if narrow in _FORMATS:
        (digits, largest, smallest), known = _FORMATS[narrow], _FORMATS.get(wide)
        return known is not None and known[0] >= digits and known[1] >= largest and known[2] <= smallest
    if wide in _FORMATS:
        return _FORMATS[wide][0] >= _digits(narrow)
    return _digits(wide) >= _digits(narrow) and (_signed(wide) or not _signed(narrow))


def _signed(dtype: DType) -> bool:
    return dtype.name.startswith("INT")


def _digits(dtype: DType) -> int:
    """Return the binary digits of an integer type, without the sign."""
    return dtype.bits - _signed(dtype)
