"""Canonicalization: rounds of passes to bring a model into standard form before its ops are painted.

The first rounds inline functions, move the model to its opset and rewrite masks. The others fuse ops into single
operators. A fused node gets one decision about precision, no Cast can split it, and runtimes fuse it further, for
example a norm with the sum before it. All of this happens in float32, and each fusion is verified when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, count
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import computes
from amp_rewrite.ir.names import normal_domain
from amp_rewrite.ir.op_classes import CASTS, LARGE_WEIGHT, LAYERS, SOFTMAXES
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.patterns.fills import far_fills
from amp_rewrite.ir.patterns.scores import scores_are_read
from amp_rewrite.ir.versions import FIRST_BFLOAT16_CAST, FIRST_IR_WITH_FREE_INITIALIZERS, OLDEST_MOVED
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.replacement import (
    ATTENTION,
    BATCH_NORM,
    CONSTANT,
    DECOMPOSED_ATTENTION,
    GROUP_NORM,
    GROUPED_ATTENTION,
    Context,
    LazyPass,
    Outcome,
    Replacement,
    findings,
    run_round,
)
from amp_rewrite.runtime.providers import refusal, run_as_bodies
from amp_rewrite.settings.choices import AUTO_OPSET, KEEP_OPSET, ROWS_SEE, Fuse, Target
from amp_rewrite.settings.io_rules import io_types, parse_io
from amp_rewrite.settings.request import Request


@dataclass(frozen=True, slots=True)
class Canonical:
    """A view in standard form, the ops selected by the user, and the findings.

    `base` is the result if nothing is lowered, and `notes` are its findings. `rescale`: quantizers get scales in the
    low type.
    """

    view: View
    keep: Mapping[OpId, str]
    lower: Mapping[OpId, str]
    findings: tuple[Finding, ...]
    base: Model
    rescale: bool = False
    notes: tuple[Finding, ...] = ()


def canonicalize(source: View, request: Request, *, widen: bool = False, low_only: bool = True) -> Canonical:
    """Bring a view into standard form, as requested by the options; selected ops are not fused.

    A pattern without a match in the model may match an op created by a fusion. `widen`: also compute ops that are in
    the low type in float32. `low_only`: as in `Context`.
    """
    base, notes = _through_float32(source, request, widen)
    expanded, expansions = _expanded(base, request)
    rescale = request.quantized == "rescale"
    refusal = Gate(request.target, request.to).rescale_refusal(expanded) if rescale else None
    patterns = (*request.keep, *request.lower)
    deferred = _unmatched(expanded, patterns)
    keep, lower = _overrides(expanded, request, skip=deferred)
    context = Context(request.to, request.opset == AUTO_OPSET, low_only, request.assume == ROWS_SEE)
    view, fusions = fuse_operators(expanded, context, request.target, {*keep, *lower}, request.fuse)
    if request.safe:
        view, outcomes = run_round(view, (_BOUND_FILLS,), Context(request.to))
        fusions = (*fusions, *findings(view, outcomes))
    keep, lower = carry_over(keep, expanded, view), carry_over(lower, expanded, view)
    if deferred:
        unmatched = _unmatched(view, deferred)
        _overrides(expanded, request, skip=[pattern for pattern in patterns if pattern not in unmatched])  # raises
        resolved = [pattern for pattern in patterns if pattern not in deferred or pattern in unmatched]
        new_keep, new_lower = _overrides(view, request, skip=resolved)
        keep, lower = {**new_keep, **keep}, {**new_lower, **lower}
    if refusal is not None:
        notes = (*notes, Finding(reasons.QUANTIZED, "model", refusal))
    return Canonical(view, keep, lower, (*expansions, *fusions), base.model, rescale and refusal is None, notes)


def _unmatched(view: View, patterns: Sequence[str]) -> list[str]:
    if not patterns:
        return []
    from amp_rewrite.settings.selectors import matched  # late: most conversions do not select ops

    return [pattern for pattern in patterns if not matched(view, pattern)]


def _overrides(view: View, request: Request, *, skip: Collection[str]) -> tuple[Mapping[OpId, str], Mapping[OpId, str]]:
    """Return the ops matched by the request's patterns, except for the patterns in `skip`."""
    keep, lower = ([p for p in patterns if p not in skip] for patterns in (request.keep, request.lower))
    if not keep and not lower:
        return {}, {}
    from amp_rewrite.settings.selectors import overrides

    return overrides(view, keep, lower)


