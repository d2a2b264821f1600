"""Types and shapes of a model's values: element types from schemas, shapes from onnx's shape inference.

onnx infers nothing after an op whose target shape is computed, although the length of that shape gives the rank.
Such ranks are declared here, and inference runs again.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx.checker
import onnx.shape_inference
from onnx import ModelProto

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, refill
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.nodes import Op, ValueId
from amp_rewrite.ir.shapes import StatedDims, stated_dims
from amp_rewrite.ir.sizes import MOST_AXES
from amp_rewrite.ir.view import View

Shape = StatedDims
"""Dims: known, named or unknown. Two dims of one name are equal."""

_ROUNDS = 8  # of inference; each round resolves the ranks that the round before made known


@dataclass(frozen=True)
class ModelFacts:
    """A model's view, its values by name, and their shapes."""

    view: View
    ids: tuple[Mapping[str, ValueId], ...]
    """For each scope the values visible in it, by name."""
    shapes: Mapping[ValueId, Shape]

    @classmethod
    def of(cls, model: Model) -> ModelFacts:
        """Collect the facts of a model; ModelError if it is invalid. O(nodes + uses) per round of inference."""
        view = View.of(model)
        ids: list[ChainMap[str, ValueId]] = []
        for scope, values in zip(view.scopes, view.values_of, strict=True):  # a parent stands before its bodies
            outer = ids[scope.parent] if scope.parent is not None else ChainMap[str, ValueId]()
            ids.append(outer.new_child({value.name: value.id for value in values}))
        return cls(view, tuple(ids), _shapes(view, ids))


def known_dims(shape: Shape | None) -> tuple[int, ...] | None:
    """Return the shape if all its dims are numbers, else None."""
    if shape is None or not all(isinstance(d, int) for d in shape):
        return None
    return tuple(int(d) for d in shape if isinstance(d, int))


def _shapes(view: View, ids: Sequence[Mapping[str, ValueId]]) -> dict[ValueId, Shape]:
    bare = view.model.skeleton()
    for _ in range(_ROUNDS):
        shapes = _inferred(view, ids, bare)
        ranks = {value: rank for op in view.ops for value, rank in _ranks(op, shapes) if value not in shapes}
        if not ranks:
            break
        _declare(view, bare, ranks)
    return shapes


def _inferred(view: View, ids: Sequence[Mapping[str, ValueId]], bare: ModelProto) -> dict[ValueId, Shape]:
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError) as cause:
        raise ModelError(f"onnx cannot infer the shapes of the model: {' '.join(str(cause).split())}") from cause
    stated = stated_dims(view, inferred.graph)
    return {ids[scope][name]: dims for (scope, name), dims in stated.items() if name in ids[scope]}


def _ranks(op: Op, shapes: Mapping[ValueId, Shape]) -> Iterator[tuple[ValueId, int]]:
    rule = None if op.domain else _RANKS.get(op.op_type)
    inputs = [None if v is None else shapes.get(v) for v in op.inputs]
    rank = rule(inputs) if rule is not None and inputs else None
    if rank is not None:
        yield from ((out, rank) for out in op.outputs if out is not None)


def _same(inputs: Sequence[Shape | None]) -> int | None:
    return None if inputs[0] is None else len(inputs[0])


def _length(inputs: Sequence[Shape | None], slot: int = 1) -> int | None:
    """Return the length of a shape held by an input; few bytes of a broken model declare 2^31."""
    shape = inputs[slot] if slot < len(inputs) else None
    count = shape[0] if shape is not None and len(shape) == 1 else None
    return count if isinstance(count, int) and count <= MOST_AXES else None


def _expanded(inputs: Sequence[Shape | None]) -> int | None:
    rank, target = _same(inputs), _length(inputs)
    return None if rank is None or target is None else max(rank, target)


_RANKS: Mapping[str, Callable[[Sequence[Shape | None]], int | None]] = {
    "Reshape": _length,
    "ConstantOfShape": lambda inputs: _length(inputs, 0),
    "Expand": _expanded,
    **dict.fromkeys(("Split", "Slice", "Pad", "Tile", "Resize", "CenterCropPad"), _same),
}


def _declare(view: View, bare: ModelProto, ranks: Mapping[ValueId, int]) -> None:
    for scope, graph in enumerate(all_graphs(bare.graph)):
        mine = {view.value_name(v): (v, rank) for v, rank in ranks.items() if view.values[v].scope == scope}
        kept = [info for info in graph.value_info if info.name not in mine]
        for name, (value, rank) in mine.items():
            dtype = view.dtype(value)
            if dtype is not None:
                kept.append(declared(name, dtype, [None] * rank))
        refill(graph, "value_info", kept)
