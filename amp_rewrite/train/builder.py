"""A graph under construction: appends nodes with fresh names, and knows types and shapes of what was there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.names import numbered
from amp_rewrite.ir.nodes import MAIN, ScopeId, Value
from amp_rewrite.ir.op_classes import UNREPEATABLE
from amp_rewrite.train.facts import Facts, Shape, known_dims

__all__ = ["Builder", "Shape", "declared"]

_FIRST = 12
_SIZES_INPUT = 13
"""The first opset whose Squeeze, Unsqueeze, Split and ReduceSum take axes and sizes as inputs."""
_AXES_INPUT = 18
"""The first opset whose other reductions do, too."""
_ALLOWZERO = 14
_LARGEST_CONSTANT = 1 << 16  # elements of a constant that `Builder.constant_of` still reads


class Builder:
    """Appends nodes to a copy of one graph of a model, or puts them in front of one of its nodes.

    Nodes are named after a *region* and numbered. The same op on the same inputs with the same attributes is
    appended once: asking for it again gives the same name, so callers may write formulas as they stand.
    `opset` is that of ai.onnx; forms that differ between opsets have methods of their own.
    """

    def __init__(self, facts: Facts, scope: ScopeId, *, taken: set[str], region: str) -> None:
        self.facts = facts
        self.scope = scope
        self.graph = clone(facts.view.scopes[scope].graph)
        self.opset = facts.view.opsets.get("", 1)
        self._taken = taken
        self._region = region
        self._added: dict[int, list[NodeProto]] = {}
        self._dropped: set[int] = set()
        self._here = len(self.graph.node)
        self._made: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._dtypes: dict[str, DType] = {}
        self._counts: dict[str, int] = {}

    @classmethod
    def of(cls, model: Model, *, region: str = "backward") -> Builder:
        """A builder for the main graph of a model, which is not changed.

        GradientError for an ai.onnx opset below 12; ModelError as `View.of` raises it.
        """
        facts = Facts.of(model)
        opset = facts.view.opsets.get("", 1)
        if opset < _FIRST:
            raise GradientError(
                f"the model imports ai.onnx opset {opset}, and gradients are made from opset {_FIRST} on; raise it"
                " with onnx.version_converter, or export the model again"
            )
        return cls(facts, MAIN, taken=set(facts.view.names), region=region)

    def body(self, scope: ScopeId) -> Builder:
        """A builder for a copy of one body of this graph. Its names collide with none of the model."""
        return Builder(self.facts, scope, taken=self._taken, region=self._region)

    def model(self) -> Model:
        """The model as it stands now, a new one. Only for the main graph."""
        assert self.scope == MAIN
        proto, source = ModelProto(), self.facts.view.model.proto
        for field, value in source.ListFields():
            if field.name == "graph":
                self._write(proto.graph)
            elif field.is_repeated:
                getattr(proto, field.name).extend(value)
            else:
                setattr(proto, field.name, value)
        return replace(self.facts.view.model, proto=proto)

    def finished(self) -> GraphProto:
        """The graph as it stands now, a new one."""
        out = GraphProto()
        self._write(out)
        return out

    def _write(self, out: GraphProto) -> None:
        out.CopyFrom(self.graph)
        del out.node[:]
        for position, node in enumerate(self.graph.node):
            out.node.extend(self._added.get(position, ()))
            if position not in self._dropped:
                out.node.append(node)
        out.node.extend(self._added.get(len(self.graph.node), ()))

    @contextmanager
    def instead_of(self, position: int) -> Iterator[NodeProto]:
        """Put what is appended inside `with` in the place of the model's node at this position, which is left out.

        Gives that node. Places are to be taken from front to back, so that what was appended before is computed
        before.
        """
        assert all(position >= place for place in self._added)
        self._here, self._dropped = position, self._dropped | {position}
        try:
            yield self.graph.node[position]
        finally:
            self._here = len(self.graph.node)

    # -- names -----------------------------------------------------------------------------------------

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Name the nodes that are appended inside `with` after another region: "update/Mul_3"."""
        before, self._region = self._region, name
        try:
            yield
        finally:
            self._region = before

    def fresh(self, name: str) -> str:
        """The name, or one made from it, that no value and no node of the model has; it is taken from now on."""
        return numbered(name, self._taken)

    def _numbered(self, op_type: str) -> str:
        stem = f"{self._region}/{op_type}"
        self._counts[stem] = self._counts.get(stem, -1) + 1
        return self.fresh(f"{stem}_{self._counts[stem]}")

    # -- what was there --------------------------------------------------------------------------------

    def known(self, name: str) -> Value | None:
        """The value of the model itself that the name means; None for what was appended, and for no value."""
        found = self.facts.ids[self.scope].get(name)
        return None if found is None else self.facts.view.values[found]

    def dtype(self, name: str) -> DType | None:
        """The element type of a value of the model, or of an input or constant that was appended."""
        value = self.known(name)
        return self._dtypes.get(name) if value is None else self.facts.view.dtype(value.id)

    def shape(self, name: str) -> Shape | None:
        """The shape of a value of the model; None where its rank is unknown, and for what was appended."""
        value = self.known(name)
        return None if value is None else self.facts.shapes.get(value.id)

    def constant_of(self, name: str) -> Array | None:
        """The values of a constant of the model of at most 65536 elements; None if it is none, or larger."""
        value = self.known(name)
        tensor = self.facts.view.constant(value.id) if value is not None else None
        if tensor is None or math.prod(tensor.dims) > _LARGEST_CONSTANT:
            return None
        return self.facts.view.model.array(tensor)

    # -- nodes -----------------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Append a node with one output; the output's name. An attribute of None is left out."""
        return self.ops(op_type, *inputs, results=1, domain=domain, **attributes)[0]

    def ops(self, op_type: str, *inputs: str, results: int, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """Append a node with several outputs; their names. "" is an input left out."""
        return self._once(onnx.helper.make_node(op_type, inputs, [], domain=domain, **attributes), results)

    def like(self, node: NodeProto, inputs: Sequence[str]) -> tuple[str, ...]:
        """Append a node that does the same as another one with other inputs; the names of as many outputs."""
        copy = NodeProto(op_type=node.op_type, domain=node.domain, input=inputs, attribute=node.attribute)
        return self._once(copy, len(node.output))

    def _once(self, node: NodeProto, results: int) -> tuple[str, ...]:
        attributes = tuple(a.SerializeToString(deterministic=True) for a in node.attribute)
        key = (node.domain, node.op_type, tuple(node.input), results, attributes)
        if key in self._made:
            return self._made[key]
        node.name = self._numbered(node.op_type)
        # A single output has its node's name: names of nodes and values do not collide in ONNX.
        outputs = [node.name] if results == 1 else [self.fresh(f"{node.name}_{i}") for i in range(results)]
        node.output.extend(outputs)
        self.append(node)
        if node.op_type not in UNREPEATABLE:
            self._made[key] = tuple(outputs)
        return tuple(outputs)

    def append(self, node: NodeProto) -> None:
        """Append a node as it is; its output names are the caller's, from `fresh`."""
        self._added.setdefault(self._here, []).append(node)

    def name(self, source: str, wanted: str) -> None:
        """Give out a value under a name that is free, or whose node was left out."""
        self.append(onnx.helper.make_node("Identity", [source], [wanted], name=self._numbered("Identity")))

    def extra_output(self, position: int, slot: int) -> str:
        """The name of an output of the model's node at this position; one that was left out is added to it."""
        proto = self.graph.node[position]
        while len(proto.output) <= slot:
            proto.output.append("")
        if not proto.output[slot]:
            proto.output[slot] = self.fresh(f"{proto.output[0]}_{slot}")
        found: str = proto.output[slot]
        return found

    # -- inputs, outputs, constants --------------------------------------------------------------------

    def input(self, name: str, dtype: DType, shape: Shape) -> str:
        """Add a graph input under the name, or a fresh one made from it; its name."""
        name = self.fresh(name)
        self.graph.input.append(onnx.helper.make_tensor_value_info(name, dtype.code, shape))
        self._dtypes[name] = dtype
        return name

    def promote(self, name: str) -> None:
        """Turn an initializer into a graph input of the same name, type and shape, after the other inputs."""
        at = next((i for i, t in enumerate(self.graph.initializer) if t.name == name), None)
        if at is None:
            raise GradientError(f"{name!r} is not an initializer of the main graph, so it cannot become an input")
        tensor = self.graph.initializer[at]
        if all(v.name != name for v in self.graph.input):
            info = onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            self.graph.input.append(info)
        del self.graph.initializer[at]

    def output(self, name: str, dtype: DType, shape: Shape | None, *, source: str | None = None) -> str:
        """Make a value a graph output. With `source` that value is given out under `name` by an Identity."""
        if source is not None:
            name = self.fresh(name)
            self.name(source, name)
        self.graph.output.append(onnx.helper.make_tensor_value_info(name, dtype.code, shape))
        return name

    def constant(self, values: Array) -> str:
        """A constant of the type and shape of the array."""
        found = self.op("Constant", value=onnx.numpy_helper.from_array(values))
        self._dtypes[found] = DType(onnx.helper.np_dtype_to_tensor_dtype(values.dtype))
        return found

    def scalar(self, value: float, dtype: DType) -> str:
        """A constant of rank 0."""
        return self.constant(np.array(value, dtype.numpy))

    def ints(self, values: Sequence[int]) -> str:
        """An int64 constant of rank 1."""
        return self.constant(np.array(values, np.int64))

    # -- forms that differ between opsets ----------------------------------------------------------------

    def requires(self, opset: int, what: str) -> None:
        """GradientError where the model's opset is lower than `what` needs."""
        if self.opset < opset:
            raise GradientError(
                f"{what} needs ai.onnx opset {opset}, and the model imports {self.opset}; raise it with"
                " onnx.version_converter, or export the model again"
            )

    def reduce(self, op_type: str, x: str, axes: Sequence[int] | str | None, *, keepdims: bool) -> str:
        """A reduction over these axes; None is all of them, an empty list is none.

        Axes that a value of the graph holds are for ReduceSum, or opset 18 and later.
        """
        if isinstance(axes, str):
            self.requires(_SIZES_INPUT, f"{op_type} with computed axes")
            if op_type != "ReduceSum":
                self.requires(_AXES_INPUT, f"{op_type} with computed axes")
            return self.op(op_type, x, axes, keepdims=int(keepdims), noop_with_empty_axes=1)
        if axes is None:
            return self.op(op_type, x, keepdims=int(keepdims))
        if not axes:
            return x
        if self.opset >= (_SIZES_INPUT if op_type == "ReduceSum" else _AXES_INPUT):
            return self.op(op_type, x, self.ints(axes), keepdims=int(keepdims))
        return self.op(op_type, x, axes=list(axes), keepdims=int(keepdims))

    def reshape(self, x: str, shape: Sequence[int] | str) -> str:
        """Reshape to dims, or to those that a value holds. A 0 is a dim of 0 from opset 14 on, as everywhere else."""
        if isinstance(shape, str):
            return self.op("Reshape", x, shape, allowzero=1 if self.opset >= _ALLOWZERO else None)
        zeros = 0 in shape
        if zeros:
            self.requires(_ALLOWZERO, "Reshape to a dim of 0")
        return self.op("Reshape", x, self.ints(shape), allowzero=1 if zeros else None)

    def reshape_like(self, x: str, like: str) -> str:
        """Reshape to the shape of a value; with one dim at most that is not known, no Shape is computed."""
        shape = self.shape(like)
        if shape is None or 0 in shape or sum(not isinstance(d, int) for d in shape) > 1:
            return self.reshape(x, self.shape_of(like))
        return self.reshape(x, [d if isinstance(d, int) else -1 for d in shape])

    def unsqueeze(self, x: str, axes: Sequence[int] | str) -> str:
        """Dims of 1 put in at these axes of the result."""
        return self._with_axes("Unsqueeze", x, axes)

    def squeeze(self, x: str, axes: Sequence[int]) -> str:
        """Dims of 1 left out at these axes."""
        return self._with_axes("Squeeze", x, axes)

    def _with_axes(self, op_type: str, x: str, axes: Sequence[int] | str) -> str:
        if isinstance(axes, str):
            self.requires(_SIZES_INPUT, f"{op_type} with computed axes")
            return self.op(op_type, x, axes)
        if not axes:
            return x
        if self.opset < _SIZES_INPUT:
            return self.op(op_type, x, axes=list(axes))
        return self.op(op_type, x, self.ints(axes))

    def split(self, x: str, sizes: Sequence[int] | str, axis: int, *, results: int) -> tuple[str, ...]:
        """The parts of these sizes, which a value may hold."""
        if self.opset >= _SIZES_INPUT:
            held = sizes if isinstance(sizes, str) else self.ints(sizes)
            return self.ops("Split", x, held, results=results, axis=axis)
        if isinstance(sizes, str):
            self.requires(_SIZES_INPUT, "Split with computed sizes")
        return self.ops("Split", x, results=results, axis=axis, split=list(sizes))

    def cast(self, x: str, to: DType) -> str:
        """The value in another type; itself where it is known to have it."""
        return x if self.dtype(x) is to else self.op("Cast", x, to=to.code)

    def shape_of(self, x: str) -> str:
        """The shape as an int64 value: a constant where it is known."""
        dims = known_dims(self.shape(x))
        return self.op("Shape", x) if dims is None else self.ints(dims)

    def zeros_like(self, x: str, dtype: DType) -> str:
        """Zeros of the shape of `x`."""
        return self.full(self.shape_of(x), 0.0, dtype)

    def full(self, shape: str, value: float, dtype: DType) -> str:
        """A tensor of one value, of the shape that `shape` holds."""
        filling: TensorProto = onnx.numpy_helper.from_array(np.array([value], dtype.numpy))
        return self.op("ConstantOfShape", shape, value=filling)


def declared(name: str, dtype: DType, shape: Shape | None) -> ValueInfoProto:
    """A declaration of a tensor."""
    info: ValueInfoProto = onnx.helper.make_tensor_value_info(name, dtype.code, shape)
    return info
