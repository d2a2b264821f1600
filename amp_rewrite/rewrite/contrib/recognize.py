"""Where ops of the standard are one operator of onnxruntime's: patterns, each a function from a model to matches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import alone
from amp_rewrite.ir.patterns.activations import QUICK_GELU
from amp_rewrite.ir.patterns.match import ENTRY, Search
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.onnx_shapes import Dims
from amp_rewrite.ir.view import MAIN, Op, OpId, ScopeId, ValueId, View
from amp_rewrite.rewrite.contrib.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Refusal, Replacement

DimsOf = Callable[[], Mapping[tuple[ScopeId, str], Dims]]


@dataclass(frozen=True, slots=True)
class Match:
    """Ops, the node that may replace them, and the shapes with which both are tried.

    `place`: as in a Replacement. `tried`: a shape for random numbers, for every value that the ops read and that is
    not a constant, and for weights whose numbers do not matter. `elementwise`: each element of the result depends on
    one of the input.
    """

    kind: str
    ops: tuple[OpId, ...]
    last: OpId
    node: NodeProto
    tried: Mapping[ValueId, tuple[int, ...]]
    place: OpId | None = None
    elementwise: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the standard: one op, or several that compute it. `inputs` are those of `node`."""

    ops: tuple[OpId, ...]
    last: Op
    node: NodeProto
    inputs: tuple[ValueId | None, ...]

    def stated(self, name: str, default: float) -> float:
        """A number among the attributes."""
        found = attribute(self.node, name)
        return default if found is None else found.f if found.type == onnx.AttributeProto.FLOAT else found.i


@dataclass(frozen=True, slots=True)
class Site:
    """A model to look for matches in: `whole` are its operators by type, written out or not; `dims` its shapes."""

    view: View
    whole: Mapping[str, tuple[Operator, ...]]
    dims: DimsOf

    @classmethod
    def of(cls, view: View, written_out: Sequence[Replacement], dims: DimsOf) -> Site:
        """The site of a view, in which some operators of the standard are written out op by op."""
        found: dict[str, list[Operator]] = {}
        for op in view.ops:
            if op.kind in _WHOLE:
                found.setdefault(op.kind, []).append(Operator((op.id,), op, op.node, op.inputs))
        for fusion in written_out:
            last = view.ops[fusion.last]
            read = {view.value_name(v): v for o in fusion.ops for v in view.ops[o].inputs if v is not None}
            inputs = tuple(read[name] for name in fusion.node.input)
            found.setdefault(fusion.node.op_type, []).append(Operator(fusion.ops, last, fusion.node, inputs))
        return cls(view, {kind: tuple(operators) for kind, operators in found.items()}, dims)

    def shape(self, value: ValueId | None) -> Dims | None:
        """The shape of a value as far as it is known. In bodies, whose turns may differ, names of dimensions go."""
        if value is None:
            return None
        held = self.view.values[value]
        found = self.dims().get((held.scope, held.name))
        if found is None or held.scope == MAIN:
            return found
        return tuple(d if isinstance(d, int) else None for d in found)

    def floats(self, ops: Collection[OpId]) -> bool:
        """Whether all numbers that ops read and make, but for integers, are float32."""
        values = {v for o in ops for v in (*self.view.ops[o].inputs, *self.view.ops[o].outputs) if v is not None}
        dtypes = {self.view.dtype(v) for v in values}
        return DType.FLOAT in dtypes and all(d is not None and (d is DType.FLOAT or not d.floating) for d in dtypes)

    def name(self, value: ValueId | None) -> str:
        return "" if value is None else self.view.value_name(value)

    def number(self, value: ValueId | None, rank: int | None) -> float | None:
        """The one number that a constant holds which does not raise the rank of what it is applied to."""
        tensor = self.view.constant(value)
        if tensor is None or math.prod(tensor.dims) != 1 or len(tensor.dims) > (1 if rank is None else rank):
            return None
        return float(self.view.model.array(tensor).item())

    def scaled(self, op: Op | None) -> tuple[ValueId, float] | None:
        """What a Mul or Div by one constant number is applied to, and the factor."""
        if op is None or op.kind not in ("Mul", "Div") or None in op.inputs:
            return None
        for slot in (1, 0) if op.kind == "Mul" else (1,):
            value = op.inputs[1 - slot]
            shape = self.shape(value)
            number = self.number(op.inputs[slot], None if shape is None else len(shape))
            if value is not None and number:
                return value, number if op.kind == "Mul" else 1 / number
        return None


_WHOLE = frozenset(("LayerNormalization", "RMSNormalization", "Gelu"))


