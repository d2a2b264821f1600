"""Fusion of clusters into standard operators: LayerNormalization, RMSNormalization, Gelu, Softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import number, only_reader, reduction_axes
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.rewrite.equivalence import disagreement, random_trials, trial_shape
from amp_rewrite.rewrite.replacement import (
    Context,
    Outcome,
    Replacement,
    as_outcome,
    external_inputs,
    fused_node,
    only_float32,
    too_old,
)


def fuse_clusters(view: View, context: Context, opset: int | None = None) -> Iterator[Outcome]:
    """Replace each cluster with a standard operator, or refuse it; `opset` defaults to the model's."""
    opset = view.opset if opset is None else opset
    for cluster in clusters(view):
        if cluster.kind in _OPERATORS:
            yield as_outcome(cluster.kind, max(cluster.ops), _fused(view, cluster, context, opset))


_Operator = tuple[Sequence[ValueId], Mapping[str, object], tuple[int, ...]]
"""The inputs of the node after its entry, the attributes of the node, and a shape of the entry for trials."""


def _fused(view: View, cluster: Cluster, context: Context, opset: int) -> Replacement | str:
    entry, ops = cluster.entry, cluster.ops
    op_type, build = _OPERATORS[cluster.kind]
    if opset < FIRST_FUSED[op_type]:
        return too_old(opset, op_type, FIRST_FUSED[op_type], context)
    if entry is None or not only_float32(view, ops):
        return "not all of it is float32"
    operator = build(view, cluster, context)
    if isinstance(operator, str):
        return operator
    weights, attributes, shape = operator
    others = [v for v in external_inputs(view, ops) if v not in (entry, *weights)]
    variable = [v for v in others if (t := view.constant(v)) is None or math.prod(t.dims) != 1]
    if variable:
        return f"it also reads {view.value_name(variable[0])}, which is not a constant scalar"
    last = view.ops[max(ops)]
    inputs = [view.value_name(v) for v in (entry, *weights)]
    node = fused_node(op_type, last, inputs, last.node.output[:1], attributes)
    fusion = Replacement(cluster.kind, ops, last.id, node)
    shapes = {entry: shape, **dict.fromkeys(weights, shape[-1:])}
    return disagreement(view, fusion, random_trials(view, shapes), {**view.opsets, "": opset}) or fusion


def divide_by_roots(view: View, context: Context) -> Iterator[Outcome]:
    """Replace x · Reciprocal(root) in a norm with x / root; onnxruntime fuses it with the rest of the norm."""
    for cluster in clusters(view):
        inverse = next((view.ops[op] for op in cluster.ops if view.ops[op].kind == "Reciprocal"), None)
        product = only_reader(view, inverse.outputs[0], "Mul") if inverse is not None else None
        if inverse is None or product is None or cluster.kind not in _NORMS or not only_float32(view, cluster.ops):
            continue
        operands = [next(v for v in product.operands if v != inverse.outputs[0]), inverse.operands[0]]
        node = fused_node("Div", product, [view.value_name(v) for v in operands], product.node.output, {})
        shapes = {operands[0]: (2, 7), operands[1]: (2, 1)}
        fusion = Replacement("division", (inverse.id, product.id), product.id, node)
        yield as_outcome("division", product.id, disagreement(view, fusion, random_trials(view, shapes)) or fusion)


_NORMS = ("layer_normalization", "rms_normalization")


# -- normalizations --------------------------------------------------------------------------------


def _norm(view: View, cluster: Cluster, context: Context) -> _Operator | str:
    shape = context.shape(view, cluster.entry)
    width = shape[-1] if shape else None
    if shape is None or width is None:
        return "the size of the normalized axis is not known"
    obstacle = _reduction_obstacle(view, cluster, len(shape))
    if obstacle:
        return obstacle
    captured = cluster.values
    epsilon = number(view, captured.get("guard"))
    if epsilon is None:
        return "its epsilon is not a constant scalar added inside the root"
    if "scale" not in captured:
        return "it is not followed by a scale, but the operator requires one"
    weights = tuple(captured[name] for name in ("scale", "bias") if name in captured)
    for value in weights:
        if context.shape(view, value) != (width,):
            return f"{view.value_name(value)} does not have one number for each of the {width} normalized elements"
    return weights, {"axis": -1, "epsilon": epsilon}, trial_shape(len(shape), width)


_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "GlobalAveragePool")


def _reduction_obstacle(view: View, cluster: Cluster, rank: int) -> str | None:
    """Return why the reductions of a cluster are not over the last axis with keepdims; None if they are."""
    for op in (op for op_id in cluster.ops if (op := view.ops[op_id]).kind in _REDUCTIONS):
        if op.kind == "GlobalAveragePool" or list(reduction_axes(view, op)) not in ([-1], [rank - 1]):
            return "it reduces axes other than the last"
        if not int_attribute(op.node, "keepdims", 1):
            return "it drops the reduced axis"
    return None


# -- softmax, activations --------------------------------------------------------------------------


def _softmax(view: View, cluster: Cluster, context: Context) -> _Operator | str:
    shape = context.shape(view, cluster.entry)
    if shape is None:
        return "the rank of its operand is not known"
    return _reduction_obstacle(view, cluster, len(shape)) or ((), {"axis": -1}, trial_shape(len(shape), 7))


def _gelu(view: View, cluster: Cluster, context: Context) -> _Operator | str:
    shape = context.shape(view, cluster.entry) or ()
    ranks = [len(t.dims) for v in external_inputs(view, cluster.ops) if (t := view.constant(v)) is not None]
    if max(ranks, default=0) > len(shape):
        return "the rank of its operand is not known, or is less than that of its constants"
    approximate = "tanh" if cluster.kind == "gelu_tanh" else "none"
    return (), {"approximate": approximate}, trial_shape(len(shape) or 1, 61)


_OPERATORS: Mapping[str, tuple[str, Callable[[View, Cluster, Context], _Operator | str]]] = {
    "layer_normalization": ("LayerNormalization", _norm),
    "rms_normalization": ("RMSNormalization", _norm),
    "softmax": ("Softmax", _softmax),
    "gelu_erf": ("Gelu", _gelu),
    "gelu_tanh": ("Gelu", _gelu),
}
"""For each kind of cluster, the operator and a function to find its inputs and attributes."""
