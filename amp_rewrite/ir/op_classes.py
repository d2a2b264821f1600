"""Sets of operators, made from the table in `ops`.

Ops are named as in `Op.kind`. An op without a row is not in any set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from amp_rewrite.ir.ops import OPS, Need, Trait, Way

Slots = Mapping[str, Sequence[int]]  # inputs by op


def _ops(trait: Trait) -> frozenset[str]:
    return frozenset(op for op, row in OPS.items() if row.traits.value & trait.value)


def _walked(*ways: Way) -> dict[str, Sequence[int]]:
    return {op: row.slots for op, row in OPS.items() if row.way in ways and Trait.CARRIES in row.traits}


# -- paths of numbers --------------------------------------------------------------------------------

COPIES = _walked(Way.COPY)  # ops that only copy elements of these inputs
SELECTIONS = {op: slots for op, slots in _walked(Way.SELECT).items() if op != "Relu"}
"""Ops that copy elements of these inputs, chosen by a comparison."""
ARITHMETIC = _walked(Way.SUM, Way.SCALE, Way.FUNCTION) | {"Relu": (0,)}  # elementwise arithmetic
REDUCTIONS = _walked(Way.REDUCE)  # small reductions and running sums
CARRIERS: Slots = {**COPIES, **SELECTIONS, **ARITHMETIC, **REDUCTIONS}  # all ops that walks pass through
KEEP_SCALE: Slots = {**COPIES, **SELECTIONS, "MaxPool": (0,), "Relu": (0,)}
"""Ops that copy elements of these inputs or write 0, so that quantized values keep their scale."""

# -- copies of numbers -------------------------------------------------------------------------------

RELABELS = _ops(Trait.RELABELS)  # ops that change at most the shape, without moving memory
MOVES = _ops(Trait.MOVES)  # ops that move or repeat all elements of their first input
SCATTERS = _ops(Trait.SCATTERS)  # ops that copy their first input, and write input 2 to places in another input
FILLS = SCATTERS | {"Pad"}  # ops that copy their first input, and write input 2 to some places
CASTS = _ops(Trait.CASTS)  # ops that only change the element type
TABLES = _ops(Trait.TABLE)  # ops that look up rows of a weight, such as an embedding
ELEMENTLESS = _ops(Trait.ELEMENTLESS)  # ops that read the shape of a value, but not its elements

# -- sources of numbers ------------------------------------------------------------------------------

RANDOM = _ops(Trait.RANDOM)  # ops that draw random numbers
UNREPEATABLE = RANDOM | {"Dropout"}  # ops whose results may differ from run to run
GENERATORS = _ops(Trait.GENERATES)  # generators of constants, for which no provider has a half-precision kernel
LABEL_LOSSES = _ops(Trait.LABEL_LOSS)  # losses that compare scores with labels
QUANTIZES, DEQUANTIZES = _ops(Trait.QUANTIZES), _ops(Trait.DEQUANTIZES)
"""Ops that convert to and from integers or 8-bit floats with a scale, including those of onnxruntime."""
QUANTIZERS = QUANTIZES | DEQUANTIZES  # ops that convert in either direction

INTEGER = _ops(Trait.INTEGER)  # ops that compute on integers with scales

# -- arithmetic --------------------------------------------------------------------------------------

SUMS = _ops(Trait.SUMS)  # elementwise sums and differences
PAIR_SUMS = SUMS - {"Sum"}  # sums of exactly two operands
SCALINGS = _ops(Trait.SCALES)  # elementwise products and quotients
AFFINE = SUMS | SCALINGS | {"Neg"}  # elementwise ops that are affine in one operand if all others are constant
COMMUTATIVE = frozenset(("Add", "Max", "Min", "Mul", "Sum"))  # ops whose operands may be swapped
MAGNIFIES: Slots = {"Div": (1,), **dict.fromkeys(_ops(Trait.MAGNIFIES), (0,))}
"""Ops for which small elements of these inputs matter as much as large ones."""
COMPARISONS = _ops(Trait.COMPARES)  # comparisons of two values, element by element
EXACT = _ops(Trait.EXACT)
"""Ops that return low values for low values, regardless of their attributes: copies, selections, and roundings to
integers. Their float32 kernels return low values for all low inputs, including infinities; MaxPool starts from the
lowest float32, so it is not exact. `dataflow.exact` adds ops that are exact with some attributes."""

# -- magnitudes --------------------------------------------------------------------------------------

BOUNDED = frozenset(
    op for op, row in OPS.items() if row.way in (Way.FUNCTION, Way.NORM) and row.low >= -1 and row.high <= 1
)
"""Ops whose results lie between -1 and 1."""
SOFTMAXES = _ops(Trait.SOFTMAX)  # softmax, its logarithm, and onnxruntime's softmax of a sum

LONG_SUMS = _ops(Trait.LONG_SUM)  # sums along axes
GROWS = _ops(Trait.GROWS)  # ops whose results can be much larger than their inputs
CHOOSES = COMPARISONS | {op for op, row in OPS.items() if Need.ORDER in row.needs.values()}
"""Ops whose results depend on which number is larger."""

# -- products ----------------------------------------------------------------------------------------

PRODUCTS = _ops(Trait.MULTIPLIES)  # matrix products
LAYERS = _ops(Trait.LAYER)  # products and convolutions of two operands and perhaps a bias
RECURRENT = _ops(Trait.RECURRENT)  # recurrent cells
TENSOR_CORE_STEP = 8  # terms that tensor cores sum at once
LARGE_WEIGHT = 1 << 22  # elements; a weight of this size is worth its own layout
HEAVY = frozenset(op for op, row in OPS.items() if row.way is Way.PRODUCT) - INTEGER
"""Ops that take most of a network's time: products, convolutions, recurrent cells, attention."""

LOW_ONLY = _ops(Trait.LOW_ONLY)  # ops with kernels only for low types; float32 ops are not fused into them

# -- shapes ------------------------------------------------------------------------------------------

SAME_SHAPE = _ops(Trait.SAME_SHAPE)  # ops whose first result has the shape of their first input
BROADCASTS = _ops(Trait.BROADCASTS)  # ops whose result has the broadcast shape of all inputs

# -- attention ---------------------------------------------------------------------------------------

ATTENTION_MASKS: Slots = {
    "Attention": (3,),
    "com.microsoft::Attention": (5,),
    "com.microsoft::DecoderMaskedMultiHeadAttention": (4,),
    "com.microsoft::GroupQueryAttention": (10,),
    "com.microsoft::MultiHeadAttention": (5,),
}
"""The inputs added to the attention scores."""
