"""The painter: TensorFlow's automatic mixed precision, and this project's groups, on (op, type variable) vertices."""

from __future__ import annotations

from collections.abc import Callable

from amp_rewrite.decide.coloring import borders, groups, rules, upcast
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.paint_state import PaintOptions, PaintState
from amp_rewrite.decide.coloring.vertices import Vertices, entries_of
from amp_rewrite.decide.hazards.find import Hazards
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import View
from amp_rewrite.settings.op_lists import OpLists

Rule = Callable[[PaintState], None]

SPREAD: tuple[Rule, ...] = (
    upcast.upcast_low,
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
    rules.weights_follow,
)
FINISH: tuple[Rule, ...] = (
    borders.hold_borders,
    rules.copies_rise,
    rules.large_tables,
    groups.clusters_whole,
    groups.norm_affine,
    rules.weights_follow,
    rules.shapes_follow,
    rules.existing_casts,
)


def paint(
    view: View,
    lists: OpLists,
    to: DType,
    options: PaintOptions | None = None,
    hazards: Hazards | None = None,
    place: Rule | None = None,
) -> Coloring:
    """Return a color for every float32 type variable of a model, with the rule and the op behind each.

    The gate wins over `options.keep` and `options.lower`, they win over pins, and pins over the lists. Low ops that
    `keep`, and pins with `raises`, name become float32 (`upcast`). O(nodes + uses), `place` apart.

    Args:
        view: the model's index.
        lists: the lists in force.
        to: float16 or bfloat16.
        options: level, target, patterns and pins.
        hazards: pins and clusters of safety rules; a cluster gets one color.
        place: moves the border between the types once the rules have spread the colors (`placement.*`).

    Returns:
        The coloring.
    """
    options, hazards = options or PaintOptions(), hazards or Hazards()
    gate = Gate(options.target, to)
    entries = entries_of(view, lists.at_level(options.level))
    state = PaintState(view, Vertices.build(view, entries, gate), gate, to, options, hazards)
    for rule in (*SPREAD, *((place,) if place is not None else ())):
        rule(state)
    finish(state)
    return state.coloring(entries)


def finish(state: PaintState) -> None:
    """Run the last rules, unless they have run."""
    for rule in () if state.finished else FINISH:
        rule(state)
    state.finished = True