def node_of(op_type: str, last: Op, inputs: Sequence[str], outputs: Sequence[str], **stated: float) -> NodeProto:
    """A node of onnxruntime's under the name of the last op that it replaces; trailing inputs left out are dropped."""
    given = list(inputs)
    while given and not given[-1]:
        given.pop()
    node = onnx.helper.make_node(op_type, given, outputs, last.node.name, domain=DOMAIN)
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in sorted(stated.items()))
    node.metadata_props.extend(last.node.metadata_props)
    return node


# -- a sum and its normalization -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Norm:
    """A normalization of the standard, its twin that adds first, and whether they know a bias after the norm."""

    kind: str
    op_type: str
    fused: str
    shifts: bool


_NORMS = (
    _Norm("skip_layer_normalization", "LayerNormalization", "SkipLayerNormalization", True),
    _Norm("skip_rms_normalization", "RMSNormalization", "SkipSimplifiedLayerNormalization", False),
)
_RANKS = (2, 3)  # tokens, or batch and tokens, by features: its kernels take no other
_EPSILON = 1e-5  # the default of both norms


def skip_norms(site: Site) -> Iterator[Match | Refusal]:
    """A sum of two tensors of one shape that is normalized. What else reads the sum gets it from the same node."""
    for row in _NORMS:
        for norm in site.whole.get(row.op_type, ()):
            add, copies = _sum(site.view, norm)
            if add is not None:
                found = _skip_norm(site, row, norm, (add, *copies))
                yield Refusal(row.kind, norm.last.id, found) if isinstance(found, str) else found


def _sum(view: View, norm: Operator) -> tuple[Op | None, list[Op]]:
    """The Add that makes what is normalized, and what copies its result in between and alone reads it."""
    op, copies = view.producer(norm.inputs[0]), []
    while op is not None and op.kind in ("Cast", "Identity") and op.scope == norm.last.scope:
        copies.append(op)
        above = view.producer(op.inputs[0])
        op = above if above is not None and alone(view, op.inputs[0], op) else None
    return (op if op is not None and op.kind == "Add" and op.scope == norm.last.scope else None), copies


def _skip_norm(site: Site, row: _Norm, norm: Operator, summing: Sequence[Op]) -> Match | str:
    view, (total, gamma, beta) = site.view, (*norm.inputs, None)[:3]
    add = summing[0]
    ops = (*(op.id for op in summing), *norm.ops)
    shape = site.shape(total)
    if not site.floats(ops) or any(
        view.dtype(v) is not DType.FLOAT for op in summing for v in op.inputs if v is not None
    ):
        return "not all of it is float32"
    if shape is None or len(shape) not in _RANKS or not isinstance(shape[-1], int):
        return "what is normalized is not known to have two or three axes, the last of known size"
    odd = _odd_norm(site, norm, shape)
    if odd is not None:
        return odd
    summands = _summands(site, add, shape)
    if summands is None:
        return "the summands are not known to have one shape, or the second to lack but the batch"
    ops, summands, bias = _with_bias(site, add, ops, summands, shape)
    shared = [use.op for use in view.uses[total] if use.op not in ops] if total is not None else []
    apart = bool(shared) or total in view.yielded or (total is not None and view.values[total].public)
    for weight in (gamma, beta, bias) if apart else ():
        made_by = view.producer(weight)
        if made_by is not None and made_by.id > add.id:
            return f"others read the sum, before {site.name(weight)} is made"
    reads = [*summands, gamma, *([beta] if row.shifts else []), bias]
    outputs = [norm.last.node.output[0], *(["", "", site.name(total)] if apart else [])]
    epsilon = norm.stated("epsilon", _EPSILON)
    node = node_of(row.fused, norm.last, [site.name(v) for v in reads], outputs, epsilon=epsilon)
    width = shape[-1]
    tried = {summands[0]: (2,) * (len(shape) - 1) + (width,), summands[1]: (2,) * (len(shape) - 1) + (width,)}
    tried.update({v: (width,) for v in (gamma, beta, bias) if v is not None and view.constant(v) is None})
    return Match(row.kind, tuple(sorted(ops)), norm.last.id, node, tried, add.id if apart else None)


def _odd_norm(site: Site, norm: Operator, shape: Dims) -> str | None:
    """What a norm has that its twin has not."""
    if any(v is not None for v in norm.last.outputs[1:]):
        return "its mean or deviation is read"
    if norm.stated("axis", -1) not in (-1, len(shape) - 1):
        return "it is not over the last axis alone"
    if norm.stated("stash_type", DType.FLOAT.code) != DType.FLOAT.code:
        return "its statistics are not float32"
    if any(v is not None and site.shape(v) != (shape[-1],) for v in norm.inputs[1:]):
        return f"its scale or bias is not one number for each of the {shape[-1]} that it normalizes"
    return None


