"""Operators without a good kernel, spelled out by others: casts, group norms, attention, unaligned products."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx.helper
from onnx import TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute, ints_attribute, text_attribute
from amp_rewrite.ir.dataflow import only_reader
from amp_rewrite.ir.op_classes import LARGE_WEIGHT
from amp_rewrite.ir.shapes import Shape
from amp_rewrite.ir.versions import FIRST_AXES_INPUT
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.rewrite.builder import Surroundings, new_node
from amp_rewrite.rewrite.equivalence import Trial, disagreement, trial_shape
from amp_rewrite.rewrite.replacement import (
    GROUP_NORM,
    SPELLED_ATTENTION,
    Context,
    Outcome,
    Replacement,
    as_outcome,
    only_float32,
)


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
            yield as_outcome(GROUP_NORM, op.id, _spelled(view, op, context))


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
    (result,), (x, *_), around = op.node.output, op.node.input, Surroundings(view, op)

    def stored(part: str, values: object, dtype: type = np.float32) -> str:
        return around.constant(f"{result}_{part}", np.array(values, dtype))

    grouped = around.before("Reshape", (x, stored("groups", (0, groups, -1), np.int64)), f"{result}_grouped")
    dims = (0, channels, *shape[2:])
    if dims.count(None) > 1:
        whole = around.before("Shape", (x,), f"{result}_shape")
    else:
        whole = stored("shape", [-1 if dim is None else dim for dim in dims], np.int64)
    normal, apart, scaled = (around.name(f"{result}_{part}") for part in ("normal", "apart", "scaled"))
    read = [grouped, stored("ones", np.ones(groups)), stored("zeros", np.zeros(groups))]
    epsilon = float_attribute(op.node, "epsilon", 1e-5)
    node = new_node("InstanceNormalization", read, normal, op.name, epsilon=epsilon)
    # onnxruntime's quantizers name the scale of a value NAME_scale, and take what has that name for it
    scale, bias = (array.reshape(channels, *[1] * (len(shape) - 2)) for array in numbers)
    around.after("Reshape", (normal, whole), apart)
    around.after("Mul", (apart, stored("gamma", scale)), scaled)
    around.after("Add", (scaled, stored("bias", bias)), result)
    fusion = Replacement(GROUP_NORM, (op.id,), op.id, node, **around.parts())
    feed = {x: np.random.default_rng(0).standard_normal((2, channels, *trial_shape(len(shape) - 2)))}
    return disagreement(view, fusion, [Trial(feed, {whole: np.array(feed[x].shape)})]) or fusion


# -- convolutions of patches -----------------------------------------------------------------------

PATCHES = "patches"


def spell_patches(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each Conv over separate patches, with tokens by features as result, by a product of patches. O(Convs).

    CUDA has no fast kernel for the few channels of an image.
    """
    for op in view.of_kinds(("Conv",)):
        flat = only_reader(view, op.outputs[0], "Reshape", "Flatten")
        turned = only_reader(view, flat.outputs[0], "Transpose") if flat is not None else None
        if flat is None or turned is None or ints_attribute(turned.node, "perm") != (0, 2, 1):
            continue
        if only_float32(view, (op.id,)) and _side_by_side(view, op):
            yield as_outcome(PATCHES, turned.id, _patches(view, op, flat, turned, context))


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
    feed = {op.node.input[0]: rng.standard_normal((2, channels, 2 * high, 3 * wide))}
    feed[op.node.input[1]] = rng.standard_normal(few)
    feed.update({name: rng.standard_normal(few[:1]) for name in op.node.input[2:3]})
    feed.update({name: np.array((2, few[0], 6)) for name in flat.node.input[1:2]})
    small = {"grid": np.array((-1, channels, 2, high, 3, wide)), "rows": np.array((-1, 6, depth))}
    after = {read[word]: array for word, array in small.items()}
    after[product] = feed[op.node.input[1]].reshape(few[0], -1).T
    fusion = Replacement(PATCHES, ops, turned.id, node, **around.parts())
    return disagreement(view, fusion, [Trial(feed, after)]) or fusion


# -- unaligned products ----------------------------------------------------------------------------

ALIGNED = "aligned_product"
_FAST, _ALIGNED = 8, 64  # fast kernels want a multiple of so many columns; the padded weight has one of these


