"""The table of ops: facts about each operator beyond its schema.

Painting, facts and needs, placement, shapes and the shift of ranges read it. Teaching the pass a new operator is one
row here and one entry in `lists/`. An op without a row belongs to no class; `op_classes` has the sets of ops by trait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any

INF = math.inf
ALL = range(1 << 16)
"""All inputs."""


class Way(Enum):
    """The way from the numbers of an op's inputs to those of its result."""

    COPY = "moves or repeats them"
    PICK = "takes some of them, or means between them"
    SELECT = "takes one of several, chosen by a comparison"
    SUM = "adds and subtracts, element by element"
    SCALE = "multiplies and divides, element by element"
    FUNCTION = "applies a function to each"
    REDUCE = "sums, averages, transforms or compares along axes"
    NORM = "relates them to others of a row"
    PRODUCT = "sums many products, as layers and attention do"
    TEST = "gives indices, truth values or integers"
    SOURCE = "gives numbers of its own, or of shapes"
    UNKNOWN = "is not known"


class Need(Enum):
    """The demand of a reader on a value, beyond the low type."""

    EXACT = "the exact number"
    SIDE = "on which side of another number it is"
    ORDER = "which of several is the largest"
    TINY = "the digits of small numbers"
    RATIO = "the digits of small numbers, and of the distance from 1"
    RANGE = "numbers beyond its own result"
    LONG = "the whole of a long sum"
    DIGITS = "more digits than the type has at this magnitude"
    PLACE = "the digits of a position or level"
    PATH = "what adds up in a state"
    FACTOR = "the distance of a factor from 1"
    SLOPE = "the difference that a small step makes"


