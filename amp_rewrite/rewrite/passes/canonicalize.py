"""The view that is painted: rounds of passes that bring a model into standard form.

First its calls, its opset and its masks; then ops that compute one thing together become one node, where there is one.
A fused node is one decision about precision, no Cast splits it, and runtimes fuse it further: a sum and its
normalization, a bias and its activation. All of it happens in float32, and each fusion is proved when it is made.
"""

from __future__ import annotations

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
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.versions import FIRST_BFLOAT16_CAST, FIRST_IR_WITH_FREE_INITIALIZERS, OLDEST_MOVED
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.attention.build import (
    KIND as ATTENTION,
)
from amp_rewrite.rewrite.attention.build import (
    fuse_attention,
)
from amp_rewrite.rewrite.const_eval import fold_constants
from amp_rewrite.rewrite.contrib.fuse import fuse_attentions, fuse_contrib, fuse_rotations
from amp_rewrite.rewrite.contrib.multi_head_attention import GROUPED
from amp_rewrite.rewrite.passes.attention_biases import move_attention_biases, part_biases
from amp_rewrite.rewrite.passes.attention_masks import bound_fills, select_masks, shrink_score_constants
from amp_rewrite.rewrite.passes.biases import (
    move_into_tables,
    split_biases,
    spread_gemms,
    widen_biases,
)
from amp_rewrite.rewrite.passes.fold_batch_norm import fold_batch_norms
from amp_rewrite.rewrite.passes.inline import inline_functions, inline_schema_functions, inlined
from amp_rewrite.rewrite.passes.spell_out import (
    GROUP_NORM,
    SPELLED_ATTENTION,
    align_products,
    spell_attentions,
    spell_group_norms,
    spell_out_casts,
    spell_patches,
)
from amp_rewrite.rewrite.passes.standard_ops import divide_by_roots, fuse_clusters
from amp_rewrite.rewrite.replacement import (
    Context,
    Objection,
    Outcome,
    Pass,
    Replacement,
    findings,
    run_round,
)
from amp_rewrite.runtime.providers import refusal
from amp_rewrite.settings.choices import AUTO_OPSET, KEEP_OPSET, ROWS_SEE, Fuse, Target
from amp_rewrite.settings.io_rules import io_types, parse_io
from amp_rewrite.settings.request import Request
from amp_rewrite.settings.selectors import matched, overrides, select


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
    late = [pattern for pattern in (*request.keep, *request.lower) if not matched(plain, pattern)]
    keep, lower = overrides(plain, _apart(request.keep, late), _apart(request.lower, late))
    context = Context(request.to, request.opset == AUTO_OPSET, grouped, request.assume == ROWS_SEE)
    view, fusions = fuse_operators(plain, context, request.target, {*keep, *lower}, request.fuse)
    if request.safe:
        view, outcomes = run_round(view, (bound_fills,), Context(request.to))
        fusions = (*fusions, *findings(view, outcomes))
    keep, lower = followed(keep, plain, view), followed(lower, plain, view)
    if late:
        unknown = [pattern for pattern in late if not matched(view, pattern)]
        for pattern in unknown:
            select(plain, pattern)  # says why nothing matches
        past = [pattern for pattern in (*request.keep, *request.lower) if pattern not in late or pattern in unknown]
        kept, lowered = overrides(view, _apart(request.keep, past), _apart(request.lower, past))
        keep, lower = {**kept, **keep}, {**lowered, **lower}
    if refusal is not None:
        notes = (*notes, Finding(reasons.QUANTIZED, "model", refusal))
    return Canonical(view, keep, lower, (*expansions, *fusions), base.model, rescale and refusal is None, notes)