def align_products(view: View, context: Context) -> Iterator[Outcome]:
    """Pad the columns of each large constant weight to a multiple of 64, and slice the product to its own columns.

    Only if they are not a multiple of 8, as in a vocabulary: CUDA's fast kernels want rows that begin at
    a multiple of 16 bytes. The zeros are joined to the weight when a session opens, so that the file does not grow, and
    a table of embeddings with the same weights stays as it is. O(MatMuls).
    """
    for op in view.of_kinds(("MatMul",)):
        turn = view.producer(op.inputs[1], "Transpose")
        weight = view.constant(op.inputs[1] if turn is None else turn.inputs[0])
        dims = () if weight is None else tuple(weight.dims) if turn is None else tuple(reversed(weight.dims))
        plain = turn is None or ints_attribute(turn.node, "perm") in ((), (1, 0))
        if len(dims) != 2 or not plain or dims[1] % _FAST == 0 or math.prod(dims) < LARGE_WEIGHT:
            continue
        if view.opset >= FIRST_AXES_INPUT and only_float32(view, (op.id,)):
            yield as_outcome(ALIGNED, op.id, _aligned(view, op, *dims))


def _aligned(view: View, op: Op, rows: int, columns: int) -> Replacement | str:
    (x, weight), (result,), around = op.node.input, op.node.output, Surroundings(view, op)
    zeros = around.constant(f"zeros_{rows}_{-columns % _ALIGNED}", np.zeros((rows, -columns % _ALIGNED), np.float32))
    ends = [around.constant(f"{word}_column_{at}", np.array([at])) for word, at in (("first", 0), ("last", columns))]
    axis = around.constant("last_axis", np.array([-1]))
    wide = around.before("Concat", (weight, zeros), f"{weight}_wide", axis=1)
    node = new_node("MatMul", [x, wide], around.name(f"{result}_wide"), op.name)
    around.after("Slice", (node.output[0], *ends, axis), result)
    rng = np.random.default_rng(0)
    feed = {x: rng.standard_normal((2, 3, 4)), weight: rng.standard_normal((4, 5))}
    words = f"{columns} columns, padded by {-columns % _ALIGNED} of zeros to align rows; a Slice removes them"
    said = (Finding("fused", op.name, words),)
    fusion = Replacement(ALIGNED, (op.id,), op.id, node, **around.parts(), findings=said)
    after = {zeros: np.zeros((4, 3)), ends[1]: np.array([5])}
    return disagreement(view, fusion, [Trial(feed, after)]) or fusion


# -- attention -------------------------------------------------------------------------------------


def spell_attentions(view: View, context: Context, among: Collection[OpId] | None = None) -> Iterator[Replacement]:
    """Write out each Attention, as far as another operator stands for its ops, too. O(ops).

    Without caches, a cap or scores as a result.
    """
    for op in view.of_kinds(("Attention",)):
        alone = all(v is None for v in (*op.inputs[4:], *op.outputs[1:])) and len(op.operands) >= 3
        capped = float_attribute(op.node, "softcap", 0.0) != 0
        typed = int_attribute(op.node, "softmax_precision", TensorProto.FLOAT) != TensorProto.FLOAT
        if alone and not capped and not typed and only_float32(view, (op.id,)) and (among is None or op.id in among):
            shapes = [context.shape(view, value) or () for value in op.inputs[:4]]
            packed = all(len(shape) == 3 for shape in shapes[:3])
            shapes = _heads_apart(op, shapes) if packed else shapes
            if _sizes_known(op, shapes):
                yield _spelled_attention(view, op, shapes, packed=packed)