class Trait(Flag):
    """Classes of operators; `op_classes` describes each."""

    NONE = 0
    CARRIES = auto()
    EXACT = auto()
    SAME_SHAPE = auto()
    BROADCASTS = auto()
    RELABELS = auto()
    MOVES = auto()
    PERMUTES = auto()
    PICKS = auto()
    FILLS = auto()
    CASTS = auto()
    SEE_THROUGH = auto()
    ELEMENTLESS = auto()
    RANDOM = auto()
    GENERATES = auto()
    LABEL_LOSS = auto()
    QUANTIZES = auto()
    DEQUANTIZES = auto()
    INTEGER = auto()
    SUMS = auto()
    SCALES = auto()
    SQUARES = auto()
    LONG_SUM = auto()
    GROWS = auto()
    MAGNIFIES = auto()
    ROUNDS = auto()
    COMPARES = auto()
    PERIODIC = auto()
    IEEE = auto()
    POOLS = auto()
    SMALL = auto()
    SQUEEZES = auto()
    SOFTMAX = auto()
    MULTIPLIES = auto()
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
"""The needs of a result that the inputs have, too, by way."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """What the pass knows of an operator.

    Args:
        way: how numbers become those of the result.
        slots: the inputs whose numbers are in the result.
        traits: the classes that it belongs to.
        shapes: inputs that state a shape, an axis, a size, a scale, a count or a position.
        needs: needs of inputs, whoever reads the result.
        passes: needs of the result that `slots` have, too; by default those of the way.
        low, high: bounds of the result, whatever the inputs.
        small: results may be far smaller than the inputs.
        near_one: distant inputs differ only in how far the result is from 1.
        whole: results are whole numbers.
        bends: results are not linear in the inputs, as the way alone would say.
        keeps: facts of the input that hold for the result of a function, too.
        states: inputs that are states, each with the output that holds the next one.
    """

    way: Way
    slots: Sequence[int] = (0,)
    traits: Trait = Trait.NONE
    shapes: Sequence[int] = ()
    needs: Sequence[tuple[int, Need]] = ()
    passes: frozenset[Need] | None = None
    low: float = -INF
    high: float = INF
    small: bool = False
    near_one: bool = False
    whole: bool = False
    bends: bool = False
    keeps: tuple[str, ...] = ()
    states: Sequence[tuple[int, int]] = ()

    @property
    def passed(self) -> frozenset[Need]:
        """The needs of a result handed on to the inputs in `slots`."""
        return PASSED.get(self.way, frozenset()) if self.passes is None else self.passes | _ALWAYS


def _rows(ops: str, *columns: Any, **more: Any) -> dict[str, OpRow]:
    return dict.fromkeys(ops.split(), OpRow(*columns, **more))


UNKNOWN = OpRow(Way.UNKNOWN, ())
"""The row of an op without one."""
T = Trait
_COPIED = T.CARRIES | T.EXACT
_MAPPED = T.CARRIES | T.SAME_SHAPE
_ROTATES = (Way.FUNCTION, ALL, T.SAME_SHAPE)
_LEVELS = ("low", "high", "whole", "levels")
OPS: Mapping[str, OpRow] = {
    **_rows("Concat SequenceConstruct", Way.COPY, ALL, _COPIED),
    **_rows("CastLike", Way.COPY, (0,), _MAPPED | T.CASTS),
    **_rows("Cast", Way.COPY, (0,), _MAPPED | T.CASTS | T.SEE_THROUGH),
    **_rows("Compress ConcatFromSequence", Way.COPY, (0,), _COPIED),
    **_rows("Transpose", Way.COPY, (0,), _COPIED | T.MOVES | T.PERMUTES),
    **_rows("Flatten", Way.COPY, (0,), _COPIED | T.RELABELS | T.MOVES | T.PERMUTES),
    **_rows("Identity", Way.COPY, (0,), _COPIED | T.SAME_SHAPE | T.RELABELS | T.MOVES | T.PERMUTES | T.SEE_THROUGH),
    **_rows("DepthToSpace SpaceToDepth", Way.COPY, (0,), _COPIED | T.PERMUTES),
    **_rows("Gather GatherElements GatherND", Way.COPY, (0,), _COPIED | T.PICKS),
    **_rows(
        "com.microsoft::GatherND com.microsoft::RemovePadding com.microsoft::RestorePadding "
        "com.microsoft::TorchEmbedding com.microsoft::UnfoldTensor",
        Way.COPY,
        (0,),
        _COPIED,
    ),
    **_rows("com.microsoft::BitmaskDropout", Way.COPY, (0,), T.SAME_SHAPE),
    **_rows("Dropout", Way.COPY, (0,), _MAPPED | T.SEE_THROUGH),
    **_rows("CenterCropPad SequenceAt SequenceErase Split SplitToSequence", Way.COPY, (0,), _COPIED, shapes=(1,)),
    **_rows("Expand Tile", Way.COPY, (0,), _COPIED | T.MOVES, shapes=(1,)),
    **_rows("Reshape Squeeze Unsqueeze", Way.COPY, (0,), _COPIED | T.RELABELS | T.MOVES | T.PERMUTES, shapes=(1,)),
    **_rows("ReverseSequence", Way.COPY, (0,), _COPIED | T.PERMUTES, shapes=(1,)),
    **_rows("Trilu com.microsoft::Trilu", Way.COPY, (0,), _COPIED | T.SAME_SHAPE, shapes=(1,)),
    **_rows("Slice", Way.COPY, (0,), _COPIED | T.PICKS, shapes=(1, 2, 3, 4)),
    **_rows("SequenceInsert", Way.COPY, (0, 1), _COPIED, shapes=(2,)),
    **_rows("Scatter", Way.COPY, (0, 2), T.CARRIES | T.FILLS),
    **_rows("ScatterElements ScatterND", Way.COPY, (0, 2), _MAPPED | T.FILLS),
    **_rows("Pad", Way.COPY, (0, 2), T.CARRIES | T.FILLS, shapes=(1, 3)),
    **_rows("com.microsoft::Pad", Way.COPY, (0, 2), T.CARRIES, shapes=(1,)),
    **_rows("If Scan SequenceMap", Way.COPY, (), T.EXACT),
    **_rows("Loop", Way.COPY, (), T.EXACT, shapes=(0,)),
    **_rows("GridSample RoiAlign com.microsoft::GridSample", Way.PICK, needs=((1, Need.PLACE),)),
    **_rows("Hardmax Unique com.microsoft::ExpandDims", Way.PICK, (0,), T.EXACT),
    **_rows("GlobalMaxPool MaxPool", Way.PICK, (0,), T.POOLS, bends=True),
    **_rows("AffineGrid Upsample", Way.PICK, shapes=(1,)),
    **_rows("com.microsoft::RelativePositionBias", Way.PICK, shapes=(1, 2)),
    **_rows("TopK", Way.PICK, (0,), T.EXACT, shapes=(1,), needs=((0, Need.ORDER),)),
    **_rows("Col2Im", Way.PICK, shapes=(1, 2)),
    **_rows("Resize", Way.PICK, shapes=(1, 2, 3)),
    **_rows("MaxUnpool", Way.PICK, shapes=(2,)),
    **_rows("TensorScatter", Way.PICK, (0,), T.EXACT, shapes=(2,)),
    **_rows("com.microsoft::CropAndResize", Way.PICK, shapes=(3,), needs=((1, Need.PLACE),)),
    **_rows("Max Min", Way.SELECT, ALL, _COPIED | T.BROADCASTS),
    **_rows("Relu", Way.SELECT, (0,), _COPIED | T.SAME_SHAPE, low=0.0),
    **_rows("ThresholdedRelu", Way.SELECT, (0,), T.EXACT | T.SAME_SHAPE),
    **_rows("Clip", Way.SELECT, (0, 1, 2), _MAPPED),
    **_rows("Where", Way.SELECT, (1, 2), _COPIED | T.BROADCASTS),
    **_rows("Add Sub", Way.SUM, ALL, T.CARRIES | T.BROADCASTS | T.SUMS | T.IEEE),
    **_rows("Sum", Way.SUM, ALL, T.CARRIES | T.BROADCASTS | T.SUMS),
    **_rows("Mean", Way.SUM, ALL, T.CARRIES),
    **_rows(
        "com.microsoft::BiasAdd com.microsoft::BiasDropout com.microsoft::BitmaskBiasDropout",
        Way.SUM,
        (0, 1, 2),
        T.SAME_SHAPE,
    ),
    **_rows("Neg", Way.SUM, (0,), _COPIED | T.SAME_SHAPE | T.IEEE),
    **_rows("Div", Way.SCALE, ALL, T.CARRIES | T.BROADCASTS | T.SCALES | T.IEEE, needs=((1, Need.TINY),)),
    **_rows("Mul", Way.SCALE, ALL, T.CARRIES | T.BROADCASTS | T.SCALES | T.SQUARES | T.IEEE),
    **_rows("DequantizeLinear com.microsoft::DequantizeLinear", Way.SCALE, (0, 1), T.DEQUANTIZES),
    **_rows("Mod", Way.FUNCTION, ALL, T.CARRIES | T.BROADCASTS, keeps=_LEVELS),
    **_rows("Pow", Way.FUNCTION, ALL, T.CARRIES | T.BROADCASTS | T.SQUARES | T.GROWS, passes=_MAGNITUDE),
    **_rows("Acos Acosh Asin", Way.FUNCTION, needs=((0, Need.DIGITS),), passes=_ROOT),
    **_rows("Atanh", Way.FUNCTION, needs=((0, Need.RATIO),), passes=_ROOT),
    **_rows("Asinh Atan Celu Mish Swish com.microsoft::ScaledSiLU", Way.FUNCTION),
    **_rows("Cosh", Way.FUNCTION, (0,), T.SAME_SHAPE | T.GROWS, low=1.0),
    **_rows("Sinh", Way.FUNCTION, (0,), T.SAME_SHAPE | T.GROWS, passes=_ROOT, keeps=("small",)),
    **_rows("Tan", Way.FUNCTION, (0,), T.SAME_SHAPE | T.GROWS, needs=((0, Need.PLACE),), passes=frozenset()),
    **_rows("Shrink", Way.FUNCTION, (0,), T.SAME_SHAPE, passes=_MAGNITUDE, keeps=("small",)),
    **_rows(
        "Sigmoid", Way.FUNCTION, (0,), _MAPPED | T.SMALL | T.SQUEEZES, low=0.0, high=1.0, small=True, near_one=True
    ),
    **_rows("Tanh", Way.FUNCTION, (0,), _MAPPED | T.SMALL | T.SQUEEZES, low=-1.0, high=1.0, near_one=True),
    **_rows(
        "Cos Sin",
        Way.FUNCTION,
        (0,),
        T.SAME_SHAPE | T.PERIODIC,
        needs=((0, Need.PLACE),),
        passes=frozenset(),
        low=-1.0,
        high=1.0,
    ),
    **_rows("Erf Softsign", Way.FUNCTION, (0,), T.SAME_SHAPE, low=-1.0, high=1.0),
    **_rows("HardSigmoid", Way.FUNCTION, (0,), T.SAME_SHAPE | T.SQUEEZES, passes=frozenset(), low=0.0, high=1.0),
    **_rows("PRelu", Way.FUNCTION, (0,), T.BROADCASTS),
    **_rows(
        "Abs",
        Way.FUNCTION,
        (0,),
        _COPIED | T.SAME_SHAPE | T.IEEE,
        passes=_MAGNITUDE,
        low=0.0,
        keeps=("small", "whole", "terms"),
    ),
    **_rows(
        "Ceil Floor Round",
        Way.FUNCTION,
        (0,),
        _COPIED | T.SAME_SHAPE | T.ROUNDS,
        needs=((0, Need.PLACE),),
        whole=True,
        keeps=_LEVELS,
    ),
    **_rows(
        "Sign",
        Way.FUNCTION,
        (0,),
        _COPIED | T.SAME_SHAPE,
        passes=frozenset(),
        low=-1.0,
        high=1.0,
        whole=True,
        keeps=_LEVELS,
    ),
    **_rows("Reciprocal", Way.FUNCTION, (0,), _MAPPED | T.MAGNIFIES | T.IEEE, needs=((0, Need.TINY),), passes=_ROOT),
    **_rows(
        "Sqrt",
        Way.FUNCTION,
        (0,),
        _MAPPED | T.MAGNIFIES | T.IEEE,
        needs=((0, Need.TINY),),
        passes=_ROOT,
        keeps=("small", "squares"),
    ),
    **_rows("Log", Way.FUNCTION, (0,), _MAPPED | T.MAGNIFIES, needs=((0, Need.RATIO),), passes=_ROOT),
    **_rows("Exp", Way.FUNCTION, (0,), _MAPPED | T.SQUEEZES | T.GROWS, low=0.0, small=True, keeps=("peak",)),
    **_rows("Softplus", Way.FUNCTION, (0,), _MAPPED | T.SQUEEZES, low=0.0, small=True),
    **_rows("Elu Gelu HardSwish LeakyRelu Selu", Way.FUNCTION, (0,), T.SAME_SHAPE),
    **_rows("com.microsoft::Gelu com.microsoft::QuickGelu", Way.FUNCTION, (0,), T.SAME_SHAPE),
    **_rows("com.microsoft::BiasGelu com.microsoft::FastGelu", Way.FUNCTION, (0, 1), T.SAME_SHAPE),
    **_rows("SwiGLU com.microsoft::BiasSplitGelu", Way.FUNCTION, (0, 1)),
    **_rows("com.microsoft::GatedRelativePositionBias", Way.FUNCTION, (0, 1, 3, 4)),
    **_rows("com.microsoft::LinearAttentionGate", Way.FUNCTION, (0, 1, 2, 3), near_one=True),
    **_rows("com.microsoft::MRotaryEmbedding", *_ROTATES, passes=_SUMMED),
    **_rows("RotaryEmbedding", *_ROTATES, needs=((1, Need.RANGE), (2, Need.RANGE)), passes=_SUMMED),
    **_rows("com.microsoft::RotaryEmbedding", *_ROTATES, needs=((2, Need.RANGE), (3, Need.RANGE)), passes=_SUMMED),
    **_rows(
        "com.microsoft::ComplexMul com.microsoft::ComplexMulConj com.microsoft::GatedAdd "
        "com.microsoft::HyperConnectionPostMix com.microsoft::HyperConnectionPreMix",
        Way.FUNCTION,
        ALL,
        passes=_SUMMED,
    ),
    **_rows("CumProd Det", Way.REDUCE, (0,), T.GROWS, bends=True),
    **_rows("DFT", Way.REDUCE, shapes=(1, 2)),
    **_rows("STFT", Way.REDUCE, shapes=(1, 3)),
    **_rows("AveragePool GlobalAveragePool", Way.REDUCE, (0,), T.POOLS),
    **_rows(
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare",
        Way.REDUCE,
        (0,),
        T.LONG_SUM | T.GROWS,
        shapes=(1,),
        bends=True,
    ),
    **_rows("GlobalLpPool LpPool", Way.REDUCE, (0,), T.POOLS | T.GROWS, bends=True),
    **_rows("ReduceMax ReduceMin", Way.REDUCE, (0,), T.CARRIES, shapes=(1,), bends=True),
    **_rows("ReduceProd", Way.REDUCE, (0,), T.CARRIES | T.GROWS, shapes=(1,), bends=True),
    **_rows("ReduceMean", Way.REDUCE, (0,), T.CARRIES, shapes=(1,)),
    **_rows("ReduceSum", Way.REDUCE, (0,), T.CARRIES | T.LONG_SUM | T.GROWS, shapes=(1,)),
    **_rows("CumSum", Way.REDUCE, (0,), _MAPPED | T.LONG_SUM | T.GROWS, shapes=(1,)),
    **_rows(
        "LpNormalization MeanVarianceNormalization SimplifiedLayerNormalization "
        "com.microsoft::BranchwiseRMSNorm com.microsoft::EngramGate com.microsoft::GatedRMSNorm "
        "com.microsoft::GroupNorm com.microsoft::SkipGroupNorm com.microsoft::SkipLayerNormalization "
        "com.microsoft::SkipSimplifiedLayerNormalization",
        Way.NORM,
    ),
    **_rows("com.microsoft::EmbedLayerNormalization", Way.NORM, ()),
    **_rows("Softmax", Way.NORM, (0,), T.SAME_SHAPE | T.SMALL | T.SQUEEZES | T.SOFTMAX, low=0.0, high=1.0, small=True),
    **_rows("BatchNormalization", Way.NORM, (0, 1, 2, 3, 4), T.SAME_SHAPE),
    **_rows("GroupNormalization InstanceNormalization", Way.NORM, (0,), T.SAME_SHAPE),
    **_rows("LayerNormalization RMSNormalization", Way.NORM, (0,), T.SAME_SHAPE | T.SMALL),
    **_rows("LogSoftmax", Way.NORM, (0,), T.SAME_SHAPE | T.SOFTMAX, high=0.0),
    **_rows("com.microsoft::BiasSoftmax", Way.NORM, (0,), T.SQUEEZES | T.SOFTMAX),
    **_rows("LinearAttention com.microsoft::LinearAttention", Way.PRODUCT, (0, 1, 2), states=((3, 1),)),
    **_rows(
        "Attention CausalConvWithState DeformConv com.microsoft::Attention com.microsoft::CausalConvWithState "
        "com.microsoft::DecoderAttention com.microsoft::DecoderMaskedMultiHeadAttention "
        "com.microsoft::DecoderMaskedSelfAttention com.microsoft::DynamicSparseAttention com.microsoft::FusedConv "
        "com.microsoft::FusedGemm com.microsoft::FusedMatMulActivation com.microsoft::GemmFastGelu "
        "com.microsoft::GemmFloat8 com.microsoft::LongformerAttention com.microsoft::MatMulBlockQuantizedFp4Weight "
        "com.microsoft::MatMulBlockQuantizedFp8Weight com.microsoft::MatMulBnb4 com.microsoft::MatMulNBits "
        "com.microsoft::MatMulNBitsMlp com.microsoft::MatMulNBitsQkv com.microsoft::MoE "
        "com.microsoft::MultiHeadAttention com.microsoft::NhwcConv com.microsoft::NhwcFusedConv "
        "com.microsoft::PackedAttention com.microsoft::PackedMultiHeadAttention "
        "com.microsoft::PackedSparseAttentionIndexer com.microsoft::PagedAttention com.microsoft::QAttention "
        "com.microsoft::QMoE com.microsoft::SparseAttention com.microsoft::SparseAttentionIndexer "
        "com.microsoft::SparsePagedAttention com.microsoft::TransposeMatMul",
        Way.PRODUCT,
        (0, 1, 2),
    ),
    **_rows("com.microsoft::GatedDeltaNet", Way.PRODUCT, (0, 1, 2), states=((6, 1),)),
    **_rows("com.microsoft::VarlenCausalConvWithState", Way.PRODUCT, (0, 1, 3)),
    **_rows("Conv ConvTranspose", Way.PRODUCT, (0, 1, 2), T.LAYER),
    **_rows("Gemm MatMul", Way.PRODUCT, (0, 1, 2), T.MULTIPLIES | T.LAYER),
    **_rows("Einsum", Way.PRODUCT, ALL, T.MULTIPLIES),
    **_rows("com.microsoft::FusedMatMul", Way.PRODUCT, (0, 1, 2), T.MULTIPLIES),
    **_rows("GRU RNN", Way.PRODUCT, (0, 1, 2), T.RECURRENT, states=((5, 1),)),
    **_rows("LSTM", Way.PRODUCT, (0, 1, 2), T.RECURRENT, states=((5, 1), (6, 2))),
    **_rows(
        "ConvInteger MatMulInteger QLinearConv QLinearMatMul com.microsoft::DynamicQuantizeLSTM "
        "com.microsoft::DynamicQuantizeMatMul com.microsoft::MatMulInteger16 com.microsoft::MatMulIntegerToFloat "
        "com.microsoft::QGemm com.microsoft::QLinearAdd com.microsoft::QLinearAveragePool "
        "com.microsoft::QLinearConcat com.microsoft::QLinearConv com.microsoft::QLinearGlobalAveragePool "
        "com.microsoft::QLinearLeakyRelu com.microsoft::QLinearMul com.microsoft::QLinearReduceMean "
        "com.microsoft::QLinearSigmoid com.microsoft::QLinearSoftmax com.microsoft::QLinearWhere",
        Way.PRODUCT,
        (0, 1, 2),
        T.INTEGER,
    ),
    **_rows(
        "com.microsoft::GroupQueryAttention",
        Way.PRODUCT,
        (0, 1, 2),
        shapes=(5, 6),
        needs=((7, Need.RANGE), (8, Need.RANGE)),
    ),
    **_rows("ArgMax ArgMin", Way.TEST, needs=((0, Need.ORDER),)),
    **_rows("NonZero", Way.TEST),
    **_rows("SequenceLength", Way.TEST, ()),
    **_rows("And BitwiseAnd BitwiseOr Or Xor", Way.TEST, ALL, T.BROADCASTS),
    **_rows(
        "Equal Greater GreaterOrEqual Less LessOrEqual",
        Way.TEST,
        ALL,
        T.BROADCASTS | T.COMPARES,
        needs=((0, Need.SIDE), (1, Need.SIDE)),
    ),
    **_rows("QuantizeLinear com.microsoft::QuantizeLinear", Way.TEST, (0,), T.QUANTIZES),
    **_rows("IsInf IsNaN", Way.TEST, (0,), T.SAME_SHAPE, needs=((0, Need.SIDE),)),
    **_rows("Not", Way.TEST, (0,), T.SAME_SHAPE),
    **_rows("NonMaxSuppression", Way.TEST, (0, 1), shapes=(2,), needs=((0, Need.PLACE), (1, Need.ORDER))),
    **_rows("Shape Size", Way.SOURCE, (), T.ELEMENTLESS, whole=True),
    **_rows("Constant", Way.SOURCE, (), T.EXACT),
    **_rows("EyeLike", Way.SOURCE, (), T.EXACT | T.GENERATES, low=0.0, high=1.0, whole=True),
    **_rows(
        "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike", Way.SOURCE, (), T.RANDOM
    ),
    **_rows("ConstantOfShape", Way.SOURCE, (), T.EXACT, shapes=(0,)),
    **_rows("BlackmanWindow HammingWindow HannWindow", Way.SOURCE, (), T.GENERATES, shapes=(0,)),
    **_rows("Range", Way.SOURCE, (), shapes=(0, 1, 2), whole=True),
    **_rows("MelWeightMatrix", Way.SOURCE, (), T.GENERATES, shapes=(0, 1, 2)),
    **_rows("OneHot", Way.SOURCE, (), T.EXACT, shapes=(1,), low=0.0, high=1.0, whole=True),
    **_rows("Optional OptionalGetElement SequenceEmpty", Way.UNKNOWN, (0,), T.EXACT),
    **_rows("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", Way.UNKNOWN, (0,), T.LABEL_LOSS),
    **_rows("com.microsoft::ConvTransposeWithDynamicPads", Way.UNKNOWN, shapes=(2,)),
}
"""The rows, by kind of op."""


def row_of(kind: str) -> OpRow:
    """Return the row of a kind of op."""
    return OPS.get(kind, UNKNOWN)
