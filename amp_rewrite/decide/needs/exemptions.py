"""Ops on the deny list that are harmless in their context: the risk of their kind cannot arise there.

They count as gray: lowered between two lowered ops and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, axes_of, float32_ops, number, sums_squares
from amp_rewrite.ir.op_classes import COPIES, ELEMENTLESS, LAYERS, MAGNIFIES, RANDOM, REDUCTIONS
from amp_rewrite.ir.patterns.clusters import CUBIC, Cluster, snakes
from amp_rewrite.ir.patterns.match import Search
from amp_rewrite.ir.shapes.onnx_shapes import combined_elements
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_CUBE = "the cube in a GELU: where it leaves the range the tanh around it is 1 or -1 already"
_MOST_TERMS = 8
_SUM = f"a sum of at most {_MOST_TERMS} numbers, as that many Adds give"
_SQUARE = "a square that no sum, mean, root or divisor reads, as a product of two equal factors is"
_SNAKE = "of a snake activation: off by no more than the sum behind it rounds"
_MEAN = "a mean, bounded by its input; of so few numbers, or in a type of such range, that their sum fits"
_CUBES = Search.of(CUBIC)
_POOLED_FOR = LAYERS - {"ConvTranspose"}  # layers that read pooled feature maps
_FEW = 1 << 8
_FEW_OF_MAPS = 1 << 12
"""Terms of a mean in a type of small range. CUDA kernels accumulate in float32, but store the sum in the low type
before they divide it, by a number of the low type. 256 terms of 255 fit float16, and 4096 terms of 16: feature maps
that layers pool have values near 1, a residual stream does not."""


def benign(view: View, groups: Sequence[Cluster], to: DType) -> Mapping[OpId, str]:
    """Return the harmless ops, each with a one-line reason. O(nodes), plus the copies behind each mean."""
    return {
        **dict.fromkeys(_cubes(view, groups), _CUBE),
        **dict.fromkeys(_small_sums(view), _SUM),
        **dict.fromkeys((op for pair in snakes(view).items() for op in pair), _SNAKE),
        **dict.fromkeys(_squares_alone(view, groups), _SQUARE),
        **dict.fromkeys(_means(view, groups, to), _MEAN),
    }


def _cubes(view: View, groups: Sequence[Cluster]) -> Iterator[OpId]:
    """Yield the Pow of tanh(c · (x + k · x³)) with positive k.

    Beyond |x| = 40 x³ overflows to an infinity of x's sign, whose tanh is ±1; so is the exact tanh from |x| = 6 on.
    Below |x| = 0.004 x³ becomes 0, which is negligible beside x.
    """
    for op in (view.ops[op_id] for group in groups if group.kind == "gelu_tanh" for op_id in group.ops):
        match = _CUBES.direct(view, op)
        if match is not None and number(view, match.values["exponent"]) == 3:
            factor = number(view, match.values["factor"])
            if factor is not None and factor > 0:
                yield op.id


def _small_sums(view: View) -> Iterator[OpId]:
    """Yield every ReduceSum of a few terms by the known shapes, except sums of squares.

    A long sum leaves the range; one of eight terms needs terms of 8190 for that. It accumulates in float32, whereas a
    chain of Adds, which are on the gray list, rounds after each. Examples are sums over the chosen experts.
    """
    for op in float32_ops(view, ("ReduceSum",)):
        if sums_squares(view, op) is None and _combines(view, op, _MOST_TERMS):
            yield op.id


def _squares_alone(view: View, groups: Sequence[Cluster]) -> Iterator[OpId]:
    """Yield each Pow with the exponent 2 that no reduction, root or divisor reads: what is said of Mul holds for it."""
    clustered, copies = {op for group in groups for op in group.ops}, Flow.of(view, COPIES)
    for op in float32_ops(view, ("Pow",)):
        square = op.id not in clustered and number(view, op.inputs[1]) == 2
        if square and not any(map(_sums_or_divides, _readers(copies, op))):
            yield op.id


def _sums_or_divides(op: Op) -> bool:
    return op.kind in REDUCTIONS or op.kind in MAGNIFIES or op.kind.endswith("Normalization")


def _means(view: View, groups: Sequence[Cluster], to: DType) -> Iterator[OpId]:
    """Yield means of few terms, except those that are subtracted and variances: these need extra precision."""
    clustered = {op for group in groups for op in group.ops}
    wide, copies = to.max > 2.0**32, Flow.of(view, COPIES)
    for op in float32_ops(view, ("ReduceMean",)):
        if op.id in clustered or _squares(view, op):
            continue
        readers = _readers(copies, op)
        if any(reader.kind == "Sub" for reader in readers):
            continue
        pooled = bool(readers) and all(reader.kind in _POOLED_FOR for reader in readers)
        if wide or _combines(view, op, _FEW_OF_MAPS if pooled else _FEW):
            yield op.id


def _combines(view: View, op: Op, most: int) -> bool:
    terms = combined_elements(view, op)
    return terms is not None and terms <= most


def _squares(view: View, op: Op) -> bool:
    """True if a reduction reads squares or, along the last axis, products of variables as in gradients of norms."""
    if sums_squares(view, op) is not None:
        return True
    product = view.producer(op.inputs[0], "Mul")
    if product is None or list(axes_of(view, op)) != [-1]:
        return False
    return all(view.constant(value) is None for value in product.inputs)


def _readers(copies: Flow, op: Op) -> Sequence[Op]:
    return copies.readers(copies.forth(dict.fromkeys(op.results[:1]), copies.view.holds_floats))


def numbers(view: View) -> frozenset[OpId]:
    """Return the ops whose results depend on shapes and constants alone, not on data. O(nodes + uses).

    An example is an attention scale computed as `Pow(head size, -0.5)`. Pow is on the deny list, but this one is not a
    reason to keep the attention behind it in float32.
    """
    return frozenset(op.id for op in _constant_ops(view))


def _constant_ops(view: View) -> Iterator[Op]:
    known: set[ValueId | None] = {None, *view.constants}
    for op in view.ops:
        plain = known.issuperset(op.inputs) and not op.bodies and op.signature is not None and op.kind not in RANDOM
        constant = plain and bool(op.operands)
        if constant or op.kind in ELEMENTLESS:
            known.update(op.outputs)
        if constant:
            yield op
