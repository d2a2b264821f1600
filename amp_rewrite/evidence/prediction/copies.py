"""Copies of a model's values at the sites, and the rounding error of each, as nodes beside those of the model.

Every site that reads is an Identity in front of its reader: the gradient by it counts this reader alone, whatever the
reader is decomposed into.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.instrument.vertices import Vertex
from amp_rewrite.evidence.prediction.sites import RoundingSite
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.builder import new_cast, new_constant, new_node
from amp_rewrite.ir.dataflow import read_variable
from amp_rewrite.ir.names import numbered
from amp_rewrite.ir.op_classes import HEAVY, UNREPEATABLE
from amp_rewrite.ir.view import MAIN, OpId, ValueId, View

_LARGE = 1 << 16
"""Numbers of a large matrix."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A model with copies and roundings.

    `names`: the value that stands for each site, by which to differentiate. `pairs`: a value and its rounded version
    for each site; their difference is the rounding error. For a result these are of the *shadow* of its op, which
    reads rounded operands: a sum with 0 or a product with a power of two has no digits left to round.
    """

    model: Model
    names: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


def with_copies(
    view: View, sites: Sequence[RoundingSite], to: DType, saturate: Collection[ValueId], taken: set[str]
) -> Copied:
    """Return the model with a copy, a value and its rounded version for each site. O(nodes + sites).

    `saturate`: values that are clamped before they are rounded, as constants are. `taken`: names in use, which grow.
    """
    return _Copying(view, to, saturate, taken).copied(sites)


@dataclass
class _Copying:
    """One pass over the sites. `copies` by value and reader, `lowered` by value, `shadows` by op and result."""

    view: View
    to: DType
    saturate: Collection[ValueId]
    taken: set[str]
    copies: dict[tuple[ValueId, Vertex], str] = field(default_factory=dict)
    lowered: dict[ValueId, str] = field(default_factory=dict)
    shadows: dict[OpId, dict[str, str]] = field(default_factory=dict)
    ahead: dict[OpId, list[NodeProto]] = field(default_factory=dict)
    behind: list[NodeProto] = field(default_factory=list)

    def copied(self, sites: Sequence[RoundingSite]) -> Copied:
        view = self.view
        self.limits = [numbered(f"{end}_{self.to.spelling}", self.taken) for end in ("lowest", "highest")]
        ends = (np.array(end, np.float32) for end in (-self.to.max, self.to.max))
        bounds = [new_constant(name, end) for name, end in zip(self.limits, ends, strict=True)]
        for site in sites:
            if site.reader is not None:
                self._copy(site.value, site.reader)
        self._low_names = {(value, reader): self.lowered[value] for value, reader in self.copies}
        names, pairs = zip(*map(self._site, sites), strict=True)
        proto = clone(view.model.proto)
        proto.ClearField("training_info")
        nodes = []
        for op_id, node in zip(view.scopes[MAIN].ops, proto.graph.node, strict=True):
            self._reread(node, op_id, self.copies)
            nodes += [*self.ahead.get(op_id, ()), node]
        refill(proto.graph, "node", [*bounds, *nodes, *self.behind])
        return Copied(replace(view.model, proto=proto), names, pairs)

    def _copy(self, value: ValueId, reader: Vertex) -> None:
        name = self.view.value_name(value)
        copy = self.copies[value, reader] = numbered(f"{name}/read", self.taken)
        if value not in self.lowered:
            self.lowered[value] = self._rounded(name, value, clamps=self.view.constant(value) is not None)
        self.ahead.setdefault(reader[0], []).append(new_node("Identity", [name], copy, copy))

    def _rounded(self, name: str, value: ValueId, *, clamps: bool = False) -> str:
        """Append the nodes that round a value; return the result."""
        clamped, low, wide = (numbered(f"{name}/{word}", self.taken) for word in ("clamped", "low", "rounded"))
        if clamps or value in self.saturate:
            self.behind.append(new_node("Clip", [name, *self.limits], clamped, clamped))
            name = clamped
        self.behind.append(new_cast(name, low, self.to, name=low))
        self.behind.append(new_cast(low, wide, DType.FLOAT, name=wide))
        return wide

    def _site(self, site: RoundingSite) -> tuple[str, tuple[str, str]]:
        name = self.view.value_name(site.value)
        if site.reader is not None:
            return self.copies[site.value, site.reader], (name, self.lowered[site.value])
        if site.op not in self.shadows:
            self.shadows[site.op] = self._shadow(site.op)
        shadow = self.shadows[site.op].get(name, name)
        return name, (shadow, self._rounded(shadow, site.value))

    def _shadow(self, op_id: OpId) -> dict[str, str]:
        """Append an op that reads rounded operands; return its results.

        None for an op that draws random numbers, and for a product with a large matrix: its rounding errors are as
        large whatever it reads, and it takes long.
        """
        op = self.view.ops[op_id]
        if op.kind in UNREPEATABLE or (op.kind in HEAVY and any(map(self._is_large, op.operands))):
            return {}
        node = clone(op.node)
        self._reread(node, op_id, self._low_names)
        results = {name: numbered(f"{name}/shadow", self.taken) for name in node.output if name}
        node.output[:] = [results.get(name, "") for name in node.output]
        node.ClearField("name")
        self.behind.append(node)
        return results

    def _is_large(self, value: ValueId) -> bool:
        tensor = self.view.constant(value)
        return tensor is not None and math.prod(tensor.dims) > _LARGE

    def _reread(self, node: NodeProto, op_id: OpId, names: dict[tuple[ValueId, Vertex], str]) -> None:
        """Make a node read other names at the inputs of a reader."""
        op = self.view.ops[op_id]
        for slot, value in enumerate(op.inputs):
            variable = read_variable(op, slot)
            if value is not None and variable is not None and (value, variable) in names:
                node.input[slot] = names[value, variable]
