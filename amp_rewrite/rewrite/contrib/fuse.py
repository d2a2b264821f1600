"""Operators of onnxruntime that the standard lacks: a sum and its norm, a bias and its activation.

Each is found on the model in standard form, written out as its document says (`reference`), and proved: the ops
that go and that formula are run in float64. onnxruntime is not needed.
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
from amp_rewrite.rewrite.passes.spell_out import spell_attentions
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

LATEST = 23
"""The opset from which the standard has all the operators that these are made of."""


def fuse_contrib(view: View, context: Context) -> Iterator[Outcome]:
    """Replace several ops by one operator of onnxruntime, or refuse it; the largest ones first.

    Ops of the standard count also where the model writes them out, at an opset that lacks them. O(nodes).
    """
    site, found = Site(view, context), list(operators(view, context, (*_SKIP_NORMS, "Gelu")))
    for kinds, fused in ((_SKIP_NORMS, _skip_norm), (("Gelu",), _gelu)):
        outcomes = (fused(site, operator) for operator in found if operator.node.op_type in kinds)
        yield from (outcome for outcome in outcomes if outcome is not None)
    yield from _quick_gelus(site)


def operators(view: View, context: Context, kinds: Sequence[str]) -> Iterator[Operator]:
    """Yield operators of the standard of these kinds, also written-out ones."""
    yield from (Operator((op.id,), op, op.node, op.inputs) for op in view.of_kinds(kinds))
    for fusion in fuse_clusters(view, context, LATEST):
        if isinstance(fusion, Replacement) and fusion.node.op_type in kinds:
            read = {view.value_name(v): v for o in fusion.ops for v in view.ops[o].operands}
            inputs = tuple(read[name] for name in fusion.node.input)
            yield Operator(fusion.ops, view.ops[fusion.last], fusion.node, inputs)


def fuse_attentions(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention by MultiHeadAttention or GroupQueryAttention."""
    return (_declaring(view, outcome) for outcome in multi_head_attentions(view, context))


def fuse_rotations(view: View, _: Context) -> Iterator[Outcome]:
    """Replace each written-out rotation by RotaryEmbedding."""
    return (_declaring(view, outcome) for outcome in rotations(view))


def spelled_attentions(view: View, context: Context, objection: Objection) -> View:
    """Return the view with each Attention spelled out that onnxruntime's own operator stands for; the others stay."""
    spelled, _ = run_round(view, (spell_attentions,), context, objection)
    _, outcomes = run_round(spelled, (fuse_attentions,), context, objection)
    fused = {
        name for o in outcomes if isinstance(o, Replacement) for op in o.ops for name in spelled.ops[op].node.output
    }
    chosen = {op.id for op in view.of_kinds(("Attention",)) if op.node.output[0] in fused}
    return run_round(view, (partial(spell_attentions, among=chosen),), context, objection)[0] if chosen else view


def _declaring(view: View, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Refusal):
        return outcome
    results, dims, scope = [], known_dims(view), view.ops[outcome.last].scope
    alike = dict(zip(outcome.node.output, outcome.node.input, strict=False)) if outcome.kind == ROTARY else {}
    for name in filter(None, (name for node in (outcome.node, *outcome.behind) for name in node.output)):
        known = dims.get(_ids(view).get((scope, alike.get(name, name))))
        if known is not None and scope != MAIN:
            known = fixed(known)  # the turns of a body may differ in what a name stands for
        stable = (
            d if isinstance(d, int | str) and not str(d).startswith(INVENTED_PREFIX) else None for d in known or ()
        )
        shape = None if known is None else list(stable)
        results.append(declared(name, DType.FLOAT, shape))
    return replace(outcome, declared=tuple(results))


@once
def _ids(view: View) -> Mapping[tuple[ScopeId, str], ValueId]:
    return {(value.scope, value.name): value.id for value in view.values}


