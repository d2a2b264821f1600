"""Nodes in the form of another opset, by onnx's own converter, with what it gets wrong put right.

Only nodes whose form changes go through the converter, each form once and without its surroundings. So it needs no
weights, and cannot drop what it does not know: functions, names, metadata, operators of other domains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.helper
import onnx.version_converter
from onnx import GraphProto, NodeProto, TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import one_line
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone, rename_node, renamed
from amp_rewrite.ir.attributes import int_attribute, text_attribute
from amp_rewrite.ir.builder import new_node, restate
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.shapes import AllDims, Shape, fixed, known_dims, shape_at
from amp_rewrite.ir.versions import FIRST_RESIZE_WITH_REGION, FIRST_ROW_SOFTMAX, MEANING_CHANGES
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_SMALL = 4096
"""Elements of a constant that the converter may need: axes, sizes, scales."""


@dataclass(frozen=True, slots=True)
class Form:
    """Nodes and constants in place of a node: they read `x0`, `x1` … and make `y0`, `y1` …"""

    nodes: tuple[NodeProto, ...]
    constants: tuple[TensorProto, ...] = ()

    def placed(
        self, node: NodeProto, taken: set[str], held: dict[bytes, str]
    ) -> tuple[list[NodeProto], list[TensorProto]]:
        """Return the nodes, named after the replaced one, and their constants without those `held`."""
        names = {"": "", **_slots("x", node.input), **_slots("y", node.output)}
        added: list[TensorProto] = []
        for constant in self.constants:
            bare = clone(constant)
            bare.ClearField("name")
            content = bare.SerializeToString(deterministic=True)
            if content not in held:
                bare.name = held[content] = claimed(f"{node.output[0]}_{constant.name}", taken)
                added.append(bare)
            names[constant.name] = held[content]
        for made in self.nodes:
            for inner in made.output:
                if inner not in names:
                    names[inner] = claimed(f"{node.output[0]}_{inner}", taken)
        placed = [renamed(made, names) for made in self.nodes]
        for made in placed:
            if node.name:
                made.name = node.name if made.output[0] in node.output else f"{node.name}_{made.op_type}"
            if node.doc_string:
                made.doc_string = node.doc_string
            made.metadata_props.extend(node.metadata_props)
        return placed, added


def _slots(letter: str, names: Sequence[str]) -> dict[str, str]:
    return {f"{letter}{slot}": name for slot, name in enumerate(names) if name}


@dataclass(frozen=True, slots=True)
class _Case:
    """A node without names, with the types, shapes and small constants around it.

    `typed`: all types are known. Float32 stands for others, behind operators that onnx does not know.
    """

    opset: int
    node: NodeProto
    types: Mapping[str, int]
    shapes: Mapping[str, Shape | None]
    constants: Mapping[str, Array]
    typed: bool

    @classmethod
    def of(cls, view: View, op: Op, dims: AllDims) -> _Case | str:
        if op.bodies or op.op_type in MEANING_CHANGES.keys() - {"Resize", *_ROWS}:
            return ""
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
        arrays = {name: view.array(value, _SMALL) for name, value in values.items()}
        held = {name: array for name, array in arrays.items() if array is not None}
        shapes: dict[str, Shape | None] = {}
        for name, value in values.items():
            tensor, known = view.constant(value), shape_at(dims, view, value)
            shapes[name] = tuple(tensor.dims) if tensor is not None else None if known is None else fixed(known)
        if op.op_type in _ROWS:
            shapes["x0"] = shapes["x0"] or shapes["y0"]
        return cls(view.opset, node, codes, shapes, held, None not in dtypes.values())

    @property
    def op_type(self) -> str:
        return str(self.node.op_type)

    @property
    def key(self) -> tuple[object, ...]:
        held = tuple((name, array.tobytes()) for name, array in self.constants.items())
        known = tuple(self.types.items()), tuple(self.shapes.items()), self.typed
        return self.node.SerializeToString(deterministic=True), *known, held

    def alone(self, prefix: str) -> GraphProto:
        node = clone(self.node)
        rename_node(node, lambda name: prefix + name)
        declare = onnx.helper.make_tensor_value_info
        infos = {name: declare(prefix + name, code, self.shapes[name]) for name, code in self.types.items()}
        reads = [infos[name] for name in infos if name[0] == "x" and name not in self.constants]
        weights = [from_array(array, prefix + name) for name, array in self.constants.items()]
        return onnx.helper.make_graph([node], "g", reads, [i for name, i in infos.items() if name[0] == "y"], weights)


def restated(view: View, ops: Sequence[Op], opset: int) -> Mapping[OpId, Form] | tuple[Op, str]:
    """Return the form of each op at another opset; or the first op without one, and why."""
    dims = known_dims(view) if ops else {}
    known: dict[tuple[object, ...], Form | str] = {}
    found: dict[OpId, Form] = {}
    for op in ops:
        case = _Case.of(view, op, dims)
        if isinstance(case, str):
            return op, case
        if case.key not in known:
            known[case.key] = _form(case, opset)
        form = known[case.key]
        if isinstance(form, str):
            return op, form
        found[op.id] = form
    return found


# -- the forms -------------------------------------------------------------------------------------


def _form(case: _Case, opset: int) -> Form | str:
    own = case.op_type in _ROWS and case.opset < FIRST_ROW_SOFTMAX <= opset
    form = _over_rows(case) if own else _converted(case, opset)
    return form if isinstance(form, str) else _completed(case, form)


def _converted(case: _Case, opset: int) -> Form | str:
    imports = [onnx.helper.make_opsetid("", case.opset)]
    model = onnx.helper.make_model(case.alone(_PREFIX), opset_imports=imports)
    try:
        made = onnx.version_converter.convert_version(model, opset).graph
    except (onnx.version_converter.ConvertError, RuntimeError, ValueError) as cause:
        return f"onnx's converter: {one_line(cause).rpartition('failed: ')[2][:120]}"
    given = {t.name for t in model.graph.initializer}
    constants = {t.name: t for t in made.initializer if t.name not in given}
    constants.update({node.output[0]: node.attribute[0].t for node in made.node if node.op_type == "Constant"})
    own = [node for node in made.node if node.op_type != "Constant"]
    constants = {name: constants[name] for node in own for name in node.input if name in constants}
    inner = {name: _word(name, own) for name in constants}
    inner.update((name, node.op_type.lower()) for node in own for name in node.output if not name.startswith(_PREFIX))
    names = {name: inner.get(name, name.removeprefix(_PREFIX)) for node in own for name in (*node.input, *node.output)}
    held = []
    for name, tensor in constants.items():
        held.append(clone(tensor))
        held[-1].name = names[name]
    for node in own:
        node.ClearField("name")
    return Form(tuple(renamed(node, names) for node in own), tuple(held))


_PREFIX = "own/"  # of the names of a case: other names are the converter's


def _word(name: str, nodes: Sequence[NodeProto]) -> str:
    node, slot = next((node, slot) for node in nodes for slot, read in enumerate(node.input) if read == name)
    return onnx.defs.get_schema(node.op_type).inputs[slot].name


def _completed(case: _Case, form: Form) -> Form | str:
    """State what the converter leaves out: how images were resized before Resize could say so.

    A constant of a type that had to be guessed is refused.
    """
    if not case.typed and any(tensor.data_type == TensorProto.FLOAT for tensor in form.constants):
        return "the type of what it reads is not known"
    if case.op_type == "Clip":
        return _bounded(form)
    if case.op_type not in _RESIZES or case.opset >= FIRST_RESIZE_WITH_REGION:
        return form
    node = clone(form.nodes[0])
    nearest = text_attribute(node, "mode", "nearest") == "nearest"
    scales = case.constants.get(_SCALES)
    if nearest and case.op_type == "Resize" and (scales is None or (scales < 1).any()):
        return "a nearest pixel of a smaller image was chosen by each runtime in its way"
    restate(node, "coordinate_transformation_mode", "asymmetric")
    if nearest:
        restate(node, "nearest_mode", "floor")
    node.input[1] = ""  # the region, which only another mode reads
    return Form((node,), tuple(tensor for tensor in form.constants if tensor.name in node.input))


def _bounded(form: Form) -> Form:
    """Leave out bounds beyond float32's range: in a smaller type they would be infinite."""
    node = clone(form.nodes[0])
    kept = [t for t in form.constants if np.abs(onnx.numpy_helper.to_array(t)) < np.finfo(np.float32).max]
    dropped = {tensor.name for tensor in form.constants} - {tensor.name for tensor in kept}
    node.input[:] = ["" if name in dropped else name for name in node.input]
    return Form((node,), tuple(kept))


