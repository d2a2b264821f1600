"""What operators are: one row per op, and the classes that follow from the rows.

A row names an op as `Op.kind` does, and says

- how its result is made of the numbers that it reads, and the inputs that these stand in (`*`: all): `copies` moves or
  repeats them, `selects` takes some of several, `computes` is elementwise arithmetic, `reduces` works along axes;
- the inputs that state a shape, an axis, a size, a scale, a count or a position;
- its classes, each described where the table is read below.

An op that has no row belongs to no class. A set of ops that a module needs is derived from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Slots = Mapping[str, Sequence[int]]
"""Inputs by op."""

ALL = range(1 << 16)
"""All inputs."""

_TABLE = """
Abs                       computes:0    -       contracts exact ieee same_shape
Add                       computes:*    -       sums ieee broadcasts
AffineGrid                -             1
And                       -             -       broadcasts
Attention                 -             -       heavy
AveragePool               -             -       contracts
BatchNormalization        -             -       same_shape
Bernoulli                 -             -       random
BitwiseAnd                -             -       broadcasts
BitwiseOr                 -             -       broadcasts
BlackmanWindow            -             0       generates
Cast                      copies:0      -       casts see_through same_shape
CastLike                  copies:0      -       casts same_shape
Ceil                      computes:0    -       rounds exact same_shape
CenterCropPad             copies:0      1       exact
Clip                      selects:0,1,2 -       same_shape
Col2Im                    -             1,2
Compress                  copies:0      -       exact
Concat                    copies:*      -       exact
ConcatFromSequence        copies:0      -       exact
Constant                  -             -       exact
ConstantOfShape           -             0       exact
Conv                      -             -       layer heavy
ConvTranspose             -             -       layer heavy
Cos                       -             -       bounded periodic same_shape
CumSum                    reduces:0     1       same_shape
DFT                       -             1,2
DeformConv                -             -       heavy
DepthToSpace              copies:0      -       permutes exact
DequantizeLinear          -             -       dequantizes
Div                       computes:*    -       scales ieee broadcasts
Dropout                   copies:0      -       see_through same_shape
Einsum                    -             -       multiplies heavy
Elu                       -             -       same_shape
Equal                     -             -       broadcasts
Erf                       -             -       bounded same_shape
Exp                       computes:0    -       squeezes same_shape
Expand                    copies:0      1       moves exact
EyeLike                   -             -       generates exact
Flatten                   copies:0      -       relabels moves permutes exact
Floor                     computes:0    -       rounds exact same_shape
GRU                       -             -       recurrent heavy
Gather                    copies:0      -       picks exact
GatherElements            copies:0      -       picks exact
GatherND                  copies:0      -       picks exact
Gelu                      -             -       contracts same_shape
Gemm                      -             -       multiplies layer heavy
GlobalAveragePool         -             -       contracts
GlobalMaxPool             -             -       contracts
Greater                   -             -       broadcasts
GreaterOrEqual            -             -       broadcasts
GroupNormalization        -             -       same_shape
HammingWindow             -             0       generates
HannWindow                -             0       generates
HardSigmoid               -             -       bounded squeezes same_shape
HardSwish                 -             -       contracts same_shape
Hardmax                   -             -       exact
Identity                  copies:0      -       relabels moves permutes see_through exact same_shape
If                        -             -       exact
InstanceNormalization     -             -       same_shape
IsInf                     -             -       same_shape
IsNaN                     -             -       same_shape
LSTM                      -             -       recurrent heavy
LayerNormalization        -             -       small same_shape
LeakyRelu                 -             -       same_shape
Less                      -             -       broadcasts
LessOrEqual               -             -       broadcasts
Log                       computes:0    -       magnifies same_shape
LogSoftmax                -             -       softmax same_shape
Loop                      -             0       exact
MatMul                    -             -       multiplies layer heavy
Max                       selects:*     -       exact broadcasts
MaxPool                   -             -       contracts
MaxUnpool                 -             2
Mean                      computes:*    -
MelWeightMatrix           -             0,1,2   generates
Min                       selects:*     -       exact broadcasts
Mish                      -             -       contracts
Mod                       computes:*    -       broadcasts
Mul                       computes:*    -       scales squares ieee broadcasts
Multinomial               -             -       random
Neg                       computes:0    -       contracts exact ieee same_shape
NegativeLogLikelihoodLoss -             -       label_loss
NonMaxSuppression         -             2
Not                       -             -       same_shape
OneHot                    -             1       exact
Optional                  -             -       exact
OptionalGetElement        -             -       exact
Or                        -             -       broadcasts
PRelu                     -             -       broadcasts
Pad                       copies:0,2    1,3     fills
Pow                       computes:*    -       squares broadcasts
QuantizeLinear            -             -       quantizes
RMSNormalization          -             -       small same_shape
RNN                       -             -       recurrent heavy
RandomNormal              -             -       random
RandomNormalLike          -             -       random
RandomUniform             -             -       random
RandomUniformLike         -             -       random
Range                     -             0,1,2
Reciprocal                computes:0    -       magnifies ieee same_shape
ReduceL1                  -             1
ReduceL2                  -             1
ReduceLogSum              -             1
ReduceLogSumExp           -             1
ReduceMax                 reduces:0     1       contracts
ReduceMean                reduces:0     1       contracts
ReduceMin                 reduces:0     1       contracts
ReduceProd                reduces:0     1
ReduceSum                 reduces:0     1
ReduceSumSquare           -             1
Relu                      computes:0    -       contracts exact same_shape
Reshape                   copies:0      1       relabels moves permutes exact
Resize                    -             1,2,3
ReverseSequence           copies:0      1       permutes exact
Round                     computes:0    -       rounds exact same_shape
STFT                      -             1,3
Scan                      -             -       exact
Scatter                   copies:0,2    -       fills
ScatterElements           copies:0,2    -       fills same_shape
ScatterND                 copies:0,2    -       fills same_shape
Selu                      -             -       same_shape
SequenceAt                copies:0      1       exact
SequenceConstruct         copies:*      -       exact
SequenceEmpty             -             -       exact
SequenceErase             copies:0      1       exact
SequenceInsert            copies:0,1    2       exact
SequenceMap               -             -       exact
Shape                     -             -       elementless
Sigmoid                   computes:0    -       bounded small squeezes same_shape
Sign                      computes:0    -       exact same_shape
Sin                       -             -       bounded periodic same_shape
Size                      -             -       elementless
Slice                     copies:0      1,2,3,4 picks exact
Softmax                   -             -       softmax bounded small squeezes same_shape
SoftmaxCrossEntropyLoss   -             -       label_loss
Softplus                  computes:0    -       squeezes same_shape
Softsign                  -             -       bounded same_shape
SpaceToDepth              copies:0      -       permutes exact
Split                     copies:0      1       exact
SplitToSequence           copies:0      1       exact
Sqrt                      computes:0    -       magnifies ieee same_shape
Squeeze                   copies:0      1       relabels moves permutes exact
Sub                       computes:*    -       sums ieee broadcasts
Sum                       computes:*    -       sums broadcasts
Swish                     -             -       contracts
Tanh                      computes:0    -       bounded small squeezes same_shape
TensorScatter             -             2       exact
Tile                      copies:0      1       moves exact
TopK                      -             1       exact
Transpose                 copies:0      -       moves permutes exact
Trilu                     copies:0      1       exact same_shape
Unique                    -             -       exact
Unsqueeze                 copies:0      1       relabels moves permutes exact
Upsample                  -             1
Where                     selects:1,2   -       exact broadcasts
Xor                       -             -       broadcasts
com.microsoft::Attention                        -             -       heavy
com.microsoft::BiasSoftmax                      -             -       softmax squeezes
com.microsoft::ConvTransposeWithDynamicPads     -             2
com.microsoft::CropAndResize                    -             3
com.microsoft::DecoderMaskedMultiHeadAttention  -             -       heavy
com.microsoft::DequantizeLinear                 -             -       dequantizes
com.microsoft::ExpandDims                       -             -       exact
com.microsoft::FusedConv                        -             -       heavy
com.microsoft::FusedGemm                        -             -       heavy
com.microsoft::FusedMatMul                      -             -       multiplies heavy
com.microsoft::GemmFastGelu                     -             -       heavy
com.microsoft::GroupQueryAttention              -             5,6     heavy
com.microsoft::MatMulNBits                      -             -       heavy
com.microsoft::MoE                              -             -       heavy
com.microsoft::MultiHeadAttention               -             -       heavy
com.microsoft::NhwcConv                         -             -       heavy
com.microsoft::PackedAttention                  -             -       heavy
com.microsoft::PackedMultiHeadAttention         -             -       heavy
com.microsoft::QAttention                       -             -       heavy
com.microsoft::QMoE                             -             -       heavy
com.microsoft::QuantizeLinear                   -             -       quantizes
"""


def _parse(slots: str) -> Sequence[int]:
    return ALL if slots == "*" else tuple(map(int, slots.split(",")))


_ROWS = {op: (numbers, sizes, words) for op, numbers, sizes, *words in map(str.split, _TABLE.strip().splitlines())}


def _numbers(how: str) -> Slots:
    """The inputs whose numbers a result is made of, by op."""
    cells = ((op, *row[0].split(":")) for op, row in _ROWS.items() if row[0] != "-")
    return {op: _parse(slots) for op, verb, slots in cells if verb == how}


def _ops(word: str) -> frozenset[str]:
    """The ops of a class."""
    return frozenset(op for op, (_, _, words) in _ROWS.items() if word in words)


# -- how numbers travel ------------------------------------------------------------------------------

COPIES = _numbers("copies")
"""Ops whose result consists of elements of these inputs."""

SELECTIONS = _numbers("selects")
"""Ops whose result consists of elements of these inputs, chosen by comparison."""

ARITHMETIC = _numbers("computes")
"""Elementwise arithmetic."""

REDUCTIONS = _numbers("reduces")
"""Small reductions, and the running sum."""

CARRIERS: Slots = {**COPIES, **SELECTIONS, **ARITHMETIC, **REDUCTIONS}
"""Every op that a walk along numbers passes."""

SHAPE_SLOTS: Slots = {op: _parse(sizes) for op, (_, sizes, _) in _ROWS.items() if sizes != "-"}
"""The inputs that state a shape, an axis, a size, a scale, a count or a position. The scales of Resize stand in slot 1
at opset 10, and behind the region of interest from 11 on; sizes follow."""

# -- what moves numbers ------------------------------------------------------------------------------

RELABELS = _ops("relabels")
"""Ops that give all elements in the same order, in another shape at most: no memory moves."""

MOVES = _ops("moves")
"""Ops that give all elements of their first input, moved or repeated, and no others."""

PERMUTES = _ops("permutes")
"""Ops that give each element of their first input exactly once."""

PICKS = _ops("picks")
"""Ops that read the part of their first input that the other inputs state."""

FILLS = _ops("fills")
"""Ops that copy their first input and put input 2 in some places."""

SCATTERS = FILLS - {"Pad"}
"""Those of them that take the places from an input."""

CASTS = _ops("casts")
"""Ops that change the element type alone."""

SEEN_THROUGH = _ops("see_through")
"""Ops that onnxruntime looks past where it fuses a normalization."""

ELEMENTLESS = _ops("elementless")
"""Ops that read the shape of a value and none of its elements."""

VIEWS = RELABELS | ELEMENTLESS | {"Constant"}
"""Ops that rename or relabel memory: a kernel moves nothing."""

# -- what makes numbers ------------------------------------------------------------------------------

RANDOM = _ops("random")
"""Ops that draw random numbers."""

UNREPEATABLE = RANDOM | {"Dropout"}
"""Ops that may give other numbers each time."""

GENERATORS = _ops("generates")
"""Ops that make constants out of nothing. No provider has a half-precision kernel for them."""

LABEL_LOSSES = _ops("label_loss")
"""Losses that compare scores with labels."""

QUANTIZES, DEQUANTIZES = _ops("quantizes"), _ops("dequantizes")
"""Ops to and from integers or 8-bit floats with a scale, those of onnxruntime included."""

# -- arithmetic --------------------------------------------------------------------------------------

SUMS = _ops("sums")
"""Elementwise sums and differences."""

PAIR_SUMS = SUMS - {"Sum"}
"""Those of exactly two operands."""

SCALINGS = _ops("scales")
"""Elementwise products and quotients."""

AFFINE = SUMS | SCALINGS | {"Neg"}
"""Elementwise ops that make linear combinations where all operands but one are constant."""

SQUARES = _ops("squares")
"""Ops by which models write a square."""

MAGNIFIES: Slots = {"Div": (1,), **dict.fromkeys(_ops("magnifies"), (0,))}
"""Ops for which small elements of these inputs count as much as large ones."""

ROUNDS = _ops("rounds")
"""Ops that give whole numbers."""

PERIODIC = _ops("periodic")
"""Ops that read an angle."""

CORRECTLY_ROUNDED = _ops("ieee")
"""Arithmetic that every machine computes to the bit (IEEE 754-2019, section 5.4.1)."""

EXACT = _ops("exact")
"""Ops that give values of a low type whenever they read such values, whatever their attributes: copies, selections, and
what rounds to whole numbers. No input at all, infinities included, makes the float32 kernel of one leave the low type;
MaxPool starts from the lowest float32 and is not exact. `exact_ops` adds those of which attributes decide."""

# -- magnitudes --------------------------------------------------------------------------------------

BOUNDED = _ops("bounded")
"""Ops whose results lie between -1 and 1."""

CONTRACTS = _ops("contracts")
"""Ops whose results are no larger than their first input."""

SMALL = _ops("small")
"""Ops whose results are finite and small whatever they read: normalizations, and what ends a network's layers."""

SQUEEZES = _ops("squeezes")
"""Ops that bring values that lie apart together near 0 or 1."""

SOFTMAXES = _ops("softmax")
"""Softmax, its logarithm, and onnxruntime's softmax of a sum."""

# -- products ----------------------------------------------------------------------------------------

PRODUCTS = _ops("multiplies")
"""Products of matrices."""

LAYERS = _ops("layer")
"""Products and convolutions with weights, of two operands and perhaps a bias."""

RECURRENT = _ops("recurrent")
"""Recurrent cells."""

HEAVY = _ops("heavy")
"""Ops in which networks spend their time: products, convolutions, recurrent cells, attention."""

# -- shapes ------------------------------------------------------------------------------------------

SAME_SHAPE = _ops("same_shape")
"""Ops whose first result has the shape of their first input."""

BROADCASTS = _ops("broadcasts")
"""Ops whose result has the shape that all inputs broadcast to."""
