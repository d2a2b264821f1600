"""Findings that little of a model becomes low: the share of its operations, the rules behind that, the remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.sizes import Sizes
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, count
from amp_rewrite.ir.dataflow import computes
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.reports.render import share
from amp_rewrite.settings.choices import KEEP_OPSET, Target
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.request import Request

_FEW = 0.25
"""The share of low operations below which a conversion gains little."""
_NAMED = 2
"""Rules that a message names."""
_REMEDIES = {
    reasons.KEEP: "keep fewer ops",
    reasons.LONG_SUM: "--lower 'op=MatMul' lowers them anyway, with the error of longer sums",
    reasons.OVERFLOW: "--to bfloat16 holds larger values",
    reasons.REPAIR: "a wider tolerance or bound pins fewer",
    reasons.UNSEEN: "use data that reaches them",
}


def in_float64(view: View, coloring: Coloring) -> Iterator[Finding]:
    """Yield a finding if products and convolutions compute in float64, which no list lowers. O(nodes)."""
    compute = [op for op in view.ops if coloring.entries[op.id].color is Color.ALLOW]
    wide = [op for op in compute if computes(view, op, (DType.DOUBLE,))]
    if wide:
        note = f"{len(wide)} of {count(len(compute), 'compute op')} in float64, and only float32 becomes low"
        yield Finding("float64", "model", note)


def few_low(view: View, coloring: Coloring, request: Request) -> Iterator[Finding]:
    """Yield a finding if less than a quarter of the operations of compute ops are low. O(nodes).

    A model of which less than a quarter of the compute ops stays float32 is not measured.
    """
    if view.low_types:  # what is low already has no paint
        return
    compute = [op for op in view.ops if coloring.entries[op.id].color is Color.ALLOW]
    paints = {op.id: paint for op in compute if (paint := coloring.of(op.id)) and paint.rule != reasons.QUANTIZED}
    kept = {op: paint.rule for op, paint in paints.items() if not paint.dtype.low}
    if not kept or len(kept) < _FEW * len(paints):
        return
    sizes = Sizes(view)
    flops = {op: round(sizes.flops(view.ops[op])) for op in paints}
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
    if first in (reasons.KERNEL_GATE, reasons.SCHEMA_GATE):
        remedy = _served_by(view, [op for op, rule in kept.items() if rule == first], request)
    else:
        remedy = _REMEDIES.get(first, f"`amp-rewrite explain {first}` says how to override it")
    means = "the result is hardly quicker or smaller" if low else "the result computes as the float32 model does"
    yield Finding("few_low", "model", f"{to} has {shown}: {', '.join(facts)} · {means} · {remedy}")


def _served_by(view: View, ops: Sequence[OpId], request: Request) -> str:
    """Return the changes of a request that bring some of these ops a kernel in a low type."""
    from amp_rewrite.rewrite.opset import serving  # late: few conversions lower little
    from amp_rewrite.runtime.kernels import releases

    def serves(target: Target, to: DType) -> bool:
        gate = Gate(target, to)
        return any(gate.lowerable_groups(view, view.ops[op]).groups for op in ops)

    to, target = request.to, request.target
    opset = serving(view, ops, to, target, fuse=request.fuse)
    kept = "without --opset keep" if request.opset == KEEP_OPSET else "with --opset auto"
    ways = [] if opset is None else [f"{kept} the model moves to opset {opset}"]
    known = releases() if target.family is Target.ORT_CUDA else ()
    newer = [release for release in reversed(known) if serves(Target.parse(f"{Target.ORT_CUDA.value}:{release}"), to)]
    ways += [f"--target {Target.ORT_CUDA.value}:{newer[0]}"] if newer else []
    other = DType.FLOAT16 if to is DType.BFLOAT16 else DType.BFLOAT16
    ways += [f"--to {other.spelling}"] if serves(target, other) else []
    return f"more kernels: {'; '.join(ways)}" if ways else "no opset and no release of the target has more kernels"
