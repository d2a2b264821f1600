"""The view that is painted: rounds of passes that bring a model into standard form.

First its calls, its opset and its masks; then ops that compute one thing together become one node, where there is one.
A fused node is one decision about precision, no Cast splits it, and runtimes fuse it further: a sum and its
normalization, a bias and its activation. All of it happens in float32, and each fusion is proved when it is made.
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
    GROUP_NORM,
    GROUPED_ATTENTION,
    SPELLED_ATTENTION,
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
    """A view in standard form, the ops that the user's selectors name in it, and what was done.

    `base`: the result if nothing is lowered. `rescale`: quantizers get scales of the low type. `notes`: findings that
    hold then, too.
    """

    view: View
    keep: Mapping[OpId, str]
    lower: Mapping[OpId, str]
    findings: tuple[Finding, ...]
    base: Model
    rescale: bool = False
    notes: tuple[Finding, ...] = ()


def canonicalize(source: View, request: Request, *, widen: bool = False, grouped: bool = True) -> Canonical:
    """Bring a view into standard form, as far as the options ask for it and no selector names the ops.

    A pattern that matches no op of the model may name one that a fusion makes. `widen`: float32 in place of the low
    type, too. `grouped`: as for `Context`.
    """
    base, notes = _through_float32(source, request, widen)
    plain, expansions = _expanded(base, request)
    rescale = request.quantized == "rescale"
    refusal = Gate(request.target, request.to).rescale_refusal(plain) if rescale else None
    patterns = (*request.keep, *request.lower)
    late = _unmatched(plain, patterns)
    keep, lower = _overrides(plain, request, but=late)
    context = Context(request.to, request.opset == AUTO_OPSET, grouped, request.assume == ROWS_SEE)
    view, fusions = fuse_operators(plain, context, request.target, {*keep, *lower}, request.fuse)
    if request.safe:
        view, outcomes = run_round(view, (_BOUND_FILLS,), Context(request.to))
        fusions = (*fusions, *findings(view, outcomes))
    keep, lower = followed(keep, plain, view), followed(lower, plain, view)
    if late:
        unknown = _unmatched(view, late)
        _overrides(plain, request, but=[pattern for pattern in patterns if pattern not in unknown])  # says why
        past = [pattern for pattern in patterns if pattern not in late or pattern in unknown]
        kept, lowered = _overrides(view, request, but=past)
        keep, lower = {**kept, **keep}, {**lowered, **lower}
    if refusal is not None:
        notes = (*notes, Finding(reasons.QUANTIZED, "model", refusal))
    return Canonical(view, keep, lower, (*expansions, *fusions), base.model, rescale and refusal is None, notes)


def _unmatched(view: View, patterns: Sequence[str]) -> list[str]:
    if not patterns:
        return []
    from amp_rewrite.settings.selectors import matched  # late: most conversions name no ops

    return [pattern for pattern in patterns if not matched(view, pattern)]


def _overrides(view: View, request: Request, *, but: Collection[str]) -> tuple[Mapping[OpId, str], Mapping[OpId, str]]:
    """Return the ops of a request's patterns, without some of the patterns."""
    keep, lower = ([text for text in texts if text not in but] for texts in (request.keep, request.lower))
    if not keep and not lower:
        return {}, {}
    from amp_rewrite.settings.selectors import overrides

    return overrides(view, keep, lower)