def _heads_apart(op: Op, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of packed queries, keys and values, tokens by features, once their heads are split off."""
    stated = [int_attribute(op.node, f"{word}_num_heads", 0) for word in ("q", "kv", "kv")]
    apart = zip(stated, shapes[:3], strict=True)
    return [
        *((batch, heads, length, (width or 0) // max(heads, 1)) for heads, (batch, length, width) in apart),
        *shapes[3:],
    ]


def _sizes_known(op: Op, shapes: Sequence[Shape]) -> bool:
    queries, keys, values, *mask = shapes
    if {len(queries), len(keys), len(values)} != {4} or (mask and op.inputs[3] is not None and len(mask[0]) < 2):
        return False
    alike = queries[2] is not None and queries[2] == keys[2]
    sizes = all((queries[1], queries[3], keys[1], keys[3], values[1], values[3]))
    return sizes and (queries[1] or 0) % (keys[1] or 1) == 0 and (alike or not int_attribute(op.node, "is_causal", 0))


def _spelled_attention(view: View, op: Op, shapes: Sequence[Shape], *, packed: bool) -> Replacement:
    """Return the ops of an Attention. By its errata a row that sees no key is 0.

    `shapes`: with heads apart. `packed`: operands and result are tokens by features.
    """
    around, (result,), (_, heads, length, width) = Surroundings(view, op), op.node.output, shapes[0]
    assert heads is not None and width is not None

    def number(word: str, value: float) -> str:
        return around.constant(f"{result}_{word}", np.array(value, np.float32))

    def hidden(mask: str, scores: str, word: str) -> str:
        return around.before("Where", (mask, scores, number("least", -np.inf)), f"{result}_{word}")

    query, key, value = (_laid(around, op, slot, shapes[slot], heads, packed=packed) for slot in range(3))
    turned = around.before("Transpose", (key,), f"{result}_turned", perm=(0, 1, 3, 2))
    product = around.before("MatMul", (query, turned), f"{result}_scores")
    scale = number("scale", float_attribute(op.node, "scale", 1 / math.sqrt(width)))
    scores, boolean = around.before("Mul", (product, scale), f"{result}_scaled"), False
    causal = int_attribute(op.node, "is_causal", 0)
    if len(op.inputs) > 3 and op.inputs[3] is not None:
        mask, boolean = op.node.input[3], view.dtype(op.inputs[3]) is DType.BOOL
        if len(shapes[3]) < 4:
            axes = around.constant(f"{result}_axes", np.arange(4 - len(shapes[3])))
            mask = around.before("Unsqueeze", (mask, axes), f"{result}_mask")
        scores = hidden(mask, scores, "masked") if boolean else around.before("Add", (scores, mask), f"{result}_sum")
    if causal:
        scores = hidden(around.constant(f"triangle_{length}", np.tri(length or 0, dtype=bool)), scores, "causal")
    weights = around.before("Softmax", (scores,), f"{result}_weights", axis=-1)
    if boolean or causal:
        blind = around.before("IsNaN", (weights,), f"{result}_blind")
        weights = around.before("Where", (blind, number("zero", 0), weights), f"{result}_seen")
    attended = around.name(f"{result}_attended") if packed else result
    node = new_node("MatMul", [weights, value], attended, op.name)
    if packed:
        whole = around.constant(f"{result}_packed", np.array((0, 0, heads * (shapes[2][3] or 0))))
        turned_back = around.name(f"{result}_heads")
        around.after("Transpose", (attended,), turned_back, perm=(0, 2, 1, 3))
        around.after("Reshape", (turned_back, whole), result)
    return Replacement(SPELLED_ATTENTION, (op.id,), op.id, node, **around.parts(), findings=())


def _laid(around: Surroundings, op: Op, slot: int, shape: Shape, heads: int, *, packed: bool) -> str:
    """Return an operand with as many heads as the queries, apart from each other."""
    name, stem, fewer = str(op.node.input[slot]), f"{op.node.output[0]}_{'qkv'[slot]}", shape[1] or heads
    if packed:
        split = around.constant(f"{stem}_split", np.array((0, 0, fewer, shape[3])))
        apart = around.before("Reshape", (name, split), f"{stem}_apart")
        name = around.before("Transpose", (apart,), f"{stem}_heads", perm=(0, 2, 1, 3))
    if fewer == heads:
        return name
    alone = around.before("Unsqueeze", (name, around.constant(f"{stem}_axis", np.array([2]))), f"{stem}_alone")
    groups = around.constant(f"{stem}_groups", np.array((1, 1, heads // fewer, 1, 1)))
    whole = around.constant(f"{stem}_shape", np.array((0, heads, -1, shape[3])))
    return around.before(
        "Reshape", (around.before("Expand", (alone, groups), f"{stem}_wide"), whole), f"{stem}_repeated"
    )
