"""The table of ops, with facts about each operator beyond its schema.

It is used for painting, facts and needs, placement, shape inference and range shifting. A new operator needs one row
here and one entry in `lists/`. An op without a row does not belong to any class; `op_classes` has the sets of ops by
trait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any

INF = math.inf
ALL = range(1 << 16)
"""All inputs."""


class Way(Enum):
    """An op's way of computing its result from its inputs.

    PRODUCT ops count as heavy in placement. PRODUCT and SCALE ops stay in float32 if the low type loses digits of their
    constants.
    """

    COPY = "moves or repeats them"
    PICK = "takes some of them, or interpolates between them"
    SELECT = "takes one of several, chosen by a comparison"
    SUM = "adds and subtracts, element by element"
    SCALE = "multiplies and divides, element by element"
    FUNCTION = "applies a function to each"
    REDUCE = "sums, averages, transforms or compares along axes"
    NORM = "relates them to others of a row"
    PRODUCT = "sums many products, as layers and attention do"
    TEST = "returns indices, Boolean values or integers"
    SOURCE = "returns numbers of its own, or of shapes"
    UNKNOWN = "is not known"


class Need(Enum):
    """Information that a reader needs from a value, and that a low type may lose."""

    EXACT = "the exact number"
    SIDE = "the side of another number that it is on"
    ORDER = "the order of several numbers"
    TINY = "the digits of small numbers"
    RATIO = "the digits of small numbers, and of the distance from 1"
    RANGE = "numbers larger than its own result"
    LONG = "all terms of a long sum"
    DIGITS = "more digits than the low type has at this magnitude"
    PLACE = "the digits of a position or level"
    PATH = "the small changes that add up in a state"
    FACTOR = "the distance of a factor from 1"
    SLOPE = "the difference that a small step makes"


class Trait(Flag):
    """Classes of operators, described in `op_classes`."""

    NONE = 0
    CARRIES = auto()
    EXACT = auto()
    SAME_SHAPE = auto()
    BROADCASTS = auto()
    RELABELS = auto()
    MOVES = auto()
    SCATTERS = auto()
    CASTS = auto()
    ELEMENTLESS = auto()
    RANDOM = auto()
    GENERATES = auto()
    LABEL_LOSS = auto()
    QUANTIZES = auto()
    DEQUANTIZES = auto()
    INTEGER = auto()
    SUMS = auto()
    SCALES = auto()
    LONG_SUM = auto()
    GROWS = auto()
    MAGNIFIES = auto()
    COMPARES = auto()
    SOFTMAX = auto()
    MULTIPLIES = auto()
    LOW_ONLY = auto()
    TABLE = auto()
    LAYER = auto()
    RECURRENT = auto()


_EVERY = frozenset(Need)
_SUMMED = _EVERY - {Need.FACTOR}
_ALWAYS = frozenset((Need.SLOPE,))
_MAGNITUDE = frozenset((Need.EXACT, Need.TINY, Need.RATIO, Need.RANGE, Need.DIGITS, Need.PLACE))
_ROOT = frozenset((Need.EXACT, Need.TINY, Need.RATIO, Need.DIGITS))
PASSED: Mapping[Way, frozenset[Need]] = {
    **dict.fromkeys((Way.COPY, Way.PICK, Way.SELECT), _EVERY),
    **dict.fromkeys((Way.SUM, Way.SCALE, Way.REDUCE), _SUMMED),
    **dict.fromkeys((Way.PRODUCT, Way.NORM), _ALWAYS),
    Way.FUNCTION: _ALWAYS | {Need.EXACT},
}
"""The needs that an op passes from its result to its inputs, by its way. A new member of Need is in `_EVERY` and
`_SUMMED`; functions, products and norms pass it on only if it is named here or in their rows."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """The facts about an operator.

    Args:
        way: the way of computing the result from the inputs.
        traits: the classes of the operator.
        slots: the inputs with numbers that reach the result.
        shapes: inputs with a shape, an axis, a size, a scale, a count or a position.
        needs: needs of inputs, independent of the readers of the result.
        passes: needs of the result passed on to `slots`; by default the needs of the way.
        low, high: bounds of the result for any input.
        small: the result may be far smaller than the inputs.
        near_one: different inputs may give results that differ only in their distance from 1.
        whole: the result consists of whole numbers.
        bends: the result is not linear in the inputs, unlike for other ops of this way.
        keeps: facts about the input that also hold for the result of a function.
        states: the inputs that are states, each with the output of its next state.
        kept: a type variable that stays float32, since kernels use float32 for it anyway.
    """

    way: Way
    traits: Trait = Trait.NONE
    slots: Sequence[int] = (0,)
    shapes: Sequence[int] = ()
    needs: Mapping[int, Need] = field(default_factory=dict)
    passes: frozenset[Need] | None = None
    low: float = -INF
    high: float = INF
    small: bool = False
    near_one: bool = False
    whole: bool = False
    bends: bool = False
    keeps: tuple[str, ...] = ()
    states: Sequence[tuple[int, int]] = ()
    kept: str = ""

    @property
    def passed(self) -> frozenset[Need]:
        """The needs of the result passed on to the inputs in `slots`."""
        return PASSED.get(self.way, frozenset()) if self.passes is None else self.passes | _ALWAYS


def _rows(ops: str, *columns: Any, **more: Any) -> dict[str, OpRow]:
    return dict.fromkeys(ops.split(), OpRow(*columns, **more))


def _contrib(ops: str, *columns: Any, **more: Any) -> dict[str, OpRow]:
    return dict.fromkeys([f"com.microsoft::{op}" for op in ops.split()], OpRow(*columns, **more))


UNKNOWN = OpRow(Way.UNKNOWN, slots=())
"""The row for ops missing from the table."""
T = Trait
_COPIED = T.CARRIES | T.EXACT
_MAPPED = T.CARRIES | T.SAME_SHAPE
_LEVELS = ("low", "high", "whole", "levels")
OPS: Mapping[str, OpRow] = {
    **_rows("Concat SequenceConstruct", Way.COPY, _COPIED, slots=ALL),
    **_rows("Cast CastLike", Way.COPY, _MAPPED | T.CASTS),
    **_rows("Compress ConcatFromSequence DepthToSpace GatherElements GatherND SpaceToDepth", Way.COPY, _COPIED),
    **_rows("Gather com.microsoft::TorchEmbedding", Way.COPY, _COPIED | T.TABLE),
    **_rows("Transpose", Way.COPY, _COPIED | T.MOVES),
    **_rows("Flatten", Way.COPY, _COPIED | T.RELABELS | T.MOVES),
    **_rows("Identity", Way.COPY, _COPIED | T.SAME_SHAPE | T.RELABELS | T.MOVES),
    **_contrib("GatherND RemovePadding RestorePadding UnfoldTensor", Way.COPY, _COPIED),
    **_contrib("BitmaskDropout", Way.COPY, T.SAME_SHAPE, kept="T1"),
    **_rows("Dropout", Way.COPY, _MAPPED, kept="T1"),
    **_rows(
        "CenterCropPad SequenceAt SequenceErase Split SplitToSequence ReverseSequence", Way.COPY, _COPIED, shapes=(1,)
    ),
    **_rows("Expand Tile", Way.COPY, _COPIED | T.MOVES, shapes=(1,)),
    **_rows("Reshape Squeeze Unsqueeze", Way.COPY, _COPIED | T.RELABELS | T.MOVES, shapes=(1,)),
    **_rows("Trilu com.microsoft::Trilu", Way.COPY, _COPIED | T.SAME_SHAPE, shapes=(1,)),
    **_rows("Slice", Way.COPY, _COPIED, shapes=(1, 2, 3, 4)),
    **_rows("SequenceInsert", Way.COPY, _COPIED, slots=(0, 1), shapes=(2,)),
    **_rows("Scatter", Way.COPY, T.CARRIES | T.SCATTERS, slots=(0, 2)),
    **_rows("ScatterElements ScatterND", Way.COPY, _MAPPED | T.SCATTERS, slots=(0, 2)),
    **_rows("Pad", Way.COPY, T.CARRIES, slots=(0, 2), shapes=(1, 3)),
    **_contrib("Pad", Way.COPY, T.CARRIES, slots=(0, 2), shapes=(1,)),
    **_rows("If Scan SequenceMap", Way.COPY, T.EXACT, slots=()),
    **_rows("Loop", Way.COPY, T.EXACT, slots=(), shapes=(0,)),
    **_rows("GridSample RoiAlign com.microsoft::GridSample", Way.PICK, needs={1: Need.PLACE}),
    **_rows("Unique com.microsoft::ExpandDims", Way.PICK, T.EXACT),
    **_rows("GlobalMaxPool MaxPool", Way.PICK, bends=True),
    **_rows("AffineGrid Upsample", Way.PICK, shapes=(1,)),
    **_rows("TopK", Way.PICK, T.EXACT, shapes=(1,), needs={0: Need.ORDER}),
    **_rows("Col2Im", Way.PICK, shapes=(1, 2)),
    **_contrib("RelativePositionBias", Way.PICK, T.TABLE, shapes=(1, 2)),
    **_rows("Resize", Way.PICK, shapes=(1, 2, 3), kept="T2"),
    **_rows("MaxUnpool", Way.PICK, shapes=(2,)),
    **_rows("TensorScatter", Way.PICK, T.EXACT, shapes=(2,)),
    **_contrib("CropAndResize", Way.PICK, shapes=(3,), needs={1: Need.PLACE}),
    **_rows("Max Min", Way.SELECT, _COPIED | T.BROADCASTS, slots=ALL),
    **_rows("Relu", Way.SELECT, _COPIED | T.SAME_SHAPE, low=0.0),
    **_rows("ThresholdedRelu", Way.SELECT, T.EXACT | T.SAME_SHAPE),
    **_rows("Clip", Way.SELECT, _MAPPED, slots=(0, 1, 2)),
    **_rows("Where", Way.SELECT, _COPIED | T.BROADCASTS, slots=(1, 2)),
    **_rows("Add Sub Sum", Way.SUM, T.CARRIES | T.BROADCASTS | T.SUMS, slots=ALL),
    **_rows("Mean", Way.SUM, T.CARRIES, slots=ALL),
    **_contrib("BiasAdd", Way.SUM, T.SAME_SHAPE, slots=(0, 1, 2)),
    **_contrib("BiasDropout BitmaskBiasDropout", Way.SUM, T.SAME_SHAPE, slots=(0, 1, 2), kept="T1"),
    **_rows("Neg", Way.SUM, _COPIED | T.SAME_SHAPE),
    **_rows("Div", Way.SCALE, T.CARRIES | T.BROADCASTS | T.SCALES, slots=ALL, needs={1: Need.TINY}),
    **_rows("Mul", Way.SCALE, T.CARRIES | T.BROADCASTS | T.SCALES, slots=ALL),
    **_rows("DequantizeLinear com.microsoft::DequantizeLinear", Way.SCALE, T.DEQUANTIZES, slots=(0, 1)),
    **_rows("Mod", Way.FUNCTION, T.CARRIES | T.BROADCASTS, slots=ALL, keeps=(*_LEVELS, "states", "moved")),
    **_rows("Pow", Way.FUNCTION, T.CARRIES | T.BROADCASTS | T.GROWS, slots=ALL, passes=_MAGNITUDE, keeps=("near_one",)),
    **_rows("Acos Acosh Asin", Way.FUNCTION, needs={0: Need.DIGITS}, passes=_ROOT),
    **_rows("Atanh", Way.FUNCTION, needs={0: Need.RATIO}, passes=_ROOT),
    **_rows("Asinh Atan Celu Mish Swish com.microsoft::ScaledSiLU", Way.FUNCTION),
    **_rows("Cosh", Way.FUNCTION, T.SAME_SHAPE | T.GROWS, low=1.0),
    **_rows("Sinh", Way.FUNCTION, T.SAME_SHAPE | T.GROWS, passes=_ROOT, keeps=("small",)),
    **_rows("Tan", Way.FUNCTION, T.SAME_SHAPE | T.GROWS, needs={0: Need.PLACE}, passes=frozenset()),
    **_rows("Shrink", Way.FUNCTION, T.SAME_SHAPE, passes=_MAGNITUDE, keeps=("small",)),
    **_rows("Sigmoid", Way.FUNCTION, _MAPPED, low=0.0, high=1.0, small=True, near_one=True),
    **_rows("Tanh", Way.FUNCTION, _MAPPED, low=-1.0, high=1.0, near_one=True),
    **_rows("Cos Sin", Way.FUNCTION, T.SAME_SHAPE, needs={0: Need.PLACE}, passes=frozenset(), low=-1.0, high=1.0),
    **_rows("Erf Softsign", Way.FUNCTION, T.SAME_SHAPE, low=-1.0, high=1.0),
    **_rows("HardSigmoid", Way.FUNCTION, T.SAME_SHAPE, passes=frozenset(), low=0.0, high=1.0),
    **_rows("PRelu", Way.FUNCTION, T.BROADCASTS),
    **_rows(
        "Abs",
        Way.FUNCTION,
        _COPIED | T.SAME_SHAPE,
        passes=_MAGNITUDE | {Need.ORDER},
        low=0.0,
        keeps=("small", "whole", "terms", "placed"),
    ),
    **_rows("Ceil Floor Round", Way.FUNCTION, _COPIED | T.SAME_SHAPE, needs={0: Need.PLACE}, whole=True, keeps=_LEVELS),
    **_rows(
        "Sign",
        Way.FUNCTION,
        _COPIED | T.SAME_SHAPE,
        needs={0: Need.SIDE},
        passes=frozenset(),
        low=-1.0,
        high=1.0,
        whole=True,
        keeps=_LEVELS,
    ),
    **_rows("Reciprocal", Way.FUNCTION, _MAPPED | T.MAGNIFIES, needs={0: Need.TINY}, passes=_ROOT, keeps=("near_one",)),
    **_rows(
        "Sqrt",
        Way.FUNCTION,
        _MAPPED | T.MAGNIFIES,
        needs={0: Need.TINY},
        passes=_ROOT,
        keeps=("small", "squares", "near_one"),
    ),
    **_rows("Log", Way.FUNCTION, _MAPPED | T.MAGNIFIES, needs={0: Need.RATIO}, passes=_ROOT),
    **_rows("Exp", Way.FUNCTION, _MAPPED | T.GROWS, low=0.0, small=True, keeps=("peak",)),
    **_rows("Softplus", Way.FUNCTION, _MAPPED, passes=_ROOT, low=0.0, small=True),
    **_rows("Elu Gelu HardSwish LeakyRelu Selu", Way.FUNCTION, T.SAME_SHAPE),
    **_contrib("Gelu QuickGelu", Way.FUNCTION, T.SAME_SHAPE),
    **_contrib("BiasGelu FastGelu", Way.FUNCTION, T.SAME_SHAPE, slots=(0, 1)),
    **_rows("SwiGLU com.microsoft::BiasSplitGelu", Way.FUNCTION, slots=(0, 1)),
    **_contrib("GatedRelativePositionBias", Way.FUNCTION, slots=(0, 1, 3, 4)),
    **_contrib("LinearAttentionGate", Way.FUNCTION, slots=(0, 1, 2, 3), near_one=True),
    **_contrib("MRotaryEmbedding", Way.FUNCTION, T.SAME_SHAPE, slots=ALL, passes=_SUMMED),
    **_rows(
        "RotaryEmbedding", Way.FUNCTION, T.SAME_SHAPE, slots=ALL, needs={1: Need.RANGE, 2: Need.RANGE}, passes=_SUMMED
    ),
    **_contrib(
        "RotaryEmbedding", Way.FUNCTION, T.SAME_SHAPE, slots=ALL, needs={2: Need.RANGE, 3: Need.RANGE}, passes=_SUMMED
    ),
    **_contrib(
        "ComplexMul ComplexMulConj GatedAdd HyperConnectionPostMix HyperConnectionPreMix",
        Way.FUNCTION,
        slots=ALL,
        passes=_SUMMED,
    ),
    **_rows("CumProd Det GlobalLpPool LpPool", Way.REDUCE, T.GROWS, bends=True),
    **_rows("DFT", Way.REDUCE, shapes=(1, 2)),
    **_rows("STFT", Way.REDUCE, shapes=(1, 3)),
    **_rows("AveragePool GlobalAveragePool", Way.REDUCE),
    **_rows(
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare",
        Way.REDUCE,
        T.LONG_SUM | T.GROWS,
        shapes=(1,),
        bends=True,
    ),
    **_rows("ReduceMax ReduceMin", Way.REDUCE, T.CARRIES, shapes=(1,), bends=True),
    **_rows("ReduceProd", Way.REDUCE, T.CARRIES | T.GROWS, shapes=(1,), needs={0: Need.FACTOR}, bends=True),
    **_rows("ReduceMean", Way.REDUCE, T.CARRIES, shapes=(1,)),
    **_rows("ReduceSum", Way.REDUCE, T.CARRIES | T.LONG_SUM | T.GROWS, shapes=(1,)),
    **_rows("CumSum", Way.REDUCE, _MAPPED | T.LONG_SUM | T.GROWS, shapes=(1,)),
    **_rows("LpNormalization MeanVarianceNormalization", Way.NORM),
    **_rows("SimplifiedLayerNormalization", Way.NORM, kept="U"),
    **_contrib("BranchwiseRMSNorm EngramGate GatedRMSNorm", Way.NORM),
    **_contrib("GroupNorm", Way.NORM, kept="M"),
    **_contrib("SkipGroupNorm", Way.NORM, states=((0, 1), (3, 1)), kept="M"),
    **_contrib("SkipLayerNormalization SkipSimplifiedLayerNormalization", Way.NORM, states=((0, 3), (1, 3)), kept="U"),
    **_contrib("EmbedLayerNormalization", Way.NORM, slots=(), kept="U"),
    **_rows("Softmax", Way.NORM, T.SAME_SHAPE | T.SOFTMAX, low=0.0, high=1.0, small=True),
    **_rows("BatchNormalization", Way.NORM, T.SAME_SHAPE, slots=(0, 1, 2, 3, 4)),
    **_rows("GroupNormalization InstanceNormalization RMSNormalization", Way.NORM, T.SAME_SHAPE),
    **_rows("LayerNormalization", Way.NORM, T.SAME_SHAPE, kept="U"),
    **_rows("LogSoftmax", Way.NORM, T.SAME_SHAPE | T.SOFTMAX, high=0.0),
    **_contrib("BiasSoftmax", Way.NORM, T.SOFTMAX),
    **_rows("LinearAttention com.microsoft::LinearAttention", Way.PRODUCT, slots=(0, 1, 2), states=((3, 1),)),
    **_rows("Attention CausalConvWithState DeformConv", Way.PRODUCT, slots=(0, 1, 2)),
    **_contrib(
        "Attention CausalConvWithState DecoderAttention DecoderMaskedMultiHeadAttention "
        "DecoderMaskedSelfAttention DynamicSparseAttention FusedConv FusedGemm FusedMatMulActivation GemmFastGelu "
        "GemmFloat8 LongformerAttention MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight MatMulBnb4 "
        "MatMulNBits MatMulNBitsMlp MatMulNBitsQkv MoE MultiHeadAttention NhwcConv NhwcFusedConv PackedAttention "
        "PackedMultiHeadAttention PackedSparseAttentionIndexer PagedAttention QAttention QMoE SparseAttention "
        "SparseAttentionIndexer SparsePagedAttention TransposeMatMul",
        Way.PRODUCT,
        slots=(0, 1, 2),
    ),
    **_contrib("GatedDeltaNet", Way.PRODUCT, slots=(0, 1, 2), states=((6, 1),)),
    **_contrib("VarlenCausalConvWithState", Way.PRODUCT, slots=(0, 1, 3)),
    **_rows("Conv ConvTranspose", Way.PRODUCT, T.LAYER, slots=(0, 1, 2)),
    **_rows("Gemm MatMul", Way.PRODUCT, T.MULTIPLIES | T.LAYER, slots=(0, 1, 2)),
    **_rows("Einsum", Way.PRODUCT, T.MULTIPLIES, slots=ALL),
    **_contrib("FusedMatMul", Way.PRODUCT, T.MULTIPLIES, slots=(0, 1, 2)),
    **_rows("GRU RNN", Way.PRODUCT, T.RECURRENT, slots=(0, 1, 2), states=((5, 1),)),
    **_rows("LSTM", Way.PRODUCT, T.RECURRENT, slots=(0, 1, 2), states=((5, 1), (6, 2))),
    **_rows("ConvInteger MatMulInteger QLinearConv QLinearMatMul", Way.PRODUCT, T.INTEGER, slots=(0, 1, 2)),
    **_contrib(
        "DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulInteger16 MatMulIntegerToFloat QGemm QLinearAdd "
        "QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul "
        "QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere",
        Way.PRODUCT,
        T.INTEGER,
        slots=(0, 1, 2),
    ),
    **_contrib(
        "GroupQueryAttention",
        Way.PRODUCT,
        T.LOW_ONLY,
        slots=(0, 1, 2),
        shapes=(5, 6),
        needs={7: Need.RANGE, 8: Need.RANGE},
    ),
    **_rows("ArgMax ArgMin", Way.TEST, needs={0: Need.ORDER}),
    **_rows("Hardmax", Way.TEST, T.EXACT, needs={0: Need.ORDER}, low=0.0, high=1.0, whole=True),
    **_rows("NonZero", Way.TEST, needs={0: Need.SIDE}),
    **_rows("SequenceLength", Way.TEST, slots=()),
    **_rows("And BitwiseAnd BitwiseOr Or Xor", Way.TEST, T.BROADCASTS, slots=ALL),
    **_rows(
        "Equal Greater GreaterOrEqual Less LessOrEqual",
        Way.TEST,
        T.BROADCASTS | T.COMPARES,
        slots=ALL,
        needs={0: Need.SIDE, 1: Need.SIDE},
    ),
    **_rows("QuantizeLinear com.microsoft::QuantizeLinear", Way.TEST, T.QUANTIZES),
    **_rows("IsInf IsNaN", Way.TEST, T.SAME_SHAPE, needs={0: Need.SIDE}),
    **_rows("Not", Way.TEST, T.SAME_SHAPE),
    **_rows("NonMaxSuppression", Way.TEST, slots=(0, 1), shapes=(2,), needs={0: Need.PLACE, 1: Need.ORDER}),
    **_rows("Shape Size", Way.SOURCE, T.ELEMENTLESS, slots=(), whole=True),
    **_rows("Constant", Way.SOURCE, T.EXACT, slots=()),
    **_rows("EyeLike", Way.SOURCE, T.EXACT | T.GENERATES, slots=(), low=0.0, high=1.0, whole=True),
    **_rows(
        "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
        Way.SOURCE,
        T.RANDOM,
        slots=(),
    ),
    **_rows("ConstantOfShape", Way.SOURCE, T.EXACT, slots=(), shapes=(0,)),
    **_rows("BlackmanWindow HammingWindow HannWindow", Way.SOURCE, T.GENERATES, slots=(), shapes=(0,)),
    **_rows("Range", Way.SOURCE, slots=(), shapes=(0, 1, 2), whole=True),
    **_rows("MelWeightMatrix", Way.SOURCE, T.GENERATES, slots=(), shapes=(0, 1, 2)),
    **_rows("OneHot", Way.SOURCE, T.EXACT, slots=(), shapes=(1,), low=0.0, high=1.0, whole=True),
    **_rows("Optional OptionalGetElement SequenceEmpty", Way.UNKNOWN, T.EXACT),
    **_rows("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", Way.UNKNOWN, T.LABEL_LOSS),
    **_contrib("ConvTransposeWithDynamicPads", Way.UNKNOWN, shapes=(2,)),
}
"""The rows by `Op.kind`."""


def row_of(kind: str) -> OpRow:
    return OPS.get(kind, UNKNOWN)
