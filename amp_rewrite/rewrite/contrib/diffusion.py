"""Operators that onnxruntime has for diffusion models, on CUDA alone: group norms with SiLU, and gated GELUs.

Their kernels take few shapes, no bfloat16, and group norms with channels last, so that they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import float_attribute, text_attribute
from amp_rewrite.ir.dataflow import confined, is_only_reader, only_reader, orders
from amp_rewrite.ir.dims import Dims
from amp_rewrite.ir.shapes import known_dims
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.builder import Surroundings
from amp_rewrite.rewrite.contrib.fuse import Operator, Site, operators
from amp_rewrite.rewrite.equivalence import Trial, disagreement
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, as_outcome, fused_node, only_float32

_SPLIT_WIDTHS = (2560, 5120, 10240)
"""Features of which the kernel of BiasSplitGelu takes the halves."""
_WIDEST_GROUP = 512
"""Channels of a group that a block of the kernel of GroupNorm takes, two a thread."""
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # permutations that move the channels


def fuse_diffusion(view: View, context: Context) -> Iterator[Outcome]:
    """Replace gated GELUs and group norms by operators of onnxruntime, or refuse them. O(nodes)."""
    site = Site(view, context)
    for gelu in operators(view, context, ("Gelu",)):
        yield from _split_gelus(site, gelu)
    for op in view.of_kinds(("InstanceNormalization",)):
        norm = _GroupNorm.of(view, op)
        if norm is not None and only_float32(view, norm.ops):
            yield norm.fused()


# -- gated GELUs -----------------------------------------------------------------------------------


def _split_gelus(site: Site, gelu: Operator) -> Iterator[Outcome]:
    """Yield the product of the first half of biased features and the GELU of the second."""
    view, result = site.view, gelu.last.results[0]
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
        shape, flat = site.shape(x), site.shape(bias)
        if shape and len(shape) == 3 and flat == shape[-1:] and only_float32(view, ops) and site.fits(bias, x):
            width, kind = shape[-1], "bias_split_gelu"
            if width in _SPLIT_WIDTHS and isinstance(width, int):
                node = fused_node("BiasSplitGelu", product, site.names(x, bias), list(product.node.output), {}, DOMAIN)
                yield site.proved(Replacement(kind, ops, product.id, node), {x: (2, 3, width), bias: (width,)})
            else:
                widths = ", ".join(map(str, _SPLIT_WIDTHS))
                yield as_outcome(kind, product.id, f"its kernel takes {widths} features, not {width}")
            return


# -- group norms -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GroupNorm:
    """An InstanceNormalization of groups of channels, scaled and shifted by channel, perhaps with SiLU behind it."""

    view: View
    op: Op
    apart: Op
    together: Op
    scale: Array
    shift: Array
    tail: Sequence[Op]
    silu: bool

    @classmethod
    def of(cls, view: View, op: Op) -> _GroupNorm | None:
        apart, chain = view.producer(op.inputs[0], "Reshape"), [op]
        if apart is None or not is_only_reader(view, op.inputs[0], op):
            return None
        for kind in ("Reshape", "Mul", "Add"):
            reader = only_reader(view, chain[-1].outputs[0], kind)
            if reader is None:
                return None
            chain.append(reader)
        _, together, scaled, shifted = chain
        scale, shift = (_by_channel(view, b, a.results[0]) for a, b in ((together, scaled), (scaled, shifted)))
        if scale is None or shift is None or scale.size != shift.size:
            return None
        silu = _silu(view, shifted)
        return cls(view, op, apart, together, scale, shift, (scaled, shifted, *silu), bool(silu))

    @property
    def ops(self) -> tuple[OpId, ...]:
        return tuple(sorted((self.apart.id, self.op.id, self.together.id, *(op.id for op in self.tail))))

    def fused(self) -> Outcome:
        view, x, last = self.view, self.apart.inputs[0], self.tail[-1]
        assert x is not None
        shape, grouped = (known_dims(view).get(value) or () for value in (x, self.apart.results[0]))
        groups, channels = grouped[1:2], self.scale.size
        kind, summed = "group_norm", _summed(view, x, shape)
        if len(shape) != 4 or shape[1] != channels or known_dims(view).get(self.together.results[0]) != shape:
            return as_outcome(kind, last.id, "its input is not known to be a batch of images")
        if len(groups) != 1 or not isinstance(groups[0], int) or grouped[0] != shape[0] or channels % groups[0]:
            return as_outcome(kind, last.id, "its groups are not known")
        if (channels // groups[0]) % 2 or channels // groups[0] > _WIDEST_GROUP:
            why = f"its kernel takes an even number of channels in a group, up to {_WIDEST_GROUP}"
            return as_outcome(kind, last.id, f"{why}, not {channels // groups[0]}")
        return as_outcome(kind, last.id, self._written(x, groups[0], summed))

    def _written(self, x: ValueId, groups: int, add: tuple[Op, ValueId, ValueId] | None) -> Outcome | str:
        view, last, channels = self.view, self.tail[-1], self.scale.size
        (result,), around = last.node.output, Surroundings(view, last)
        rng, small = np.random.default_rng(0), (2, channels, 2, 2)
        fed, kind, place = {}, "group_norm", None
        reads, outputs, ops = [x], [around.name(f"{result}_last")], set(self.ops)
        if add is not None:
            kind, reads = "skip_group_norm", [add[1], add[2]]
            ops.add(add[0].id)
            if not confined(view, x, ops):
                place, total = add[0].id, view.value_name(x)
                outputs.append(around.name(f"{total}_last"))
                around.after("Transpose", (outputs[1],), total, perm=_FIRST)
        for value in reads:
            flat = known_dims(view).get(value) != known_dims(view).get(x)
            fed[view.value_name(value)] = 3 * rng.standard_normal((*small[:2], 1, 1) if flat else small) + 1
        names = [view.value_name(value) for value in reads]
        turned = [around.before("Transpose", (name,), f"{name}_last", perm=_LAST) for name in names]
        weights = {"gamma": self.scale, "bias": self.shift}
        affine = [around.constant(f"{result}_{word}", array.reshape(-1)) for word, array in weights.items()]
        stated = {
            "activation": int(self.silu),
            "groups": groups,
            "epsilon": float_attribute(self.op.node, "epsilon", 1e-5),
        }
        op_type = "GroupNorm" if add is None else "SkipGroupNorm"
        node = fused_node(op_type, last, [turned[0], *affine, *turned[1:]], outputs, stated, DOMAIN)
        around.after("Transpose", (outputs[0],), result, perm=_FIRST)
        fusion = Replacement(kind, tuple(sorted(ops)), last.id, node, place=place, **around.parts())
        shapes = {self.apart.node.input[1]: (2, groups, -1), self.together.node.input[1]: small}
        before = {**fed, **{name: np.array(dims) for name, dims in shapes.items()}}
        return disagreement(view, fusion, [Trial(before, fed)]) or fusion


def _by_channel(view: View, op: Op, value: ValueId) -> Array | None:
    """Return what a sum or product adds to a value or multiplies it by, if it is one number for each channel."""
    array = next((view.array(b) for a, b in orders(op) if a == value), None)
    axes = () if array is None else array.shape
    return array if len(axes) in (3, 4) and axes[-2:] == (1, 1) and axes[:-3] in ((), (1,)) else None


def _silu(view: View, op: Op) -> tuple[Op, ...]:
    """Return the logistic function of the result of an op, and their product; () for other readers."""
    readers = view.readers(op.results[0])
    sigmoid = next((reader for reader in readers if reader.kind == "Sigmoid"), None)
    product = sigmoid and only_reader(view, sigmoid.results[0], "Mul")
    if sigmoid is None or product is None or not confined(view, op.results[0], (sigmoid.id, product.id)):
        return ()
    return (sigmoid, product) if set(product.inputs) == {op.results[0], sigmoid.results[0]} else ()


def _summed(view: View, x: ValueId, shape: Dims) -> tuple[Op, ValueId, ValueId] | None:
    """Return the sum that makes x of an image, and another or one number for each of its channels."""
    add, dims = view.producer(x, "Add"), known_dims(view)
    if add is None or None in shape:
        return None
    for image, skip in orders(add):
        if dims.get(image) == shape and dims.get(skip) in (shape, (*shape[:2], 1, 1)) and only_float32(view, (add.id,)):
            return add, image, skip
    return None