def _summands(site: Site, add: Op, shape: Dims) -> tuple[ValueId, ValueId] | None:
    """Both operands, first the one that has the sum's shape; the other has it too, or lacks the batch alone."""
    for a, b in (add.inputs, add.inputs[::-1]):
        whole, other = site.shape(a), site.shape(b)
        if a is None or b is None or whole != shape or None in shape or other is None:
            continue
        if other == shape or (len(shape) == max(_RANKS) and other in (shape[1:], (1, *shape[1:]))):
            return a, b
    return None


def _with_bias(
    site: Site, add: Op, ops: tuple[OpId, ...], summands: tuple[ValueId, ValueId], shape: Dims
) -> tuple[tuple[OpId, ...], tuple[ValueId, ValueId], ValueId | None]:
    """The same with the sum that makes an operand, where that adds a weight of one number per feature."""
    view = site.view
    for slot, value in enumerate(summands):
        inner = view.producer(value)
        if inner is None or inner.kind != "Add" or inner.scope != add.scope or not alone(view, value, add):
            continue
        for a, b in (inner.inputs, inner.inputs[::-1]):
            if a is None or b is None or a == b or site.shape(b) != (shape[-1],):
                continue
            if site.shape(a) == site.shape(value) and site.floats((inner.id,)):
                pair = (a, summands[1]) if slot == 0 else (summands[0], a)
                return (inner.id, *ops), pair, b
    return ops, summands, None


# -- activations -----------------------------------------------------------------------------------


def gelus(site: Site) -> Iterator[Match | Refusal]:
    """A Gelu after a bias; and one that is written out at an opset that has no Gelu."""
    for gelu in site.whole.get("Gelu", ()):
        x = gelu.inputs[0]
        form = attribute(gelu.node, "approximate")
        tanh = form is not None and form.s == b"tanh"
        shape = site.shape(x)
        if x is None or not site.floats(gelu.ops):
            continue
        rank = 1 if shape is None else len(shape)
        result = list(gelu.last.node.output)
        biased = _biased(site, gelu, x)
        if biased is not None:
            add, a, b, width = biased
            kind, op_type = ("bias_gelu_tanh", "FastGelu") if tanh else ("bias_gelu", "BiasGelu")
            node = node_of(op_type, gelu.last, [site.name(a), site.name(b)], result)
            tried = {a: (2,) * (rank - 1) + (width,), b: (width,)}
            yield Match(kind, (add, *gelu.ops), gelu.last.id, node, tried, elementwise=True)
        elif len(gelu.ops) > 1:
            kind, op_type = ("gelu_tanh", "FastGelu") if tanh else ("gelu_erf", "Gelu")
            node = node_of(op_type, gelu.last, [site.name(x)], result)
            yield Match(kind, gelu.ops, gelu.last.id, node, {x: (2,) * (rank - 1) + (61,)}, elementwise=True)


def _biased(site: Site, gelu: Operator, x: ValueId) -> tuple[OpId, ValueId, ValueId, int] | None:
    """The Add before an activation that alone reads it, its operand, and its bias with that one's size."""
    view = site.view
    add = view.producer(x)
    if add is None or add.kind != "Add" or add.scope != gelu.last.scope or not site.floats((add.id,)):
        return None
    if view.values[x].public or x in view.yielded or any(use.op not in gelu.ops for use in view.uses[x]):
        return None
    for a, b in (add.inputs, add.inputs[::-1]):
        whole, flat = site.shape(a), site.shape(b)
        if a is None or b is None or a == b or not whole or not flat or len(flat) != 1:
            continue
        if isinstance(flat[0], int) and whole[-1] == flat[0]:
            return add.id, a, b, flat[0]
    return None


def quick_gelus(site: Site) -> Iterator[Match]:
    """x times the logistic function of x, or of x times a number."""
    view = site.view
    for sigmoid in (op for op in view.ops if op.kind in _QUICK_GELUS.after):
        found = _QUICK_GELUS.direct(view, sigmoid)
        if found is None or not site.floats(found.ops):
            continue
        x, alpha = found.values[ENTRY], 1.0
        if "scaled" in found.values:
            scaled = site.scaled(view.producer(found.values["scaled"]))
            if scaled is None or scaled[0] != x:
                continue
            alpha = scaled[1]
        mul, shape = view.ops[max(found.ops)], site.shape(x)
        node = node_of("QuickGelu", mul, [site.name(x)], list(mul.node.output), alpha=alpha)
        tried = {x: (2,) * (0 if shape is None else len(shape) - 1) + (61,)}
        yield Match("quick_gelu", tuple(sorted(found.ops)), mul.id, node, tried, elementwise=True)


