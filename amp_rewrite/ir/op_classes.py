"""Classes of operators, from a table with one row per group of ops that share all columns.

The columns:

- the way from the numbers of these inputs (`*`: all) to the result: `copies` moves or repeats them, `selects` takes
  some of several, `computes` is elementwise arithmetic, `reduces` works along axes;
- the inputs that state a shape, an axis, a size, a scale, a count or a position;
- classes, each described below; after `=` the ops, named as `Op.kind` does.

An op without a row belongs to no class. Modules derive the sets of ops that they need from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Slots = Mapping[str, Sequence[int]]
"""Inputs by op."""
ALL = range(1 << 16)
"""All inputs."""

_TABLES = {
    "": """
copies:*      -       exact = Concat SequenceConstruct
copies:0      -       casts same_shape = CastLike
copies:0      -       casts see_through same_shape = Cast
copies:0      -       exact = Compress ConcatFromSequence
copies:0      -       moves permutes exact = Transpose
copies:0      -       permutes exact = DepthToSpace SpaceToDepth
copies:0      -       picks exact = Gather GatherElements GatherND
copies:0      -       relabels moves permutes exact = Flatten
copies:0      -       relabels moves permutes see_through exact same_shape = Identity
copies:0      -       see_through same_shape = Dropout
copies:0      1       exact = CenterCropPad SequenceAt SequenceErase Split SplitToSequence
copies:0      1       exact same_shape = Trilu
copies:0      1       moves exact = Expand Tile
copies:0      1       permutes exact = ReverseSequence
copies:0      1       relabels moves permutes exact = Reshape Squeeze Unsqueeze
copies:0      1,2,3,4 picks exact = Slice
copies:0,1    2       exact = SequenceInsert
copies:0,2    -       fills = Scatter
copies:0,2    -       fills same_shape = ScatterElements ScatterND
copies:0,2    1,3     fills = Pad
selects:*     -       exact broadcasts = Max Min
selects:0,1,2 -       same_shape = Clip
selects:1,2   -       exact broadcasts = Where
computes:*    -       = Mean
computes:*    -       broadcasts = Mod
computes:*    -       scales ieee broadcasts = Div
computes:*    -       scales squares ieee broadcasts = Mul
computes:*    -       squares broadcasts = Pow
computes:*    -       sums broadcasts = Sum
computes:*    -       sums ieee broadcasts = Add Sub
computes:0    -       bounded small squeezes same_shape = Sigmoid Tanh
computes:0    -       exact ieee same_shape = Abs Neg
computes:0    -       exact same_shape = Relu Sign
computes:0    -       magnifies ieee same_shape = Reciprocal Sqrt
computes:0    -       magnifies same_shape = Log
computes:0    -       rounds exact same_shape = Ceil Floor Round
computes:0    -       squeezes same_shape = Exp Softplus
reduces:0     1       = ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
reduces:0     1       same_shape = CumSum
-             -       bounded periodic same_shape = Cos Sin
-             -       bounded same_shape = Erf Softsign
-             -       bounded squeezes same_shape = HardSigmoid
-             -       broadcasts = And BitwiseAnd BitwiseOr Or PRelu Xor
-             -       compares broadcasts = Equal Greater GreaterOrEqual Less LessOrEqual
-             -       pools = AveragePool GlobalAveragePool GlobalMaxPool MaxPool
-             -       dequantizes = DequantizeLinear
-             -       elementless = Shape Size
-             -       exact = Constant Hardmax If Optional OptionalGetElement Scan SequenceEmpty SequenceMap Unique
-             -       generates exact = EyeLike
-             -       heavy = Attention DeformConv
-             -       integer = ConvInteger MatMulInteger QLinearConv QLinearMatMul
-             -       label_loss = NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss
-             -       layer heavy = Conv ConvTranspose
-             -       multiplies heavy = Einsum
-             -       multiplies layer heavy = Gemm MatMul
-             -       quantizes = QuantizeLinear
-             -       random = Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike
-             -       recurrent heavy = GRU LSTM RNN
-             -       same_shape = BatchNormalization Elu Gelu GroupNormalization HardSwish InstanceNormalization
-             -       same_shape = IsInf IsNaN LeakyRelu Not Selu
-             -       small same_shape = LayerNormalization RMSNormalization
-             -       softmax bounded small squeezes same_shape = Softmax
-             -       softmax same_shape = LogSoftmax
-             0       exact = ConstantOfShape Loop
-             0       generates = BlackmanWindow HammingWindow HannWindow
-             0,1,2   = Range
-             0,1,2   generates = MelWeightMatrix
-             1       = AffineGrid ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare Upsample
-             1       exact = OneHot TopK
-             1,2     = Col2Im DFT
-             1,2,3   = Resize
-             1,3     = STFT
-             2       = MaxUnpool NonMaxSuppression
-             2       exact = TensorScatter
""",
    "com.microsoft::": """