def _apart(patterns: Sequence[str], others: Sequence[str]) -> list[str]:
    return [pattern for pattern in patterns if pattern not in others]


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
    whole = View.of(inlined(view.model)) if request.narrow and view.model.proto.functions else view
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
    view, local = inline_functions(view, low=bool(request.keep))
    moves: tuple[Finding, ...] = ()
    opset = AUTO_OPSET if request.opset is None and request.target == Target.WEBGPU else request.opset
    if opset != KEEP_OPSET and (opset is not None or view.opset < OLDEST_MOVED):
        from amp_rewrite.rewrite.opset import at_opset  # late: only a model that is moved pays for it

        view, moves = at_opset(view, opset, request.to, request.target, fuse=request.fuse)
    view, standard = inline_schema_functions(view, request.op_lists, request.to, request.target)
    spelled: list[Finding] = []
    for passes in _SPELLING if request.safe else _SPELLING[:1]:
        after, outcomes = run_round(view, passes, Context(request.to))
        spelled.extend(findings(view, outcomes))
        view = after
    return view, (*local, *moves, *standard, *spelled)


_SPELLING: tuple[tuple[Pass, ...], ...] = (
    (spell_out_casts,),
    (select_masks, split_biases),
    (shrink_score_constants,),
)
"""The first selects no mask. A mask is bounded only where the scores are not selected by another one already."""


def fuse_operators(
    view: View, context: Context, target: Target, named: Collection[OpId] = (), fuse: Fuse = "basic"
) -> tuple[View, tuple[Finding, ...]]:
    """Fold constants and BatchNormalization and fuse decomposed operators; return the new view and what was done.

    `fuse`: BASIC, or CONTRIB for operators of onnxruntime as well. Ops that are `named` stay as they are. A model
    that carries its training, or that lists its weights as inputs (IR version 3), is left alone.
    """
    proto = view.model.proto
    if fuse == "none" or proto.training_info or proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return view, ()
    steps: list[tuple[View, list[Outcome]]] = []
    objection = partial(_objection, context.to, target, {_key(view, op) for op in named})
    if fuse == "contrib":
        view = _with_spelled_attentions(view, context, objection)
    for passes in _CONTRIB_ROUNDS if fuse == "contrib" else _ROUNDS:
        after, outcomes = run_round(view, passes, context, objection)
        steps.append((view, outcomes))
        view = after
    return view, _findings(steps)


def _with_spelled_attentions(view: View, context: Context, objection: Objection) -> View:
    """Return the view with each Attention spelled out that onnxruntime's own operator stands for; the others stay."""
    if not view.of_kinds(("Attention",)):
        return view
    spelled, _ = run_round(view, (spell_attentions,), context, objection)
    _, outcomes = run_round(spelled, (fuse_attentions,), context, objection)
    fused = {
        name for o in outcomes if isinstance(o, Replacement) for op in o.ops for name in spelled.ops[op].node.output
    }
    chosen = {op.id for op in view.of_kinds(("Attention",)) if op.node.output[0] in fused}
    return run_round(view, (partial(spell_attentions, among=chosen),), context, objection)[0] if chosen else view


_ROUNDS: tuple[tuple[Pass, ...], ...] = (
    (fold_constants,),
    (fold_batch_norms, fuse_clusters, spell_group_norms),
    (move_attention_biases,),
    (fuse_attention, divide_by_roots),
)
"""Attention comes after the operators: a softmax that was written out is one of them."""
_CONTRIB_ROUNDS: tuple[tuple[Pass, ...], ...] = (
    _ROUNDS[0],
    (*_ROUNDS[1], spread_gemms, spell_patches, fuse_rotations),
    (fuse_attentions, *_ROUNDS[-1]),
    (part_biases, move_into_tables),
    (move_attention_biases,),
    (fuse_contrib,),
    (widen_biases, align_products),
)
"""onnxruntime's own attention goes before the standard's, whose CUDA kernel is slower."""


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
    if kernels is None or fusion.kind in ("constant", "batch_normalization", SPELLED_ATTENTION):
        return None
    node, types = fusion.node, (to,) if fusion.kind == GROUPED else (DType.FLOAT, to)
    return refusal(kernels, node, view.opsets.get(normal_domain(node.domain), 1), types)
