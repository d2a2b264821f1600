"""The painter: TensorFlow's automatic mixed precision, and this project's groups, on (op, type variable) vertices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amp_rewrite.decide.coloring import groups, rules, upcast
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.state import Canvas
from amp_rewrite.decide.coloring.vertices import Vertices, entries_of
from amp_rewrite.decide.hazards.find import Hazards
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.op_lists import OpLists

Rule = Callable[[Canvas], None]

SPREAD: tuple[Rule, ...] = (
    upcast.raise_low,
    rules.freeze,
    groups.freeze_clusters,
    rules.allow_roots,
    rules.deny_forward,
    groups.sequences_by_deny,
    rules.between_allow,
    rules.gray_after_allow,
    rules.joins,
    rules.allow_through_clear,
    groups.sequences_by_allow,
)
FINISH: tuple[Rule, ...] = (
    groups.clusters_whole,
    groups.norm_tails,
    rules.shapes_follow,
    rules.existing_casts,
)


@dataclass(frozen=True, slots=True)
class PaintOptions:
    """Options of painting, resolved to the ops of one view.

    `keep` and `lower` map ops to the pattern that named them. `pins` come on top of the hazards'. `norms`: clusters of
    which only scale and bias are treated apart. `low_inputs`: graph inputs that the caller feeds in the low type.
    `gray_follows_allow`: by default TensorFlow's choice, off for float16, on for bfloat16. Two extensions of
    TensorFlow's rules: with `shapes_follow`, Shape and Size take their input as it is; with `spare_casts`, ops become
    low where that takes no Cast, or takes one away: tables of weights (`rules.between_allow`) and ends (`rules.joins`).
    """

    level: Level = Level.DEFAULT
    target: Target = Target.ORT_CUDA
    gray_follows_allow: bool | None = None
    keep: Mapping[OpId, str] = field(default_factory=dict)
    lower: Mapping[OpId, str] = field(default_factory=dict)
    pins: Sequence[Pin] = ()
    norms: Sequence[Cluster] = ()
    low_inputs: Collection[ValueId] = ()
    shapes_follow: bool = False
    spare_casts: bool = False


def paint(
    view: View,
    lists: OpLists,
    to: DType,
    options: PaintOptions | None = None,
    hazards: Hazards | None = None,
    place: Rule | None = None,
    **old: Any,
) -> Coloring:
    """Return a color for every float32 type variable of a model, with the rule and the op behind each.

    The gate wins over `options.keep` and `options.lower`, they win over pins, and pins over the lists. Low ops that
    `keep`, and pins that raise, name become float32 (`upcast`). Clusters of `hazards` get one color each. `place`
    moves the border between the types once the rules have spread the colors (`placement.*`). O(nodes + uses), `place`
    apart.

    `old`: fields of `PaintOptions` and `Hazards` as keywords, which is deprecated.
    """
    options, hazards = _with_keywords(options or PaintOptions(), hazards or Hazards(), old)
    gate = Gate.of(options.target, to)
    entries = entries_of(view, lists.at_level(options.level))
    follows = options.gray_follows_allow
    canvas = Canvas(
        view=view,
        vertices=Vertices.build(view, entries, gate),
        gate=gate,
        to=to,
        level=options.level,
        gray_follows_allow=to is DType.BFLOAT16 if follows is None else follows,
        keep=options.keep,
        lower=options.lower,
        pins=(*hazards.pins, *options.pins),
        clusters=hazards.clusters,
        norms=options.norms,
        low_inputs=options.low_inputs,
        shapes_follow=options.shapes_follow,
        numbers=hazards.numbers,
        benign=hazards.benign,
        spare_casts=options.spare_casts,
    )
    for rule in (*SPREAD, *((place,) if place is not None else ()), *FINISH):
        rule(canvas)
    return canvas.coloring(entries)


def _with_keywords(options: PaintOptions, hazards: Hazards, old: Mapping[str, Any]) -> tuple[PaintOptions, Hazards]:
    """Return options and hazards with deprecated keywords folded in; those that are None keep the default."""
    if not old:
        return options, hazards
    warnings.warn("keywords of paint() are deprecated; pass PaintOptions and Hazards", DeprecationWarning, stacklevel=3)
    ours = {name: value for name, value in old.items() if value is not None}
    of_hazards = {name: ours.pop(name) for name in ("clusters", "numbers", "benign") if name in ours}
    return replace(options, **ours), replace(hazards, **of_hazards)
