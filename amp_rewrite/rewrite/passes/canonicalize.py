"""The view that is painted, in standard form: what computes one thing is one node where the standard has one.

A fused node is one decision about precision, cannot be split by a Cast, and is what a runtime fuses further: a sum and
its normalization, a bias and its activation. All of it happens in float32, and each fusion is proved on the spot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.schema import normal_domain, signature
from amp_rewrite.ir.shapes.infer import in_numbers, known_dims
from amp_rewrite.ir.shapes.onnx_shapes import AllDims, Shapes
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.attention.fuse import KIND as ATTENTION
from amp_rewrite.rewrite.attention.fuse import fuse_attention
from amp_rewrite.rewrite.passes.fold_batch_norm import fold_batch_norms
from amp_rewrite.rewrite.passes.fold_constants import fold_constants
from amp_rewrite.rewrite.passes.standard_ops import fuse_clusters
from amp_rewrite.rewrite.replace import fused
from amp_rewrite.rewrite.replacement import Fusion, Outcome, Refusal, findings
from amp_rewrite.runtime.kernels import load_kernels
from amp_rewrite.settings.choices import Fuse, Target


def canonical(
    view: View, to: DType, target: Target, named: Collection[OpId] = (), fuse: Fuse = Fuse.BASIC
) -> tuple[View, tuple[Finding, ...]]:
    """The view with constants folded, BatchNormalization folded and decomposed operators fused, and what was done.

    `fuse`: BASIC, or CONTRIB for operators of onnxruntime as well. `named` are ops that a pattern of the user names:
    they stay as they are. A model that carries its training, or that lists its weights as inputs (IR version 3), is
    left alone.
    """
    proto = view.model.proto
    if proto.training_info or proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return view, ()
    steps: list[tuple[View, list[Outcome]]] = []
    keys = {_key(view, op) for op in named}
    for step in (_constants, _operators, _attentions, *((_contrib,) if fuse is Fuse.CONTRIB else ())):
        outcomes = [_allowed(view, o, to, target, keys) for o in step(view, to)]
        fusions = _apart([o for o in outcomes if isinstance(o, Fusion)])
        steps.append((view, [*fusions, *(o for o in outcomes if isinstance(o, Refusal))]))
        if fusions:
            view = View.of(fused(view, fusions))
    return view, _told(steps)


def _told(steps: Sequence[tuple[View, Sequence[Outcome]]]) -> tuple[Finding, ...]:
    """What was done in each step, and what stood apart to the end: not what a later step fused after all."""
    fused_at: dict[_Key, int] = {}
    for number, (view, outcomes) in enumerate(steps):
        fused_at.update((_key(view, op), number) for o in outcomes if isinstance(o, Fusion) for op in o.ops)
    told: list[Finding] = []
    for number, (view, outcomes) in enumerate(steps):
        final = [o for o in outcomes if isinstance(o, Fusion) or fused_at.get(_key(view, o.last), -1) <= number]
        told.extend(findings(view, final))
    return tuple(told)


def followed(marked: Mapping[OpId, str], before: View, after: View) -> Mapping[OpId, str]:
    """What is marked in one view, in the one that `canonical` made of it."""
    if before is after or not marked:
        return marked
    words = {_key(before, op): word for op, word in marked.items()}
    return {op.id: words[found] for op in after.ops if (found := _key(after, op.id)) in words}


_Key = tuple[int, tuple[str, ...]]


def _key(view: View, op: OpId) -> _Key:
    """What names an op in every view of a model: its scope and the values that it makes."""
    return view.ops[op].scope, tuple(view.ops[op].node.output)


def _constants(view: View, to: DType) -> Iterator[Outcome]:
    yield from fold_constants(view)


def _operators(view: View, to: DType) -> Iterator[Outcome]:
    @cache
    def shapes() -> Shapes:
        return in_numbers(known_dims(view))

    yield from fold_batch_norms(view, to)
    yield from fuse_clusters(view, clusters(view), shapes)


def _attentions(view: View, to: DType) -> Iterator[Outcome]:
    """After the operators: a softmax that was written out is one of them."""

    @cache
    def dims() -> AllDims:
        return known_dims(view)

    yield from fuse_attention(view, to, dims)


def _contrib(view: View, to: DType) -> Iterator[Outcome]:
    from amp_rewrite.rewrite.contrib.fuse import fuse_contrib  # late: only who asks for it pays for it

    yield from fuse_contrib(view, to)


def _allowed(view: View, outcome: Outcome, to: DType, target: Target, named: Collection[_Key]) -> Outcome:
    """The outcome, or a refusal where a pattern names one of the ops, or the target has no kernel for the node."""
    if isinstance(outcome, Refusal):
        return outcome
    chosen = [op for op in outcome.ops if _key(view, op) in named]
    if chosen:
        return Refusal(outcome.kind, outcome.last, f"a pattern names {view.ops[chosen[0]].name}")
    if outcome.kind == ATTENTION and target is Target.TENSORRT:
        return Refusal(
            outcome.kind, outcome.last, "whether TensorRT reads Attention is not known here, so it stays written out"
        )
    node = outcome.node
    known = signature(node.domain, node.op_type, view.opsets.get(normal_domain(node.domain), 1))
    if target is Target.ORT_CUDA and known is not None and outcome.kind not in ("constant", "batch_normalization"):
        for dtype in (DType.FLOAT, to):
            types = dict.fromkeys(("T", "T1", "T2"), f"tensor({dtype.onnx_name})")
            missing = load_kernels().refusal(node.domain, node.op_type, known.since, types)
            if missing:
                return Refusal(outcome.kind, outcome.last, missing)
    return outcome


def _apart(fusions: Sequence[Fusion]) -> list[Fusion]:
    """Fusions, the first of any two that share an op."""
    taken: set[OpId] = set()
    found = []
    for fusion in fusions:
        if taken.isdisjoint(fusion.ops):
            taken.update(fusion.ops)
            found.append(fusion)
    return found
