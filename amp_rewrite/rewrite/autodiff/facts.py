"""Types and shapes of a model's values."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass

from amp_rewrite.files.model import Model
from amp_rewrite.ir import shapes
from amp_rewrite.ir.nodes import ValueId
from amp_rewrite.ir.shapes import StatedDims
from amp_rewrite.ir.sizes import Size
from amp_rewrite.ir.view import View

Shape = StatedDims
"""Dims: known, named or unknown. Two dims of one name are equal."""


@dataclass(frozen=True)
class ModelFacts:
    """A model's view, its values by name, and their shapes."""

    view: View
    ids: tuple[Mapping[str, ValueId], ...]
    """For each scope the values visible in it, by name."""
    shapes: Mapping[ValueId, Shape]

    @classmethod
    def of(cls, model: Model) -> ModelFacts:
        """Collect the facts of a model; ModelError if it is invalid. O(nodes + uses)."""
        view = View.of(model)
        ids: list[ChainMap[str, ValueId]] = []
        for scope, values in zip(view.scopes, view.values_of, strict=True):  # a parent stands before its bodies
            outer = ids[scope.parent] if scope.parent is not None else ChainMap[str, ValueId]()
            ids.append(outer.new_child({value.name: value.id for value in values}))
        known = {
            value: tuple(str(d) if isinstance(d, Size) else d for d in dims)
            for value, dims in shapes.known_dims(view).items()
            if value is not None
        }
        return cls(view, tuple(ids), known)


def known_dims(shape: Shape | None) -> tuple[int, ...] | None:
    """Return the shape if all its dims are numbers, else None."""
    if shape is None or not all(isinstance(d, int) for d in shape):
        return None
    return tuple(int(d) for d in shape if isinstance(d, int))
