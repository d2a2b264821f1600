"""The safety rules, and their results on a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.cancellation import cancellation
from amp_rewrite.decide.hazards.constant_folding import folded
from amp_rewrite.decide.hazards.constants import epsilon, statistics
from amp_rewrite.decide.hazards.coordinates import places
from amp_rewrite.decide.hazards.disguises import disguises
from amp_rewrite.decide.hazards.distance import distance
from amp_rewrite.decide.hazards.exemptions import benign
from amp_rewrite.decide.hazards.integers import accumulators, element_counts, index_taint, shape_taint
from amp_rewrite.decide.hazards.logarithm import logarithm
from amp_rewrite.decide.hazards.long_sums import long_sums
from amp_rewrite.decide.hazards.mask import additive_mask, constant_range, saturated
from amp_rewrite.decide.hazards.position_biases import position_bias
from amp_rewrite.decide.hazards.products import products
from amp_rewrite.decide.hazards.proved_overflow import proved_overflow
from amp_rewrite.decide.hazards.quantized import quantized
from amp_rewrite.decide.hazards.quantizers import quantizers
from amp_rewrite.decide.hazards.rule import Rule, rule
from amp_rewrite.decide.hazards.shape_math import numbers
from amp_rewrite.decide.hazards.small_steps import small_steps
from amp_rewrite.decide.hazards.trig_arguments import angle
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.view import OpId, ValueId, View


@rule(reasons.CLUSTER, "A norm, softmax or activation written out op by op gets one type as a whole.")
def cluster(view: View, to: DType) -> tuple[Cluster, ...]:
    """Find the groups of ops that compute one operator together. O(nodes).

    What it protects: LayerNormalization, RMSNorm, L2 norm, softmax and GELU that an exporter decomposed.
    Why: Values are largest between the ops of such a group. If one op stays float32, a low type costs the others Casts
        and rounding, and the runtime no longer fuses the group into one kernel.
    Example: A LayerNormalization at opset 13, whose square is on the deny list.
    Source: onnxruntime, graph optimizations, "Layer Normalization Fusion", "Gelu Fusion".
    """
    return clusters(view)


PINNING: tuple[Rule[[View, DType], Iterator[Pin]], ...] = (
    shape_taint,
    index_taint,
    accumulators,
    element_counts,
    angle,
    statistics,
    additive_mask,
    constant_range,
    epsilon,
    folded,
    places,
    distance,
    cancellation,
    logarithm,
    quantizers,
    quantized,
    products,
    proved_overflow,
    small_steps,
    disguises,
    position_bias,
)
"""The rules that pin ops to float32. If several pin one op, the first gives the reason."""
ON_TARGET: tuple[Rule[[View, DType], Iterator[Pin]], ...] = (long_sums,)
"""The rules that pin ops for one target alone, after the others."""
RULES: tuple[Rule[..., Any], ...] = (*PINNING, *ON_TARGET, cluster, saturated)
"""The rules that read the model alone, by reason or by finding."""


@dataclass(frozen=True, slots=True)
class Hazards:
    """Results of the safety rules on a model.

    `pins`: ops that stay float32, at most one pin per op, in order of the ops. `clusters`: groups of ops that share one
    type. `saturate`: values to clamp to the low type's finite range when they are lowered; constants are clamped when
    baked, results at their Cast. `numbers`: ops that compute with shapes and constants alone; their denial need not
    spread. `benign`: ops on the deny list that are harmless in their context, with the reason. `findings`: notes for
    the report. `guarded`: the rules on the border between the types (`coloring/borders.py`) run, too.
    """

    pins: tuple[Pin, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    findings: tuple[Finding, ...] = ()
    saturate: frozenset[ValueId] = frozenset()
    numbers: frozenset[OpId] = frozenset()
    benign: Mapping[OpId, str] = field(default_factory=dict)
    guarded: bool = False


def find_hazards(view: View, to: DType, *, but: Collection[str] = (), target: str = "") -> Hazards:
    """Run every safety rule on a model, `but` some that pin ops. O(nodes + uses); reads each float32 constant once.

    `target`: the name of the runtime, for rules that hold for one alone.
    """
    pins: dict[OpId, Pin] = {}
    own = (pinning for pinning in ON_TARGET if pinning.target == target)
    for pinning in (*(pinning for pinning in PINNING if pinning.name not in but), *own):
        for pin in pinning(view, to):
            pins.setdefault(pin.op, pin)
    saturate, findings = saturated(view, to)
    groups = cluster(view, to)
    pinned = tuple(pins[op] for op in sorted(pins))
    return Hazards(pinned, groups, findings, saturate, numbers(view), benign(view, groups, to), guarded=True)
