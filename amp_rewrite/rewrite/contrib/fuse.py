"""Fusion into onnxruntime's own operators: a norm of a sum, an activation of a sum with a bias.

Each fusion is verified: the replaced ops and the operator's formula (`reference`) run in float64. This does not need
onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onnx import NodeProto

from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute, int_attribute, text_attribute
from amp_rewrite.ir.dataflow import confined, is_only_reader, number, orders, trail
from amp_rewrite.ir.dims import INVENTED_PREFIX, Dims
from amp_rewrite.ir.op_classes import SCALINGS
from amp_rewrite.ir.patterns.written_out import ENTRY, QUICK_GELU, direct_match
from amp_rewrite.ir.shapes import fixed, known_dims
from amp_rewrite.ir.view import MAIN, Op, OpId, ScopeId, ValueId, View, once
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.contrib.multi_head_attention import multi_head_attentions
from amp_rewrite.rewrite.contrib.rotary import KIND as ROTARY
from amp_rewrite.rewrite.contrib.rotary import rotations
from amp_rewrite.rewrite.equivalence import disagreement, random_trials, trial_shape
from amp_rewrite.rewrite.passes.decompose import decompose_attentions
from amp_rewrite.rewrite.passes.standard_ops import fuse_clusters
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import (
    Context,
    Objection,
    Outcome,
    Refusal,
    Replacement,
    as_outcome,
    fused_node,
    only_float32,
    run_round,
)

_COMPLETE_OPSET = 23
"""The first opset with all the standard operators extended by these fusions."""


def fuse_contrib(view: View, context: Context) -> Iterator[Outcome]:
    """Replace groups of ops with onnxruntime's operators, or refuse them; the largest groups first. O(nodes).

    This includes standard operators that are written out because the model's opset does not define them.
    """
    fuser, candidates = Fuser(view, context), list(operators(view, context, (*_SKIP_NORMS, "Gelu")))
    for kinds, fused in ((_SKIP_NORMS, _skip_norm), (("Gelu",), _gelu)):
        outcomes = (fused(fuser, operator) for operator in candidates if operator.node.op_type in kinds)
        yield from (outcome for outcome in outcomes if outcome is not None)
    yield from _quick_gelus(fuser)


def operators(view: View, context: Context, kinds: Sequence[str]) -> Iterator[Operator]:
    """Yield standard operators of these kinds, including written-out operators."""
    yield from (Operator((op.id,), op, op.node, op.inputs) for op in view.of_kinds(kinds))
    for fusion in fuse_clusters(view, context, _COMPLETE_OPSET):
        if isinstance(fusion, Replacement) and fusion.node.op_type in kinds:
            ids = {view.value_name(v): v for o in fusion.ops for v in view.ops[o].operands}
            inputs = tuple(ids[name] for name in fusion.node.input)
            yield Operator(fusion.ops, view.ops[fusion.last], fusion.node, inputs)


def fuse_attentions(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention with MultiHeadAttention or GroupQueryAttention."""
    return (_with_types(view, outcome) for outcome in multi_head_attentions(view, context))


def fuse_rotations(view: View, _: Context) -> Iterator[Outcome]:
    return (_with_types(view, outcome) for outcome in rotations(view))


def decompose_fusible(view: View, context: Context, objection: Objection) -> View:
    """Decompose each Attention with an equivalent among onnxruntime's own operators; return the new view."""
    decomposed, _ = run_round(view, (decompose_attentions,), context, objection)
    _, outcomes = run_round(decomposed, (fuse_attentions,), context, objection)
    fused = {
        name for o in outcomes if isinstance(o, Replacement) for op in o.ops for name in decomposed.ops[op].node.output
    }
    chosen = {op.id for op in view.of_kinds(("Attention",)) if op.node.output[0] in fused}
    return run_round(view, (partial(decompose_attentions, among=chosen),), context, objection)[0] if chosen else view


