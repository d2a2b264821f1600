"""Conversion of individual nodes to another opset with onnx's version converter, and corrections of its faults.

Only nodes with a new form go through the converter, each form once and outside its graph. So the converter does not
need weights, and cannot drop parts unknown to it: functions, names, metadata, operators of other domains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.helper
import onnx.version_converter
from onnx import GraphProto, NodeProto, TensorProto
from onnx.numpy_helper import from_array, to_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import one_line
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone, rename_node
from amp_rewrite.ir.attributes import int_attribute, text_attribute
from amp_rewrite.ir.shapes import Shape, fixed, known_dims
from amp_rewrite.ir.versions import FIRST_RESIZE_WITH_REGION, FIRST_ROW_SOFTMAX, MEANING_CHANGES
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.builder import NewNodes, set_attribute
from amp_rewrite.rewrite.replacement import Replacement

CONVERTED = "converted"
_MAX_CONSTANT = 4096
"""Maximum number of elements of a constant for the converter, such as axes, sizes or scales."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A converted node with its constants. Its inputs are named `x0`, `x1` …, and its outputs `y0`, `y1` …

    `shapes`: the target shapes of a Reshape before the node and of another after it; () without Reshapes.
    """

    node: NodeProto
    constants: tuple[TensorProto, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    def placed(self, view: View, op: Op) -> Replacement:
        new, old = NewNodes(view, op), op.node
        names = {f"x{slot}": name for slot, name in enumerate(old.input)}
        names.update((f"y{slot}", name) for slot, name in enumerate(old.output))
        for constant in self.constants:
            names[constant.name] = new.constant(f"{old.output[0]}_{constant.name}", to_array(constant))
        for rows, whole in zip(self.shapes[:1], self.shapes[1:], strict=True):
            stem = old.output[0]
            shape_in, shape_out = (
                new.constant(f"{stem}_{suffix}", np.array(dims)) for suffix, dims in (("rows", rows), ("whole", whole))
            )
            names["x0"] = new.before("Reshape", (old.input[0], shape_in), f"{stem}_in_rows")
            names["y0"] = new.name(f"{stem}_of_rows")
            new.after("Reshape", (names["y0"], shape_out), stem)
        node = rename_node(clone(self.node), names)
        node.name, node.doc_string = old.name, old.doc_string
        node.metadata_props.extend(old.metadata_props)
        return Replacement(CONVERTED, (op.id,), op.id, node, **new.parts())


@dataclass(frozen=True, slots=True)
class _Case:
    """A node without names, with the types, shapes and small constants of its values.

    `typed`: all types are known. Unknown types, after operators unknown to onnx, are assumed to be float32.
    """

    opset: int
    node: NodeProto
    types: Mapping[str, int]
    shapes: Mapping[str, Shape | None]
    constants: Mapping[str, Array]
    typed: bool

    @classmethod
    def of(cls, view: View, op: Op) -> _Case:
        node = clone(op.node)
        for field in ("name", "doc_string", "metadata_props"):
            node.ClearField(field)
        node.input[:] = [name and f"x{slot}" for slot, name in enumerate(node.input)]
        node.output[:] = [name and f"y{slot}" for slot, name in enumerate(node.output)]
        values: dict[str, ValueId] = {}
        for letter, side in (("x", op.inputs), ("y", op.outputs)):
            values.update((f"{letter}{slot}", value) for slot, value in enumerate(side) if value is not None)
        dtypes = {name: view.tensor_dtype(value) for name, value in values.items()}
        codes = {name: (dtype or DType.FLOAT).code for name, dtype in dtypes.items()}
        arrays = {name: view.array(value, _MAX_CONSTANT) for name, value in values.items()}
        constants = {name: array for name, array in arrays.items() if array is not None}
        shapes: dict[str, Shape | None] = {}
        for name, value in values.items():
            tensor, dims = view.constant(value), known_dims(view).get(value)
            shapes[name] = tuple(tensor.dims) if tensor is not None else None if dims is None else fixed(dims)
        if op.op_type in _ROWWISE:
            shapes["x0"] = shapes["x0"] or shapes["y0"]
        return cls(view.opset, node, codes, shapes, constants, None not in dtypes.values())

    @property
    def key(self) -> tuple[object, ...]:
        constants = tuple((name, array.tobytes()) for name, array in self.constants.items())
        declared = tuple(self.types.items()), tuple(self.shapes.items()), self.typed
        return self.node.SerializeToString(deterministic=True), *declared, constants

    def graph(self, prefix: str) -> GraphProto:
        node = rename_node(clone(self.node), {name: prefix + name for name in (*self.node.input, *self.node.output)})
        declare = onnx.helper.make_tensor_value_info
        infos = {name: declare(prefix + name, code, self.shapes[name]) for name, code in self.types.items()}
        inputs = [infos[name] for name in infos if name[0] == "x" and name not in self.constants]
        weights = [from_array(array, prefix + name) for name, array in self.constants.items()]
        return onnx.helper.make_graph([node], "g", inputs, [i for name, i in infos.items() if name[0] == "y"], weights)


class NodeConverter:
    """Converter of ops to another opset, once for all ops with the same form."""

    def __init__(self, view: View, opset: int) -> None:
        self.view, self.opset = view, opset
        self.forms: dict[tuple[object, ...], _Form | str] = {}

    def of(self, op: Op) -> Replacement | str:
        """Return the replacement of an op at the other opset, or the reason why it cannot be converted."""
        if op.bodies or op.op_type in MEANING_CHANGES.keys() - {"Resize", *_ROWWISE}:
            return ""
        case = _Case.of(self.view, op)
        form = self.forms.get(case.key)
        if form is None:
            by_rows = case.node.op_type in _ROWWISE and case.opset < FIRST_ROW_SOFTMAX <= self.opset
            form = self.forms[case.key] = _rowwise(case) if by_rows else _converted(case, self.opset)
        return form if isinstance(form, str) else form.placed(self.view, op)


# -- the forms -------------------------------------------------------------------------------------


def _converted(case: _Case, opset: int) -> _Form | str:
    imports = [onnx.helper.make_opsetid("", case.opset)]
    model = onnx.helper.make_model(case.graph(_CASE_PREFIX), opset_imports=imports)
    try:
        converted = onnx.version_converter.convert_version(model, opset).graph
    except (onnx.version_converter.ConvertError, RuntimeError, ValueError) as cause:
        return f"onnx's converter: {one_line(cause).rpartition('failed: ')[2][:120]}"
    nodes = [node for node in converted.node if node.op_type != "Constant"]
    if len(nodes) != 1:
        return "onnx's converter replaces the op with several nodes"
    original = {t.name for t in model.graph.initializer}
    constants = {t.name: t for t in converted.initializer if t.name not in original}
    constants.update({node.output[0]: node.attribute[0].t for node in converted.node if node.op_type == "Constant"})
    formals, stored, names = onnx.defs.get_schema(nodes[0].op_type).inputs, [], dict[str, str]()
    for slot, name in enumerate(nodes[0].input):
        names[name] = name.removeprefix(_CASE_PREFIX)
        if name in constants:
            stored.append(clone(constants[name]))
            stored[-1].name = names[name] = formals[slot].name
    names.update((name, name.removeprefix(_CASE_PREFIX)) for name in nodes[0].output)
    nodes[0].ClearField("name")
    return _corrected(case, _Form(rename_node(clone(nodes[0]), names), tuple(stored)))


_CASE_PREFIX = "case/"  # marks the names of a case, as opposed to names added by the converter


def _corrected(case: _Case, form: _Form) -> _Form | str:
    """Return the corrected form, or the reason why it cannot be trusted.

    The converter does not add the attributes needed to resize as in older opsets.
    """
    if not case.typed and any(tensor.data_type == TensorProto.FLOAT for tensor in form.constants):
        return "the type of its input is not known"
    node = clone(form.node)
    if case.node.op_type == "Clip":  # drop the bounds of float32, which would be infinite in a smaller type
        finite = {t.name for t in form.constants if np.abs(to_array(t)) < np.finfo(np.float32).max}
        dropped = {tensor.name for tensor in form.constants} - finite
        node.input[:] = ["" if name in dropped else name for name in node.input]
        return _Form(node, tuple(tensor for tensor in form.constants if tensor.name in finite))
    if case.node.op_type not in _RESIZES or case.opset >= FIRST_RESIZE_WITH_REGION:
        return form
    nearest = text_attribute(node, "mode", "nearest") == "nearest"
    scales = case.constants.get(_SCALES)
    if nearest and case.node.op_type == "Resize" and (scales is None or (scales < 1).any()):
        return "runtimes disagreed on the nearest pixel of a smaller image"
    set_attribute(node, "coordinate_transformation_mode", "asymmetric")
    if nearest:
        set_attribute(node, "nearest_mode", "floor")
    node.input[1] = ""  # the region of interest, which is read only in another mode
    return _Form(node, tuple(tensor for tensor in form.constants if tensor.name in node.input))


_RESIZES, _SCALES = ("Resize", "Upsample"), "x1"
_ROWWISE = ("Softmax", "LogSoftmax", "Hardmax")


def _rowwise(case: _Case) -> _Form | str:
    """Return the one-axis form of opset 13 for a softmax over all axes from `axis` on.

    If several of these axes are larger than 1, a Reshape before the softmax merges them, and another restores them.
    """
    shape, axis, node = case.shapes["x0"], int_attribute(case.node, "axis", 1), clone(case.node)
    if shape is None:
        return "the rank of its input is not known"
    wide = [place for place in range(len(shape))[axis:] if shape[place] != 1]
    if len(wide) > 1 and sum(shape[place] is None for place in wide) > 1:
        return "it is over several axes of unknown sizes"
    if len(wide) > 1:
        first = axis % len(shape)
        trailing = (-1 if size is None else size for size in shape[first:])
        set_attribute(node, "axis", -1)
        return _Form(node, shapes=((*[0] * first, -1), (*[0] * first, *trailing)))
    set_attribute(node, "axis", wide[0] if wide and wide[0] < len(shape) - 1 else -1)
    return _Form(node)