def _through_float32(view: View, request: Request, widen: bool = False) -> tuple[View, tuple[Finding, ...]]:
    """Return the view with float32 in place of low types, if ops compute in a low type other than the requested one.

    float64 is also replaced if the request narrows it. Inputs and outputs keep their types, unless options change
    them.
    """
    others = [dtype for dtype in view.low_types if widen or dtype is not request.to]
    if DType.BFLOAT16 in others and view.opsets.get("", FIRST_BFLOAT16_CAST) < FIRST_BFLOAT16_CAST:
        others = []
    low = [op for op in view.ops if op.kind not in CASTS and computes(view, op, others)] if others else []
    if not request.lower and not any(request.op_lists.entries_of(op.domain, op.op_type) for op in low):
        low, others = [], []
    whole = view
    if request.narrow and view.model.proto.functions:
        from amp_rewrite.rewrite.passes.inline import inlined  # late: few models have functions

        whole = View.of(inlined(view.model))
    wide = [op for op in whole.ops if request.narrow and computes(whole, op, (DType.DOUBLE,))]
    if not low and not wide:
        return view, ()
    from amp_rewrite.rewrite.emulate import in_float32  # late: few models are already in half precision

    retyped = {view.value_name(value) for value in io_types(view, parse_io(request.io), request.to)}
    findings = []
    if low:
        names = " and ".join(dtype.spelling for dtype in others)
        text = f"{count(len(low), 'op')} in {names}, decided as if in float32"
        findings.append(Finding("widened", "model", f"{text} · values may be out of range · check with --data"))
    if wide:
        text = f"{count(len(wide), 'op')} narrowed from float64 to float32"
        findings.append(Finding("narrowed", "model", text))
    types = [*others, *([DType.DOUBLE] if wide else [])]
    return View.of(in_float32(view.model, types, retyped)), tuple(findings)


def _expanded(view: View, request: Request) -> tuple[View, tuple[Finding, ...]]:
    """Return the view at its final opset, with useful functions inlined, and CastLike and masks replaced."""
    local, moved, standard = tuple[Finding, ...](), tuple[Finding, ...](), tuple[Finding, ...]()
    if view.model.proto.functions:
        from amp_rewrite.rewrite.passes.inline import inline_functions

        view, local = inline_functions(view, low=bool(request.keep))
    opset = AUTO_OPSET if request.opset is None and request.target == Target.WEBGPU else request.opset
    if opset != KEEP_OPSET and (opset is not None or view.opset < OLDEST_MOVED):
        from amp_rewrite.rewrite.opset import at_opset  # late: most models are not moved

        view, moved = at_opset(view, opset, request.to, request.target, fuse=request.fuse)
    if run_as_bodies(view, request.target.kernels):
        from amp_rewrite.rewrite.passes.inline import inline_schema_functions

        view, standard = inline_schema_functions(view, request)
    decomposed: list[Finding] = []
    for passes in _DECOMPOSITIONS if request.safe else _DECOMPOSITIONS[:1]:
        after, outcomes = run_round(view, passes, Context(request.to))
        decomposed.extend(findings(view, outcomes))
        view = after
    return view, (*local, *moved, *standard, *decomposed)


_DECOMPOSITIONS = (
    (LazyPass("passes.decompose:replace_cast_like", (("CastLike",),)),),
    (
        LazyPass("passes.attention_masks:select_masks", (SOFTMAXES, ("Add",))),
        LazyPass("passes.biases:split_biases", (LAYERS - {"MatMul"},)),
    ),
    (LazyPass("passes.attention_masks:shrink_score_constants", (("Softmax",), ("Add",))),),
)
"""The rounds before fusion. Without safety, only the first one runs. Constants are shrunk after masks are replaced."""


def fuse_operators(
    view: View, context: Context, target: Target, excluded: Collection[OpId] = (), fuse: Fuse = "basic"
) -> tuple[View, tuple[Finding, ...]]:
    """Fold constants and BatchNormalization, and fuse written-out operators; return the new view and the findings.

    With `fuse` "contrib" or "diffusion" this also writes onnxruntime's own operators. The ops in `excluded` are not
    changed, nor is a model with training_info or with weights listed as inputs (IR version 3).
    """
    proto = view.model.proto
    if fuse == "none" or proto.training_info or proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return view, ()
    steps: list[tuple[View, list[Outcome]]] = []
    objection = partial(_objection, context.to, target, {_key(view, op) for op in excluded})
    if fuse != "basic" and view.of_kinds(("Attention",)):
        from amp_rewrite.rewrite.contrib.fuse import decompose_fusible  # late: few models contain that operator

        view = decompose_fusible(view, context, objection)
    for passes in _ROUNDS_BY_FUSE[fuse]:
        after, outcomes = run_round(view, passes, context, objection)
        steps.append((view, outcomes))
        view = after
    return view, _findings(steps)


def _has_foldable_ops(view: View, context: Context) -> bool:
    return any(op.inputs and all(view.constant(value) is not None for value in op.operands) for op in view.ops)


def _has_clusters(view: View, context: Context) -> bool:
    return bool(clusters(view))


def _has_attention(view: View, context: Context) -> bool:
    return any(kind in _ATTENTIONS for kind in view.by_kind) or scores_are_read(view)


def _has_norms_or_activations(view: View, context: Context) -> bool:
    kinds = ("LayerNormalization", "RMSNormalization", "Gelu", "Sigmoid")
    return any(kind in kinds for kind in view.by_kind) or _has_clusters(view, context)


