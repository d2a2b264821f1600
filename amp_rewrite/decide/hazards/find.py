"""What may not be lowered whatever the lists say: every safety rule, run in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from amp_rewrite.decide.hazards.cancellation import cancellation
from amp_rewrite.decide.hazards.cluster import clusters
from amp_rewrite.decide.hazards.constant_folding import folded
from amp_rewrite.decide.hazards.constants import epsilon, statistics, underflow
from amp_rewrite.decide.hazards.coordinates import places
from amp_rewrite.decide.hazards.distance import distance
from amp_rewrite.decide.hazards.exemptions import benign
from amp_rewrite.decide.hazards.growth import growth
from amp_rewrite.decide.hazards.integers import accumulators, element_counts, index_taint, shape_taint
from amp_rewrite.decide.hazards.logarithm import logarithm
from amp_rewrite.decide.hazards.mask import overflow, saturated
from amp_rewrite.decide.hazards.products import products
from amp_rewrite.decide.hazards.quantizers import quantizers
from amp_rewrite.decide.hazards.shape_math import numbers
from amp_rewrite.decide.hazards.trig_arguments import angle
from amp_rewrite.decide.pin import Cluster, Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.view import OpId, ValueId, View

Rule = Callable[[View, DType], Iterable[Pin]]

# Of several rules that pin one op the first speaks for it.
RULES: tuple[Rule, ...] = (
    shape_taint,
    index_taint,
    accumulators,
    element_counts,
    angle,
    statistics,
    overflow,
    underflow,
    epsilon,
    folded,
    places,
    distance,
    cancellation,
    logarithm,
    quantizers,
    products,
    growth,
)


@dataclass(frozen=True, slots=True)
class Hazards:
    """What the safety rules found in a model.

    pins: ops that stay float32, at most one pin per op, in order of the ops. clusters: ops that share one color.
    saturate: values to clamp to the low type's finite range where they become low: constants where they are
    baked, results where a Cast lowers them. numbers: ops that compute with shapes and constants alone, whose
    denial need not spread. benign: ops on the deny list that are harmless where they stand, and why. findings: what
    a person should know about all that.
    """

    pins: tuple[Pin, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    findings: tuple[Finding, ...] = ()
    saturate: frozenset[ValueId] = frozenset()
    numbers: frozenset[OpId] = frozenset()
    benign: Mapping[OpId, str] = field(default_factory=dict)


def hazards(view: View, to: DType) -> Hazards:
    """Everything that the safety rules say of a model. O(nodes + uses); reads each float32 constant once."""
    pins: dict[OpId, Pin] = {}
    for rule in RULES:
        for pin in rule(view, to):
            pins.setdefault(pin.op, pin)
    saturate, findings = saturated(view, to)
    groups = clusters(view)
    pinned = tuple(pins[op] for op in sorted(pins))
    return Hazards(pinned, groups, findings, saturate, numbers(view), benign(view, groups, to))