_QUICK_GELUS = Search.of(QUICK_GELU)


# -- products --------------------------------------------------------------------------------------

_MILD = 2.0**6
"""By what factor, or its inverse, numbers may be scaled where that moves into the product: they are then read unscaled,
or made scaled, in the low type, which has to hold them so. Scores are scaled by 1/sqrt(size of a head) (Vaswani et al.
2017, section 3.2.1), and heads have far less than 4096 numbers."""


def _mild(scale: float) -> bool:
    return 1 / _MILD <= abs(scale) <= _MILD


@dataclass(frozen=True, slots=True)
class _Side:
    """A factor of a product before a swap of its last axes and scales, the ops of those, and the scale."""

    value: ValueId
    ops: tuple[OpId, ...]
    swapped: bool
    scale: float


def products(site: Site) -> Iterator[Match]:
    """A MatMul whose factors are transposed or scaled, or whose result is scaled by one number."""
    view = site.view
    for product in view.ops:
        if product.kind != "MatMul" or not site.floats((product.id,)):
            continue
        left, right = (_side(site, product, value) for value in product.inputs)
        last, after = _scaled_after(site, product)
        ops = tuple(sorted({*left.ops, *right.ops, product.id, last.id}))
        alpha = float(np.float32(left.scale * right.scale * after))
        if len(ops) == 1 or not math.isfinite(alpha) or abs(alpha) < DType.FLOAT.tiny or left.value == right.value:
            continue
        stated = {"alpha": alpha, "transA": int(left.swapped), "transB": int(right.swapped)}
        reads = [site.name(left.value), site.name(right.value)]
        node = node_of("FusedMatMul", last, reads, list(last.node.output), **stated)
        tried = {left.value: _tried(site, left, (3, 5)), right.value: _tried(site, right, (5, 4))}
        yield Match("scaled_product", ops, last.id, node, tried)


def _side(site: Site, product: Op, value: ValueId | None) -> _Side:
    """A factor, followed up past one swap of its last axes and scales that it alone reads. No weight is followed."""
    assert value is not None
    view, reader, ops, swapped, scale = site.view, product, [], False, 1.0
    while True:
        op = view.producer(value)
        # A Constant reads nothing, and has nothing above it.
        if op is None or not op.inputs or op.scope != product.scope:
            break
        if not alone(view, value, reader) or not site.floats((op.id,)):
            break
        scaled = site.scaled(op) if view.constant(op.inputs[0]) is None else None
        if scaled is not None and _mild(scale * scaled[1]):
            source, scale = scaled[0], scale * scaled[1]
        elif not swapped and _swaps(op) and view.constant(op.inputs[0]) is None and op.inputs[0] is not None:
            source, swapped = op.inputs[0], True
        else:
            break
        ops.append(op.id)
        value, reader = source, op
    return _Side(value, tuple(ops), swapped, scale)


def _swaps(op: Op) -> bool:
    """Whether an op swaps the last two axes and no others."""
    stated = attribute(op.node, "perm") if op.kind == "Transpose" else None
    axes = list(stated.ints) if stated is not None else []
    return len(axes) > 1 and axes == [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]


def _scaled_after(site: Site, product: Op) -> tuple[Op, float]:
    """The last op of a product and the one scale that follows it, or the product itself."""
    result = product.outputs[0]
    uses = site.view.uses[result] if result is not None else ()
    reader = site.view.ops[uses[0].op] if len(uses) == 1 else None
    if reader is None or not alone(site.view, result, reader) or not site.floats((reader.id,)):
        return product, 1.0
    scaled = site.scaled(reader)
    fits = scaled is not None and scaled[0] == result and _mild(scaled[1])
    return (reader, scaled[1]) if scaled is not None and fits else (product, 1.0)


def _tried(site: Site, side: _Side, last: tuple[int, int]) -> tuple[int, ...]:
    shape = site.shape(side.value)
    rows = last[::-1] if side.swapped else last
    return (2,) * (len(shape) - 2 if shape is not None and len(shape) > 1 else 0) + rows


MATCHERS: tuple[Callable[[Site], Iterator[Match | Refusal]], ...] = (skip_norms, gelus, quick_gelus, products)
"""Of two matches that share an op the first is taken."""
