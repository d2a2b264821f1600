"""Shapes of values: inferred by onnx, and followed through the shape computations of exporters.

Equal names mean equal sizes. Inputs are assumed not to be empty, since a model computes nothing for an empty input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

import onnx.checker
import onnx.shape_inference
from onnx import GraphProto, ValueInfoProto

from amp_rewrite.files.protos import all_graphs, clone
from amp_rewrite.files.tensors import MAX_ELEMENTS
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import number, reduction_axes
from amp_rewrite.ir.dims import (
    CONTENTS,
    INTEGERS,
    INVENTED_PREFIX,
    MAX_AXES,
    Contents,
    Dim,
    Dims,
    InventedNames,
    OpInputs,
    integer_contents,
    is_nonnegative,
    minus,
    names_in,
    over,
    product,
    renamed,
)
from amp_rewrite.ir.op_classes import BROADCASTS, SAME_SHAPE
from amp_rewrite.ir.schema import normal_domain
from amp_rewrite.ir.versions import FIRST_ALLOWZERO
from amp_rewrite.ir.view import MAIN, Op, ValueId, View, once

Shape = tuple[int | None, ...]
DeclaredDims = tuple[int | str | None, ...]
"""A declared shape, with known, named or unknown dimensions."""

# Errors of inference for contradictory models, which leave shapes unknown.
_FAULTS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, IndexError)
_MAX_RANGE_LENGTH = 1 << 20


def elements(sizes: Sequence[int | None] | None) -> int | None:
    """Return the number of elements of a shape; None if its rank or a size is unknown."""
    numbers = [size for size in sizes or () if size is not None]
    return math.prod(numbers) if sizes is not None and len(numbers) == len(sizes) else None


def combined_elements(view: View, op: Op) -> int | None:
    """Return the number of elements combined into each result of a reduction; None if unknown."""
    axes, shape = reduction_axes(view, op), shape_of(view, op.inputs[0]) or ()
    if not axes or any(not -len(shape) <= axis < len(shape) for axis in axes):
        return None
    return elements([shape[axis] for axis in axes])


def shape_of(view: View, value: ValueId | None) -> Shape | None:
    """Return the shape of a value, with None for symbolic and unknown dimensions; None if its rank is unknown.

    onnx's inference runs once for each view, on the model without its heavy weights.
    """
    return _shapes(view).get(value)


@once
def _shapes(view: View) -> Mapping[ValueId | None, Shape]:
    return {value: fixed(dims) for value, dims in _declared_shapes(view, _inferred(view, False)).items()}


def fixed(dims: Dims) -> Shape:
    return tuple([d if isinstance(d, int) else None for d in dims])


def _long_range(view: View, op: Op) -> bool:
    start, limit, delta = (number(view, value) for value in (*op.inputs, None, None, None)[:3])
    if start is None or limit is None or not delta:
        return False
    return not abs((limit - start) / delta) <= _MAX_RANGE_LENGTH


def _declared_shapes(view: View, inferred: GraphProto) -> dict[ValueId | None, Dims]:
    """Return the shapes declared in a graph after inference, and the shapes of constants."""
    dims_by_value: dict[ValueId | None, Dims] = {}
    graphs = all_graphs(inferred) if len(view.scopes) > 1 else (inferred,)
    for graph, values in zip(graphs, view.values_of, strict=False):
        ids = {value.name: value.id for value in values}
        for formal in (*graph.input, *graph.value_info, *graph.output):
            if formal.name in ids and (dims := declared_dims(formal)) is not None:
                dims_by_value[ids[formal.name]] = dims
    # A stub is an input of the skeleton, and Constants are not declared.
    dims_by_value.update((v.id, tuple(v.tensor.dims)) for v in view.values if v.tensor is not None)
    return dims_by_value


def _inferred(view: View, through_values: bool) -> GraphProto:
    skeleton = view.model.skeleton()
    deep = through_values and not any(_long_range(view, op) for op in view.of_kinds(("Range",)))
    if deep and view.opset == FIRST_ALLOWZERO - 1:
        # At the next opset, onnx infers shapes through Reshape; all other shapes are the same.
        skeleton = clone(skeleton)
        for imported in skeleton.opset_import:
            imported.version += normal_domain(imported.domain) == ""
    with suppress(*_FAULTS):
        return onnx.shape_inference.infer_shapes(skeleton, data_prop=deep).graph
    return skeleton.graph


def declared_dims(formal: ValueInfoProto) -> DeclaredDims | None:
    """Return the dimensions in a declaration; None for an unknown rank or an impossible shape."""
    tensor = formal.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    # Iterating over a slice is twice as fast.
    dims = tuple([d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim[:]])
    return dims if _possible(dims) else None


@lru_cache(1 << 12)
def _possible(dims: DeclaredDims) -> bool:
    """True if a value can have these dimensions: none negative, at most MAX_AXES, and at most MAX_ELEMENTS elements."""
    if any(isinstance(size, bytes) for size in dims):
        return False  # its name is not UTF-8
    sizes = [size or 1 for size in dims if isinstance(size, int)]
    return min(sizes, default=1) > 0 and math.prod(sizes) <= MAX_ELEMENTS and len(dims) <= MAX_AXES


@once
def known_dims(view: View) -> Mapping[ValueId | None, Dims]:
    """Return the dimensions of each value of known rank. O(nodes)."""
    return _ShapeWalk(view, _declared_shapes(view, _inferred(view, True))).dims()


def dims_of(view: View, value: ValueId | None) -> Dims:
    """Return the dimensions of a value, with names for symbolic ones; () if its rank is unknown."""
    return known_dims(view).get(value, ())


@dataclass(slots=True)
class _ShapeWalk:
    view: View
    shapes: dict[ValueId | None, Dims]
    contents: dict[ValueId, Contents] = field(default_factory=dict)
    same: dict[str, Dim] = field(default_factory=dict)
    """Names of sizes in the model, each with another expression for the same size."""
    invented: InventedNames = field(default_factory=InventedNames)

    def dims(self) -> Mapping[ValueId | None, Dims]:
        for op in self.view.ops:
            if op.kind in RULES or op.kind in CONTENTS:
                self.follow(op)
            elif op.kind == "Split" and (whole := self.at(op.inputs[0])):
                axis = int_attribute(op.node, "axis", 0) % len(whole)
                for part in op.results:  # onnx does not infer the parts if one is empty
                    self.shapes.setdefault(part, (*whole[:axis], None, *whole[axis + 1 :]))
        return {value: self.renamed(dims) for value, dims in self.shapes.items()}

    def at(self, value: ValueId | None) -> Dims | None:
        dims = self.shapes.get(value)
        return self.renamed(dims) if dims is not None else None

    def renamed(self, dims: Dims) -> Dims:
        return tuple(renamed(d, self.same) for d in dims) if self.same else dims

    def follow(self, op: Op) -> None:
        result = op.outputs[0]
        inferred, counts = self.at(result), self.view.dtype(result) in INTEGERS
        if result is None or (not counts and inferred is not None and all(isinstance(d, int) for d in inferred)):
            return  # the shape is known, and floats cannot be the shape of another value
        contents = [self.contents[v] if v in self.contents else integer_contents(self.view, v) for v in op.inputs]
        inputs = OpInputs(op, [self.at(v) for v in op.inputs], contents, self.invented)
        dims = _ruled(RULES, inputs)
        if dims is not None and (inferred is None or len(inferred) == len(dims)):
            dims = self.shapes[result] = tuple(map(_better, dims, inferred or (None,) * len(dims)))
            if op.scope == MAIN:
                # The model may have another name for the same size.
                for mine, other in zip(dims, inferred or (), strict=False):
                    if isinstance(other, str) and mine is not None and mine != other and other not in names_in(mine):
                        self.same.setdefault(other, mine)
        made, rank = _ruled(CONTENTS, inputs) if counts else None, self.at(result)
        if made is not None and rank is not None and len(rank) <= 1:
            self.contents[result] = made


def _better(followed: Dim, inferred: Dim) -> Dim:
    if not is_nonnegative(followed) or isinstance(inferred, int):
        return inferred
    vague = any(name.startswith(INVENTED_PREFIX) for name in names_in(followed))
    return inferred if vague and isinstance(inferred, str) and not inferred.startswith(INVENTED_PREFIX) else followed


# -- rules: the dimensions of an op's first result --------------------------------------------------


# Errors of a rule if a size is unknown, or if ranks, axes, bounds or steps do not match.
_MISMATCHES = (ValueError, IndexError, ArithmeticError)


def _ruled(rules: Mapping[str, Callable[[OpInputs], tuple[Dim, ...] | None]], inputs: OpInputs) -> Dims | None:
    rule = rules.get(inputs.op.kind)
    try:
        return rule(inputs) if rule is not None else None
    except _MISMATCHES:
        return None


def _product(inputs: OpInputs) -> Dims | None:
    a, b = inputs.shape(0), inputs.shape(1)
    outer = inputs.broadcast((a[:-2], b[:-2]))
    return None if outer is None or len(a) < 2 or len(b) < 2 else (*outer, a[-2], b[-1])


def _reshaped(inputs: OpInputs) -> Dims | None:
    if inputs.contents[1] is None:
        (rank,) = inputs.shape(1)
        return (None,) * rank if isinstance(rank, int) and rank <= MAX_AXES else None
    x, shape = inputs.dims[0], inputs.elements(1)
    copies = not inputs.attribute("allowzero", 0)
    whole = x if x is not None else ()
    dims = [(whole[i] if i < len(whole) else None) if d == 0 and copies else d for i, d in enumerate(shape)]
    if -1 in dims:
        rest = product(d for d in dims if d != -1)
        dims[dims.index(-1)] = over(product(x), rest) if x is not None else None
    return tuple(dims)


def _concatenated(inputs: OpInputs) -> Dims:
    shapes = [inputs.shape(slot) for slot in range(len(inputs.dims))]
    dims: list[Dim] = [next((d for d in column if d is not None), None) for column in zip(*shapes, strict=True)]
    axis = inputs.attribute("axis", 0) % len(dims)
    dims[axis] = inputs.invented.total([x[axis] for x in shapes])
    return tuple(dims)


def _sliced(inputs: OpInputs) -> Dims | None:
    x, starts, ends = inputs.shape(0), inputs.elements(1), inputs.elements(2)
    axes = inputs.elements(3) if len(inputs.contents) > 3 else range(len(starts))
    steps = inputs.contents[4] if len(inputs.contents) > 4 else (1,) * len(starts)
    dims = list(x)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[i]
        if not isinstance(axis, int):
            return None
        axis %= len(x)
        dims[axis] = _cut(inputs, x[axis], start, end) if steps is not None and steps[i] == 1 else None
    return tuple(dims)


_OPEN_END = 2**31 - 1  # exporters write this number or the largest int64 for a slice to the end


def _cut(inputs: OpInputs, whole: Dim, start: Dim, end: Dim) -> Dim:
    if whole is None or start is None or end is None:
        return None
    if isinstance(whole, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(*slice(start, end).indices(whole)))
    last = end == whole or (isinstance(end, int) and end >= _OPEN_END)
    if last and is_nonnegative(minus(whole, start)) and is_nonnegative(start):
        return minus(whole, start)
    bounds: list[Dim] = [whole]
    if is_nonnegative(start) and is_nonnegative(end):
        bounds.append(minus(end, start))
    return inputs.invented.name(f"{whole}[{start}:{end}]", *bounds)


def _counted(inputs: OpInputs) -> Dims | None:
    (start,), (limit,), (step,) = (x if x is not None else (None,) for x in inputs.contents)
    length = minus(limit, start)
    return (length,) if step == 1 and is_nonnegative(length) else None


RULES: Mapping[str, Callable[[OpInputs], Dims | None]] = {
    **dict.fromkeys(SAME_SHAPE, lambda inputs: inputs.shape(0)),
    **dict.fromkeys(BROADCASTS, lambda inputs: inputs.broadcast(inputs.dims)),
    "Concat": _concatenated,
    "Expand": lambda inputs: inputs.broadcast((inputs.dims[0], inputs.contents[1])),
    "MatMul": _product,
    "Range": _counted,
    "Reshape": _reshaped,
    "Slice": _sliced,
}
"""Shape rules for the first result of an op, by op."""
