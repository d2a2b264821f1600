"""Operators of onnxruntime that the standard lacks: a sum and its norm, a bias and its activation.

Each is found on the model in standard form, written out as its document says (`reference`), and proved: the ops
that go and that formula are run in float64. onnxruntime is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import NodeProto

from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute, int_attribute, text_attribute
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.dataflow import alone, confined, number, orders, trail
from amp_rewrite.ir.op_classes import SCALINGS
from amp_rewrite.ir.patterns.clusters import QUICK_GELU
from amp_rewrite.ir.patterns.match import ENTRY, direct_match
from amp_rewrite.ir.shapes import fixed, shape_at
from amp_rewrite.ir.sizes import MADE_UP, Dim, Dims
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View
from amp_rewrite.rewrite.contrib.multi_head_attention import multi_head_attentions
from amp_rewrite.rewrite.contrib.rotary import KIND as ROTARY
from amp_rewrite.rewrite.contrib.rotary import rotations
from amp_rewrite.rewrite.equivalence import node_mismatch, trial_shape
from amp_rewrite.rewrite.passes.standard_ops import fuse_clusters
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Context, Outcome, Refusal, Replacement, fused_node, judged

_LATEST = 23
"""The opset from which the standard has all the operators that these are made of."""


def fuse_contrib(view: View, context: Context) -> Iterator[Outcome]:
    """Replace several ops by one operator of onnxruntime, or refuse it; the largest ones first.

    Ops of the standard count also where the model writes them out, at an opset that lacks them. O(nodes).
    """
    whole = [o for o in fuse_clusters(view, context, _LATEST) if isinstance(o, Replacement)]
    site = OpIndex.of(view, whole, context)
    for matcher in (_skip_norms, _gelus, _quick_gelus):  # the first of two matches that share an op is taken
        yield from matcher(site)


def fuse_attentions(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention by MultiHeadAttention or GroupQueryAttention."""
    return (_declaring(view, context, outcome) for outcome in multi_head_attentions(view, context))