def _with_types(view: View, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Refusal):
        return outcome
    results, dims, scope = [], known_dims(view), view.ops[outcome.last].scope
    same_shape = dict(zip(outcome.node.output, outcome.node.input, strict=False)) if outcome.kind == ROTARY else {}
    for name in filter(None, (name for node in (outcome.node, *outcome.trailing) for name in node.output)):
        full = dims.get(_value_ids(view).get((scope, same_shape.get(name, name))))
        if full is not None and scope != MAIN:
            full = fixed(full)  # a symbolic size may differ between iterations of a body
        shape = [d if isinstance(d, int | str) else None for d in full or ()]
        stable = [None if str(d).startswith(INVENTED_PREFIX) else d for d in shape]
        results.append(declared(name, DType.FLOAT, None if full is None else stable))
    return replace(outcome, declared=tuple(results))


@once
def _value_ids(view: View) -> Mapping[tuple[ScopeId, str], ValueId]:
    return {(value.scope, value.name): value.id for value in view.values}


Shapes = Mapping[ValueId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Operator:
    """A standard operator, as one op or written out. `inputs` are the inputs of `node`."""

    ops: tuple[OpId, ...]
    last: Op
    node: NodeProto
    inputs: tuple[ValueId | None, ...]


@dataclass(frozen=True, slots=True)
class Fuser:
    """Helpers for the fusions of one model."""

    view: View
    context: Context

    def shape(self, value: ValueId | None) -> Dims | None:
        """Return the known shape of a value; in bodies, without symbolic sizes, since they may vary by iteration."""
        if value is not None and self.view.values[value].scope != MAIN:
            return self.context.shape(self.view, value)
        return known_dims(self.view).get(value)

    def movable(self, bias: ValueId, total: ValueId) -> bool:
        """True unless a bias exceeds the range of the low type, or is nearly uniform and dominates its sum."""
        array = self.view.array(bias)
        if array is None or not array.size:
            return True
        uniform = abs(array.mean()) > array.std()
        dominates = uniform and find_facts(self.view, self.context.to)[total].beyond is not None
        return not dominates and not self.view.fit(bias, self.context.to).overflow

    def names(self, *values: ValueId | None) -> list[str]:
        return ["" if value is None else self.view.value_name(value) for value in values]

    def small(self, value: ValueId) -> tuple[int, ...]:
        """Return a small shape with the rank of a value, or with one axis if the rank is unknown."""
        return trial_shape(len(self.shape(value) or (None,)), _WIDTH)

    def verified(self, fusion: Replacement, shapes: Shapes) -> Outcome:
        """Return a replacement, or a refusal if it differs from its ops on random inputs.

        `shapes` contains a shape for each value that the ops read, except constants whose numbers matter.
        """
        reason = disagreement(self.view, fusion, random_trials(self.view, shapes))
        return _with_types(self.view, as_outcome(fusion.kind, fusion.last, reason or fusion))


# -- norms of sums ---------------------------------------------------------------------------------

_SKIP_NORMS = {
    "LayerNormalization": ("skip_layer_normalization", "SkipLayerNormalization"),
    "RMSNormalization": ("skip_rms_normalization", "SkipSimplifiedLayerNormalization"),
}
"""For each standard norm, the kind of fusion and the operator with the sum."""
_RANKS = (2, 3)  # the kernels only accept [tokens, features] and [batch, tokens, features]
_EPSILON = 1e-5  # the default of both norms


def _skip_norm(fuser: Fuser, norm: Operator) -> Outcome | None:
    """Fuse a norm with the sum of two tensors of the same shape; the node also outputs the sum for other readers."""
    view = fuser.view

    def copy_source(op: Op) -> ValueId | None:
        return op.inputs[0] if op.kind in ("Cast", "Identity") and is_only_reader(view, op.inputs[0], op) else None

    copies, total = trail(view, norm.inputs[0], copy_source)
    add = view.producer(total, "Add")
    if add is None or any(op.scope != norm.last.scope for op in (add, *copies)):
        return None
    kind, _ = _SKIP_NORMS[norm.node.op_type]
    return as_outcome(kind, norm.last.id, _fused_norm(fuser, norm, add, copies))


def _fused_norm(fuser: Fuser, norm: Operator, add: Op, copies: Sequence[Op]) -> Outcome | str:
    view, (total, gamma, beta) = fuser.view, (*norm.inputs, None)[:3]
    ops = (add.id, *(op.id for op in copies), *norm.ops)
    shape = fuser.shape(total)
    if not only_float32(view, ops) or any(view.dtype(v) is not DType.FLOAT for v in (total, *add.operands)):
        return "not all of it is float32"
    if shape is None or len(shape) not in _RANKS or not isinstance(shape[-1], int):
        return "its input is not known to have two or three axes, with a last axis of known size"
    reason = _unsupported_norm(fuser, norm, shape)
    if reason is not None:
        return reason
    summands = _summands(fuser, add, shape)
    if summands is None:
        return "its summands are not known to have the same shape, except for a missing batch in the second"
    bias_ops, summands, bias = _with_bias(fuser, add, summands, shape)
    ops = (*bias_ops, *ops)
    sum_is_read = not confined(view, total, ops)
    for weight in (gamma, beta, bias) if sum_is_read else ():
        producer = view.producer(weight)
        if producer is not None and producer.id > add.id:
            return f"other ops read the sum before {fuser.names(weight)[0]} is computed"
    kind, op_type = _SKIP_NORMS[norm.node.op_type]
    betas = [beta] if norm.node.op_type == "LayerNormalization" else []
    outputs = [norm.last.node.output[0], *(["", "", *fuser.names(total)] if sum_is_read else [])]
    epsilon = {"epsilon": float_attribute(norm.node, "epsilon", _EPSILON)}
    node = fused_node(op_type, norm.last, fuser.names(*summands, gamma, *betas, bias), outputs, epsilon, DOMAIN)
    shapes = dict.fromkeys(summands, (2,) * (len(shape) - 1) + (shape[-1],))
    shapes.update({v: (shape[-1],) for v in (gamma, beta, bias) if v is not None})
    place = add.id if sum_is_read else None
    return fuser.verified(Replacement(kind, tuple(sorted(ops)), norm.last.id, node, place=place), shapes)


def _unsupported_norm(fuser: Fuser, norm: Operator, shape: Dims) -> str | None:
    if any(v is not None for v in norm.last.outputs[1:]):
        return "its mean or deviation is also read"
    if int_attribute(norm.node, "axis", -1) not in (-1, len(shape) - 1):
        return "it normalizes axes other than the last"
    if int_attribute(norm.node, "stash_type", DType.FLOAT.code) != DType.FLOAT.code:
        return "its statistics are not float32"
    if any(v is not None and fuser.shape(v) != (shape[-1],) for v in norm.inputs[1:]):
        return f"its scale or bias does not have one number for each of the {shape[-1]} normalized elements"
    return None


def _summands(fuser: Fuser, add: Op, shape: Dims) -> tuple[ValueId, ValueId] | None:
    for a, b in orders(add) if None not in shape else ():
        other = fuser.shape(b)
        batchless = len(shape) == max(_RANKS) and other in (shape[1:], (1, *shape[1:]))
        if fuser.shape(a) == shape and (other == shape or batchless):
            return a, b
    return None


def _with_bias(
    fuser: Fuser, add: Op, summands: tuple[ValueId, ValueId], shape: Dims
) -> tuple[tuple[OpId, ...], tuple[ValueId, ValueId], ValueId | None]:
    """Split a bias of one number per feature off a summand; return its op, the summands without it, and the bias.

    Kernels add the bias to the first summand and round. So the summand with the bias must come first, not the residual
    stream, which is larger.
    """
    for slot, value in enumerate(summands):
        inner = fuser.view.producer(value, "Add")
        if inner is None or inner.scope != add.scope or not is_only_reader(fuser.view, value, add):
            continue
        for a, b in orders(inner):
            flat = a != b and fuser.shape(b) == (shape[-1],) and fuser.shape(a) == fuser.shape(value)
            if flat and fuser.movable(b, value):
                other = summands[1 - slot]
                first = slot == 0 or fuser.shape(a) == fuser.shape(other)
                return (inner.id,), ((a, other) if first else (other, a)), b
    return (), summands, None


# -- activations -----------------------------------------------------------------------------------


def _gelu(fuser: Fuser, gelu: Operator) -> Outcome | None:
    """Fuse a Gelu with a preceding bias, or a written-out Gelu at an opset without the operator."""
    x, tanh = gelu.inputs[0], text_attribute(gelu.node, "approximate") == "tanh"
    if x is None or not only_float32(fuser.view, gelu.ops):
        return None
    biased = _with_bias_before(fuser, gelu, x)
    if biased is not None:
        kind, op_type = ("bias_gelu_tanh", "FastGelu") if tanh else ("bias_gelu", "BiasGelu")
        add, a, b = biased
        return _activation(fuser, kind, op_type, (add, *gelu.ops), {a: fuser.small(x), b: (_WIDTH,)})
    if len(gelu.ops) > 1:
        kind, op_type = ("gelu_tanh", "FastGelu") if tanh else ("gelu_erf", "Gelu")
        return _activation(fuser, kind, op_type, gelu.ops, {x: fuser.small(x)})
    return None


_WIDTH = 61
"""The size of the last axis in trials of activations."""


def _activation(
    fuser: Fuser, kind: str, op_type: str, ops: Sequence[OpId], shapes: Shapes, **attributes: float
) -> Outcome:
    last = fuser.view.ops[max(ops)]
    node = fused_node(op_type, last, fuser.names(*shapes), list(last.node.output), attributes, DOMAIN)
    return fuser.verified(Replacement(kind, tuple(ops), last.id, node), shapes)


def _with_bias_before(fuser: Fuser, gelu: Operator, x: ValueId) -> tuple[OpId, ValueId, ValueId] | None:
    add = fuser.view.producer(x, "Add")
    if add is None or add.scope != gelu.last.scope or not confined(fuser.view, x, gelu.ops):
        return None
    for a, b in orders(add):
        whole, flat = fuser.shape(a), fuser.shape(b)
        if a != b and whole and flat == whole[-1:] and isinstance(flat[0], int) and fuser.movable(b, x):
            return add.id, a, b
    return None


def _quick_gelus(fuser: Fuser) -> Iterator[Outcome]:
    """Yield fusions of x · sigmoid(x) and x · sigmoid(a x)."""
    view = fuser.view
    for sigmoid in view.of_kinds(("Sigmoid",)):
        match = direct_match(view, sigmoid, QUICK_GELU)
        if match is None or not only_float32(view, match.ops):
            continue
        x, scaled = match.values[ENTRY], view.producer(match.values.get("scaled"))
        alpha = _factor(fuser, scaled, x) if "scaled" in match.values else 1.0
        if alpha is not None:
            yield _activation(fuser, "quick_gelu", "QuickGelu", sorted(match.ops), {x: fuser.small(x)}, alpha=alpha)


def _factor(fuser: Fuser, op: Op | None, x: ValueId) -> float | None:
    """Return the constant factor of x in a Mul or Div; None for other ops and for 0."""
    rank = len(fuser.shape(x) or (None,))
    for slot in (1, 0) if op is not None and op.kind == "Mul" else (1,):
        if op is not None and op.kind in SCALINGS and op.inputs[1 - slot] == x:
            factor = number(fuser.view, op.inputs[slot], axes=rank)
            return (factor if op.kind == "Mul" else 1 / factor) if factor else None
    return None