def _through_float32(view: View, request: Request, widen: bool = False) -> tuple[View, tuple[Finding, ...]]:
    """Return the view with float32 in place of low types, if ops compute in another one than asked for.

    And of float64, if the request narrows it. Inputs and outputs keep their types, unless those are to change.
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
    from amp_rewrite.rewrite.emulate import in_float32  # late: few models are half already

    edges = {view.value_name(value) for value in io_types(view, parse_io(request.io), request.to)}
    notes = []
    if low:
        names = " and ".join(dtype.spelling for dtype in others)
        told = f"{count(len(low), 'op computes', 'ops compute')} in {names}: decided as if in float32"
        notes.append(Finding("widened", "model", f"{told} · values may be out of range · check with --data"))
    if wide:
        told = f"{count(len(wide), 'op computes', 'ops compute')} in float64: float32 in its place"
        notes.append(Finding("narrowed", "model", told))
    types = [*others, *([DType.DOUBLE] if wide else [])]
    return View.of(in_float32(view.model, types, edges)), tuple(notes)


def _expanded(view: View, request: Request) -> tuple[View, tuple[Finding, ...]]:
    """Return the view at its opset, with functions inlined if painting gains by it, CastLike and masks spelled out."""
    local, moves, standard = tuple[Finding, ...](), tuple[Finding, ...](), tuple[Finding, ...]()
    if view.model.proto.functions:
        from amp_rewrite.rewrite.passes.inline import inline_functions

        view, local = inline_functions(view, low=bool(request.keep))
    opset = AUTO_OPSET if request.opset is None and request.target == Target.WEBGPU else request.opset
    if opset != KEEP_OPSET and (opset is not None or view.opset < OLDEST_MOVED):
        from amp_rewrite.rewrite.opset import at_opset  # late: only a model that is moved pays for it

        view, moves = at_opset(view, opset, request.to, request.target, fuse=request.fuse)
    if run_as_bodies(view, request.target.kernels):
        from amp_rewrite.rewrite.passes.inline import inline_schema_functions

        view, standard = inline_schema_functions(view, request)
    spelled: list[Finding] = []
    for passes in _SPELLING if request.safe else _SPELLING[:1]:
        after, outcomes = run_round(view, passes, Context(request.to))
        spelled.extend(findings(view, outcomes))
        view = after
    return view, (*local, *moves, *standard, *spelled)


_SPELLING = (
    (LazyPass("passes.spell_out:spell_out_casts", (("CastLike",),)),),
    (
        LazyPass("passes.attention_masks:select_masks", (SOFTMAXES, ("Add",))),
        LazyPass("passes.biases:split_biases", (LAYERS - {"MatMul"},)),
    ),
    (LazyPass("passes.attention_masks:shrink_score_constants", (("Softmax",), ("Add",))),),
)
"""The first selects no mask. A mask is bounded only where the scores are not selected by another one already."""


def fuse_operators(
    view: View, context: Context, target: Target, named: Collection[OpId] = (), fuse: Fuse = "basic"
) -> tuple[View, tuple[Finding, ...]]:
    """Fold constants and BatchNormalization and fuse decomposed operators; return the new view and what was done.

    `fuse`: "contrib" and "diffusion" also write operators of onnxruntime. Ops that are `named` stay as they are. A
    model that carries its training, or that lists its weights as inputs (IR version 3), is left alone.
    """
    proto = view.model.proto
    if fuse == "none" or proto.training_info or proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return view, ()
    steps: list[tuple[View, list[Outcome]]] = []
    objection = partial(_objection, context.to, target, {_key(view, op) for op in named})
    if fuse != "basic" and view.of_kinds(("Attention",)):
        from amp_rewrite.rewrite.contrib.fuse import spelled_attentions  # late: few models have that operator

        view = spelled_attentions(view, context, objection)
    for passes in _ROUNDS_BY_FUSE[fuse]:
        after, outcomes = run_round(view, passes, context, objection)
        steps.append((view, outcomes))
        view = after
    return view, _findings(steps)


def _folds(view: View, context: Context) -> bool:
    return any(op.inputs and all(view.constant(value) is not None for value in op.operands) for op in view.ops)


def _has_clusters(view: View, context: Context) -> bool:
    return bool(clusters(view))


def _attends(view: View, context: Context) -> bool:
    return any(kind in _ATTENTIONS for kind in view.by_kind) or scores_are_read(view)


def _norms_or_activates(view: View, context: Context) -> bool:
    kinds = ("LayerNormalization", "RMSNormalization", "Gelu", "Sigmoid")
    return any(kind in kinds for kind in view.by_kind) or _has_clusters(view, context)


_ATTENTIONS = ("Attention", "com.microsoft::MultiHeadAttention")
_MOVE_BIASES = LazyPass("passes.attention_biases:move_attention_biases", when=_attends)
_ROUNDS = (
    (LazyPass("const_eval:fold_constants", when=_folds),),
    (
        LazyPass("passes.fold_batch_norm:fold_batch_norms", (("BatchNormalization",),)),
        LazyPass("passes.standard_ops:fuse_clusters", when=_has_clusters),
        LazyPass("passes.spell_out:spell_group_norms", (("GroupNormalization",),)),
    ),
    (_MOVE_BIASES,),
    (
        LazyPass("attention.build:fuse_attention", (("Softmax",),), _attends),
        LazyPass("passes.standard_ops:divide_by_roots", (("Reciprocal",),), _has_clusters),
    ),
)
"""Attention comes after the operators: a softmax that was written out is one of them."""
_CONTRIB_ROUNDS = (
    _ROUNDS[0],
    (
        *_ROUNDS[1],
        LazyPass("passes.biases:spread_gemms", (("Gemm",), ("Reshape",))),
        LazyPass("passes.spell_out:spell_patches", (("Conv",), ("Transpose",))),
        LazyPass("contrib.fuse:fuse_rotations", (("Neg", "RotaryEmbedding"),)),
    ),
    (LazyPass("contrib.fuse:fuse_attentions", (("Softmax",),), _attends), *_ROUNDS[-1]),
    (
        LazyPass("passes.attention_biases:part_biases", (_ATTENTIONS, ("Split",))),
        LazyPass("passes.biases:move_into_tables", (("MatMul",), ("Add",))),
    ),
    (_MOVE_BIASES,),
    (LazyPass("contrib.fuse:fuse_contrib", when=_norms_or_activates),),
    (
        LazyPass("passes.biases:widen_biases", (("MatMul",), ("Add",))),
        LazyPass(
            "passes.spell_out:align_products",
            (("MatMul",),),
            lambda view, _: any(math.prod(t.dims) >= LARGE_WEIGHT for t in view.constants.values()),
        ),
    ),
)
"""onnxruntime's own attention goes before the standard's, whose CUDA kernel is slower."""
_DIFFUSION = LazyPass("contrib.diffusion:fuse_diffusion", (("InstanceNormalization", "Gelu", "Erf"),))
_ROUNDS_BY_FUSE = {
    "basic": _ROUNDS,
    "contrib": _CONTRIB_ROUNDS,
    "diffusion": (*_CONTRIB_ROUNDS[:-2], (_DIFFUSION, *_CONTRIB_ROUNDS[-2]), _CONTRIB_ROUNDS[-1]),
}
_BOUND_FILLS = LazyPass("passes.attention_masks:bound_fills", when=lambda view, context: far_fills(view, context.to))


def _findings(steps: Sequence[tuple[View, Sequence[Outcome]]]) -> tuple[Finding, ...]:
    """Return the findings of each round, without refusals of ops that it or a later one fused after all."""
    fused_at: dict[_Key, int] = {}
    for number, (view, outcomes) in enumerate(steps):
        fused_at.update((_key(view, op), number) for o in outcomes if isinstance(o, Replacement) for op in o.ops)
    final: list[Finding] = []
    for number, (view, outcomes) in enumerate(steps):
        kept = [o for o in outcomes if isinstance(o, Replacement) or fused_at.get(_key(view, o.last), -1) < number]
        final.extend(findings(view, kept))
    return tuple(final)


def followed(
    marked: Mapping[OpId, str], before: View, after: View, results: Mapping[OpId, tuple[str, ...]] | None = None
) -> Mapping[OpId, str]:
    """Return the marks of ops in another view of a model. `results`: names of the results of ops written anew."""
    if before is after or not marked:
        return marked
    changed = results or {}
    keys = {op: _key(before, op) for op in marked}
    words = {(keys[op][0], changed.get(op, keys[op][1])): word for op, word in marked.items()}
    return {op.id: words[key] for op in after.ops if (key := _key(after, op.id)) in words}


_Key = tuple[int, tuple[str, ...]]


def _key(view: View, op: OpId) -> _Key:
    return view.ops[op].scope, tuple(view.ops[op].node.output)


def _objection(to: DType, target: Target, named: Collection[_Key], view: View, fusion: Replacement) -> str | None:
    chosen = [op for op in fusion.ops if _key(view, op) in named]
    if chosen:
        return f"a pattern names {view.ops[chosen[0]].name}"
    if fusion.kind == ATTENTION and target.family == Target.TENSORRT:
        return "TensorRT fuses attention from its parts, so it stays written out"
    kernels = target.kernels
    if fusion.kind == GROUP_NORM and kernels is None:
        return "the target may have a kernel for it"
    if kernels is None or fusion.kind in (CONSTANT, BATCH_NORM, SPELLED_ATTENTION):
        return None
    node, types = fusion.node, (to,) if fusion.kind == GROUPED_ATTENTION else (DType.FLOAT, to)
    return refusal(kernels, node, view.opsets.get(normal_domain(node.domain), 1), types)
