"""Which of two colourings of a draft is the cheaper one, and by how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from amp_rewrite.finding import Finding
from amp_rewrite.painting.color import Coloring
from amp_rewrite.placement.place import Placing
from amp_rewrite.plan import Plan


def cheaper(placing: Placing, spread: Coloring, cut: Coloring, plan: Callable[[Coloring], Plan]) -> Coloring:
    """The colouring by minimum cut, if it takes no more Casts and no more time than the one by spreading colours.

    It says so in a finding, with both costs. The cut itself is never dearer, but it does not see what the rules after
    it do, and it would take two small Casts for a large one. `placing` is the one that made `cut`.
    """
    costs = {way: placing.seconds(coloring) for way, coloring in ((_SPREAD, spread), (_CUT, cut))}
    casts = {way: len(plan(coloring).casts) for way, coloring in ((_SPREAD, spread), (_CUT, cut))}
    better = costs[_CUT] <= costs[_SPREAD] and casts[_CUT] <= casts[_SPREAD]
    chosen = cut if better else spread
    told = ", ".join(f"{way} {casts[way]} Casts and {costs[way] * 1e6:.3g} µs" for way in (_CUT, _SPREAD))
    note = f"predicted beyond the cheapest run on {placing.work.roof.gpu}: {told}; {_CUT if better else _SPREAD} it is"
    return replace(chosen, findings=(*chosen.findings, Finding("placement", "model", note)))


_SPREAD, _CUT = "propagate", "mincut"
