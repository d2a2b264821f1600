"""The finding that little of a model becomes low: the share of its operations, the rules behind that, the remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.placement.cost_model import CostModel
from amp_rewrite.errors import Finding, count
from amp_rewrite.ir.view import View
from amp_rewrite.reports.render import share
from amp_rewrite.runtime.roofline import ROOFS
from amp_rewrite.settings.list_entry import Color

_FEW = 0.25
"""The share of low operations below which a conversion gains little."""
_NAMED = 2
"""Rules that a message names."""
_REMEDIES = {
    reasons.KEEP: "keep fewer ops",
    reasons.KERNEL_GATE: "--opset auto, or another release of the target",
    reasons.LONG_SUM: "--lower 'op=MatMul' lowers them anyway, with the error of longer sums",
    reasons.OVERFLOW: "--to bfloat16 holds larger values",
    reasons.REPAIR: "a wider tolerance or bound pins fewer",
    reasons.SCHEMA_GATE: "--opset auto, or another release of the target",
    reasons.UNSEEN: "use data that reaches them",
}


def few_low(view: View, coloring: Coloring) -> Iterator[Finding]:
    """Yield a finding if less than a quarter of the operations of compute ops are low. O(nodes).

    A model of which less than a quarter of the compute ops stays float32 is not measured.
    """
    compute = [op for op in view.ops if coloring.entries[op.id].color is Color.ALLOW]
    paints = {op.id: paint for op in compute if (paint := coloring.of(op.id)) and paint.rule != reasons.QUANTIZED}
    kept = {op: paint.rule for op, paint in paints.items() if not paint.dtype.low}
    if not kept or len(kept) < _FEW * len(paints):
        return
    costs = CostModel(view, ROOFS["A100"], coloring.to)  # for sizes alone, the same on all GPUs
    flops = {op: round(costs.flops(view.ops[op])) for op in paints}
    if not any(flops.values()):  # operators whose operations are not known
        flops = dict.fromkeys(paints, 1)
    whole, by_rule = sum(flops.values()), Counter[str]()
    for op, rule in kept.items():
        by_rule[rule] += flops[op]
    low = whole - by_rule.total()
    if low >= _FEW * whole:
        return
    to, causes = coloring.to.spelling, by_rule.most_common(_NAMED)
    facts = [f"{rule} keeps {share(part, whole)} in float32" for rule, part in causes if part]
    shown = f"{share(low, whole)} of the operations of {count(len(paints), 'compute op')}" if low else "no compute op"
    first = causes[0][0]
    remedy = _REMEDIES.get(first, f"`amp-rewrite explain {first}` says how to override it")
    means = "the result is hardly quicker or smaller" if low else "the result computes as the float32 model does"
    yield Finding("few_low", "model", f"{to} has {shown}: {', '.join(facts)} · {means} · {remedy}")
