"""The table of ops: what the pass knows of each operator beyond its schema.

Painting, facts and needs, placement, shapes and the shift of ranges read it. Teaching the pass a new operator is one
row here and one entry in `lists/`. An op without a row belongs to no class; `op_classes` has the sets of ops by trait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto

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
    REDUCE = "sums, averages or compares along axes"
    NORM = "relates them to others of a row"
    PRODUCT = "sums many products, as layers and attention do"
    TEST = "gives indices, truth values or integers"
    SOURCE = "gives numbers of its own, or of shapes"
    UNKNOWN = "is not known"


class Need(Enum):
    """What a reader asks of a value, beyond what the low type may keep."""

    EXACT = "the exact number"
    SIDE = "on which side of another number it is"
    ORDER = "which of several is the largest"
    TINY = "the digits of small numbers"
    RATIO = "the digits of small numbers, and of the distance from 1"
    HUGE = "numbers beyond its own result"
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
    MAGNIFIES = auto()
    ROUNDS = auto()
    COMPARES = auto()
    PERIODIC = auto()
    IEEE = auto()
    BOUNDED = auto()
    POOLS = auto()
    SMALL = auto()
    SQUEEZES = auto()
    SOFTMAX = auto()
    MULTIPLIES = auto()
    LAYER = auto()
    RECURRENT = auto()
    HEAVY = auto()


_EVERY = frozenset(Need)
_SUMMED = _EVERY - {Need.FACTOR}
_ALWAYS = frozenset((Need.SLOPE,))
_MAGNITUDE = frozenset((Need.EXACT, Need.TINY, Need.RATIO, Need.HUGE, Need.DIGITS, Need.PLACE))
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
    states: Sequence[tuple[int, int]] = ()

    @property
    def passed(self) -> frozenset[Need]:
        """The needs that the inputs in `slots` have if the result has them."""
        return PASSED.get(self.way, frozenset()) if self.passes is None else self.passes | _ALWAYS


def _rows(row: OpRow, *ops: str) -> dict[str, OpRow]:
    return dict.fromkeys(ops, row)


UNKNOWN = OpRow(Way.UNKNOWN, ())
"""The row of an op without one."""

OPS: Mapping[str, OpRow] = {
    **_rows(OpRow(Way.COPY, ALL, Trait.CARRIES | Trait.EXACT), "Concat", "SequenceConstruct"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.CASTS | Trait.SAME_SHAPE), "CastLike"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.CASTS | Trait.SAME_SHAPE | Trait.SEE_THROUGH), "Cast"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT), "Compress", "ConcatFromSequence"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.MOVES | Trait.PERMUTES), "Transpose"),
    **_rows(
        OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.MOVES | Trait.PERMUTES | Trait.RELABELS), "Flatten"
    ),
    **_rows(
        OpRow(
            Way.COPY,
            (0,),
            Trait.CARRIES
            | Trait.EXACT
            | Trait.MOVES
            | Trait.PERMUTES
            | Trait.RELABELS
            | Trait.SAME_SHAPE
            | Trait.SEE_THROUGH,
        ),
        "Identity",
    ),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.PERMUTES), "DepthToSpace", "SpaceToDepth"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.PICKS), "Gather", "GatherElements", "GatherND"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.SAME_SHAPE | Trait.SEE_THROUGH), "Dropout"),
    **_rows(
        OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT, shapes=(1,)),
        "CenterCropPad",
        "SequenceAt",
        "SequenceErase",
        "Split",
        "SplitToSequence",
    ),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.MOVES, shapes=(1,)), "Expand", "Tile"),
    **_rows(
        OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.MOVES | Trait.PERMUTES | Trait.RELABELS, shapes=(1,)),
        "Reshape",
        "Squeeze",
        "Unsqueeze",
    ),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.PERMUTES, shapes=(1,)), "ReverseSequence"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.SAME_SHAPE, shapes=(1,)), "Trilu"),
    **_rows(OpRow(Way.COPY, (0,), Trait.CARRIES | Trait.EXACT | Trait.PICKS, shapes=(1, 2, 3, 4)), "Slice"),
    **_rows(OpRow(Way.COPY, (0, 1), Trait.CARRIES | Trait.EXACT, shapes=(2,)), "SequenceInsert"),
    **_rows(OpRow(Way.COPY, (0, 2), Trait.CARRIES | Trait.FILLS), "Scatter"),
    **_rows(OpRow(Way.COPY, (0, 2), Trait.CARRIES | Trait.FILLS | Trait.SAME_SHAPE), "ScatterElements", "ScatterND"),
    **_rows(OpRow(Way.COPY, (0, 2), Trait.CARRIES | Trait.FILLS, shapes=(1, 3)), "Pad"),
    **_rows(OpRow(Way.COPY, (), Trait.EXACT), "If", "Scan", "SequenceMap"),
    **_rows(OpRow(Way.COPY, (), Trait.EXACT, shapes=(0,)), "Loop"),
    **_rows(OpRow(Way.PICK, needs=((1, Need.PLACE),)), "GridSample", "RoiAlign", "com.microsoft::GridSample"),
    **_rows(OpRow(Way.PICK, (0,), Trait.EXACT), "Hardmax", "Unique", "com.microsoft::ExpandDims"),
    **_rows(OpRow(Way.PICK, (0,), Trait.POOLS), "GlobalMaxPool", "MaxPool"),
    **_rows(OpRow(Way.PICK, shapes=(1,)), "AffineGrid", "Upsample"),
    **_rows(OpRow(Way.PICK, (0,), Trait.EXACT, shapes=(1,), needs=((0, Need.ORDER),)), "TopK"),
    **_rows(OpRow(Way.PICK, shapes=(1, 2)), "Col2Im"),
    **_rows(OpRow(Way.PICK, shapes=(1, 2, 3)), "Resize"),
    **_rows(OpRow(Way.PICK, shapes=(2,)), "MaxUnpool"),
    **_rows(OpRow(Way.PICK, (0,), Trait.EXACT, shapes=(2,)), "TensorScatter"),
    **_rows(OpRow(Way.PICK, shapes=(3,), needs=((1, Need.PLACE),)), "com.microsoft::CropAndResize"),
    **_rows(OpRow(Way.SELECT, ALL, Trait.BROADCASTS | Trait.CARRIES | Trait.EXACT), "Max", "Min"),
    **_rows(OpRow(Way.SELECT, (0,), Trait.CARRIES | Trait.EXACT | Trait.SAME_SHAPE, low=0.0), "Relu"),
    **_rows(OpRow(Way.SELECT, (0, 1, 2), Trait.CARRIES | Trait.SAME_SHAPE), "Clip"),
    **_rows(OpRow(Way.SELECT, (1, 2), Trait.BROADCASTS | Trait.CARRIES | Trait.EXACT), "Where"),
    **_rows(OpRow(Way.SUM, ALL, Trait.BROADCASTS | Trait.CARRIES | Trait.IEEE | Trait.SUMS), "Add", "Sub"),
    **_rows(OpRow(Way.SUM, ALL, Trait.BROADCASTS | Trait.CARRIES | Trait.SUMS), "Sum"),
    **_rows(OpRow(Way.SUM, ALL, Trait.CARRIES), "Mean"),
    **_rows(OpRow(Way.SUM, (0,), Trait.CARRIES | Trait.EXACT | Trait.IEEE | Trait.SAME_SHAPE), "Neg"),
    **_rows(
        OpRow(
            Way.SCALE,
            ALL,
            Trait.BROADCASTS | Trait.CARRIES | Trait.IEEE | Trait.SCALES,
            needs=((1, Need.TINY),),
        ),
        "Div",
    ),
    **_rows(OpRow(Way.SCALE, ALL, Trait.BROADCASTS | Trait.CARRIES | Trait.IEEE | Trait.SCALES | Trait.SQUARES), "Mul"),
    **_rows(OpRow(Way.SCALE, (0, 1), Trait.DEQUANTIZES), "DequantizeLinear", "com.microsoft::DequantizeLinear"),
    **_rows(OpRow(Way.FUNCTION, ALL, Trait.BROADCASTS | Trait.CARRIES), "Mod"),
    **_rows(OpRow(Way.FUNCTION, ALL, Trait.BROADCASTS | Trait.CARRIES | Trait.SQUARES, passes=_MAGNITUDE), "Pow"),
    **_rows(OpRow(Way.FUNCTION, needs=((0, Need.DIGITS),), passes=_ROOT), "Acos", "Acosh"),
    **_rows(OpRow(Way.FUNCTION, needs=((0, Need.RATIO),), passes=_ROOT), "Atanh"),
    **_rows(OpRow(Way.FUNCTION), "Asinh", "Atan", "Celu", "Mish", "Swish"),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.BOUNDED | Trait.CARRIES | Trait.SAME_SHAPE | Trait.SMALL | Trait.SQUEEZES,
            low=0.0,
            high=1.0,
            small=True,
            near_one=True,
        ),
        "Sigmoid",
    ),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.BOUNDED | Trait.CARRIES | Trait.SAME_SHAPE | Trait.SMALL | Trait.SQUEEZES,
            low=-1.0,
            high=1.0,
            near_one=True,
        ),
        "Tanh",
    ),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.BOUNDED | Trait.PERIODIC | Trait.SAME_SHAPE,
            needs=((0, Need.PLACE),),
            low=-1.0,
            high=1.0,
            passes=frozenset(),
        ),
        "Cos",
        "Sin",
    ),
    **_rows(OpRow(Way.FUNCTION, (0,), Trait.BOUNDED | Trait.SAME_SHAPE, low=-1.0, high=1.0), "Erf", "Softsign"),
    **_rows(
        OpRow(
            Way.FUNCTION, (0,), Trait.BOUNDED | Trait.SAME_SHAPE | Trait.SQUEEZES, low=0.0, high=1.0, passes=frozenset()
        ),
        "HardSigmoid",
    ),
    **_rows(OpRow(Way.FUNCTION, (0,), Trait.BROADCASTS), "PRelu"),
    **_rows(
        OpRow(
            Way.FUNCTION, (0,), Trait.CARRIES | Trait.EXACT | Trait.IEEE | Trait.SAME_SHAPE, low=0.0, passes=_MAGNITUDE
        ),
        "Abs",
    ),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.CARRIES | Trait.EXACT | Trait.ROUNDS | Trait.SAME_SHAPE,
            needs=((0, Need.PLACE),),
            whole=True,
        ),
        "Ceil",
        "Floor",
        "Round",
    ),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.CARRIES | Trait.EXACT | Trait.SAME_SHAPE,
            low=-1.0,
            high=1.0,
            whole=True,
            passes=frozenset(),
        ),
        "Sign",
    ),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.CARRIES | Trait.IEEE | Trait.MAGNIFIES | Trait.SAME_SHAPE,
            needs=((0, Need.TINY),),
            passes=_ROOT,
        ),
        "Reciprocal",
    ),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.CARRIES | Trait.IEEE | Trait.MAGNIFIES | Trait.SAME_SHAPE,
            needs=((0, Need.TINY),),
            passes=_ROOT,
        ),
        "Sqrt",
    ),
    **_rows(
        OpRow(
            Way.FUNCTION,
            (0,),
            Trait.CARRIES | Trait.MAGNIFIES | Trait.SAME_SHAPE,
            needs=((0, Need.RATIO),),
            passes=_ROOT,
        ),
        "Log",
    ),
    **_rows(
        OpRow(Way.FUNCTION, (0,), Trait.CARRIES | Trait.SAME_SHAPE | Trait.SQUEEZES, low=0.0, small=True),
        "Exp",
        "Softplus",
    ),
    **_rows(OpRow(Way.FUNCTION, (0,), Trait.SAME_SHAPE), "Elu", "Gelu", "HardSwish", "LeakyRelu", "Selu"),
    **_rows(OpRow(Way.REDUCE), "CumProd"),
    **_rows(OpRow(Way.REDUCE, (0,), Trait.POOLS), "AveragePool", "GlobalAveragePool"),
    **_rows(
        OpRow(Way.REDUCE, shapes=(1,)), "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"
    ),
    **_rows(
        OpRow(Way.REDUCE, (0,), Trait.CARRIES, shapes=(1,)),
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
    ),
    **_rows(OpRow(Way.REDUCE, (0,), Trait.CARRIES | Trait.SAME_SHAPE, shapes=(1,)), "CumSum"),
    **_rows(
        OpRow(Way.NORM),
        "LpNormalization",
        "MeanVarianceNormalization",
        "SimplifiedLayerNormalization",
        "com.microsoft::SkipLayerNormalization",
        "com.microsoft::SkipSimplifiedLayerNormalization",
    ),
    **_rows(
        OpRow(
            Way.NORM,
            (0,),
            Trait.BOUNDED | Trait.SAME_SHAPE | Trait.SMALL | Trait.SOFTMAX | Trait.SQUEEZES,
            low=0.0,
            high=1.0,
            small=True,
        ),
        "Softmax",
    ),
    **_rows(OpRow(Way.NORM, (0, 1, 2, 3, 4), Trait.SAME_SHAPE), "BatchNormalization"),
    **_rows(OpRow(Way.NORM, (0,), Trait.SAME_SHAPE), "GroupNormalization", "InstanceNormalization"),
    **_rows(OpRow(Way.NORM, (0,), Trait.SAME_SHAPE | Trait.SMALL), "LayerNormalization", "RMSNormalization"),
    **_rows(OpRow(Way.NORM, (0,), Trait.SAME_SHAPE | Trait.SOFTMAX, high=0.0), "LogSoftmax"),
    **_rows(OpRow(Way.NORM, (0,), Trait.SOFTMAX | Trait.SQUEEZES), "com.microsoft::BiasSoftmax"),
    **_rows(OpRow(Way.PRODUCT, (0, 1, 2), states=((3, 1),)), "LinearAttention", "com.microsoft::LinearAttention"),
    **_rows(
        OpRow(Way.PRODUCT, (0, 1, 2), Trait.HEAVY),
        "Attention",
        "DeformConv",
        "com.microsoft::Attention",
        "com.microsoft::DecoderMaskedMultiHeadAttention",
        "com.microsoft::FusedConv",
        "com.microsoft::FusedGemm",
        "com.microsoft::GemmFastGelu",
        "com.microsoft::MatMulNBits",
        "com.microsoft::MoE",
        "com.microsoft::MultiHeadAttention",
        "com.microsoft::NhwcConv",
        "com.microsoft::PackedAttention",
        "com.microsoft::PackedMultiHeadAttention",
        "com.microsoft::QAttention",
        "com.microsoft::QMoE",
    ),
    **_rows(OpRow(Way.PRODUCT, (0, 1, 2), Trait.HEAVY | Trait.LAYER), "Conv", "ConvTranspose"),
    **_rows(OpRow(Way.PRODUCT, (0, 1, 2), Trait.HEAVY | Trait.LAYER | Trait.MULTIPLIES), "Gemm", "MatMul"),
    **_rows(OpRow(Way.PRODUCT, ALL, Trait.HEAVY | Trait.MULTIPLIES), "Einsum"),
    **_rows(OpRow(Way.PRODUCT, (0, 1, 2), Trait.HEAVY | Trait.MULTIPLIES), "com.microsoft::FusedMatMul"),
    **_rows(OpRow(Way.PRODUCT, (0, 1, 2), Trait.HEAVY | Trait.RECURRENT, states=((5, 1),)), "GRU", "RNN"),
    **_rows(OpRow(Way.PRODUCT, (0, 1, 2), Trait.HEAVY | Trait.RECURRENT, states=((5, 1), (6, 2))), "LSTM"),
    **_rows(
        OpRow(Way.PRODUCT, (0, 1, 2), Trait.INTEGER),
        "ConvInteger",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "com.microsoft::DynamicQuantizeLSTM",
        "com.microsoft::DynamicQuantizeMatMul",
        "com.microsoft::MatMulInteger16",
        "com.microsoft::MatMulIntegerToFloat",
        "com.microsoft::QGemm",
        "com.microsoft::QLinearAdd",
        "com.microsoft::QLinearAveragePool",
        "com.microsoft::QLinearConcat",
        "com.microsoft::QLinearConv",
        "com.microsoft::QLinearGlobalAveragePool",
        "com.microsoft::QLinearLeakyRelu",
        "com.microsoft::QLinearMul",
        "com.microsoft::QLinearReduceMean",
        "com.microsoft::QLinearSigmoid",
        "com.microsoft::QLinearSoftmax",
        "com.microsoft::QLinearWhere",
    ),
    **_rows(OpRow(Way.PRODUCT, (0, 1, 2), Trait.HEAVY, shapes=(5, 6)), "com.microsoft::GroupQueryAttention"),
    **_rows(OpRow(Way.TEST, needs=((0, Need.ORDER),)), "ArgMax", "ArgMin"),
    **_rows(OpRow(Way.TEST), "NonZero"),
    **_rows(OpRow(Way.TEST, ALL, Trait.BROADCASTS), "And", "BitwiseAnd", "BitwiseOr", "Or", "Xor"),
    **_rows(
        OpRow(Way.TEST, ALL, Trait.BROADCASTS | Trait.COMPARES, needs=((0, Need.SIDE), (1, Need.SIDE))),
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
    ),
    **_rows(OpRow(Way.TEST, (0,), Trait.QUANTIZES), "QuantizeLinear", "com.microsoft::QuantizeLinear"),
    **_rows(OpRow(Way.TEST, (0,), Trait.SAME_SHAPE, needs=((0, Need.SIDE),)), "IsInf", "IsNaN"),
    **_rows(OpRow(Way.TEST, (0,), Trait.SAME_SHAPE), "Not"),
    **_rows(OpRow(Way.TEST, (0, 1), shapes=(2,), needs=((0, Need.PLACE), (1, Need.ORDER))), "NonMaxSuppression"),
    **_rows(OpRow(Way.SOURCE, (), Trait.ELEMENTLESS, whole=True), "Shape", "Size"),
    **_rows(OpRow(Way.SOURCE, (), Trait.EXACT), "Constant"),
    **_rows(OpRow(Way.SOURCE, (), Trait.EXACT | Trait.GENERATES, low=0.0, high=1.0, whole=True), "EyeLike"),
    **_rows(
        OpRow(Way.SOURCE, (), Trait.RANDOM),
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ),
    **_rows(OpRow(Way.SOURCE, (), Trait.EXACT, shapes=(0,)), "ConstantOfShape"),
    **_rows(OpRow(Way.SOURCE, (), Trait.GENERATES, shapes=(0,)), "BlackmanWindow", "HammingWindow", "HannWindow"),
    **_rows(OpRow(Way.SOURCE, (), shapes=(0, 1, 2), whole=True), "Range"),
    **_rows(OpRow(Way.SOURCE, (), Trait.GENERATES, shapes=(0, 1, 2)), "MelWeightMatrix"),
    **_rows(OpRow(Way.SOURCE, (), Trait.EXACT, shapes=(1,), low=0.0, high=1.0, whole=True), "OneHot"),
    **_rows(OpRow(Way.UNKNOWN, (0,), Trait.EXACT), "Optional", "OptionalGetElement", "SequenceEmpty"),
    **_rows(OpRow(Way.UNKNOWN, (0,), Trait.LABEL_LOSS), "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"),
    **_rows(OpRow(Way.UNKNOWN, shapes=(1, 2)), "DFT"),
    **_rows(OpRow(Way.UNKNOWN, shapes=(1, 3)), "STFT"),
    **_rows(OpRow(Way.UNKNOWN, shapes=(2,)), "com.microsoft::ConvTransposeWithDynamicPads"),
}
"""The rows, by kind of op."""
