"""Nodes under construction: fresh names, equal nodes written once, and forms that differ between opsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, ModelError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.names import numbered, unused
from amp_rewrite.ir.op_classes import UNREPEATABLE
from amp_rewrite.ir.versions import FIRST_ALLOWZERO, FIRST_AXES_INPUT, FIRST_CAST_BY_CODE, FIRST_REDUCTION_AXES_INPUT
from amp_rewrite.ir.view import MAIN, Op, View

# -- single nodes ----------------------------------------------------------------------------------


def new_node(op_type: str, inputs: Sequence[str], output: str, name: str = "", **attributes: Any) -> NodeProto:
    """Return a node with one output."""
    return onnx.helper.make_node(op_type, inputs, [output], name, **attributes)


def new_cast(source: str, result: str, to: DType, *, name: str = "", opset: int = FIRST_CAST_BY_CODE) -> NodeProto:
    """Return a Cast. Large models get as many as they have nodes, and make_node takes ten times as long."""
    made: NodeProto = NodeProto.FromString(_nameless_cast(to, opset < FIRST_CAST_BY_CODE))
    if name:
        made.name = name
    made.input.append(source)
    made.output.append(result)
    return made


@cache
def _nameless_cast(to: DType, in_words: bool) -> bytes:
    """A serialized Cast; before opset 6 it states its type as a word."""
    stated = AttributeProto(name="to", type=AttributeProto.INT, i=to.code)
    if in_words:
        stated = onnx.helper.make_attribute("to", TensorProto.DataType.Name(to.code))
    serialized: bytes = NodeProto(op_type="Cast", attribute=(stated,)).SerializeToString()
    return serialized


def new_constant(output: str, values: Array, name: str = "") -> NodeProto:
    """Return a Constant node."""
    return new_node("Constant", [], output, name, value=onnx.numpy_helper.from_array(values))


def new_if(condition: str, output: str, then: GraphProto, otherwise: GraphProto) -> NodeProto:
    """Return an If with one output."""
    return new_node("If", [condition], output, then_branch=then, else_branch=otherwise)


def declared(name: str, dtype: DType, shape: Sequence[int | str | None] | None) -> ValueInfoProto:
    """Return the declaration of a tensor."""
    info: ValueInfoProto = onnx.helper.make_tensor_value_info(name, dtype.code, shape)
    return info


# -- the nodes around a replacement ----------------------------------------------------------------


class Surroundings:
    """The nodes ahead of a node and behind it, and the constants that they read.

    Names are made from stems: the same stem gives the same name, in whichever replacement, so that equal nodes of
    several replacements are one. `op`: one that is replaced, in the same graph. `typed`: the names of nodes ahead end
    with their type.
    """

    def __init__(self, view: View, op: Op, *, typed: bool = False) -> None:
        self._names, self._suffix, self._typed = view.names, "" if op.scope == MAIN else f"_{op.scope}", typed
        self.ahead: list[NodeProto] = []
        self.behind: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def name(self, stem: str) -> str:
        """Return a name that no value and no node of the model has."""
        return unused(stem + self._suffix, self._names)

    def constant(self, stem: str, values: Array) -> str:
        """Add a constant; return its name."""
        name = self.name(stem)
        self.weights.append(onnx.numpy_helper.from_array(values, name))
        return name

    def before(self, op_type: str, inputs: Sequence[str], stem: str, **attributes: Any) -> str:
        """Add a node ahead; return the name of its result."""
        name = self.name(stem)
        self.ahead.append(new_node(op_type, inputs, name, f"{name}_{op_type}" if self._typed else name, **attributes))
        return name

    def after(self, op_type: str, inputs: Sequence[str], result: str, **attributes: Any) -> None:
        """Add a node behind, which makes `result`."""
        self.behind.append(new_node(op_type, inputs, result, f"{result}_{op_type}", **attributes))


# -- graphs ----------------------------------------------------------------------------------------


class Builder:
    """Appends nodes with fresh names.

    Nodes are named after a *region* and numbered. The same op on the same inputs with the same attributes is
    appended once: asking for it again gives the same name, so callers may write formulas as they stand.
    `opset` is that of ai.onnx; forms that differ between opsets have methods of their own.
    """

    error: type[AmpRewriteError] = ModelError
    """Raised where the opset lacks a form."""

    def __init__(self, taken: set[str], *, opset: int, region: str) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self._taken = taken
        self._region = region
        self._known: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._dtypes: dict[str, DType] = {}
        self._counts: dict[str, int] = {}

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
        """Return the name, or one made from it, that no value and no node has; it is taken from now on."""
        return numbered(name, self._taken)

    def _numbered(self, op_type: str) -> str:
        stem = f"{self._region}/{op_type}"
        self._counts[stem] = self._counts.get(stem, -1) + 1
        return self.fresh(f"{stem}_{self._counts[stem]}")

    def dtype(self, name: str) -> DType | None:
        """Return the element type of an input or constant that was appended."""
        return self._dtypes.get(name)

    # -- nodes -----------------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Append a node with one output; return the output's name. An attribute of None is left out."""
        return self.ops(op_type, *inputs, results=1, domain=domain, **attributes)[0]

    def ops(self, op_type: str, *inputs: str, results: int, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """Append a node with several outputs; return their names. "" is an input left out."""
        return self._once(onnx.helper.make_node(op_type, inputs, [], domain=domain, **attributes), results)

    def like(self, node: NodeProto, inputs: Sequence[str]) -> tuple[str, ...]:
        """Append a copy of a node with other inputs; return the names of its outputs."""
        copy = NodeProto(op_type=node.op_type, domain=node.domain, input=inputs, attribute=node.attribute)
        return self._once(copy, len(node.output))

    def _once(self, node: NodeProto, results: int) -> tuple[str, ...]:
        attributes = tuple(a.SerializeToString(deterministic=True) for a in node.attribute)
        key = (node.domain, node.op_type, tuple(node.input), results, attributes)
        if key in self._known:
            return self._known[key]
        node.name = self._numbered(node.op_type)
        # A single output has its node's name: names of nodes and values do not collide in ONNX.
        outputs = [node.name] if results == 1 else [self.fresh(f"{node.name}_{i}") for i in range(results)]
        node.output.extend(outputs)
        self.append(node)
        if node.op_type not in UNREPEATABLE:
            self._known[key] = tuple(outputs)
        return tuple(outputs)

    def append(self, node: NodeProto) -> None:
        """Append a node as it is; its output names are the caller's, from `fresh`."""
        self.nodes.append(node)

    def name(self, source: str, result: str) -> None:
        """Append an Identity that gives a value another name, one that is free or whose node was left out."""
        self.append(onnx.helper.make_node("Identity", [source], [result], name=self._numbered("Identity")))

    # -- constants ---------------------------------------------------------------------------------------

    def constant(self, values: Array) -> str:
        """Return a constant of the type and shape of the array."""
        found = self.op("Constant", value=onnx.numpy_helper.from_array(values))
        self._dtypes[found] = DType(onnx.helper.np_dtype_to_tensor_dtype(values.dtype))
        return found

    def scalar(self, value: float, dtype: DType) -> str:
        """Return a constant of rank 0."""
        return self.constant(np.array(value, dtype.numpy))

    def ints(self, values: Sequence[int]) -> str:
        """Return an int64 constant of rank 1."""
        return self.constant(np.array(values, np.int64))

    # -- forms that differ between opsets ----------------------------------------------------------------

    def requires(self, opset: int, what: str) -> None:
        """Raise where the model's opset is lower than `what` needs."""
        if self.opset < opset:
            raise self.error(
                f"{what} needs ai.onnx opset {opset}, and the model imports {self.opset}; raise it with"
                " onnx.version_converter, or export the model again"
            )

    def reduce(self, op_type: str, x: str, axes: Sequence[int] | str | None, *, keepdims: bool) -> str:
        """Reduce over these axes; None means all of them, an empty list none.

        Axes held by a value of the graph need ReduceSum, or opset 18.
        """
        if isinstance(axes, str):
            self.requires(FIRST_AXES_INPUT, f"{op_type} with computed axes")
            if op_type != "ReduceSum":
                self.requires(FIRST_REDUCTION_AXES_INPUT, f"{op_type} with computed axes")
            return self.op(op_type, x, axes, keepdims=int(keepdims), noop_with_empty_axes=1)
        if axes is None:
            return self.op(op_type, x, keepdims=int(keepdims))
        if not axes:
            return x
        if self.opset >= (FIRST_AXES_INPUT if op_type == "ReduceSum" else FIRST_REDUCTION_AXES_INPUT):
            return self.op(op_type, x, self.ints(axes), keepdims=int(keepdims))
        return self.op(op_type, x, axes=list(axes), keepdims=int(keepdims))

    def reshape(self, x: str, shape: Sequence[int] | str) -> str:
        """Reshape to dims, or to those that a value holds. A 0 is a dim of 0, from opset 14 on."""
        if isinstance(shape, str):
            return self.op("Reshape", x, shape, allowzero=1 if self.opset >= FIRST_ALLOWZERO else None)
        zeros = 0 in shape
        if zeros:
            self.requires(FIRST_ALLOWZERO, "Reshape to a dim of 0")
        return self.op("Reshape", x, self.ints(shape), allowzero=1 if zeros else None)

    def unsqueeze(self, x: str, axes: Sequence[int] | str) -> str:
        """Insert dims of 1 at these axes of the result."""
        return self._with_axes("Unsqueeze", x, axes)

    def squeeze(self, x: str, axes: Sequence[int]) -> str:
        """Remove the dims of 1 at these axes."""
        return self._with_axes("Squeeze", x, axes)

    def _with_axes(self, op_type: str, x: str, axes: Sequence[int] | str) -> str:
        if isinstance(axes, str):
            self.requires(FIRST_AXES_INPUT, f"{op_type} with computed axes")
            return self.op(op_type, x, axes)
        if not axes:
            return x
        if self.opset < FIRST_AXES_INPUT:
            return self.op(op_type, x, axes=list(axes))
        return self.op(op_type, x, self.ints(axes))

    def split(self, x: str, sizes: Sequence[int] | str, axis: int, *, results: int) -> tuple[str, ...]:
        """Split into parts of these sizes, which a value may hold; return the parts."""
        if self.opset >= FIRST_AXES_INPUT:
            held = sizes if isinstance(sizes, str) else self.ints(sizes)
            return self.ops("Split", x, held, results=results, axis=axis)
        if isinstance(sizes, str):
            self.requires(FIRST_AXES_INPUT, "Split with computed sizes")
        return self.ops("Split", x, results=results, axis=axis, split=list(sizes))

    def cast(self, x: str, to: DType) -> str:
        """Cast a value, unless it is known to have the type."""
        return x if self.dtype(x) is to else self.op("Cast", x, to=to.code)

    def full(self, shape: str, value: float, dtype: DType) -> str:
        """Return a tensor of one value, of the shape that `shape` holds."""
        filling: TensorProto = onnx.numpy_helper.from_array(np.array([value], dtype.numpy))
        return self.op("ConstantOfShape", shape, value=filling)