-             -       dequantizes = DequantizeLinear
-             -       exact = ExpandDims
-             -       integer = DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulInteger16 MatMulIntegerToFloat QGemm
-             -       integer = QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool
-             -       integer = QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere
-             -       heavy = Attention DecoderMaskedMultiHeadAttention FusedConv FusedGemm GemmFastGelu MatMulNBits
-             -       heavy = MoE MultiHeadAttention NhwcConv PackedAttention PackedMultiHeadAttention QAttention QMoE
-             -       multiplies heavy = FusedMatMul
-             -       quantizes = QuantizeLinear
-             -       softmax squeezes = BiasSoftmax
-             2       = ConvTransposeWithDynamicPads
-             3       = CropAndResize
-             5,6     heavy = GroupQueryAttention
""",
}

_ROWS = {
    domain + op: columns.split()
    for domain, table in _TABLES.items()
    for columns, _, ops in (line.partition("=") for line in table.strip().splitlines())
    for op in ops.split()
}


def _slots(column: int, prefix: str = "") -> Slots:
    """Return the inputs that a column lists behind a prefix, by op."""
    cells = {op: row[column] for op, row in _ROWS.items() if row[column] != "-" and row[column].startswith(prefix)}
    listed = {op: cell.removeprefix(prefix) for op, cell in cells.items()}
    return {op: ALL if slots == "*" else tuple(map(int, slots.split(","))) for op, slots in listed.items()}


def _ops(word: str) -> frozenset[str]:
    """Return the ops of a class."""
    return frozenset(op for op, row in _ROWS.items() if word in row[2:])


# -- how numbers travel ------------------------------------------------------------------------------

COPIES = _slots(0, "copies:")
"""Ops whose result consists of elements of these inputs."""
SELECTIONS = _slots(0, "selects:")
"""Ops whose result consists of elements of these inputs, chosen by comparison."""
ARITHMETIC = _slots(0, "computes:")
"""Elementwise arithmetic."""
REDUCTIONS = _slots(0, "reduces:")
"""Small reductions, and the running sum."""
CARRIERS: Slots = {**COPIES, **SELECTIONS, **ARITHMETIC, **REDUCTIONS}
"""All ops that a walk along numbers passes."""
CLAMPS = SELECTIONS.keys() - {"Where"}
"""Selections that bound a value by others."""
KEEP_SCALE: Slots = {**COPIES, **SELECTIONS, "MaxPool": (0,), "Relu": (0,)}
"""Ops whose results are numbers of these inputs, or 0: integers with a scale keep it."""
SHAPE_SLOTS: Slots = _slots(1)
"""The inputs that state a shape, an axis, a size, a scale, a count or a position. Resize has its scales in slot 1 at
opset 10, and behind the region of interest from 11 on; sizes follow."""

# -- copies of numbers -------------------------------------------------------------------------------

RELABELS = _ops("relabels")
"""Ops that keep all elements in order and change at most the shape: no memory moves."""
MOVES = _ops("moves")
"""Ops that give all elements of their first input, moved or repeated, and no others."""
PERMUTES = _ops("permutes")
"""Ops that give each element of their first input exactly once."""
PICKS = _ops("picks")
"""Ops that read a part of their first input, stated by the other inputs."""
FILLS = _ops("fills")
"""Ops that copy their first input and put input 2 in some places."""
SCATTERS = FILLS - {"Pad"}
"""Fills whose places are an input."""
CASTS = _ops("casts")
"""Ops that only change the element type."""
SEEN_THROUGH = _ops("see_through")
"""Ops that onnxruntime looks through when it fuses a normalization."""
ELEMENTLESS = _ops("elementless")
"""Ops that read the shape of a value and none of its elements."""
VIEWS = RELABELS | ELEMENTLESS | {"Constant"}
"""Ops that rename or relabel memory: a kernel moves nothing."""

# -- sources of numbers ------------------------------------------------------------------------------

RANDOM = _ops("random")
"""Ops that draw random numbers."""
UNREPEATABLE = RANDOM | {"Dropout"}
"""Ops whose results may differ from run to run."""
GENERATORS = _ops("generates")
"""Generators of constants. No provider has a half-precision kernel for them."""
LABEL_LOSSES = _ops("label_loss")
"""Losses that compare scores with labels."""
QUANTIZES, DEQUANTIZES = _ops("quantizes"), _ops("dequantizes")
"""Ops to and from integers or 8-bit floats with a scale, those of onnxruntime included."""
QUANTIZERS = QUANTIZES | DEQUANTIZES
"""Both."""

INTEGER = _ops("integer")
"""Ops that compute on integers with scales."""

# -- arithmetic --------------------------------------------------------------------------------------

SUMS = _ops("sums")
"""Elementwise sums and differences."""
PAIR_SUMS = SUMS - {"Sum"}
"""Sums of exactly two operands."""
SCALINGS = _ops("scales")
"""Elementwise products and quotients."""
AFFINE = SUMS | SCALINGS | {"Neg"}
"""Elementwise ops that are affine in one operand if all others are constant."""
COMMUTATIVE = frozenset(("Add", "Max", "Min", "Mul", "Sum"))
"""Ops whose operands may stand in any order."""
SQUARES = _ops("squares")
"""Ops that models write a square with."""
MAGNIFIES: Slots = {"Div": (1,), **dict.fromkeys(_ops("magnifies"), (0,))}
"""Ops in which small elements of these inputs count as much as large ones."""
ROUNDS = _ops("rounds")
"""Ops that round to integers."""
COMPARISONS = _ops("compares")
"""Comparisons of two values, element by element."""
PERIODIC = _ops("periodic")
"""Ops that read an angle."""
CORRECTLY_ROUNDED = _ops("ieee")
"""Arithmetic with the same bits on every machine (IEEE 754-2019, section 5.4.1)."""
EXACT = _ops("exact")
"""Ops that turn values of a low type into values of that type, with any attributes: copies, selections, and roundings
to integers. The float32 kernel keeps to the low type for all inputs, infinities included; MaxPool starts from the
lowest float32 and is not exact. `exact_ops` adds ops that are exact with some attributes."""

# -- magnitudes --------------------------------------------------------------------------------------

BOUNDED = _ops("bounded")
"""Ops whose results lie between -1 and 1."""
POOLS = _ops("pools")
"""Ops that reduce windows or whole maps."""
SMALL = _ops("small")
"""Ops whose results are finite and small for all inputs: normalizations, and the last ops of layers."""
SQUEEZES = _ops("squeezes")
"""Ops that map distant values to near ones, close to 0 or 1."""
SOFTMAXES = _ops("softmax")
"""Softmax, its logarithm, and onnxruntime's softmax of a sum."""

LONG_SUMS = frozenset(
    ("CumSum", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSum", "ReduceSumSquare")
)
"""Sums along axes."""
GROWS = LONG_SUMS | frozenset(("CumProd", "Exp", "Pow", "ReduceProd"))
"""Ops whose results can outgrow what they read."""
CHOOSES = COMPARISONS | frozenset(("ArgMax", "ArgMin", "TopK"))
"""Ops whose results say which number is larger."""

# -- products ----------------------------------------------------------------------------------------

PRODUCTS = _ops("multiplies")
"""Products of matrices."""
LAYERS = _ops("layer")
"""Products and convolutions with weights, of two operands and perhaps a bias."""
RECURRENT = _ops("recurrent")
"""Recurrent cells."""
TENSOR_CORE_STEP = 8
"""Terms that tensor cores sum at once."""
HEAVY = _ops("heavy")
"""Ops that take most of a network's time: products, convolutions, recurrent cells, attention."""

# -- shapes ------------------------------------------------------------------------------------------

SAME_SHAPE = _ops("same_shape")
"""Ops whose first result has the shape of their first input."""
BROADCASTS = _ops("broadcasts")
"""Ops whose result has the shape that all inputs broadcast to."""
