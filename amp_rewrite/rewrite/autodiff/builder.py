"""A graph under construction: appends nodes with fresh names, and knows types and shapes of what was there."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from onnx import GraphProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, names_read
from amp_rewrite.ir import shapes
from amp_rewrite.ir.dims import Size
from amp_rewrite.ir.nodes import MAIN, ScopeId, Value, ValueId
from amp_rewrite.ir.view import View, once
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.node_builder import NodeBuilder

Shape = shapes.DeclaredDims
"""Dims: known, named or unknown. Two dims of one name are equal."""


@once
def values_in(view: View) -> Sequence[Mapping[str, ValueId]]:
    """Return for each scope the values visible in it, by name."""
    ids: list[ChainMap[str, ValueId]] = []
    for scope, values in zip(view.scopes, view.values_of, strict=True):  # a parent stands before its bodies
        outer = ids[scope.parent] if scope.parent is not None else ChainMap[str, ValueId]()
        ids.append(outer.new_child({value.name: value.id for value in values}))
    return ids


@once
def shapes_of(view: View) -> Mapping[ValueId | None, Shape]:
    known = shapes.known_dims(view).items()
    return {value: tuple(str(d) if isinstance(d, Size) else d for d in dims) for value, dims in known}


def known_dims(shape: Shape | None) -> tuple[int, ...] | None:
    """Return the shape if all its dims are numbers, else None."""
    known = tuple(d for d in shape or () if isinstance(d, int))
    return known if shape is not None and len(known) == len(shape) else None


_LARGEST_CONSTANT = 1 << 16  # elements of a constant that `NodeBuilder.constant_of` still reads


class Builder(NodeBuilder):
    """Appends nodes to a copy of one graph of a model."""

    error = GradientError

    def __init__(self, view: View, scope: ScopeId, *, taken: set[str], region: str) -> None:
        super().__init__(taken, opset=view.opset, region=region)
        self.view, self.scope = view, scope
        self.ids, self.shapes = values_in(view)[scope], shapes_of(view)

        self._narrow: dict[str, str] = {}

    @cached_property
    def graph(self) -> GraphProto:
        """A copy of the graph."""
        return clone(self.view.scopes[self.scope].graph)

    @classmethod
    def of(cls, model: Model, *, region: str = "backward") -> Builder:
        """A builder for the main graph of a model; the model stays. ModelError as `View.of` raises it."""
        view = View.of(model)
        return cls(view, MAIN, taken=set(view.names), region=region)

    def body(self, scope: ScopeId) -> Builder:
        """A builder for a copy of one body of this graph. Its names collide with none of the model."""
        return Builder(self.view, scope, taken=self._taken, region=self._region)

    def model(self) -> Model:
        """The model as it stands now, a new one. Only for the main graph."""
        assert self.scope == MAIN
        proto = clone(self.view.model.proto)
        proto.graph.CopyFrom(self.finished())
        return replace(self.view.model, proto=proto)

    def finished(self) -> GraphProto:
        """The graph as it stands now, a new one."""
        out = clone(self.graph)
        read = {*names_read(self.nodes), *(v.name for v in self.graph.output)} if self._narrow else set()
        nodes = [n for n in self.nodes if n.output[0] not in self._narrow or n.output[0] in read]
        out.node.extend(nodes)
        return out

    # -- what was there --------------------------------------------------------------------------------

    def known(self, name: str) -> Value | None:
        """The value of the model itself by its name; None for an appended one, and for no value."""
        value = self.ids.get(name)
        return None if value is None else self.view.values[value]

    def dtype(self, name: str) -> DType | None:
        """The element type of a value of the model, or of an appended input or constant."""
        value = self.known(name)
        return super().dtype(name) if value is None else self.view.dtype(value.id)

    def element_type(self, name: str) -> DType:
        """The element type of a value; GradientError if it is not known."""
        dtype = self.dtype(name)
        if dtype is None:
            raise GradientError(f"the element type of {name!r} is unknown; declare it")
        return dtype

    def shape(self, name: str) -> Shape | None:
        """The shape of a value of the model; None for one of unknown rank, and for an appended one."""
        value = self.known(name)
        return None if value is None else self.shapes.get(value.id)

    def constant_of(self, name: str) -> Array | None:
        """A constant of the model of at most 65536 elements; None for other values and larger constants."""
        value = self.known(name)
        return None if value is None else self.view.array(value.id, _LARGEST_CONSTANT)

    # -- nodes -----------------------------------------------------------------------------------------

    def extra_output(self, position: int, slot: int) -> str:
        """The name of an output of the model's node at this position; a missing one is added to it."""
        proto = self.graph.node[position]
        while len(proto.output) <= slot:
            proto.output.append("")
        if not proto.output[slot]:
            proto.output[slot] = self.fresh(f"{proto.output[0]}_{slot}")
        return str(proto.output[slot])

    def spread(self, x: str, shape: str) -> str:
        """Expand a value to a shape; `narrow` gives it back. An unread Expand is left out."""
        spread = self.op("Expand", x, shape)
        self._narrow[spread] = x
        return spread

    def narrow(self, x: str) -> str:
        """The source of `x` before `spread`, else `x` itself; for ops with broadcasting."""
        return self._narrow.get(x, x)

    # -- inputs and outputs ----------------------------------------------------------------------------

    def input(self, name: str, dtype: DType, shape: Shape) -> str:
        """Add a graph input under the name, or a fresh one made from it; its name."""
        name = self.fresh(name)
        self.graph.input.append(declared(name, dtype, shape))
        self._dtypes[name] = dtype
        return name

    def promote(self, name: str) -> None:
        """Turn an initializer into a graph input of the same name, type and shape, after the other inputs."""
        at = next((i for i, t in enumerate(self.graph.initializer) if t.name == name), None)
        if at is None:
            raise GradientError(f"{name!r} is not an initializer of the main graph, so it cannot become an input")
        tensor = self.graph.initializer[at]
        if all(v.name != name for v in self.graph.input):
            self.graph.input.append(declared(name, DType(tensor.data_type), tensor.dims))
        del self.graph.initializer[at]

    def output(self, name: str, dtype: DType, shape: Shape | None, *, source: str | None = None) -> str:
        """Make a value a graph output. With `source` that value is given out under `name` by an Identity."""
        if source is not None:
            name = self.fresh(name)
            self.name(source, name)
        self.graph.output.append(declared(name, dtype, shape))
        return name

    def reshape_like(self, x: str, like: str) -> str:
        """Reshape to the shape of a value; with at most one unknown dim, no Shape is computed."""
        shape = self.shape(like)
        if shape is None or 0 in shape or sum(not isinstance(d, int) for d in shape) > 1:
            return self.reshape(x, self.shape_of(like))
        return self.reshape(x, [d if isinstance(d, int) else -1 for d in shape])

    def shape_of(self, x: str) -> str:
        """The shape as an int64 value: a constant where it is known, else from graph inputs with dims of these names.

        Reading the shape of a value late, in the backward pass, would keep the value until then.
        """
        shape = self.shape(x)
        dims = known_dims(shape)
        if dims is not None:
            return self.ints(dims)
        named = {} if self.scope != MAIN else self._input_dims
        if shape is None or any(not isinstance(dim, int) and dim not in named for dim in shape):
            return self.op("Shape", x)
        parts = [self.ints([dim]) if isinstance(dim, int) else self._input_dim(*named[dim]) for dim in shape]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    @cached_property
    def _input_dims(self) -> dict[str | int | None, tuple[str, int]]:
        """Named dims of graph inputs, each with an input and its axis."""
        shapes = {v.name: self.shape(v.name) or () for v in self.view.model.proto.graph.input}
        return {d: (name, axis) for name, shape in shapes.items() for axis, d in enumerate(shape) if isinstance(d, str)}

    def _input_dim(self, name: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", name), self.ints([axis]), axis=0)

    def zeros_like(self, x: str, dtype: DType) -> str:
        """Zeros of the shape of `x`."""
        return self.full(self.shape_of(x), 0.0, dtype)
