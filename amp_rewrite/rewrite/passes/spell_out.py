"""Operators without a good kernel, spelled out by others: CastLike, GroupNormalization, Attention, odd products."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx.helper
from onnx import TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute, ints_attribute, text_attribute
from amp_rewrite.ir.builder import Surroundings, new_node
from amp_rewrite.ir.dataflow import only_reader
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.shapes import Shape
from amp_rewrite.ir.versions import FIRST_AXES_INPUT
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.rewrite.equivalence import disagreement, trial_shape
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, judged, only_float32

GROUP_NORM = "group_normalization"


def spell_out_casts(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each CastLike by the equivalent Cast without the model tensor.

    The usual runtimes have no kernel for CastLike: they run this Cast.
    """
    for op in view.of_kinds(("CastLike",)):
        like = op.inputs[1]
        dtype = view.dtype(like)
        if dtype is None or op.inputs[0] is None:
            continue
        node = clone(op.node)
        del node.input[1:]
        if view.dtype(op.inputs[0]) is dtype:
            node.op_type = "Identity"
            del node.attribute[:]
        else:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", dtype.code))
        yield Replacement("cast_like", (op.id,), op.id, node, findings=())


def spell_group_norms(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each GroupNormalization with constant scale and bias, one number per channel. O(ops).

    By InstanceNormalization between two Reshapes, as PyTorch exports it below opset 21: onnxruntime has no CUDA kernel
    for GroupNormalization, and opens it into some 25 nodes with Casts between.
    """
    for op in view.of_kinds(("GroupNormalization",)):
        if only_float32(view, (op.id,)):
            yield judged(GROUP_NORM, op.id, _spelled(view, op, context))


def _spelled(view: View, op: Op, context: Context) -> Replacement | str:
    source, *affine = op.operands
    shape, arrays = context.shape(view, source), [view.array(value) for value in affine]
    numbers = [array for array in arrays if array is not None]
    groups = int_attribute(op.node, "num_groups", 0)
    if shape is None or len(shape) < 3 or len(numbers) != 2:
        return "its rank, or its scale or bias, is not known"
    channels = numbers[0].size
    if groups < 1 or channels % groups or numbers[1].size != channels or shape[1] not in (None, channels):
        return "it has no scale and bias for each channel"
    (result,), (x, *_) = op.node.output, op.node.input

    def name(part: str) -> str:
        return unused(f"{result}_{part}", view.names)

    def stored(part: str, values: object, dtype: type) -> TensorProto:
        return from_array(np.array(values, dtype), name(part))

    wide = (channels, *[1] * (len(shape) - 2))
    scale, bias = (array.reshape(wide) for array in numbers)
    weights = [stored("groups", (0, groups, -1), np.int64), stored("ones", np.ones(groups), np.float32)]
    weights += [stored("zeros", np.zeros(groups), np.float32)]
    # onnxruntime's quantizers name the scale of a value NAME_scale, and take what has that name for it
    weights += [stored("gamma", scale, np.float32), stored("bias", bias, np.float32)]
    ahead, dims = [new_node("Reshape", [x, weights[0].name], name("grouped"))], (0, channels, *shape[2:])
    if dims.count(None) > 1:
        ahead.append(new_node("Shape", [x], name("shape")))
    else:
        weights.append(stored("shape", [-1 if dim is None else dim for dim in dims], np.int64))
    read = [name("grouped"), weights[1].name, weights[2].name]
    epsilon = float_attribute(op.node, "epsilon", 1e-5)
    node = new_node("InstanceNormalization", read, name("normal"), op.name, epsilon=epsilon)
    behind = [
        new_node("Reshape", [name("normal"), name("shape")], name("apart")),
        new_node("Mul", [name("apart"), weights[3].name], name("scaled")),
        new_node("Add", [name("scaled"), weights[4].name], result),
    ]
    fusion = Replacement(GROUP_NORM, (op.id,), op.id, node, tuple(weights), ahead=tuple(ahead), behind=tuple(behind))
    feed = {x: np.random.default_rng(0).standard_normal((2, channels, *trial_shape(len(shape) - 2)))}
    return disagreement(view, fusion, feed, {name("shape"): np.array(feed[x].shape)}) or fusion


# -- convolutions of patches -----------------------------------------------------------------------

PATCHES = "patches"


def spell_patches(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each Conv whose kernels lie side by side, and whose result is laid out as tokens by features. O(Convs).

    By a product of patches: CUDA has no fast kernel for the few channels of an image.
    """
    for op in view.of_kinds(("Conv",)):
        flat = only_reader(view, op.outputs[0], "Reshape", "Flatten")
        turned = only_reader(view, flat.outputs[0], "Transpose") if flat is not None else None
        if flat is None or turned is None or ints_attribute(turned.node, "perm") != (0, 2, 1):
            continue
        if only_float32(view, (op.id,)) and _side_by_side(view, op):
            yield judged(PATCHES, turned.id, _patches(view, op, flat, turned, context))


def _side_by_side(view: View, op: Op) -> bool:
    weight = view.constant(op.inputs[1])
    size = tuple(weight.dims[2:]) if weight is not None else ()
    return (
        len(size) == 2
        and min(size) > 1
        and ints_attribute(op.node, "strides") == size
        and max(ints_attribute(op.node, "dilations"), default=1) == 1
        and not any(ints_attribute(op.node, "pads"))
        and text_attribute(op.node, "auto_pad") in ("", "NOTSET", "VALID")
        and int_attribute(op.node, "group", 1) == 1
    )


def _patches(view: View, op: Op, flat: Op, turned: Op, context: Context) -> Replacement | str:
    weight, shape = view.array(op.inputs[1]), context.shape(view, op.inputs[0])
    assert weight is not None
    features, channels, high, wide = weight.shape
    if shape is None or not shape[2] or not shape[3] or shape[2] % high or shape[3] % wide:
        return "its patches are not known to cover the image"
    rows, columns = shape[2] // high, shape[3] // wide
    if context.shape(view, flat.outputs[0]) != (shape[0], features, rows * columns):
        return "its result is not known to be laid out as tokens by features"
    (result,), around, depth = turned.node.output, Surroundings(view, turned), channels * high * wide
    held = {"grid": np.array((-1, channels, rows, high, columns, wide)), "rows": np.array((-1, rows * columns, depth))}
    read = {word: around.constant(f"{result}_{word}_shape", array) for word, array in held.items()}
    product = around.constant(f"{op.node.input[1]}_product", np.ascontiguousarray(weight.reshape(features, -1).T))
    grid = around.before("Reshape", (op.node.input[0], read["grid"]), f"{result}_grid")
    cells = around.before("Transpose", (grid,), f"{result}_cells", perm=(0, 2, 4, 1, 3, 5))
    tokens = around.before("Reshape", (cells, read["rows"]), f"{result}_patches")
    if len(op.inputs) > 2:
        bias = op.node.input[2]
        node = new_node("Add", [around.before("MatMul", (tokens, product), f"{result}_product"), bias], result, op.name)
    else:
        node = new_node("MatMul", [tokens, product], result, op.name)
    ops = (op.id, flat.id, turned.id)
    rng, few = np.random.default_rng(0), (3, channels, high, wide)
    drawn = {op.node.input[0]: rng.standard_normal((2, channels, 2 * high, 3 * wide))}
    drawn[op.node.input[1]] = rng.standard_normal(few)
    drawn.update({name: rng.standard_normal(few[:1]) for name in op.node.input[2:3]})
    drawn.update({name: np.array((2, few[0], 6)) for name in flat.node.input[1:2]})
    small = {"grid": np.array((-1, channels, 2, high, 3, wide)), "rows": np.array((-1, 6, depth))}
    after = {read[word]: array for word, array in small.items()}
    after[product] = drawn[op.node.input[1]].reshape(few[0], -1).T
    fusion = Replacement(PATCHES, ops, turned.id, node, **around.parts())
    return disagreement(view, fusion, drawn, after) or fusion


# -- products of odd widths ------------------------------------------------------------------------

ALIGNED = "aligned_product"
_FAST, _ALIGNED = 8, 64  # columns of which fast kernels want a multiple, and of which there will be one
_LEAST_WEIGHTS = 1 << 22


def align_products(view: View, context: Context) -> Iterator[Outcome]:
    """Give each product with a large constant weight of an odd number of columns more of them, and cut these off.

    Of a vocabulary, say: CUDA's fast kernels want rows that begin at a multiple of 16 bytes. The zeros are joined to
    the weight when a session opens, so that the file does not grow, and a table of embeddings with the same weights
    stays as it is. O(MatMuls).
    """
    for op in view.of_kinds(("MatMul",)):
        turn = view.producer(op.inputs[1], "Transpose")
        weight = view.constant(op.inputs[1] if turn is None else turn.inputs[0])
        dims = () if weight is None else tuple(weight.dims) if turn is None else tuple(reversed(weight.dims))
        plain = turn is None or ints_attribute(turn.node, "perm") in ((), (1, 0))
        if len(dims) != 2 or not plain or dims[1] % _FAST == 0 or math.prod(dims) < _LEAST_WEIGHTS:
            continue
        if view.opset >= FIRST_AXES_INPUT and only_float32(view, (op.id,)):
            yield judged(ALIGNED, op.id, _aligned(view, op, *dims))


def _aligned(view: View, op: Op, rows: int, columns: int) -> Replacement | str:
    (x, weight), (result,), around = op.node.input, op.node.output, Surroundings(view, op)
    zeros = around.constant(f"zeros_{rows}_{-columns % _ALIGNED}", np.zeros((rows, -columns % _ALIGNED), np.float32))
    ends = [around.constant(f"{word}_column_{at}", np.array([at])) for word, at in (("first", 0), ("last", columns))]
    axis = around.constant("last_axis", np.array([-1]))
    wide = around.before("Concat", (weight, zeros), f"{weight}_wide", axis=1)
    node = new_node("MatMul", [x, wide], around.name(f"{result}_wide"), op.name)
    around.after("Slice", (node.output[0], *ends, axis), result)
    rng = np.random.default_rng(0)
    drawn = {x: rng.standard_normal((2, 3, 4)), weight: rng.standard_normal((4, 5))}
    words = f"{columns} columns: {-columns % _ALIGNED} of zeros more, cut off behind, for kernels of aligned rows"
    said = (Finding("fused", op.name, words),)
    fusion = Replacement(ALIGNED, (op.id,), op.id, node, **around.parts(), findings=said)
    return disagreement(view, fusion, drawn, {zeros: np.zeros((4, 3)), ends[1]: np.array([5])}) or fusion


# -- attention -------------------------------------------------------------------------------------

SPELLED_ATTENTION = "spelled_attention"


def spell_attentions(view: View, context: Context, among: Collection[OpId] | None = None) -> Iterator[Replacement]:
    """Replace each Attention by the ops that it stands for, as far as another operator stands for them, too. O(ops).

    Without caches, a cap or scores as a result. By its errata a row that sees no key is 0.
    """
    for op in view.of_kinds(("Attention",)):
        alone = all(v is None for v in (*op.inputs[4:], *op.outputs[1:])) and len(op.operands) >= 3
        capped = float_attribute(op.node, "softcap", 0.0) != 0
        typed = int_attribute(op.node, "softmax_precision", TensorProto.FLOAT) != TensorProto.FLOAT
        if alone and not capped and not typed and only_float32(view, (op.id,)) and (among is None or op.id in among):
            writer = _SpelledAttention(view, op, [context.shape(view, value) or () for value in op.inputs[:4]])
            if writer.known:
                yield writer.replacement()


class _SpelledAttention(Surroundings):
    """The ops of an Attention. `heads` and `widths` of queries, keys and values; 0 if they are not known.

    `packed`: its operands are tokens by features.
    """

    def __init__(self, view: View, op: Op, shapes: Sequence[Shape]) -> None:
        super().__init__(view, op)
        self.view, self.op, self.packed = view, op, len(shapes[0]) == 3
        (self.result,) = op.node.output
        self.mask_rank = len(shapes[3]) if len(shapes) > 3 and op.inputs[3] is not None else None
        stated = [int_attribute(op.node, f"{word}_num_heads", 0) for word in ("q", "kv", "kv")]
        ranked = [shape if len(shape) == (3 if self.packed else 4) else (0, 0, 0, 0) for shape in shapes[:3]]
        self.heads = stated if self.packed else [shape[1] or 0 for shape in ranked]
        widths = [shape[-1] or 0 for shape in ranked]
        self.widths = (
            [width // max(h, 1) for width, h in zip(widths, self.heads, strict=True)] if self.packed else widths
        )
        queries, keys = (shape[1 if self.packed else 2] for shape in ranked[:2])
        self.causal, self.length = bool(int_attribute(op.node, "is_causal", 0)), queries if queries == keys else None

    @property
    def known(self) -> bool:
        sizes = all(self.heads) and all(self.widths) and self.heads[0] % self.heads[1] == 0
        return sizes and bool(self.length or not self.causal) and (self.mask_rank is None or self.mask_rank > 1)

    def replacement(self) -> Replacement:
        r, scale = self.result, float_attribute(self.op.node, "scale", 1 / math.sqrt(self.widths[0]))
        query, key, value = (self._laid(slot) for slot in range(3))
        turned = self.before("Transpose", (key,), f"{r}_turned", perm=(0, 1, 3, 2))
        product = self.before("MatMul", (query, turned), f"{r}_scores")
        scores, hides = self.before("Mul", (product, self._number("scale", scale)), f"{r}_scaled"), self.causal
        if self.mask_rank is not None:
            mask = self.op.node.input[3]
            if self.mask_rank < 4:
                axes = self.constant(f"{r}_axes", np.arange(4 - self.mask_rank))
                mask = self.before("Unsqueeze", (mask, axes), f"{r}_mask")
            boolean = self.view.dtype(self.op.inputs[3]) is DType.BOOL
            scores = self._hidden(mask, scores, "masked") if boolean else self.before("Add", (scores, mask), f"{r}_sum")
            hides = hides or boolean
        if self.causal:
            triangle = self.constant(f"triangle_{self.length}", np.tri(self.length or 0, dtype=bool))
            scores = self._hidden(triangle, scores, "causal")
        weights = self.before("Softmax", (scores,), f"{r}_weights", axis=-1)
        if hides:
            blind = self.before("IsNaN", (weights,), f"{r}_blind")
            weights = self.before("Where", (blind, self._number("zero", 0), weights), f"{r}_seen")
        attended = self.name(f"{r}_attended") if self.packed else r
        node = new_node("MatMul", [weights, value], attended, self.op.name)
        if self.packed:
            shape = self.constant(f"{r}_shape", np.array((0, 0, self.heads[0] * self.widths[2])))
            self.after("Transpose", (attended,), self.name(f"{r}_heads"), perm=(0, 2, 1, 3))
            self.after("Reshape", (self.name(f"{r}_heads"), shape), r)
        return Replacement(SPELLED_ATTENTION, (self.op.id,), self.op.id, node, **self.parts(), findings=())

    def _number(self, word: str, number: float) -> str:
        return self.constant(f"{self.result}_{word}", np.array(number, np.float32))

    def _hidden(self, mask: str, scores: str, word: str) -> str:
        return self.before("Where", (mask, scores, self._number("least", -np.inf)), f"{self.result}_{word}")

    def _laid(self, slot: int) -> str:
        name: str = self.op.node.input[slot]
        stem = f"{self.result}_{'qkv'[slot]}"
        heads, width = self.heads[slot], self.widths[slot]
        if self.packed:
            split = self.constant(f"{stem}_split", np.array((0, 0, heads, width)))
            apart = self.before("Reshape", (name, split), f"{stem}_apart")
            name = self.before("Transpose", (apart,), f"{stem}_heads", perm=(0, 2, 1, 3))
        if heads == self.heads[0]:
            return name
        alone = self.before("Unsqueeze", (name, self.constant(f"{stem}_axis", np.array([2]))), f"{stem}_alone")
        groups = self.constant(f"{stem}_groups", np.array((1, 1, self.heads[0] // heads, 1, 1)))
        shape = self.constant(f"{stem}_shape", np.array((0, self.heads[0], -1, width)))
        wide = self.before("Expand", (alone, groups), f"{stem}_wide")
        return self.before("Reshape", (wide, shape), f"{stem}_repeated")
