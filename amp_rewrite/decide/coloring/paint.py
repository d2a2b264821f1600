"""The painter: TensorFlow's automatic mixed precision, and this project's groups, on (op, type variable) vertices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from amp_rewrite.decide.coloring import groups as unit
from amp_rewrite.decide.coloring import rules
from amp_rewrite.decide.coloring import upcast as raising
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.state import Canvas
from amp_rewrite.decide.coloring.vertices import Vertices, entries_of
from amp_rewrite.decide.pin import Cluster, Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.op_lists import OpLists

Rule = Callable[[Canvas], None]

SPREAD: tuple[Rule, ...] = (
    raising.raise_low,
    rules.freeze,
    unit.freeze_clusters,
    rules.allow_roots,
    rules.deny_forward,
    unit.sequences_by_deny,
    rules.between_allow,
    rules.gray_after_allow,
    rules.joins,
    rules.allow_through_clear,
    unit.sequences_by_allow,
)
FINISH: tuple[Rule, ...] = (
    unit.clusters_whole,
    unit.norm_tails,
    rules.shapes_follow,
    rules.existing_casts,
)


def paint(
    view: View,
    lists: OpLists,
    to: DType,
    *,
    level: Level = Level.DEFAULT,
    target: Target = Target.ORT_CUDA,
    pins: Sequence[Pin] = (),
    clusters: Sequence[Cluster] = (),
    norms: Sequence[Cluster] = (),
    keep: Mapping[OpId, str] | None = None,
    lower: Mapping[OpId, str] | None = None,
    low_inputs: Collection[ValueId] = (),
    gray_follows_allow: bool | None = None,
    shapes_follow: bool = False,
    numbers: Collection[OpId] = (),
    benign: Mapping[OpId, str] | None = None,
    spare_casts: bool = False,
    place: Rule | None = None,
) -> Coloring:
    """A color for every float32 type variable of a model, with the rule and the op behind each.

    `keep` and `lower` map ops to the pattern that named them; the gate wins over both, they win over `pins`,
    and pins over the lists. What `keep`, and pins that raise, name and the model computes in a low type is raised
    to float32 (`raising`). `gray_follows_allow` defaults to TensorFlow's choice: off for float16, on for
    bfloat16. `clusters` get one color each; of `norms` only scale and bias are seen to (`unit.norm_tails`).
    `low_inputs` are graph inputs that will be fed in the low type; with `shapes_follow` (not TensorFlow's way)
    Shape and Size take their input as it is. `numbers` are ops whose denial does not spread, `benign` ops on the
    deny list that count as gray, and why. `spare_casts` adds to TensorFlow's rules what lowers ops where that takes
    no Cast, or takes one away: tables of weights (`rules.between_allow`) and ends (`rules.joins`). `place` moves the
    border between the types once the rules have spread the colors (`placement.*`). O(nodes + uses), `place` apart.
    """
    gate = Gate.of(target, to)
    entries = entries_of(view, lists.at_level(level))
    canvas = Canvas(
        view=view,
        vertices=Vertices.build(view, entries, gate),
        gate=gate,
        to=to,
        level=level,
        gray_follows_allow=to is DType.BFLOAT16 if gray_follows_allow is None else gray_follows_allow,
        keep=dict(keep or {}),
        lower=dict(lower or {}),
        pins=pins,
        clusters=clusters,
        norms=norms,
        low_inputs=low_inputs,
        shapes_follow=shapes_follow,
        numbers=numbers,
        benign=benign or {},
        spare_casts=spare_casts,
    )
    for rule in (*SPREAD, *((place,) if place is not None else ()), *FINISH):
        rule(canvas)
    return canvas.coloring(entries)