Tried = Mapping[ValueId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the standard: one op, or several in its place. `inputs` are those of `node`."""

    ops: tuple[OpId, ...]
    last: Op
    node: NodeProto
    inputs: tuple[ValueId | None, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """A model to search."""

    view: View
    context: Context

    def shape(self, value: ValueId | None) -> Dims | None:
        """Return the shape of a value as far as it is known. In bodies, whose turns may differ, names are left out."""
        if value is not None and self.view.values[value].scope != MAIN:
            return self.context.shape(self.view, value)
        return known_dims(self.view).get(value)

    def fits(self, bias: ValueId, total: ValueId) -> bool:
        """True unless a bias leaves the low type, or drowns its sum in one number for all features."""
        held = self.view.array(bias)
        if held is None or not held.size:
            return True
        alike = abs(held.mean()) > held.std()
        drowned = alike and find_facts(self.view, self.context.to)[total].beyond is not None
        return not drowned and not self.view.fit(bias, self.context.to).overflow

    def names(self, *values: ValueId | None) -> list[str]:
        """Return the names of values, "" for None."""
        return ["" if value is None else self.view.value_name(value) for value in values]

    def like(self, value: ValueId) -> tuple[int, ...]:
        """Return a small shape of the rank of a value, of one axis if that is not known."""
        return trial_shape(len(self.shape(value) or (None,)), _WIDTH)

    def proved(self, fusion: Replacement, tried: Tried) -> Outcome:
        """Return a replacement proved equal to its ops, or its refusal.

        `tried`: a shape for random numbers, for every value that the ops read and that is not a constant, and for
        weights whose numbers do not matter.
        """
        why = disagreement(self.view, fusion, random_trials(self.view, tried))
        return _declaring(self.view, as_outcome(fusion.kind, fusion.last, why or fusion))


# -- a sum and its normalization -------------------------------------------------------------------

_SKIP_NORMS = {
    "LayerNormalization": ("skip_layer_normalization", "SkipLayerNormalization"),
    "RMSNormalization": ("skip_rms_normalization", "SkipSimplifiedLayerNormalization"),
}
"""A normalization of the standard: the kind of fusion, and its twin that adds first."""
_RANKS = (2, 3)  # tokens, or batch and tokens, by features: its kernels take no other
_EPSILON = 1e-5  # the default of both norms


def _skip_norm(site: Site, norm: Operator) -> Outcome | None:
    """Return a normalized sum of two tensors of one shape. Other readers of the sum get it from the same node."""
    view = site.view

    def copied(op: Op) -> ValueId | None:
        return op.inputs[0] if op.kind in ("Cast", "Identity") and is_only_reader(view, op.inputs[0], op) else None

    copies, total = trail(view, norm.inputs[0], copied)
    add = view.producer(total, "Add")
    if add is None or any(op.scope != norm.last.scope for op in (add, *copies)):
        return None
    kind, _ = _SKIP_NORMS[norm.node.op_type]
    return as_outcome(kind, norm.last.id, _added_norm(site, norm, add, copies))


def _added_norm(site: Site, norm: Operator, add: Op, copies: Sequence[Op]) -> Outcome | str:
    view, (total, gamma, beta) = site.view, (*norm.inputs, None)[:3]
    ops = (add.id, *(op.id for op in copies), *norm.ops)
    shape = site.shape(total)
    if not only_float32(view, ops) or any(view.dtype(v) is not DType.FLOAT for v in (total, *add.operands)):
        return "not all of it is float32"
    if shape is None or len(shape) not in _RANKS or not isinstance(shape[-1], int):
        return "what is normalized is not known to have two or three axes, the last of known size"
    odd = _odd_norm(site, norm, shape)
    if odd is not None:
        return odd
    summands = _summands(site, add, shape)
    if summands is None:
        return "the summands are not known to have one shape, or the second to lack but the batch"
    inner, summands, bias = _with_bias(site, add, summands, shape)
    ops = (*inner, *ops)
    apart = not confined(view, total, ops)
    for weight in (gamma, beta, bias) if apart else ():
        producer = view.producer(weight)
        if producer is not None and producer.id > add.id:
            return f"others read the sum, before {site.names(weight)[0]} is made"
    kind, op_type = _SKIP_NORMS[norm.node.op_type]
    shifts = [beta] if norm.node.op_type == "LayerNormalization" else []
    outputs = [norm.last.node.output[0], *(["", "", *site.names(total)] if apart else [])]
    epsilon = {"epsilon": float_attribute(norm.node, "epsilon", _EPSILON)}
    node = fused_node(op_type, norm.last, site.names(*summands, gamma, *shifts, bias), outputs, epsilon, DOMAIN)
    tried = dict.fromkeys(summands, (2,) * (len(shape) - 1) + (shape[-1],))
    tried.update({v: (shape[-1],) for v in (gamma, beta, bias) if v is not None})
    place = add.id if apart else None
    return site.proved(Replacement(kind, tuple(sorted(ops)), norm.last.id, node, place=place), tried)


def _odd_norm(site: Site, norm: Operator, shape: Dims) -> str | None:
    if any(v is not None for v in norm.last.outputs[1:]):
        return "its mean or deviation is read"
    if int_attribute(norm.node, "axis", -1) not in (-1, len(shape) - 1):
        return "it is not over the last axis alone"
    if int_attribute(norm.node, "stash_type", DType.FLOAT.code) != DType.FLOAT.code:
        return "its statistics are not float32"
    if any(v is not None and site.shape(v) != (shape[-1],) for v in norm.inputs[1:]):
        return f"its scale or bias is not one number for each of the {shape[-1]} that it normalizes"
    return None


def _summands(site: Site, add: Op, shape: Dims) -> tuple[ValueId, ValueId] | None:
    for a, b in orders(add) if None not in shape else ():
        other = site.shape(b)
        batchless = len(shape) == max(_RANKS) and other in (shape[1:], (1, *shape[1:]))
        if site.shape(a) == shape and (other == shape or batchless):
            return a, b
    return None


def _with_bias(
    site: Site, add: Op, summands: tuple[ValueId, ValueId], shape: Dims
) -> tuple[tuple[OpId, ...], tuple[ValueId, ValueId], ValueId | None]:
    """Return the sum that makes an operand by adding a weight of one number per feature, and operands and bias then.

    Kernels add the bias to the first operand and round. That is the one that had it, not a larger stream of residuals.
    """
    for slot, value in enumerate(summands):
        inner = site.view.producer(value, "Add")
        if inner is None or inner.scope != add.scope or not is_only_reader(site.view, value, add):
            continue
        for a, b in orders(inner):
            if a != b and site.shape(b) == (shape[-1],) and site.shape(a) == site.shape(value) and site.fits(b, value):
                other = summands[1 - slot]
                first = slot == 0 or site.shape(a) == site.shape(other)
                return (inner.id,), ((a, other) if first else (other, a)), b
    return (), summands, None


# -- activations -----------------------------------------------------------------------------------


def _gelu(site: Site, gelu: Operator) -> Outcome | None:
    """Return a Gelu after a bias, or one that is written out at an opset without Gelu."""
    x, tanh = gelu.inputs[0], text_attribute(gelu.node, "approximate") == "tanh"
    if x is None or not only_float32(site.view, gelu.ops):
        return None
    biased = _biased(site, gelu, x)
    if biased is not None:
        kind, op_type = ("bias_gelu_tanh", "FastGelu") if tanh else ("bias_gelu", "BiasGelu")
        add, a, b = biased
        return _activation(site, kind, op_type, (add, *gelu.ops), {a: site.like(x), b: (_WIDTH,)})
    if len(gelu.ops) > 1:
        kind, op_type = ("gelu_tanh", "FastGelu") if tanh else ("gelu_erf", "Gelu")
        return _activation(site, kind, op_type, gelu.ops, {x: site.like(x)})
    return None


_WIDTH = 61
"""Numbers in the last axis with which an activation is tried."""


def _activation(site: Site, kind: str, op_type: str, ops: Sequence[OpId], tried: Tried, **stated: float) -> Outcome:
    last = site.view.ops[max(ops)]
    node = fused_node(op_type, last, site.names(*tried), list(last.node.output), stated, DOMAIN)
    return site.proved(Replacement(kind, tuple(ops), last.id, node), tried)


def _biased(site: Site, gelu: Operator, x: ValueId) -> tuple[OpId, ValueId, ValueId] | None:
    add = site.view.producer(x, "Add")
    if add is None or add.scope != gelu.last.scope or not confined(site.view, x, gelu.ops):
        return None
    for a, b in orders(add):
        whole, flat = site.shape(a), site.shape(b)
        if a != b and whole and flat == whole[-1:] and isinstance(flat[0], int) and site.fits(b, x):
            return add.id, a, b
    return None


def _quick_gelus(site: Site) -> Iterator[Outcome]:
    """Yield each product of x and the logistic function of x, or of x times a number."""
    view = site.view
    for sigmoid in view.of_kinds(("Sigmoid",)):
        match = direct_match(view, sigmoid, QUICK_GELU)
        if match is None or not only_float32(view, match.ops):
            continue
        x, scaled = match.values[ENTRY], view.producer(match.values.get("scaled"))
        alpha = _factor(site, scaled, x) if "scaled" in match.values else 1.0
        if alpha is not None:
            yield _activation(site, "quick_gelu", "QuickGelu", sorted(match.ops), {x: site.like(x)}, alpha=alpha)


def _factor(site: Site, op: Op | None, x: ValueId) -> float | None:
    """Return the one factor of a Mul or Div; None for other ops, and for 0."""
    rank = len(site.shape(x) or (None,))
    for slot in (1, 0) if op is not None and op.kind == "Mul" else (1,):
        if op is not None and op.kind in SCALINGS and op.inputs[1 - slot] == x:
            factor = number(site.view, op.inputs[slot], axes=rank)
            return (factor if op.kind == "Mul" else 1 / factor) if factor else None
    return None
