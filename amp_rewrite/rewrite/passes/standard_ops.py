"""Clusters that are one operator of the standard: LayerNormalization, RMSNormalization, Gelu, Softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import axes_of, number, only_reader
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.shapes import Shape
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.rewrite.equivalence import disagreement, drawn, trial_shape
from amp_rewrite.rewrite.replacement import (
    Context,
    Outcome,
    Replacement,
    fused_node,
    judged,
    only_float32,
    outside,
    too_old,
)


def fuse_clusters(view: View, context: Context, opset: int | None = None) -> Iterator[Outcome]:
    """Replace each cluster by the operator of the standard, or refuse it.

    `opset`: that of the operators, by default the model's.
    """
    opset = view.opset if opset is None else opset
    for cluster in clusters(view):
        if cluster.kind in _FORMULAS:
            yield judged(cluster.kind, max(cluster.ops), _fused(_Case(view, cluster, context), opset))


@dataclass(frozen=True, slots=True)
class _Case:
    view: View
    cluster: Cluster
    context: Context

    @property
    def shape(self) -> Shape | None:
        return self.context.shape(self.view, self.cluster.entry)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The node's inputs after the entry, its attributes, and the shape of the entry with which both are tried."""

    reads: tuple[ValueId, ...]
    attributes: Mapping[str, object]
    shape: tuple[int, ...]


def _fused(case: _Case, opset: int) -> Replacement | str:
    view, entry, ops = case.view, case.cluster.entry, case.cluster.ops
    op_type, read = _FORMULAS[case.cluster.kind]
    if opset < FIRST_FUSED[op_type]:
        return too_old(opset, op_type, FIRST_FUSED[op_type], case.context)
    if entry is None or not only_float32(view, ops):
        return "not all of it is float32"
    candidate = read(case)
    if isinstance(candidate, str):
        return candidate
    others = [v for v in outside(view, ops) if v not in (entry, *candidate.reads)]
    stray = [v for v in others if (t := view.constant(v)) is None or math.prod(t.dims) != 1]
    if stray:
        return f"it also reads {view.value_name(stray[0])}, which is not one constant number"
    reads = [view.value_name(v) for v in (entry, *candidate.reads)]
    last = view.ops[max(ops)]
    node = fused_node(op_type, last, reads, last.node.output[:1], candidate.attributes)
    tried = {entry: candidate.shape}
    tried.update((v, candidate.shape[-1:]) for v in candidate.reads)
    fusion = Replacement(case.cluster.kind, ops, last.id, node)
    return disagreement(view, fusion, drawn(view, tried), {**view.opsets, "": opset}) or fusion


def divide_by_roots(view: View, context: Context) -> Iterator[Outcome]:
    """Write x · Reciprocal(root) in a norm as x / root, which onnxruntime fuses with the rest of the norm."""
    for cluster in clusters(view):
        inverse = next((view.ops[op] for op in cluster.ops if view.ops[op].kind == "Reciprocal"), None)
        product = only_reader(view, inverse.outputs[0], "Mul") if inverse is not None else None
        if inverse is None or product is None or cluster.kind not in _DIVIDED or not only_float32(view, cluster.ops):
            continue
        reads = [next(v for v in product.operands if v != inverse.outputs[0]), inverse.operands[0]]
        node = fused_node("Div", product, [view.value_name(v) for v in reads], product.node.output, {})
        tried = {reads[0]: (2, 7), reads[1]: (2, 1)}
        fusion = Replacement("division", (inverse.id, product.id), product.id, node)
        yield judged("division", product.id, disagreement(view, fusion, drawn(view, tried)) or fusion)


_DIVIDED = ("layer_normalization", "rms_normalization")


# -- normalizations --------------------------------------------------------------------------------


def _norm(case: _Case) -> _Candidate | str:
    shape = case.shape
    width = shape[-1] if shape else None
    if shape is None or width is None:
        return "the size of the axis that it normalizes is not known"
    wrong = _reduces_elsewhere(case, len(shape))
    if wrong:
        return wrong
    captured = case.cluster.values
    epsilon = number(case.view, captured.get("guard"))
    if epsilon is None:
        return "its epsilon is not one constant number that is added below the root"
    if "scale" not in captured:
        return "no scale follows, and the operator wants one"
    reads = tuple(captured[name] for name in ("scale", "bias") if name in captured)
    for value in reads:
        if case.context.shape(case.view, value) != (width,):
            return f"{case.view.value_name(value)} is not one number for each of the {width} that it normalizes"
    return _Candidate(reads, {"axis": -1, "epsilon": epsilon}, trial_shape(len(shape), width))


_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "GlobalAveragePool")


def _reduces_elsewhere(case: _Case, rank: int) -> str | None:
    """Return why the reductions of a cluster are not over the last axis, keeping it; None if they are."""
    for op in (op for op_id in case.cluster.ops if (op := case.view.ops[op_id]).kind in _REDUCTIONS):
        if op.kind == "GlobalAveragePool" or list(axes_of(case.view, op)) not in ([-1], [rank - 1]):
            return "it is not over the last axis alone"
        if not int_attribute(op.node, "keepdims", 1):
            return "it drops the axis that it reduces"
    return None


# -- softmax, activations --------------------------------------------------------------------------


def _softmax(case: _Case) -> _Candidate | str:
    if case.shape is None:
        return "the rank of its operand is not known"
    wrong = _reduces_elsewhere(case, len(case.shape))
    return wrong or _Candidate((), {"axis": -1}, trial_shape(len(case.shape), 7))


def _gelu(case: _Case) -> _Candidate | str:
    ranks = [len(t.dims) for v in outside(case.view, case.cluster.ops) if (t := case.view.constant(v)) is not None]
    if max(ranks, default=0) > len(case.shape or ()):
        return "the rank of its operand is not known, or less than that of its constants"
    approximate = "tanh" if case.cluster.kind == "gelu_tanh" else "none"
    return _Candidate((), {"approximate": approximate}, trial_shape(len(case.shape or (1,)), 61))


_FORMULAS: Mapping[str, tuple[str, Callable[[_Case], _Candidate | str]]] = {
    "layer_normalization": ("LayerNormalization", _norm),
    "rms_normalization": ("RMSNormalization", _norm),
    "softmax": ("Softmax", _softmax),
    "gelu_erf": ("Gelu", _gelu),
    "gelu_tanh": ("Gelu", _gelu),
}
"""The operator of each kind of cluster, and the reading of the cluster as one."""
