"""Regions: what a repair may pin to float32 together, and in which order it is suspected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.pin import Pin
from amp_rewrite.evidence.guard import made_low, read_low
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.settings.op_lists import Color


@dataclass(frozen=True, slots=True)
class Region:
    """Ops that are pinned together: one op, or a cluster. `error` is the largest that one of them makes by itself.

    `name` is that op's, by which people know the region; `kind` its type, or the cluster's kind. `root`: it is on the
    allow list, so that it costs most to pin it.
    """

    name: str
    kind: str
    ops: tuple[OpId, ...]
    error: float
    root: bool

    @property
    def because(self) -> str:
        """Why it is suspected, in one line."""
        what = "makes infinity of finite numbers" if math.isinf(self.error) else f"errs by {self.error:.2g} by itself"
        return f"{self.name!r} ({self.kind}) {what}"

    @property
    def pins(self) -> tuple[Pin, ...]:
        """What holds it in float32, or brings it back there."""
        return tuple(Pin(op, reasons.REPAIR, None, self.because, raises=True) for op in self.ops)


def regions_of(draft: Draft, coloring: Coloring, errors: Mapping[str, float]) -> list[Region]:
    """What can be pinned, in the order of the model: low ops that round, each with its cluster. `errors`: by op name.

    What only moves values gets its color from its neighbours; what the user lowered is not raised. O(nodes + uses).
    """
    cluster_of = {op: cluster for cluster in draft.clusters for op in cluster.ops}
    found: dict[tuple[OpId, ...], Region] = {}
    for op in draft.view.ops:
        if op.id in draft.lower or not _rounds(draft.view, coloring, op):
            continue
        cluster = cluster_of.get(op.id)
        ops = cluster.ops if cluster is not None else (op.id,)
        kind = cluster.kind if cluster is not None else op.kind
        root = coloring.entries[op.id].color is Color.ALLOW
        region = Region(op.name, kind, ops, errors.get(op.name, 0.0), root)
        known = found.get(ops)
        if known is None or known.error < region.error:
            found[ops] = region
    return list(found.values())


def suspicion(region: Region) -> tuple[float, bool, float, tuple[OpId, ...]]:
    """What comes first: larger errors by powers of two, then what gains least by a low type, then larger errors."""
    power = math.frexp(region.error)[1] if math.isfinite(region.error) and region.error else -math.inf
    power = math.inf if math.isinf(region.error) else power
    return -power, region.root, -region.error, region.ops


def _rounds(view: View, coloring: Coloring, op: Op) -> bool:
    """Whether an op computes in a low type, or reads weights in it."""
    if op.signature is None or op.bodies or op.kind in CASTS or op.kind == "Constant":
        return False
    reads = [slot for slot in range(len(op.inputs)) if read_low(view, coloring, op, slot)]
    makes = any(made_low(view, coloring, op, v) for v in op.outputs if v is not None)
    if not reads and not makes:
        return False
    return not exact(op) or any(view.constant(op.inputs[slot]) is not None for slot in reads)
