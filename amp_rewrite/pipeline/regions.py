"""Regions: the ops that a repair may pin to float32 together, in order of suspicion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.pin import Pin
from amp_rewrite.evidence.guard import carried, made_low, read_low
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.settings.list_entry import Color


@dataclass(frozen=True, slots=True)
class Region:
    """Ops to pin together: one op, or a cluster. `error` is the largest local error among them.

    `name` is the name of the op with that error; `kind` its type, or the cluster's kind. `root`: the op is on the allow
    list, so that pinning it costs most.
    """

    name: str
    kind: str
    ops: tuple[OpId, ...]
    error: float
    root: bool

    @property
    def because(self) -> str:
        """Reason for the suspicion, in one line."""
        local = f"adds an error of {self.error:.2g} of the norm"
        what = "makes infinity of finite numbers" if math.isinf(self.error) else local
        return f"{self.name!r} ({self.kind}) alone {what}"

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins that hold the region in float32, or bring it back there."""
        return tuple(Pin(op, reasons.REPAIR, None, self.because, raises=True) for op in self.ops)


def regions_of(draft: Draft, coloring: Coloring, errors: Mapping[str, float]) -> list[Region]:
    """Return the regions in the order of the model: low ops that round, each with its cluster. `errors`: by op name.

    Ops that only move values get their color from their neighbours, and ops that the user lowered stay low.
    O(nodes + uses).
    """
    cluster_of = {op: cluster for cluster in draft.clusters for op in cluster.ops}
    regions: dict[tuple[OpId, ...], Region] = {}
    for op in draft.view.ops:
        if op.id in draft.lower or not _rounds(draft.view, coloring, op):
            continue
        cluster = cluster_of.get(op.id)
        kind, ops = (cluster.kind, cluster.ops) if cluster is not None else (op.kind, (op.id,))
        root = coloring.entries[op.id].color is Color.ALLOW
        region = Region(op.name, kind, ops, errors.get(op.name, 0.0), root)
        if ops not in regions or regions[ops].error < region.error:
            regions[ops] = region
    return list(regions.values())


def painted(draft: Draft, pins: Sequence[Pin], held: Iterable[Region]) -> Coloring:
    """Return the coloring with regions pinned beside other pins; ops that only move their low results follow them."""
    own = tuple(pin for region in held for pin in region.pins)
    moved = carried(draft.view, own) if draft.view.low_types else ()
    return draft.paint((*pins, *own, *moved))


def suspicion(region: Region) -> tuple[float, bool, float, tuple[OpId, ...]]:
    """Key to sort by: larger errors by powers of two, then ops that gain less by a low type, then larger errors."""
    power = math.frexp(region.error)[1] if math.isfinite(region.error) and region.error else -math.inf
    power = math.inf if math.isinf(region.error) else power
    return -power, region.root, -region.error, region.ops


def _rounds(view: View, coloring: Coloring, op: Op) -> bool:
    """True if an op computes in a low type, or reads weights in it."""
    if op.signature is None or op.bodies or op.kind in CASTS or op.kind == "Constant":
        return False
    reads = [slot for slot in range(len(op.inputs)) if read_low(view, coloring, op, slot)]
    makes = any(made_low(view, coloring, v) for v in op.outputs if v is not None)
    if not reads and not makes:
        return False
    return not exact(op) or any(view.constant(op.inputs[slot]) is not None for slot in reads)
