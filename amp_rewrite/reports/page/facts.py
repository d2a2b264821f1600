"""Facts of a model that its report does not hold: modules of ops, operations, and bytes moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from onnx import NodeProto

from amp_rewrite.decide.sizes import Sizes
from amp_rewrite.ir.op_classes import VIEWS
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.reports.rows import DTYPES, FLOATING, LOW, CastRow, ReportData
from amp_rewrite.settings.selectors import TORCH_SCOPES, torch_scopes

_NAMESPACE = "namespace"
_LONGEST = 4096
"""Characters of metadata that are read; more are not the modules of an op."""
_MOST = 10**18
"""Elements of a value; more are no measure, but hostile dims."""


@dataclass(frozen=True)
class ModelWork:
    """Operations and bytes of floats of a model in one run, all and those in a low type.

    Free dimensions count as 128.
    """

    flops: float = 0.0
    flops_low: float = 0.0
    bytes: int = 0
    bytes_low: int = 0


@dataclass(frozen=True)
class RowFacts:
    """Facts of the ops of a report, by row. `view` is the model whose ops they are."""

    view: View
    report: ReportData
    _sizes: Sizes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", Sizes(self.view))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Module of each op as its metadata tell, "encoder/layers.0"; empty where they do not."""
        return tuple(module_of(op.node) for op in self.view.ops)

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """Operations of each op; 0 for all but products, convolutions, recurrent ops and attention."""
        return tuple(self._sizes.flops(op) for op in self.view.ops)

    @cached_property
    def work(self) -> ModelWork:
        """Sums over all ops."""
        flops = low = 0.0
        moved = moved_low = 0
        for op, row, count in zip(self.view.ops, self.report.rows, self.flops, strict=True):
            flops += count
            low += count if row.dtype in LOW else 0.0
            for dtype, size in self._ports(op, (*row.inputs, *row.outputs)):
                moved += size
                moved_low += size if dtype in LOW else 0
        return ModelWork(flops, low, moved, moved_low)

    def cast_bytes(self, cast: CastRow) -> int | None:
        """Return the bytes that a Cast reads and writes; None where its types are unknown."""
        value = self._values.get((cast.scope, cast.value))
        if value is None or not {cast.from_, cast.to} <= DTYPES.keys():
            return None
        return sum(DTYPES[dtype].nbytes(self._elements(value)) for dtype in (cast.from_, cast.to))

    @cached_property
    def _values(self) -> Mapping[tuple[str, str], ValueId]:
        cast = {(row.scope, row.value) for row in self.report.casts}
        places = ((self.view.scopes[value.scope].path, value.name, value.id) for value in self.view.values)
        return {(scope, name): value for scope, name, value in places if (scope, name) in cast}

    def _elements(self, value: ValueId) -> int:
        return min(self._sizes.size(value), _MOST)

    def _ports(self, op: Op, dtypes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        """Yield type and bytes of the floats that an op reads and writes, if it moves some."""
        if op.kind in VIEWS:
            return
        for value, dtype in zip((*op.inputs, *op.outputs), dtypes, strict=False):
            if value is not None and dtype in FLOATING:
                yield dtype, DTYPES[dtype].nbytes(self._elements(value))


def module_of(node: NodeProto) -> str:
    """Return the module that computes a node, as PyTorch's exporter notes it: "encoder/layers.0"; "" if it does not."""
    stated = {entry.key: entry.value for entry in node.metadata_props if len(entry.value) <= _LONGEST}
    if TORCH_SCOPES in stated:
        names = torch_scopes(stated[TORCH_SCOPES])
    elif "/" in stated.get(_NAMESPACE, ""):
        names = [part.partition(":")[0].strip() for part in stated[_NAMESPACE].split("/")]
    else:
        return ""
    parts: list[str] = []
    before = ""
    for name in filter(None, names[:-1]):  # the last one is the op's own name
        parts.append(name.removeprefix(f"{before}."))
        before = name
    return "/".join(parts)
