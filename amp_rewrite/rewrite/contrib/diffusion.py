"""Fusion into onnxruntime's CUDA operators for diffusion models: group norms with SiLU, and gated GELUs.

The kernels accept few shapes, do not accept bfloat16, and need channels last, so these fusions run only on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import float_attribute, text_attribute
from amp_rewrite.ir.dataflow import confined, is_only_reader, only_reader, orders
from amp_rewrite.ir.dims import Dims
from amp_rewrite.ir.patterns.written_out import QUICK_GELU, direct_match
from amp_rewrite.ir.shapes import known_dims
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.builder import NewNodes
from amp_rewrite.rewrite.contrib.fuse import Fuser, Operator, operators
from amp_rewrite.rewrite.equivalence import Trial, disagreement
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, as_outcome, fused_node, only_float32

_SUPPORTED_WIDTHS = (2560, 5120, 10240)
"""Numbers of features accepted by BiasSplitGelu's kernel."""
_MAX_GROUP = 512
"""Maximum number of channels per group in GroupNorm's kernel: one block per group, two channels per thread."""
_CHANNELS_LAST, _CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # permutations of axes


def fuse_diffusion(view: View, context: Context) -> Iterator[Outcome]:
    """Replace gated GELUs and group norms with onnxruntime's operators, or refuse them. O(nodes)."""
    fuser = Fuser(view, context)
    for gelu in operators(view, context, ("Gelu",)):
        yield from _split_gelus(fuser, gelu)
    for op in view.of_kinds(("InstanceNormalization",)):
        norm = _GroupNorm.of(view, op)
        if norm is not None and only_float32(view, norm.ops):
            yield norm.fused()


# -- gated GELUs -----------------------------------------------------------------------------------


def _split_gelus(fuser: Fuser, gelu: Operator) -> Iterator[Outcome]:
    """Yield fusions of products: the first half of biased features times the GELU of the second half."""
    view, result = fuser.view, gelu.last.results[0]
    product = only_reader(view, result, "Mul")
    if product is None or text_attribute(gelu.node, "approximate") == "tanh":
        return
    other = next((a for a, b in orders(product) if b == result), None)
    halves = [view.producer(value, "Split", "Slice") for value in (other, gelu.inputs[0])]
    whole = {half.inputs[0] for half in halves if half is not None}
    add = view.producer(next(iter(whole)), "Add") if len(whole) == 1 and None not in halves else None
    if add is None:
        return
    ops = tuple(sorted({add.id, product.id, *gelu.ops, *(half.id for half in halves if half is not None)}))
    if not all(confined(view, value, ops) for op in ops[:-1] for value in view.ops[op].results):
        return
    for x, bias in orders(add):
        shape, flat = fuser.shape(x), fuser.shape(bias)
        if shape and len(shape) == 3 and flat == shape[-1:] and only_float32(view, ops) and fuser.movable(bias, x):
            width, kind = shape[-1], "bias_split_gelu"
            if width in _SUPPORTED_WIDTHS and isinstance(width, int):
                node = fused_node("BiasSplitGelu", product, fuser.names(x, bias), list(product.node.output), {}, DOMAIN)
                yield fuser.verified(Replacement(kind, ops, product.id, node), {x: (2, 3, width), bias: (width,)})
            else:
                widths = ", ".join(map(str, _SUPPORTED_WIDTHS))
                yield as_outcome(kind, product.id, f"the kernel accepts {widths} features, not {width}")
            return