_RESIZES, _SCALES = ("Resize", "Upsample"), "x1"
_ROWS = ("Softmax", "LogSoftmax", "Hardmax")


def _over_rows(case: _Case) -> Form | str:
    """Return what an operator over all axes from one on is at opset 13, where it is over one axis.

    One of these axes may be all that is not of size 1. Otherwise they become one for the while.
    """
    shape, axis = case.shapes["x0"], int_attribute(case.node, "axis", 1)
    if axis < 0 and shape is None:
        return "its axis is counted from behind, and its rank is not known"
    axis = axis + len(shape or ()) if axis < 0 else axis
    node = clone(case.node)
    behind = (None, None) if shape is None else shape[axis:]
    wide = [axis + place for place, size in enumerate(behind) if size != 1]
    if len(wide) <= 1 and shape is not None:
        restate(node, "axis", wide[0] - len(shape) if wide == [len(shape) - 1] else wide[0] if wide else -1)
        return Form((node,))
    restate(node, "axis", -1)
    node.input[0], node.output[0] = "flat", "rows"
    if behind.count(None) > 1:
        flat = new_node("Flatten", ["x0"], "flat", axis=axis)
        return Form((new_node("Shape", ["x0"], "shape"), flat, node, new_node("Reshape", ["rows", "shape"], "y0")))
    whole = -1 if None in behind else math.prod(size or 0 for size in behind)
    there = from_array(np.array([0] * axis + [whole]), "flat_shape")
    back = from_array(np.array([0] * axis + [-1 if size is None else size for size in behind]), "shape")
    flat, end = new_node("Reshape", ["x0", "flat_shape"], "flat"), new_node("Reshape", ["rows", "shape"], "y0")
    return Form((flat, node, end), (there, back))
