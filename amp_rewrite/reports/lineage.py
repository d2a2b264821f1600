"""Ways of values: the row or weight behind each, past Casts, and the types that round it on its way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import casts_floats, keeps_type
from amp_rewrite.ir.nodes import Role
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.schema import ValueType
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View
from amp_rewrite.reports.rows import DTYPES, NO_ROW


@dataclass(frozen=True)
class Lineage:
    """Lineage of the values of a view, by id. `identities` are Casts that a plan makes copies. O(nodes) each."""

    view: View
    identities: Collection[OpId] = frozenset()

    @cached_property
    def casts(self) -> frozenset[OpId]:
        """Casts of the model between floats."""
        return frozenset(op.id for op in self.casting if casts_floats(self.view, op))

    @cached_property
    def source(self) -> Sequence[ValueId]:
        """Value behind each value, through copies and Casts between floats; mostly the value itself."""
        source = [value.id for value in self.view.values]
        for op in self.casting:
            read, result = op.inputs[0], op.outputs[0]
            if (op.id in self.casts or keeps_type(self.view, op)) and read is not None and result is not None:
                source[result] = source[read]
        return source

    @cached_property
    def rows(self) -> Sequence[int]:
        """Row of each value's op; NO_ROW for inputs and weights."""
        constants = {op.id for op in self.view.ops if op.kind == "Constant"}
        producers = [self.view.values[source].producer for source in self.source]
        return [NO_ROW if producer is None or producer in constants else producer for producer in producers]

    @cached_property
    def inputs(self) -> Sequence[ValueId]:
        """Inputs of the model, without those with an initializer as default."""
        return [v for v in self.view.scopes[MAIN].inputs if self.view.values[v].tensor is None]

    def reads_of(self, sources: Collection[ValueId]) -> Mapping[ValueId, Sequence[int]]:
        """Return the readers of these values, also behind Casts: op and position in its reads, in turn, in order."""
        behind = [op.outputs[0] for op in self.casting if op.outputs[0] is not None]
        reads: dict[ValueId, list[tuple[OpId, int]]] = {source: [] for source in sources}
        for value in dict.fromkeys((*sources, *behind)):
            if (source := self.source[value]) in reads:
                reads[source] += [(use.op, use.slot) for use in self.view.uses[value]]
                reads[source] += self._handed_out.get(value, ()) if value in self.view.yielded else ()
        return {source: [number for place in sorted(places) for number in place] for source, places in reads.items()}

    @cached_property
    def _handed_out(self) -> Mapping[ValueId, Sequence[tuple[OpId, int]]]:
        """Positions of values among the reads of an op whose bodies hand them out."""
        places: dict[ValueId, list[tuple[OpId, int]]] = {}
        for op in self.view.ops:
            given = (value for body in op.bodies for value in self.view.scopes[body].outputs)
            for place, value in enumerate(given, len(op.inputs)):
                places.setdefault(value, []).append((op.id, place))
        return places

    @cached_property
    def dead(self) -> frozenset[OpId]:
        """Ops without effect on the model's outputs. O(values)."""
        unread = (self.view.producer(ValueId(v)) for v, uses in enumerate(self.view.uses) if not uses)
        waiting = [op for op in unread if op is not None]
        dead: set[OpId] = set()
        while waiting:
            op = waiting.pop()
            if op.id not in dead and all(v is None or self._unread(v, dead) for v in op.outputs):
                dead.add(op.id)
                reads = [*op.inputs, *(v for body in op.bodies for v in self.view.scopes[body].outputs)]
                waiting += [producer for v in reads if (producer := self.view.producer(v)) is not None]
        return frozenset(dead)

    def _unread(self, value: ValueId, dead: Collection[OpId]) -> bool:
        """True if dead ops alone read a value, and only outputs of their bodies hand it out."""
        if any(use.op not in dead for use in self.view.uses[value]):
            return False
        if value not in self.view.yielded:
            return True
        public = value in self.view.scopes[MAIN].outputs
        return not public and all(owner in dead for owner, _ in self._handed_out.get(value, ()))

    @cached_property
    def shapes(self) -> Sequence[tuple[int, ...] | None]:
        """Shape of the weight behind each value; None for other values."""
        tensors = (self.view.values[source].tensor for source in self.source)
        return [tuple(tensor.dims) if tensor is not None else None for tensor in tensors]

    @cached_property
    def casting(self) -> Sequence[Op]:
        """Casts of the model, without those made copies by the plan."""
        return [op for op in self.view.ops if op.kind in CASTS and op.id not in self.identities]


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
        """Return the narrowing types of a value on its way to a reader, without the type `read` itself.

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
    return dtype.bits - _signed(dtype)