# -- group norms -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GroupNorm:
    """An InstanceNormalization of channel groups, with scale and shift per channel and optional SiLU."""

    view: View
    op: Op
    split: Op
    merge: Op
    scale: Array
    shift: Array
    tail: Sequence[Op]
    silu: bool

    @classmethod
    def of(cls, view: View, op: Op) -> _GroupNorm | None:
        split, chain = view.producer(op.inputs[0], "Reshape"), [op]
        if split is None or not is_only_reader(view, op.inputs[0], op):
            return None
        for kind in ("Reshape", "Mul", "Add"):
            reader = only_reader(view, chain[-1].outputs[0], kind)
            if reader is None:
                return None
            chain.append(reader)
        _, merge, scaled, shifted = chain
        scale, shift = (_channel_constant(view, b, a.results[0]) for a, b in ((merge, scaled), (scaled, shifted)))
        if scale is None or shift is None or scale.size != shift.size:
            return None
        silu = _silu(view, shifted)
        return cls(view, op, split, merge, scale, shift, (scaled, shifted, *silu), bool(silu))

    @property
    def ops(self) -> tuple[OpId, ...]:
        return tuple(sorted((self.split.id, self.op.id, self.merge.id, *(op.id for op in self.tail))))

    def fused(self) -> Outcome:
        view, x, last = self.view, self.split.inputs[0], self.tail[-1]
        assert x is not None
        shape, grouped = (known_dims(view).get(value) or () for value in (x, self.split.results[0]))
        groups, channels = grouped[1:2], self.scale.size
        kind, skip_sum = "group_norm", _skip_sum(view, x, shape)
        if len(shape) != 4 or shape[1] != channels or known_dims(view).get(self.merge.results[0]) != shape:
            return as_outcome(kind, last.id, "its input is not known to be a batch of images")
        if len(groups) != 1 or not isinstance(groups[0], int) or grouped[0] != shape[0] or channels % groups[0]:
            return as_outcome(kind, last.id, "its groups are not known")
        if (channels // groups[0]) % 2 or channels // groups[0] > _MAX_GROUP:
            rule = f"the kernel accepts an even number of channels per group, up to {_MAX_GROUP}"
            return as_outcome(kind, last.id, f"{rule}, not {channels // groups[0]}")
        return as_outcome(kind, last.id, self._replacement(x, groups[0], skip_sum))

    def _replacement(self, x: ValueId, groups: int, add: tuple[Op, ValueId, ValueId] | None) -> Outcome | str:
        view, last, channels = self.view, self.tail[-1], self.scale.size
        (result,), new = last.node.output, NewNodes(view, last)
        rng, shape = np.random.default_rng(0), (2, channels, 2, 2)
        feed, kind, place = {}, "group_norm", None
        operands, outputs, ops = [x], [new.name(f"{result}_last")], set(self.ops)
        if add is not None:
            kind, operands = "skip_group_norm", [add[1], add[2]]
            ops.add(add[0].id)
            if not confined(view, x, ops):
                place, total = add[0].id, view.value_name(x)
                outputs.append(new.name(f"{total}_last"))
                new.after("Transpose", (outputs[1],), total, perm=_CHANNELS_FIRST)
        for value in operands:
            per_channel = known_dims(view).get(value) != known_dims(view).get(x)
            feed[view.value_name(value)] = 3 * rng.standard_normal((*shape[:2], 1, 1) if per_channel else shape) + 1
        names = [view.value_name(value) for value in operands]
        transposed = [new.before("Transpose", (name,), f"{name}_last", perm=_CHANNELS_LAST) for name in names]
        weights = {"gamma": self.scale, "bias": self.shift}
        affine = [new.constant(f"{result}_{suffix}", array.reshape(-1)) for suffix, array in weights.items()]
        epsilon = float_attribute(self.op.node, "epsilon", 1e-5)
        attributes = {"activation": int(self.silu), "groups": groups, "epsilon": epsilon}
        op_type = "GroupNorm" if add is None else "SkipGroupNorm"
        node = fused_node(op_type, last, [transposed[0], *affine, *transposed[1:]], outputs, attributes, DOMAIN)
        new.after("Transpose", (outputs[0],), result, perm=_CHANNELS_FIRST)
        fusion = Replacement(kind, tuple(sorted(ops)), last.id, node, place=place, **new.parts())
        shapes = {self.split.node.input[1]: (2, groups, -1), self.merge.node.input[1]: shape}
        before = {**feed, **{name: np.array(dims) for name, dims in shapes.items()}}
        return disagreement(view, fusion, [Trial(before, feed)]) or fusion


def _channel_constant(view: View, op: Op, value: ValueId) -> Array | None:
    """Return the other, constant operand of an op on a value, if it has one number for each channel."""
    array = next((view.array(b) for a, b in orders(op) if a == value), None)
    axes = () if array is None else array.shape
    return array if len(axes) in (3, 4) and axes[-2:] == (1, 1) and axes[:-3] in ((), (1,)) else None


def _silu(view: View, op: Op) -> tuple[Op, ...]:
    """Return the ops of a SiLU, x · sigmoid(x), if it is the only reader of an op's result; otherwise ()."""
    sigmoid = next((reader for reader in view.readers(op.results[0]) if reader.kind == "Sigmoid"), None)
    match = direct_match(view, sigmoid, QUICK_GELU) if sigmoid is not None else None
    if match is None or "scaled" in match.values or not confined(view, op.results[0], match.ops):
        return ()
    return tuple(view.ops[op_id] for op_id in sorted(match.ops))


def _skip_sum(view: View, x: ValueId, shape: Dims) -> tuple[Op, ValueId, ValueId] | None:
    """Return the Add of an image and a skip with the sum x; a skip is another image, or one number per channel."""
    add, dims = view.producer(x, "Add"), known_dims(view)
    if add is None or None in shape:
        return None
    for image, skip in orders(add):
        if dims.get(image) == shape and dims.get(skip) in (shape, (*shape[:2], 1, 1)) and only_float32(view, (add.id,)):
            return add, image, skip
    return None