def fuse_rotations(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out rotation by RotaryEmbedding."""
    return (_declaring(view, context, outcome) for outcome in rotations(view, context))


def _proved(site: OpIndex, fusion: Replacement, tried: Tried, *, elementwise: bool = False) -> Outcome:
    """Return a replacement that gives the same as its ops, or its refusal.

    `tried`: a shape for random numbers, for every value that the ops read and that is not a constant, and for weights
    whose numbers do not matter. `elementwise`: each element of the result depends on one of the input.
    """
    why = node_mismatch(site.view, fusion.ops, fusion.node, tried, site.view.opsets, elementwise=elementwise)
    return _declaring(site.view, site.context, judged(fusion.kind, fusion.last, why or fusion))


def _declaring(view: View, context: Context, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Refusal):
        return outcome
    results, dims, scope = [], context.dims(view), view.ops[outcome.last].scope
    alike = dict(zip(outcome.node.output, outcome.node.input, strict=False)) if outcome.kind == ROTARY else {}
    for name in filter(None, (name for node in (outcome.node, *outcome.behind) for name in node.output)):
        known = dims.get((scope, alike.get(name, name)))
        if known is not None and scope != MAIN:
            known = fixed(known)  # the turns of a body may differ in what a name stands for
        shape = None if known is None else [_stable(d) for d in known]
        results.append(declared(name, DType.FLOAT, shape))
    return replace(outcome, declared=tuple(results))


def _stable(dim: Dim | None) -> int | str | None:
    return dim if isinstance(dim, int | str) and not str(dim).startswith(MADE_UP) else None


Tried = Mapping[ValueId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the standard: one op, or several in its place. `inputs` are those of `node`."""

    ops: tuple[OpId, ...]
    last: Op
    node: NodeProto
    inputs: tuple[ValueId | None, ...]


@dataclass(frozen=True, slots=True)
class OpIndex:
    """A model to search: `whole` are its operators by type, written out or not."""

    view: View
    whole: Mapping[str, Sequence[Operator]]
    context: Context

    @classmethod
    def of(cls, view: View, written_out: Sequence[Replacement], context: Context) -> OpIndex:
        """Return the site of a view, in which some operators of the standard are written out op by op."""
        whole: dict[str, list[Operator]] = {kind: [] for kind in (*_SKIP_NORMS, "Gelu")}
        for op in view.ops:
            if op.kind in whole:
                whole[op.kind].append(Operator((op.id,), op, op.node, op.inputs))
        for fusion in written_out:
            read = {view.value_name(v): v for o in fusion.ops for v in view.ops[o].operands}
            inputs = tuple(read[name] for name in fusion.node.input)
            operator = Operator(fusion.ops, view.ops[fusion.last], fusion.node, inputs)
            whole.setdefault(fusion.node.op_type, []).append(operator)
        return cls(view, whole, context)

    def shape(self, value: ValueId | None) -> Dims | None:
        """Return the shape of a value as far as it is known. In bodies, whose turns may differ, names are left out."""
        if value is not None and self.view.values[value].scope != MAIN:
            return self.context.shape(self.view, value)
        return shape_at(self.context.dims(self.view), self.view, value)

    def floats(self, ops: Collection[OpId]) -> bool:
        """True if all numbers that ops read and make are float32, but for integers."""
        values = {v for o in ops for v in self.view.ops[o].ports}
        dtypes = {self.view.dtype(v) for v in values}
        return DType.FLOAT in dtypes and all(d is not None and (d is DType.FLOAT or not d.floating) for d in dtypes)

    def holds(self, bias: ValueId | None) -> bool:
        """True unless a bias has numbers beyond the low type, whose sum is better left to an op of its own."""
        return bias is None or not self.view.fit(bias, self.context.to).overflow

    def names(self, *values: ValueId | None) -> list[str]:
        """Return the names of values, "" for None."""
        return ["" if value is None else self.view.value_name(value) for value in values]

    def like(self, value: ValueId | None) -> tuple[int, ...]:
        """Return a small shape of the rank of a value, of one axis if that is not known."""
        return trial_shape(len(self.shape(value) or (None,)), _WIDTH)


# -- a sum and its normalization -------------------------------------------------------------------

_SKIP_NORMS = {
    "LayerNormalization": ("skip_layer_normalization", "SkipLayerNormalization"),
    "RMSNormalization": ("skip_rms_normalization", "SkipSimplifiedLayerNormalization"),
}
"""A normalization of the standard: the kind of fusion, and its twin that adds first."""
_RANKS = (2, 3)  # tokens, or batch and tokens, by features: its kernels take no other
_EPSILON = 1e-5  # the default of both norms


def _skip_norms(site: OpIndex) -> Iterator[Outcome]:
    """Yield each normalized sum of two tensors of one shape. Other readers of the sum get it from the same node."""
    view = site.view

    def copied(op: Op) -> ValueId | None:
        return op.inputs[0] if op.kind in ("Cast", "Identity") and alone(view, op.inputs[0], op) else None

    for op_type, (kind, _) in _SKIP_NORMS.items():
        for norm in site.whole[op_type]:
            copies, total = trail(view, norm.inputs[0], copied)
            add = view.producer(total, "Add")
            if add is not None and all(op.scope == norm.last.scope for op in (add, *copies)):
                outcome = _skip_norm(site, norm, add, copies)
                yield Refusal(kind, norm.last.id, outcome) if isinstance(outcome, str) else outcome


def _skip_norm(site: OpIndex, norm: Operator, add: Op, copies: Sequence[Op]) -> Outcome | str:
    view, (total, gamma, beta) = site.view, (*norm.inputs, None)[:3]
    assert total is not None
    ops = (add.id, *(op.id for op in copies), *norm.ops)
    shape = site.shape(total)
    read = (v for op in (add, *copies) for v in op.operands)
    if not site.floats(ops) or any(view.dtype(v) is not DType.FLOAT for v in read):
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
        made_by = view.producer(weight)
        if made_by is not None and made_by.id > add.id:
            return f"others read the sum, before {site.names(weight)[0]} is made"
    kind, op_type = _SKIP_NORMS[norm.node.op_type]
    shifts = [beta] if norm.node.op_type == "LayerNormalization" else []
    outputs = [norm.last.node.output[0], *(["", "", *site.names(total)] if apart else [])]
    epsilon = {"epsilon": float_attribute(norm.node, "epsilon", _EPSILON)}
    node = fused_node(op_type, norm.last, site.names(*summands, gamma, *shifts, bias), outputs, epsilon, DOMAIN)
    tried = dict.fromkeys(summands, (2,) * (len(shape) - 1) + (shape[-1],))
    tried.update({v: (shape[-1],) for v in (gamma, beta, bias) if v is not None})
    place = add.id if apart else None
    return _proved(site, Replacement(kind, tuple(sorted(ops)), norm.last.id, node, place=place), tried)


def _odd_norm(site: OpIndex, norm: Operator, shape: Dims) -> str | None:
    if any(v is not None for v in norm.last.outputs[1:]):
        return "its mean or deviation is read"
    if int_attribute(norm.node, "axis", -1) not in (-1, len(shape) - 1):
        return "it is not over the last axis alone"
    if int_attribute(norm.node, "stash_type", DType.FLOAT.code) != DType.FLOAT.code:
        return "its statistics are not float32"
    if any(v is not None and site.shape(v) != (shape[-1],) for v in norm.inputs[1:]):
        return f"its scale or bias is not one number for each of the {shape[-1]} that it normalizes"
    return None


def _summands(site: OpIndex, add: Op, shape: Dims) -> tuple[ValueId, ValueId] | None:
    for a, b in orders(add) if None not in shape else ():
        other = site.shape(b)
        batchless = len(shape) == max(_RANKS) and other in (shape[1:], (1, *shape[1:]))
        if site.shape(a) == shape and (other == shape or batchless):
            return a, b
    return None


def _with_bias(
    site: OpIndex, add: Op, summands: tuple[ValueId, ValueId], shape: Dims
) -> tuple[tuple[OpId, ...], tuple[ValueId, ValueId], ValueId | None]:
    """Return the sum that makes an operand by adding a weight of one number per feature, and operands and bias then."""
    for slot, value in enumerate(summands):
        inner = site.view.producer(value, "Add")
        if inner is None or inner.scope != add.scope or not alone(site.view, value, add):
            continue
        for a, b in orders(inner):
            if a == b or site.shape(b) != (shape[-1],) or not site.holds(b) or _stands_out(site, b, value):
                continue
            if site.shape(a) == site.shape(value) and site.floats((inner.id,)):
                return (inner.id,), ((a, summands[1]) if slot == 0 else (summands[0], a)), b
    return (), summands, None


def _stands_out(site: OpIndex, bias: ValueId, total: ValueId) -> bool:
    """True if a bias is mostly one number for all features, which a norm subtracts, and its sum better in float32."""
    held = site.view.array(bias)
    common = held is not None and held.size > 0 and abs(held.mean()) > held.std()
    return bool(common) and Facts.of(site.view, site.context.to)[total].beyond is not None


# -- activations -----------------------------------------------------------------------------------


def _gelus(site: OpIndex) -> Iterator[Outcome]:
    """Yield each Gelu after a bias, and each one written out at an opset without Gelu."""
    for gelu in site.whole["Gelu"]:
        x = gelu.inputs[0]
        tanh = text_attribute(gelu.node, "approximate") == "tanh"
        if x is None or not site.floats(gelu.ops):
            continue
        biased = _biased(site, gelu, x)
        if biased is not None:
            kind, op_type = ("bias_gelu_tanh", "FastGelu") if tanh else ("bias_gelu", "BiasGelu")
            add, a, b = biased
            yield _activation(site, kind, op_type, (add, *gelu.ops), {a: site.like(x), b: (_WIDTH,)})
        elif len(gelu.ops) > 1:
            kind, op_type = ("gelu_tanh", "FastGelu") if tanh else ("gelu_erf", "Gelu")
            yield _activation(site, kind, op_type, gelu.ops, {x: site.like(x)})


_WIDTH = 61
"""Numbers in the last axis with which an activation is tried."""


def _activation(site: OpIndex, kind: str, op_type: str, ops: Sequence[OpId], tried: Tried, **stated: float) -> Outcome:
    last = site.view.ops[max(ops)]
    node = fused_node(op_type, last, site.names(*tried), list(last.node.output), stated, DOMAIN)
    return _proved(site, Replacement(kind, tuple(ops), last.id, node), tried, elementwise=True)


def _biased(site: OpIndex, gelu: Operator, x: ValueId) -> tuple[OpId, ValueId, ValueId] | None:
    view = site.view
    add = view.producer(x, "Add")
    if add is None or add.scope != gelu.last.scope or not site.floats((add.id,)):
        return None
    if not confined(view, x, gelu.ops):
        return None
    for a, b in orders(add):
        whole, flat = site.shape(a), site.shape(b)
        if a != b and site.holds(b) and whole and flat == whole[-1:] and isinstance(flat[0], int):
            return add.id, a, b
    return None


def _quick_gelus(site: OpIndex) -> Iterator[Outcome]:
    """Yield each product of x and the logistic function of x, or of x times a number."""
    view = site.view
    for sigmoid in view.of_kinds(("Sigmoid",)):
        match = direct_match(view, sigmoid, QUICK_GELU)
        if match is None or not site.floats(match.ops):
            continue
        x, scaled = match.values[ENTRY], view.producer(match.values.get("scaled"))
        alpha = _factor(site, scaled, x) if "scaled" in match.values else 1.0
        if alpha is not None:
            yield _activation(site, "quick_gelu", "QuickGelu", sorted(match.ops), {x: site.like(x)}, alpha=alpha)


def _factor(site: OpIndex, op: Op | None, x: ValueId) -> float | None:
    """Return the one number by which a Mul or Div scales a value; None for other ops, and for 0."""
    rank = len(site.shape(x) or (None,))
    for slot in (1, 0) if op is not None and op.kind == "Mul" else (1,):
        if op is not None and op.kind in SCALINGS and op.inputs[1 - slot] == x:
            factor = number(site.view, op.inputs[slot], axes=rank)
            return (factor if op.kind == "Mul" else 1 / factor) if factor else None
    return None
