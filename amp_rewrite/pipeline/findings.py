"""Findings about a conversion as a whole, such as a small share of low ops, or limits of the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import onnx

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, ModelError, count, share
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import Flow, computes
from amp_rewrite.ir.op_classes import COPIES, RECURRENT
from amp_rewrite.ir.ops import row_of
from amp_rewrite.ir.schema import is_runtime_only, normal_domain
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, View
from amp_rewrite.reports.work import flops
from amp_rewrite.runtime.faults import DtypeOf
from amp_rewrite.runtime.kernels import release_number
from amp_rewrite.runtime.providers import (
    CUDA_ONLY,
    CudaOptions,
    cuda_options_of,
    oldest_release,
    own_operators,
    release_refusal,
)
from amp_rewrite.settings.choices import AUTO_OPSET, KEEP_OPSET, NEEDS, Target
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.request import Request

_MIN_SHARE = 0.25
"""Minimum share of low operations for a conversion to pay off."""
_MAX_RULES = 2
"""Maximum number of rules in one message."""
_REMEDIES = {
    reasons.CHECK: "--data FILE --tolerance X may keep fewer",
    reasons.KEEP: "keep fewer ops",
    reasons.LONG_SUM: "--lower 'op=MatMul' lowers them anyway, with the error of longer sums",
    reasons.OVERFLOW: "--to bfloat16 represents larger values",
    reasons.REPAIR: "a looser tolerance keeps fewer ops in float32",
    reasons.UNSEEN: "use data that reaches them",
}


def mostly_float32(view: View, coloring: Coloring, request: Request) -> Iterator[Finding]:
    """Yield findings if compute ops are in float64, or fewer than a quarter of their operations are low. O(nodes).

    No list lowers float64. Operations are not counted if over three quarters of the compute ops are low.
    """
    compute = [op for op in view.ops if coloring.entries[op.id].color is Color.ALLOW]
    wide = [op for op in compute if computes(view, op, (DType.DOUBLE,))]
    if wide:
        note = f"{len(wide)} of {count(len(compute), 'compute op')} in float64, but only float32 is lowered"
        yield Finding("float64", "model", note)
    if view.low_types:  # low values in the model are not painted
        return
    paints = {op.id: paint for op in compute if (paint := coloring.of(op.id)) and paint.rule != reasons.QUANTIZED}
    kept = {op: paint.rule for op, paint in paints.items() if not paint.dtype.low}
    if not kept or len(kept) < _MIN_SHARE * len(paints):
        return
    work = {op: round(flops(view, view.ops[op])) for op in paints}
    if not any(work.values()):  # the numbers of operations are unknown
        work = dict.fromkeys(paints, 1)
    whole, by_rule = sum(work.values()), Counter[str]()
    for op, rule in kept.items():
        by_rule[rule] += work[op]
    low = whole - by_rule.total()
    if low >= _MIN_SHARE * whole:
        return
    to, causes = coloring.to.spelling, by_rule.most_common(_MAX_RULES)
    facts = [f"{rule} keeps {share(part, whole)} in float32" for rule, part in causes if part]
    shown = f"{share(low, whole)} of the operations of {count(len(paints), 'compute op')}" if low else "no compute op"
    first = causes[0][0]
    if first in (reasons.KERNEL_GATE, reasons.SCHEMA_GATE):
        remedy = _options_with_kernels(view, [op for op, rule in kept.items() if rule == first], request)
    else:
        remedy = _REMEDIES.get(first, f"to override {first}: `amp-rewrite explain {first}`")
    meaning = "the result is hardly faster or smaller" if low else "the result is effectively float32"
    yield Finding("mostly_float32", "model", f"{to} has {shown}: {', '.join(facts)} · {meaning} · {remedy}")


def _options_with_kernels(view: View, ops: Sequence[OpId], request: Request) -> str:
    """Suggest options with kernels for some of these ops on the target."""
    from amp_rewrite.rewrite.opset import at_opset, relabeled  # late: few conversions lower little

    to, target = request.to, request.target

    def serves(view: View, target: Target, to: DType) -> bool:
        gate = Gate(target, to)
        return any(gate.lowerable_groups(view, view.ops[op]).groups for op in ops)

    opset = at_opset(view, AUTO_OPSET, to, target, fuse=request.fuse)[0].opset
    moves = opset != view.opset and serves(relabeled(view, opset), target, to)
    word = "without --opset keep" if request.opset == KEEP_OPSET else "with --opset auto"
    other = DType.FLOAT16 if to is DType.BFLOAT16 else DType.BFLOAT16
    ways = [f"{word} the model moves to opset {opset}"] if moves else []
    ways += [f"--target {target.word}"] if target.release and serves(view, target.family, to) else []
    ways += [f"--to {other.spelling}"] if serves(view, target, other) else []
    return f"more kernels: {'; '.join(ways)}" if ways else "no other opset or release of the target has more kernels"


def without_kernel(view: View, coloring: Coloring) -> tuple[Finding, ...]:
    """Return findings about ops kept in float32 by the opset, missing kernels or an unknown type."""
    notes: dict[tuple[str, str], str] = {}
    for op in view.ops:
        paint = coloring.of(op.id) if op.signature is not None else None
        if paint is not None and paint.rule in (reasons.SCHEMA_GATE, reasons.KERNEL_GATE, reasons.UNKNOWN_TYPE):
            notes.setdefault((paint.rule, op.kind), paint.note)
    return tuple(Finding(rule, kind, note) for (rule, kind), note in sorted(notes.items()))


def cuda_findings(view: View, dtype_of: DtypeOf, target: Target, *, permitted: bool = False) -> tuple[Finding, ...]:
    """Return findings about the CUDA options of a convolutional model: options for a faster session, or their cost."""
    on_cuda = target.family == Target.ORT_CUDA
    options = cuda_options_of(view, dtype_of, permitted=permitted) if on_cuda else CudaOptions()
    lines = {"channels_last": options.line, "tf32": options.cost.replace("; ", " · ", 1)}
    return tuple(Finding(kind, "CUDA", line) for kind, line in lines.items() if line)


def state_findings(view: View, dtype_of: DtypeOf) -> Iterator[Finding]:
    """Yield a finding about float32 caches (inputs concatenated into an output), and one for each rounded state.

    A low recurrent kernel rounds its state at each step, since both have the same type. O(Concats + copies).
    """
    graph = view.model.proto.graph
    inputs, outputs = ({port.name for port in ports} for ports in (graph.input, graph.output))
    concats = (op for op in view.of_kinds(("Concat",)) if op.scope == MAIN and dtype_of(op.results[0]) is DType.FLOAT)
    caches = {name for op in concats if op.node.output[0] in outputs for name in op.node.input if name in inputs}
    if caches:
        number = count(len(caches), "cache is a float32 input and output", "caches are float32 inputs and outputs")
        it = "it" if len(caches) == 1 else "them"
        yield Finding("caches", "model", f"{number} · --io low makes {it} low")
    flow, ends = Flow(view, COPIES), view.scopes[MAIN].outputs
    for op in view.of_kinds(RECURRENT):
        states = [(op.inputs[slot : slot + 1], op.outputs[out : out + 1]) for slot, out in row_of(op.kind).states]
        for read, results in states:
            if not any(dtype.low for value in results if value is not None and (dtype := dtype_of(value))):
                continue
            fed = {view.value_name(v) for v in flow.back(filter(None, read)) if view.values[v].role is Role.INPUT}
            if fed and not flow.forth(filter(None, results)).isdisjoint(ends):
                yield Finding("recurrent_state", op.name, f"rounds the state {min(fed)!r} at each step")


def target_findings(view: View, target: Target, *, tried: bool = False) -> Iterator[Finding]:
    """Yield findings about operators and versions unsupported by the target.

    `tried`: other opsets were tried, and none is better.
    """
    kernels, opset, ir = target.kernels, view.opset, view.model.proto.ir_version
    if target.family not in (Target.ORT_CUDA, Target.WEBGPU):
        note = f"not in ai.onnx opset {opset}: an operator that only onnxruntime has, written by its optimizers"
        kinds = sorted({op.op_type for op in view.ops if not op.domain})
        yield from (Finding("runtime_only", kind, note) for kind in kinds if is_runtime_only("", kind, opset))
    for op in _unknown(view):
        yield Finding("plugin", op.op_type, f"not in ai.onnx opset {opset}: assumed to be a TensorRT plugin")
    if target.opset is not None and opset > target.opset:
        note = f"{target.value} loads models up to opset {target.opset}, but this one has {opset}"
        remedy = " · the target rejects the model · name a newer release of the target" if tried else ""
        yield Finding("target_limits", "opset", note + remedy)
    if kernels is None:
        return
    if kernels.ir is not None and ir > kernels.ir:
        yield Finding("target_limits", "IR", f"{kernels.runtime} loads models up to IR version {kernels.ir}, not {ir}")
    own, newest = kernels.runtime.rpartition(" ")[2], kernels.opset
    if target.release not in ("", own):
        newer = release_number(target.release) > release_number(own)
        since = {op.kind: op.signature.since for op in view.ops if not op.domain and op.signature is not None}
        late = sorted(kind for kind, first in since.items() if newest is not None and newer and first > newest)
        more = f"; these ops stay float32, because their opset is newer: {', '.join(late)}" if late else ""
        note = f"there is no kernel table for {target.release}: the table for {own} is used{more}"
        yield Finding("kernel_table", target.value, note)


def refuse_unknown(view: View, target: Target) -> None:
    """Raise ModelError for an ai.onnx operator unknown to onnx, unless it may be a TensorRT plugin."""
    unknown = [] if target.family == Target.TENSORRT else list(_unknown(view))
    if unknown:
        op = unknown[0]
        raise ModelError(
            f"node {op.name!r}: onnx {onnx.__version__} does not know the operator {op.op_type!r} in ai.onnx opset "
            f"{view.opset}; upgrade onnx, correct the opset import, or set the target to tensorrt for a TensorRT plugin"
        )


def _unknown(view: View) -> Iterator[Op]:
    local = {(normal_domain(function.domain), function.name) for function in view.model.proto.functions}
    firsts = (ops[0] for ops in view.by_kind.values())
    return (op for op in firsts if not op.domain and op.signature is None and ("", op.op_type) not in local)


def oldest_onnxruntime(view: View, target: Target, to: DType) -> str | None:
    """Return the oldest release of onnxruntime with correct results; None for models without its own operators."""
    kernels = target.kernels if target.family == Target.ORT_CUDA else None
    return None if kernels is None else oldest_release(view, kernels, to)


def needs_release(view: View, oldest: str, to: DType) -> Finding:
    """Return the finding about the required release of onnxruntime."""
    names = own_operators(view)
    both = to is DType.FLOAT16 and CUDA_ONLY.isdisjoint(names)  # the CPU has no kernels in bfloat16
    where = "CUDA and on the CPU" if both else "CUDA"
    note = f"{', '.join(names)}: the file runs with onnxruntime {oldest} or later, on {where}"
    return Finding("needs_release", f"onnxruntime {oldest}", note)


def unfit_here(model: Model, release: str, provider: str) -> str | None:
    """Return why a release of onnxruntime and its first provider cannot run a converted model; None if they can.

    The metadata of the model names the release that it needs.
    """
    needed = model.recorded(NEEDS).rpartition("=")[2]
    return release_refusal(needed, own_operators(View.of(model)), release, provider) if needed else None
