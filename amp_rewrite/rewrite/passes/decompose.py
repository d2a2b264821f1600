"""Decomposition of ops without a good kernel: CastLike, group norms, convolutions of patches, products, attention."""

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
from amp_rewrite.rewrite.builder import NewNodes, new_node
from amp_rewrite.rewrite.equivalence import Trial, disagreement, trial_shape
from amp_rewrite.rewrite.replacement import (
    DECOMPOSED_ATTENTION,
    GROUP_NORM,
    Context,
    Outcome,
    Replacement,
    as_outcome,
    only_float32,
)


def replace_cast_like(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each CastLike with the equivalent Cast.

    Common runtimes do not have a kernel for CastLike, and run this Cast instead.
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


def decompose_group_norms(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each GroupNormalization with an InstanceNormalization between two Reshapes. O(ops).

    PyTorch exports this form below opset 21. Scale and bias must be constants with one number per channel. onnxruntime
    does not have a CUDA kernel for GroupNormalization, and expands it into some 25 nodes with Casts in between.
    """
    for op in view.of_kinds(("GroupNormalization",)):
        if only_float32(view, (op.id,)):
            yield as_outcome(GROUP_NORM, op.id, _group_norm(view, op, context))


def _group_norm(view: View, op: Op, context: Context) -> Replacement | str:
    source, *affine = op.operands
    shape, arrays = context.shape(view, source), [view.array(value) for value in affine]
    numbers = [array for array in arrays if array is not None]
    groups = int_attribute(op.node, "num_groups", 0)
    if shape is None or len(shape) < 3 or len(numbers) != 2:
        return "its rank is not known, or its scale or bias is not constant"
    channels = numbers[0].size
    if groups < 1 or channels % groups or numbers[1].size != channels or shape[1] not in (None, channels):
        return "it does not have a scale and a bias for each channel"
    (result,), (x, *_), new = op.node.output, op.node.input, NewNodes(view, op)

    def stored(part: str, values: object, dtype: type = np.float32) -> str:
        return new.constant(f"{result}_{part}", np.array(values, dtype))

    grouped = new.before("Reshape", (x, stored("groups", (0, groups, -1), np.int64)), f"{result}_grouped")
    dims = (0, channels, *shape[2:])
    if dims.count(None) > 1:
        full_shape = new.before("Shape", (x,), f"{result}_shape")
    else:
        full_shape = stored("shape", [-1 if dim is None else dim for dim in dims], np.int64)
    normal, ungrouped, scaled = (new.name(f"{result}_{part}") for part in ("normal", "apart", "scaled"))
    inputs = [grouped, stored("ones", np.ones(groups)), stored("zeros", np.zeros(groups))]
    epsilon = float_attribute(op.node, "epsilon", 1e-5)
    node = new_node("InstanceNormalization", inputs, normal, op.name, epsilon=epsilon)
    # not named NAME_scale, which onnxruntime's quantizers would take for the scale of NAME
    scale, bias = (array.reshape(channels, *[1] * (len(shape) - 2)) for array in numbers)
    new.after("Reshape", (normal, full_shape), ungrouped)
    new.after("Mul", (ungrouped, stored("gamma", scale)), scaled)
    new.after("Add", (scaled, stored("bias", bias)), result)
    fusion = Replacement(GROUP_NORM, (op.id,), op.id, node, **new.parts())
    feed = {x: np.random.default_rng(0).standard_normal((2, channels, *trial_shape(len(shape) - 2)))}
    return disagreement(view, fusion, [Trial(feed, {full_shape: np.array(feed[x].shape)})]) or fusion


# -- convolutions of patches -----------------------------------------------------------------------

PATCHES = "patches"


def decompose_patch_convs(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each Conv over separate patches with a product, if its result becomes tokens by features. O(Convs).

    CUDA has no fast convolution kernel for the few channels of an image.
    """
    for op in view.of_kinds(("Conv",)):
        flat = only_reader(view, op.outputs[0], "Reshape", "Flatten")
        transpose = only_reader(view, flat.outputs[0], "Transpose") if flat is not None else None
        if flat is None or transpose is None or ints_attribute(transpose.node, "perm") != (0, 2, 1):
            continue
        if only_float32(view, (op.id,)) and _covers_separate_patches(view, op):
            yield as_outcome(PATCHES, transpose.id, _patches(view, op, flat, transpose, context))


def _covers_separate_patches(view: View, op: Op) -> bool:
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


def _patches(view: View, op: Op, flat: Op, transpose: Op, context: Context) -> Replacement | str:
    weight, shape = view.array(op.inputs[1]), context.shape(view, op.inputs[0])
    assert weight is not None
    features, channels, height, width = weight.shape
    if shape is None or not shape[2] or not shape[3] or shape[2] % height or shape[3] % width:
        return "its patches are not known to cover the image"
    rows, columns = shape[2] // height, shape[3] // width
    if context.shape(view, flat.outputs[0]) != (shape[0], features, rows * columns):
        return "the layout of its result is not known to be tokens by features"
    (result,), new, depth = transpose.node.output, NewNodes(view, transpose), channels * height * width
    shapes = {"grid": (-1, channels, rows, height, columns, width), "rows": (-1, rows * columns, depth)}
    names = {name: new.constant(f"{result}_{name}_shape", np.array(dims)) for name, dims in shapes.items()}
    product = new.constant(f"{op.node.input[1]}_product", np.ascontiguousarray(weight.reshape(features, -1).T))
    grid = new.before("Reshape", (op.node.input[0], names["grid"]), f"{result}_grid")
    cells = new.before("Transpose", (grid,), f"{result}_cells", perm=(0, 2, 4, 1, 3, 5))
    tokens = new.before("Reshape", (cells, names["rows"]), f"{result}_patches")
    if len(op.inputs) > 2:
        bias = op.node.input[2]
        node = new_node("Add", [new.before("MatMul", (tokens, product), f"{result}_product"), bias], result, op.name)
    else:
        node = new_node("MatMul", [tokens, product], result, op.name)
    ops = (op.id, flat.id, transpose.id)
    rng, kernel = np.random.default_rng(0), (3, channels, height, width)
    feed = {op.node.input[0]: rng.standard_normal((2, channels, 2 * height, 3 * width))}
    feed[op.node.input[1]] = rng.standard_normal(kernel)
    feed.update({name: rng.standard_normal(kernel[:1]) for name in op.node.input[2:3]})
    feed.update({name: np.array((2, kernel[0], 6)) for name in flat.node.input[1:2]})
    small_shapes = {"grid": np.array((-1, channels, 2, height, 3, width)), "rows": np.array((-1, 6, depth))}
    after = {names[name]: array for name, array in small_shapes.items()}
    after[product] = feed[op.node.input[1]].reshape(kernel[0], -1).T
    fusion = Replacement(PATCHES, ops, transpose.id, node, **new.parts())
    return disagreement(view, fusion, [Trial(feed, after)]) or fusion


# -- unaligned products ----------------------------------------------------------------------------

ALIGNED = "aligned_product"
_FAST_MULTIPLE, _PADDED_MULTIPLE = 8, 64  # numbers of columns: for fast kernels, and after padding


def align_products(view: View, context: Context) -> Iterator[Outcome]:
    """Pad the columns of large constant weights to a multiple of 64, and slice the product to the original columns.

    Applies if the number of columns is not a multiple of 8, as in many vocabularies: CUDA's fast kernels need rows that
    start at a multiple of 16 bytes. The runtime appends the zeros when it loads the model, so the file does not grow,
    and an embedding table that shares the weights is preserved. O(MatMuls).
    """
    for op in view.of_kinds(("MatMul",)):
        transpose = view.producer(op.inputs[1], "Transpose")
        weight = view.constant(op.inputs[1] if transpose is None else transpose.inputs[0])
        dims = () if weight is None else tuple(weight.dims) if transpose is None else tuple(reversed(weight.dims))
        two_axes = transpose is None or ints_attribute(transpose.node, "perm") in ((), (1, 0))
        if len(dims) != 2 or not two_axes or dims[1] % _FAST_MULTIPLE == 0 or math.prod(dims) < LARGE_WEIGHT:
            continue
        if view.opset >= FIRST_AXES_INPUT and only_float32(view, (op.id,)):
            yield as_outcome(ALIGNED, op.id, _aligned(view, op, *dims))


def _aligned(view: View, op: Op, rows: int, columns: int) -> Replacement | str:
    (x, weight), (result,), new = op.node.input, op.node.output, NewNodes(view, op)
    added = -columns % _PADDED_MULTIPLE
    zeros = new.constant(f"zeros_{rows}_{added}", np.zeros((rows, added), np.float32))
    ends = [new.constant(f"{end}_column_{n}", np.array([n])) for end, n in (("first", 0), ("last", columns))]
    axis = new.constant("last_axis", np.array([-1]))
    padded = new.before("Concat", (weight, zeros), f"{weight}_wide", axis=1)
    node = new_node("MatMul", [x, padded], new.name(f"{result}_wide"), op.name)
    new.after("Slice", (node.output[0], *ends, axis), result)
    rng = np.random.default_rng(0)
    feed = {x: rng.standard_normal((2, 3, 4)), weight: rng.standard_normal((4, 5))}
    note = f"{columns} columns, padded with {added} columns of zeros to align rows; a Slice removes them"
    findings = (Finding("fused", op.name, note),)
    fusion = Replacement(ALIGNED, (op.id,), op.id, node, **new.parts(), findings=findings)
    after = {zeros: np.zeros((4, 3)), ends[1]: np.array([5])}
    return disagreement(view, fusion, [Trial(feed, after)]) or fusion


# -- attention -------------------------------------------------------------------------------------


def decompose_attentions(view: View, context: Context, among: Collection[OpId] | None = None) -> Iterator[Replacement]:
    """Decompose each Attention without caches, a softcap, or scores as an output. O(ops).

    `among`: the only ops to decompose; None for all.
    """
    for op in view.of_kinds(("Attention",)):
        simple = all(v is None for v in (*op.inputs[4:], *op.outputs[1:])) and len(op.operands) >= 3
        capped = float_attribute(op.node, "softcap", 0.0) != 0
        recast = int_attribute(op.node, "softmax_precision", TensorProto.FLOAT) != TensorProto.FLOAT
        chosen = among is None or op.id in among
        if chosen and simple and not capped and not recast and only_float32(view, (op.id,)):
            shapes = [context.shape(view, value) or () for value in op.inputs[:4]]
            packed = all(len(shape) == 3 for shape in shapes[:3])
            shapes = _with_separate_heads(op, shapes) if packed else shapes
            if _sizes_known(op, shapes):
                yield _decomposed_attention(view, op, shapes, packed=packed)


def _with_separate_heads(op: Op, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of packed queries, keys and values after their heads are split."""
    counts = [int_attribute(op.node, f"{name}_num_heads", 0) for name in ("q", "kv", "kv")]
    pairs = zip(counts, shapes[:3], strict=True)
    separate = ((batch, heads, length, (width or 0) // max(heads, 1)) for heads, (batch, length, width) in pairs)
    return [*separate, *shapes[3:]]


def _sizes_known(op: Op, shapes: Sequence[Shape]) -> bool:
    queries, keys, values, *mask = shapes
    if {len(queries), len(keys), len(values)} != {4} or (mask and op.inputs[3] is not None and len(mask[0]) < 2):
        return False
    square = queries[2] is not None and queries[2] == keys[2]
    sizes = all((queries[1], queries[3], keys[1], keys[3], values[1], values[3]))
    return sizes and (queries[1] or 0) % (keys[1] or 1) == 0 and (square or not int_attribute(op.node, "is_causal", 0))


def _decomposed_attention(view: View, op: Op, shapes: Sequence[Shape], *, packed: bool) -> Replacement:
    """Return the ops of an Attention. According to its errata, a row without visible keys is 0.

    `shapes` have separate heads. `packed`: operands and result are tokens by features.
    """
    new, (result,), (_, heads, length, width) = NewNodes(view, op), op.node.output, shapes[0]
    assert heads is not None and width is not None

    def number(suffix: str, value: float) -> str:
        return new.constant(f"{result}_{suffix}", np.array(value, np.float32))

    def hidden(mask: str, scores: str, suffix: str) -> str:
        return new.before("Where", (mask, scores, number("least", -np.inf)), f"{result}_{suffix}")

    query, key, value = (_operand(new, op, slot, shapes[slot], heads, packed=packed) for slot in range(3))
    transposed = new.before("Transpose", (key,), f"{result}_turned", perm=(0, 1, 3, 2))
    product = new.before("MatMul", (query, transposed), f"{result}_scores")
    scale = number("scale", float_attribute(op.node, "scale", 1 / math.sqrt(width)))
    scores, boolean = new.before("Mul", (product, scale), f"{result}_scaled"), False
    causal = int_attribute(op.node, "is_causal", 0)
    if len(op.inputs) > 3 and op.inputs[3] is not None:
        mask, boolean = op.node.input[3], view.dtype(op.inputs[3]) is DType.BOOL
        if len(shapes[3]) < 4:
            axes = new.constant(f"{result}_axes", np.arange(4 - len(shapes[3])))
            mask = new.before("Unsqueeze", (mask, axes), f"{result}_mask")
        scores = hidden(mask, scores, "masked") if boolean else new.before("Add", (scores, mask), f"{result}_sum")
    if causal:
        scores = hidden(new.constant(f"triangle_{length}", np.tri(length or 0, dtype=bool)), scores, "causal")
    weights = new.before("Softmax", (scores,), f"{result}_weights", axis=-1)
    if boolean or causal:
        invisible = new.before("IsNaN", (weights,), f"{result}_blind")
        weights = new.before("Where", (invisible, number("zero", 0), weights), f"{result}_seen")
    attended = new.name(f"{result}_attended") if packed else result
    node = new_node("MatMul", [weights, value], attended, op.name)
    if packed:
        packed_shape = new.constant(f"{result}_packed", np.array((0, 0, heads * (shapes[2][3] or 0))))
        merged_heads = new.name(f"{result}_heads")
        new.after("Transpose", (attended,), merged_heads, perm=(0, 2, 1, 3))
        new.after("Reshape", (merged_heads, packed_shape), result)
    return Replacement(DECOMPOSED_ATTENTION, (op.id,), op.id, node, **new.parts(), findings=())


def _operand(new: NewNodes, op: Op, slot: int, shape: Shape, heads: int, *, packed: bool) -> str:
    """Return an operand with separate heads, repeated to the number of query heads."""
    name, stem, own_heads = str(op.node.input[slot]), f"{op.node.output[0]}_{'qkv'[slot]}", shape[1] or heads
    if packed:
        split_shape = new.constant(f"{stem}_split", np.array((0, 0, own_heads, shape[3])))
        separate = new.before("Reshape", (name, split_shape), f"{stem}_apart")
        name = new.before("Transpose", (separate,), f"{stem}_heads", perm=(0, 2, 1, 3))
    if own_heads == heads:
        return name
    grouped = new.before("Unsqueeze", (name, new.constant(f"{stem}_axis", np.array([2]))), f"{stem}_alone")
    groups = new.constant(f"{stem}_groups", np.array((1, 1, heads // own_heads, 1, 1)))
    full = new.constant(f"{stem}_shape", np.array((0, heads, -1, shape[3])))
    expanded = new.before("Expand", (grouped, groups), f"{stem}_wide")
    return new.before("Reshape", (expanded, full), f"{stem}_repeated")
