"""Ops on the deny list that are harmless where they stand: what the list fears of their kind cannot happen there.

They count as gray, so that they are lowered between two lowered ops and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from amp_rewrite.decide.hazards.small_sums import small_sums, terms_of
from amp_rewrite.decide.hazards.snake import snakes
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, axes_of, computes_float32, float32, number, sums_squares
from amp_rewrite.ir.op_classes import COPIES, LAYERS
from amp_rewrite.ir.patterns.activations import CUBIC
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.patterns.match import Search
from amp_rewrite.ir.shapes.onnx_shapes import Shapes, shapes_of
from amp_rewrite.ir.view import Op, OpId, View


def benign(view: View, groups: Sequence[Cluster], to: DType) -> Mapping[OpId, str]:
    """The harmless ops, each with one line that says why. O(nodes), and the copies behind each mean."""
    found = dict(_cubes(view, groups))
    shapes = cache(lambda: shapes_of(view))
    found.update(small_sums(view, shapes))
    found.update((op, _SNAKE) for pair in snakes(view).items() for op in pair)
    found.update((op, _MEAN) for op in _means(view, groups, to, shapes))
    return found


_CUBES = Search.of(CUBIC)
_CUBE = "the cube in a GELU: where it leaves the range the tanh around it is 1 or -1 already"
_MEAN = "a mean, bounded by its input; of so few numbers, or in a type of such range, that their sum fits"
_SNAKE = "of a snake activation: off by no more than the sum behind it rounds"
_FEW = 1 << 8
_FEW_OF_MAPS = 1 << 12
"""Terms of a mean in a type of small range. The CUDA kernels add up in float32, but store the sum in the low type
before they divide it, by a number of the low type: 256 terms of 255 still fit float16, 4096 of 16. Feature maps that
layers pool are near 1; a residual stream is not."""


def _cubes(view: View, groups: Sequence[Cluster]) -> Iterator[tuple[OpId, str]]:
    """The Pow of tanh(c · (x + k · x³)) with positive k.

    Beyond |x| = 40 x³ becomes an infinity of x's own sign, whose tanh is ±1, as it is from |x| = 6 on in any case;
    below |x| = 0.004 it becomes 0 beside x.
    """
    for op in (view.ops[op_id] for group in groups if group.kind == "gelu_tanh" for op_id in group.ops):
        match = _CUBES.direct(view, op)
        if match is not None and number(view, match.values["exponent"]) == 3:
            factor = number(view, match.values["factor"])
            if factor is not None and factor > 0:
                yield op.id, _CUBE


def _means(view: View, groups: Sequence[Cluster], to: DType, shapes: Callable[[], Shapes]) -> Iterator[OpId]:
    """Means of few numbers: not those that are subtracted, nor variances, which need more digits than their input."""
    taken = {op for group in groups for op in group.ops}
    means = [op for op in view.ops if op.kind == "ReduceMean" and op.id not in taken and computes_float32(view, op)]
    wide, copies = to.max > 2.0**32, Flow.of(view, COPIES)
    for op in means:
        readers, squares = _readers(copies, op), _squares(view, op)
        if squares or any(reader.kind == "Sub" for reader in readers):
            continue
        pooled = bool(readers) and all(reader.kind in _LAYERS for reader in readers)
        terms = 0 if wide else terms_of(view, op, shapes())
        if terms is not None and terms <= (_FEW_OF_MAPS if pooled else _FEW):
            yield op.id


_LAYERS = LAYERS - {"ConvTranspose"}  # that read pooled maps


def _squares(view: View, op: Op) -> bool:
    """Whether a reduction reads squares, or along the last axis products, as gradients of norms do."""
    if sums_squares(view, op) is not None:
        return True
    made_by = view.producer(op.inputs[0])
    if made_by is None or made_by.kind != "Mul" or list(axes_of(view, op)) != [-1]:
        return False
    return all(view.constant(value) is None for value in made_by.inputs)


def _readers(copies: Flow, op: Op) -> Sequence[Op]:
    """What reads a result, copies looked past."""
    view, result = copies.view, op.outputs[0]
    reached = copies.forth({result: None}, float32(view)) if result is not None else {}
    readers = [view.ops[use.op] for value in reached for use in view.uses[value]]
    return [reader for reader in readers if not copies.through(reader)]