_ATTENTIONS = ("Attention", "com.microsoft::MultiHeadAttention")
_MOVE_BIASES = LazyPass("passes.attention_biases:move_attention_biases", when=_has_attention)
_ROUNDS = (
    (LazyPass("const_eval:fold_constants", when=_has_foldable_ops),),
    (
        LazyPass("passes.fold_batch_norm:fold_batch_norms", (("BatchNormalization",),)),
        LazyPass("passes.standard_ops:fuse_clusters", when=_has_clusters),
        LazyPass("passes.decompose:decompose_group_norms", (("GroupNormalization",),)),
    ),
    (_MOVE_BIASES,),
    (
        LazyPass("attention.build:fuse_attention", (("Softmax",),), _has_attention),
        LazyPass("passes.standard_ops:divide_by_roots", (("Reciprocal",),), _has_clusters),
    ),
)
"""Attention comes after the other operators, since its softmax may be written out."""
_CONTRIB_ROUNDS = (
    _ROUNDS[0],
    (
        *_ROUNDS[1],
        LazyPass("passes.biases:replace_gemms", (("Gemm",), ("Reshape",))),
        LazyPass("passes.decompose:decompose_patch_convs", (("Conv",), ("Transpose",))),
        LazyPass("contrib.fuse:fuse_rotations", (("Neg", "RotaryEmbedding"),)),
    ),
    (LazyPass("contrib.fuse:fuse_attentions", (("Softmax",),), _has_attention), *_ROUNDS[-1]),
    (
        LazyPass("passes.attention_biases:split_attention_biases", (_ATTENTIONS, ("Split",))),
        LazyPass("passes.biases:move_into_tables", (("MatMul",), ("Add",))),
    ),
    (_MOVE_BIASES,),
    (LazyPass("contrib.fuse:fuse_contrib", when=_has_norms_or_activations),),
    (
        LazyPass("passes.biases:expand_biases", (("MatMul",), ("Add",))),
        LazyPass(
            "passes.decompose:align_products",
            (("MatMul",),),
            lambda view, _: any(math.prod(t.dims) >= LARGE_WEIGHT for t in view.constants.values()),
        ),
    ),
)
"""onnxruntime's own attention comes before the standard's, since its CUDA kernel is faster."""
_DIFFUSION = LazyPass("contrib.diffusion:fuse_diffusion", (("InstanceNormalization", "Gelu", "Erf"),))
_ROUNDS_BY_FUSE = {
    "basic": _ROUNDS,
    "contrib": _CONTRIB_ROUNDS,
    "diffusion": (*_CONTRIB_ROUNDS[:-2], (_DIFFUSION, *_CONTRIB_ROUNDS[-2]), _CONTRIB_ROUNDS[-1]),
}
_BOUND_FILLS = LazyPass("passes.attention_masks:bound_fills", when=lambda view, context: far_fills(view, context.to))


def _findings(rounds: Sequence[tuple[View, Sequence[Outcome]]]) -> tuple[Finding, ...]:
    """Return the findings of all rounds, except refusals for ops fused in the same round or a later one."""
    fused_at: dict[_Key, int] = {}
    for number, (view, outcomes) in enumerate(rounds):
        fused_at.update((_key(view, op), number) for o in outcomes if isinstance(o, Replacement) for op in o.ops)
    final: list[Finding] = []
    for number, (view, outcomes) in enumerate(rounds):
        current = [o for o in outcomes if isinstance(o, Replacement) or fused_at.get(_key(view, o.last), -1) < number]
        final.extend(findings(view, current))
    return tuple(final)


def carry_over(
    marks: Mapping[OpId, str], before: View, after: View, results: Mapping[OpId, tuple[str, ...]] | None = None
) -> Mapping[OpId, str]:
    """Transfer marks of ops to another view of the model. `results`: the new result names of rewritten ops."""
    if before is after or not marks:
        return marks
    renamed = results or {}
    keys = {op: _key(before, op) for op in marks}
    marks_by_key = {(keys[op][0], renamed.get(op, keys[op][1])): mark for op, mark in marks.items()}
    return {op.id: marks_by_key[key] for op in after.ops if (key := _key(after, op.id)) in marks_by_key}


_Key = tuple[int, tuple[str, ...]]


def _key(view: View, op: OpId) -> _Key:
    return view.ops[op].scope, tuple(view.ops[op].node.output)


def _objection(to: DType, target: Target, excluded: Collection[_Key], view: View, fusion: Replacement) -> str | None:
    matched_ops = [op for op in fusion.ops if _key(view, op) in excluded]
    if matched_ops:
        return f"a pattern selects {view.ops[matched_ops[0]].name}"
    if fusion.kind == ATTENTION and target.family == Target.TENSORRT:
        return "TensorRT fuses attention from its parts, so it is left written out"
    kernels = target.kernels
    if fusion.kind == GROUP_NORM and kernels is None:
        return "the target may have a kernel for it"
    if kernels is None or fusion.kind in (CONSTANT, BATCH_NORM, DECOMPOSED_ATTENTION):
        return None
    node, types = fusion.node, (to,) if fusion.kind == GROUPED_ATTENTION else (DType.FLOAT, to)
    return refusal(kernels, node, view.opsets.get(normal_domain(node.domain), 1), types)
