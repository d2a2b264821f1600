"""Builder of nodes in a copy of a model's graph, with the types and shapes of the original values."""

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
"""Dims: each is a number, a name, or None if unknown. Dims with the same name are equal."""


@once
def values_in(view: View) -> Sequence[Mapping[str, ValueId]]:
    """Return the values visible in each scope, by name."""
    ids: list[ChainMap[str, ValueId]] = []
    for scope, values in zip(view.scopes, view.values_of, strict=True):  # a parent comes before its bodies
        outer = ids[scope.parent] if scope.parent is not None else ChainMap[str, ValueId]()
        ids.append(outer.new_child({value.name: value.id for value in values}))
    return ids


@once
def shapes_of(view: View) -> Mapping[ValueId | None, Shape]:
    pairs = shapes.known_dims(view).items()
    return {value: tuple(str(d) if isinstance(d, Size) else d for d in dims) for value, dims in pairs}


def fixed_dims(shape: Shape | None) -> tuple[int, ...] | None:
    """Return the shape if all its dims are numbers, else None."""
    fixed = tuple(d for d in shape or () if isinstance(d, int))
    return fixed if shape is not None and len(fixed) == len(shape) else None


_MAX_CONSTANT_ELEMENTS = 1 << 16


class Builder(NodeBuilder):
    """Appends nodes to a copy of one graph of a model."""

    error = GradientError

    def __init__(self, view: View, scope: ScopeId, *, taken: set[str], region: str) -> None:
        super().__init__(taken, opset=view.opset, region=region)
        self.view, self.scope = view, scope
        self.ids, self.shapes = values_in(view)[scope], shapes_of(view)

        self._expand_inputs: dict[str, str] = {}

    @cached_property
    def graph(self) -> GraphProto:
        """The copy of the graph."""
        return clone(self.view.scopes[self.scope].graph)

    @classmethod
    def of(cls, model: Model, *, region: str = "backward") -> Builder:
        """Return a builder for a copy of a model's main graph. Raises ModelError as `View.of` does."""
        view = View.of(model)
        return cls(view, MAIN, taken=set(view.names), region=region)

    def body(self, scope: ScopeId) -> Builder:
        """Return a builder for a copy of one of this graph's bodies, with names unique in the model."""
        return Builder(self.view, scope, taken=self._taken, region=self._region)

    def model(self) -> Model:
        """Return a new model with the current graph as its main graph."""
        assert self.scope == MAIN
        proto = clone(self.view.model.proto)
        proto.graph.CopyFrom(self.finished())
        return replace(self.view.model, proto=proto)

    def finished(self) -> GraphProto:
        graph = clone(self.graph)
        names = {*names_read(self.nodes), *(v.name for v in self.graph.output)} if self._expand_inputs else set()
        nodes = [n for n in self.nodes if n.output[0] not in self._expand_inputs or n.output[0] in names]
        graph.node.extend(nodes)
        return graph

    # -- original values -------------------------------------------------------------------------------

    def original(self, name: str) -> Value | None:
        """Return a value of the original model by its name; None for an appended or missing one."""
        value = self.ids.get(name)
        return None if value is None else self.view.values[value]

    def dtype(self, name: str) -> DType | None:
        """Return the element type of an original value, or of an appended input or constant."""
        value = self.original(name)
        return super().dtype(name) if value is None else self.view.dtype(value.id)

    def element_type(self, name: str) -> DType:
        dtype = self.dtype(name)
        if dtype is None:
            raise GradientError(f"the element type of {name!r} is unknown; declare it")
        return dtype

    def shape(self, name: str) -> Shape | None:
        """Return the shape of an original value; None for an unknown rank or an appended value."""
        value = self.original(name)
        return None if value is None else self.shapes.get(value.id)

    def constant_of(self, name: str) -> Array | None:
        """Return an original constant of at most 65536 elements; None for other values."""
        value = self.original(name)
        return None if value is None else self.view.array(value.id, _MAX_CONSTANT_ELEMENTS)

    # -- nodes -----------------------------------------------------------------------------------------

    def extra_output(self, position: int, slot: int) -> str:
        """Return the name of an output of the original node at this position; add the output if it is missing."""
        proto = self.graph.node[position]
        while len(proto.output) <= slot:
            proto.output.append("")
        if not proto.output[slot]:
            proto.output[slot] = self.fresh(f"{proto.output[0]}_{slot}")
        return str(proto.output[slot])

    def expand(self, x: str, shape: str) -> str:
        """Expand a value to a shape. `unexpanded` recovers the value, and an Expand without readers is dropped."""
        expand = self.op("Expand", x, shape)
        self._expand_inputs[expand] = x
        return expand

    def unexpanded(self, x: str) -> str:
        """Return the input of `expand` if `x` is its result, for broadcasting readers; otherwise return `x`."""
        return self._expand_inputs.get(x, x)

    # -- inputs and outputs ----------------------------------------------------------------------------

    def input(self, name: str, dtype: DType, shape: Shape) -> str:
        """Add a graph input with this name, or a fresh one derived from it; return the name."""
        name = self.fresh(name)
        self.graph.input.append(declared(name, dtype, shape))
        self._dtypes[name] = dtype
        return name

    def promote(self, name: str) -> None:
        """Replace an initializer with a graph input of the same name, type and shape, after the other inputs."""
        index = next((i for i, t in enumerate(self.graph.initializer) if t.name == name), None)
        if index is None:
            raise GradientError(f"{name!r} is not an initializer of the main graph, so it cannot become an input")
        tensor = self.graph.initializer[index]
        if all(v.name != name for v in self.graph.input):
            self.graph.input.append(declared(name, DType(tensor.data_type), tensor.dims))
        del self.graph.initializer[index]

    def output(self, name: str, dtype: DType, shape: Shape | None, *, source: str | None = None) -> str:
        """Make a value a graph output; return its name. With `source`, an Identity copies `source` to `name`."""
        if source is not None:
            name = self.fresh(name)
            self.name(source, name)
        self.graph.output.append(declared(name, dtype, shape))
        return name

    def reshape_like(self, x: str, like: str) -> str:
        """Reshape to the shape of a value, without a Shape op if at most one dim is unknown."""
        shape = self.shape(like)
        if shape is None or 0 in shape or sum(not isinstance(d, int) for d in shape) > 1:
            return self.reshape(x, self.shape_of(like))
        return self.reshape(x, [d if isinstance(d, int) else -1 for d in shape])

    def shape_of(self, x: str) -> str:
        """Return the shape as an int64 value: a constant, or computed from graph inputs with the same named dims.

        A Shape op on the value itself would keep the value in memory until the backward pass.
        """
        shape = self.shape(x)
        dims = fixed_dims(shape)
        if dims is not None:
            return self.ints(dims)
        named = {} if self.scope != MAIN else self._input_dims
        if shape is None or any(not isinstance(dim, int) and dim not in named for dim in shape):
            return self.op("Shape", x)
        parts = [self.ints([dim]) if isinstance(dim, int) else self._input_dim(*named[dim]) for dim in shape]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    @cached_property
    def _input_dims(self) -> dict[str | int | None, tuple[str, int]]:
        """The named dims of graph inputs, each with an input and an axis."""
        shapes = {v.name: self.shape(v.name) or () for v in self.view.model.proto.graph.input}
        return {d: (name, axis) for name, shape in shapes.items() for axis, d in enumerate(shape) if isinstance(d, str)}

    def _input_dim(self, name: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", name), self.ints([axis]), axis=0)

    def zeros_like(self, x: str, dtype: DType) -> str:
        return self.full(self.shape_of(x), 0.0, dtype)
