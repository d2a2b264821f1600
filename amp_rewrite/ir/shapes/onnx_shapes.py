"""Shapes of values, as far as onnx infers them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

import numpy as np
import onnx.checker
import onnx.shape_inference
from onnx import GraphProto, ValueInfoProto

from amp_rewrite.files.protos import clone
from amp_rewrite.files.tensors import MOST_ELEMENTS
from amp_rewrite.ir.dataflow import axes_of, number
from amp_rewrite.ir.graphs import all_graphs
from amp_rewrite.ir.schema import normal_domain
from amp_rewrite.ir.shapes.symbolic import Dim
from amp_rewrite.ir.versions import FIRST_ALLOWZERO
from amp_rewrite.ir.view import Op, ScopeId, ValueId, View, once

S = TypeVar("S")
Shape = tuple[int | None, ...]
Dims = tuple[Dim, ...]
"""A shape whose free dimensions may have names: equal names, equal sizes."""
StatedDims = tuple[int | str | None, ...]
"""A shape as a model states it: dimensions that are known, named or unknown."""
AllDims = Mapping[tuple[ScopeId, str], Dims]

# Errors of inference on models that contradict themselves; they leave shapes unknown.
_FAULTS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, IndexError)
_LONGEST_RANGE = 1 << 20
MADE_UP = "unk__"
"""The prefix of names that inference invents: the size of such a name may have another name at the next run."""
MOST_AXES: int = getattr(np, "MAXDIMS", 64)
"""Axes of an array: numpy has 64, and had 32 before version 2."""


def elements(sizes: Sequence[int | None] | None) -> int | None:
    """Return the number of elements of a shape; None if its rank or a size is unknown."""
    known = [size for size in sizes or () if size is not None]
    return math.prod(known) if sizes is not None and len(known) == len(sizes) else None


def combined_elements(view: View, op: Op) -> int | None:
    """Return how many elements each result of a reduction combines; None if axes or their lengths are unknown."""
    axes, shape = axes_of(view, op), shape_of(view, op.inputs[0]) or ()
    if not axes or any(not -len(shape) <= axis < len(shape) for axis in axes):
        return None
    return elements([shape[axis] for axis in axes])


def shape_of(view: View, value: ValueId | None) -> Shape | None:
    """Return the shape of a value, None for a dimension without a number; None if its rank is not known.

    By onnx's inference on the model without its heavy weights, once for each view.
    """
    if value is None:
        return None
    tensor = view.values[value].tensor
    if tensor is not None:
        return tuple(tensor.dims)
    stated = shape_at(_declarations(view), view, value)
    dims = declared_dims(stated) if stated is not None else None
    return fixed(dims) if dims is not None else None


@once
def _declarations(view: View) -> Mapping[tuple[ScopeId, str], ValueInfoProto]:
    """Return a model's declaration of each value after inference; most shapes are never asked for."""
    formals, kept = list(_formals(view, _inferred(view, False))), GraphProto()
    kept.value_info.extend([formal for _, formal in formals])
    declared: dict[tuple[ScopeId, str], ValueInfoProto] = {}
    for (scope, _), formal in zip(formals, kept.value_info, strict=True):
        key = scope, formal.name
        if key not in declared or formal.type.tensor_type.HasField("shape"):
            declared[key] = formal
    return declared


def _formals(view: View, graph: GraphProto) -> Iterator[tuple[ScopeId, ValueInfoProto]]:
    for place, own in enumerate(all_graphs(graph) if len(view.scopes) > 1 else (graph,)):
        yield from ((ScopeId(place), formal) for formal in (*own.input, *own.value_info, *own.output))


def fixed(dims: Dims) -> Shape:
    """Return dimensions with None in place of names."""
    return tuple([d if isinstance(d, int) else None for d in dims])


def shape_at(shapes: Mapping[tuple[ScopeId, str], S], view: View, value: ValueId | None) -> S | None:
    """Return the known shape of a value; None if its rank is not known."""
    return shapes.get((view.values[value].scope, view.value_name(value))) if value is not None else None


def dims_of(view: View) -> AllDims:
    """Return shapes with names of free dimensions, also through Shape, Gather and Concat."""
    return stated_dims(view, _inferred(view, True))


def _long_range(view: View, op: Op) -> bool:
    """True for a constant Range too long for onnx's inference of values."""
    start, limit, delta = (number(view, value) for value in (*op.inputs, None, None, None)[:3])
    if start is None or limit is None or not delta:
        return False
    return not abs((limit - start) / delta) <= _LONGEST_RANGE


def stated_dims(view: View, inferred: GraphProto) -> Mapping[tuple[ScopeId, str], StatedDims]:
    """Return the shapes declared in the inferred graph of a view's model, and those of constants."""
    formals = _formals(view, inferred)
    known = {(scope, formal.name): dims for scope, formal in formals if (dims := declared_dims(formal)) is not None}
    # A stub is an input of the skeleton; Constants have no declaration of their own.
    known.update(((v.scope, v.name), tuple(v.tensor.dims)) for v in view.values if v.tensor is not None)
    return known


def _inferred(view: View, through_values: bool) -> GraphProto:
    skeleton = view.model.skeleton()
    attempts, deep = [skeleton], through_values and not any(_long_range(view, op) for op in view.of_kinds(("Range",)))
    opsets = {o.version for o in skeleton.opset_import if normal_domain(o.domain) == ""}
    if deep and opsets == {FIRST_ALLOWZERO - 1}:
        # The next opset infers through Reshape, and gives all else the same shapes.
        attempts.insert(0, clone(skeleton))
        for imported in attempts[0].opset_import:
            imported.version = FIRST_ALLOWZERO if normal_domain(imported.domain) == "" else imported.version
    for attempt in attempts:
        with suppress(*_FAULTS):
            return onnx.shape_inference.infer_shapes(attempt, data_prop=deep).graph
    return skeleton.graph


def declared_dims(formal: ValueInfoProto) -> StatedDims | None:
    """Return the dimensions in a declaration; None without a rank, and for an impossible one."""
    tensor = formal.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    # Iterating over a slice takes half as long.
    dims = tuple([d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim[:]])
    return dims if _possible(dims) else None


@lru_cache(1 << 12)
def _possible(dims: StatedDims) -> bool:
    """True if a value can have the dimensions: MOST_AXES at most, none negative, an addressable number of elements."""
    count = 1
    for size in dims:
        if isinstance(size, int):
            count *= size or 1
            if size < 0:
                return False
    return count <= MOST_ELEMENTS and len(dims) <= MOST_AXES
