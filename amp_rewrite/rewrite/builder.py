"""Construction of nodes, including the nodes around a replaced op."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx
import onnx.helper
from onnx import NodeProto, TensorProto, ValueInfoProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import refill
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.versions import FIRST_CAST_BY_CODE
from amp_rewrite.ir.view import MAIN, Op, View, once


def new_node(op_type: str, inputs: Sequence[str], output: str, name: str = "", **attributes: Any) -> NodeProto:
    return onnx.helper.make_node(op_type, inputs, [output], name, **attributes)


def set_attribute(node: NodeProto, name: str, value: Any = None) -> None:
    """Set an attribute of a node, after its others; None removes it."""
    replacement = [onnx.helper.make_attribute(name, value)] if value is not None else []
    refill(node, "attribute", [*(a for a in node.attribute if a.name != name), *replacement])


def new_cast(source: str, result: str, to: DType, *, name: str = "", opset: int = FIRST_CAST_BY_CODE) -> NodeProto:
    """Return a Cast, ten times faster than make_node: a large model may need as many Casts as it has nodes."""
    cast: NodeProto = NodeProto.FromString(_nameless_cast(to, opset < FIRST_CAST_BY_CODE))
    if name:
        cast.name = name
    cast.input.append(source)
    cast.output.append(result)
    return cast


@cache
def _nameless_cast(to: DType, as_string: bool) -> bytes:
    """Return a serialized Cast; before opset 6 its `to` attribute is a string."""
    attribute = onnx.helper.make_attribute("to", TensorProto.DataType.Name(to.code) if as_string else to.code)
    serialized: bytes = NodeProto(op_type="Cast", attribute=(attribute,)).SerializeToString()
    return serialized


def new_constant(output: str, values: Array) -> NodeProto:
    return new_node("Constant", [], output, value=from_array(values))


def declared(name: str, dtype: DType, shape: Sequence[int | str | None] | None) -> ValueInfoProto:
    info: ValueInfoProto = onnx.helper.make_tensor_value_info(name, dtype.code, shape)
    return info


# -- the nodes around a replacement ----------------------------------------------------------------


class NewNodes:
    """Nodes before and after a replaced op, and their constants.

    Equal nodes and constants get the same name in all replacements of a view, and are written once. Different ones with
    the same stem get different names. `typed`: the names of nodes before the op end with their op type.
    """

    def __init__(self, view: View, op: Op, *, typed: bool = False) -> None:
        self.view, self._op, self._typed = view, op, typed
        self.leading: list[NodeProto] = []
        self.trailing: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def name(self, stem: str) -> str:
        """Return a new name; calls for the same op and stem return the same name."""
        return self._named(stem, self._op.id)

    def constant(self, stem: str, values: Array) -> str:
        digest = hashlib.blake2b(values.tobytes()).digest()
        name = self._named(stem, (values.dtype.str, values.shape, digest))
        self.weights.append(from_array(values, name))
        return name

    def before(self, op_type: str, inputs: Sequence[str], stem: str, **attributes: Any) -> str:
        """Add a node before the op, unless an equal one exists; return the name of its result."""
        node = new_node(op_type, inputs, "", **attributes)
        name = node.output[0] = self._named(stem, (self._op.scope, node.SerializeToString(deterministic=True)))
        node.name = f"{name}_{op_type}" if self._typed else name
        if node not in self.leading:
            self.leading.append(node)
        return name

    def after(self, op_type: str, inputs: Sequence[str], result: str, **attributes: Any) -> None:
        """Add a node after the op, with `result` as its output."""
        self.trailing.append(new_node(op_type, inputs, result, f"{result}_{op_type}", **attributes))

    def parts(self) -> dict[str, Any]:
        """Return the nodes and constants as keyword arguments of a Replacement."""
        return {"leading": tuple(self.leading), "trailing": tuple(self.trailing), "weights": tuple(self.weights)}

    def _named(self, stem: str, content: object) -> str:
        stem = stem if self._op.scope == MAIN else f"{stem}_{self._op.scope}"
        contents, number = _content_by_name(self.view), 1
        name = unused(stem, self.view.names)
        while contents.setdefault(name, content) != content:
            number += 1
            name = unused(f"{stem}_{number}", self.view.names)
        return name


@once
def _content_by_name(view: View) -> dict[str, object]:
    return {}
