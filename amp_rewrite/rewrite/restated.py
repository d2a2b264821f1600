"""Nodes in the form of another opset, by onnx's own converter, with what it gets wrong put right.

Only nodes whose form changes go through the converter, each form once and without its surroundings. So it needs no
weights, and cannot drop what it does not know: functions, names, metadata, operators of other domains.
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
from amp_rewrite.rewrite.builder import Surroundings, restate
from amp_rewrite.rewrite.replacement import Replacement

RESTATED = "restated"
_SMALL = 4096
"""Elements of a constant that the converter may need: axes, sizes, scales."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A node in place of another, and its constants: it reads `x0`, `x1` … and makes `y0`, `y1` …

    `shapes`: those of Reshapes around it, of what it reads first and of its result; () without any.
    """

    node: NodeProto
    constants: tuple[TensorProto, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    def placed(self, view: View, op: Op) -> Replacement:
        """Return the node in the place of an op."""
        around, own = Surroundings(view, op), op.node
        names = {f"x{slot}": name for slot, name in enumerate(own.input)}
        names.update((f"y{slot}", name) for slot, name in enumerate(own.output))
        for constant in self.constants:
            names[constant.name] = around.constant(f"{own.output[0]}_{constant.name}", to_array(constant))
        for rows, whole in zip(self.shapes[:1], self.shapes[1:], strict=True):
            stem = own.output[0]
            read, made = (
                around.constant(f"{stem}_{word}", np.array(d)) for word, d in (("rows", rows), ("whole", whole))
            )
            names["x0"] = around.before("Reshape", (own.input[0], read), f"{stem}_in_rows")
            names["y0"] = around.name(f"{stem}_of_rows")
            around.after("Reshape", (names["y0"], made), stem)
        node = rename_node(clone(self.node), names)
        node.name, node.doc_string = own.name, own.doc_string
        node.metadata_props.extend(own.metadata_props)
        return Replacement(RESTATED, (op.id,), op.id, node, **around.parts())


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
        arrays = {name: view.array(value, _SMALL) for name, value in values.items()}
        held = {name: array for name, array in arrays.items() if array is not None}
        shapes: dict[str, Shape | None] = {}
        for name, value in values.items():
            tensor, known = view.constant(value), known_dims(view).get(value)
            shapes[name] = tuple(tensor.dims) if tensor is not None else None if known is None else fixed(known)
        if op.op_type in _ROWS:
            shapes["x0"] = shapes["x0"] or shapes["y0"]
        return cls(view.opset, node, codes, shapes, held, None not in dtypes.values())

    @property
    def key(self) -> tuple[object, ...]:
        held = tuple((name, array.tobytes()) for name, array in self.constants.items())
        known = tuple(self.types.items()), tuple(self.shapes.items()), self.typed
        return self.node.SerializeToString(deterministic=True), *known, held

    def alone(self, prefix: str) -> GraphProto:
        node = rename_node(clone(self.node), {name: prefix + name for name in (*self.node.input, *self.node.output)})
        declare = onnx.helper.make_tensor_value_info
        infos = {name: declare(prefix + name, code, self.shapes[name]) for name, code in self.types.items()}
        reads = [infos[name] for name in infos if name[0] == "x" and name not in self.constants]
        weights = [from_array(array, prefix + name) for name, array in self.constants.items()]
        return onnx.helper.make_graph([node], "g", reads, [i for name, i in infos.items() if name[0] == "y"], weights)


class Restatement:
    """The forms of ops at another opset; ops that differ in names alone share one."""

    def __init__(self, view: View, opset: int) -> None:
        self.view, self.opset = view, opset
        self.forms: dict[tuple[object, ...], _Form | str] = {}

    def of(self, op: Op) -> Replacement | str:
        """Return a replacement of an op at the other opset; or why there is none."""
        if op.bodies or op.op_type in MEANING_CHANGES.keys() - {"Resize", *_ROWS}:
            return ""
        case = _Case.of(self.view, op)
        form = self.forms.get(case.key)
        if form is None:
            by_rows = case.node.op_type in _ROWS and case.opset < FIRST_ROW_SOFTMAX <= self.opset
            form = self.forms[case.key] = _over_rows(case) if by_rows else _converted(case, self.opset)
        return form if isinstance(form, str) else form.placed(self.view, op)


# -- the forms -------------------------------------------------------------------------------------


def _converted(case: _Case, opset: int) -> _Form | str:
    imports = [onnx.helper.make_opsetid("", case.opset)]
    model = onnx.helper.make_model(case.alone(_PREFIX), opset_imports=imports)
    try:
        made = onnx.version_converter.convert_version(model, opset).graph
    except (onnx.version_converter.ConvertError, RuntimeError, ValueError) as cause:
        return f"onnx's converter: {one_line(cause).rpartition('failed: ')[2][:120]}"
    own = [node for node in made.node if node.op_type != "Constant"]
    if len(own) != 1:
        return "onnx's converter: it takes several nodes"
    given = {t.name for t in model.graph.initializer}
    constants = {t.name: t for t in made.initializer if t.name not in given}
    constants.update({node.output[0]: node.attribute[0].t for node in made.node if node.op_type == "Constant"})
    formals, held, names = onnx.defs.get_schema(own[0].op_type).inputs, [], dict[str, str]()
    for slot, name in enumerate(own[0].input):
        names[name] = name.removeprefix(_PREFIX)
        if name in constants:
            held.append(clone(constants[name]))
            held[-1].name = names[name] = formals[slot].name
    names.update((name, name.removeprefix(_PREFIX)) for name in own[0].output)
    own[0].ClearField("name")
    return _completed(case, _Form(rename_node(clone(own[0]), names), tuple(held)))


_PREFIX = "own/"  # of the names of a case: other names are the converter's


def _completed(case: _Case, form: _Form) -> _Form | str:
    """State what the converter leaves out: how images were resized before Resize could say so.

    A constant of a type that had to be guessed is refused.
    """
    if not case.typed and any(tensor.data_type == TensorProto.FLOAT for tensor in form.constants):
        return "the type of what it reads is not known"
    node = clone(form.node)
    if case.node.op_type == "Clip":  # bounds beyond float32 are left out: in a smaller type they would be infinite
        kept = {t.name for t in form.constants if np.abs(to_array(t)) < np.finfo(np.float32).max}
        dropped = {tensor.name for tensor in form.constants} - kept
        node.input[:] = ["" if name in dropped else name for name in node.input]
        return _Form(node, tuple(tensor for tensor in form.constants if tensor.name in kept))
    if case.node.op_type not in _RESIZES or case.opset >= FIRST_RESIZE_WITH_REGION:
        return form
    nearest = text_attribute(node, "mode", "nearest") == "nearest"
    scales = case.constants.get(_SCALES)
    if nearest and case.node.op_type == "Resize" and (scales is None or (scales < 1).any()):
        return "a nearest pixel of a smaller image was chosen by each runtime in its way"
    restate(node, "coordinate_transformation_mode", "asymmetric")
    if nearest:
        restate(node, "nearest_mode", "floor")
    node.input[1] = ""  # the region, which only another mode reads
    return _Form(node, tuple(tensor for tensor in form.constants if tensor.name in node.input))


_RESIZES, _SCALES = ("Resize", "Upsample"), "x1"
_ROWS = ("Softmax", "LogSoftmax", "Hardmax")


def _over_rows(case: _Case) -> _Form | str:
    """Return what an operator over all axes from one on is at opset 13, where it is over one axis.

    All others of these axes are of size 1, or they become one for the while.
    """
    shape, axis, node = case.shapes["x0"], int_attribute(case.node, "axis", 1), clone(case.node)
    if shape is None:
        return "the rank of what it reads is not known"
    wide = [place for place in range(len(shape))[axis:] if shape[place] != 1]
    if len(wide) > 1 and sum(shape[place] is None for place in wide) > 1:
        return "it is over several axes of unknown sizes"
    if len(wide) > 1:
        first = axis % len(shape)
        behind = (-1 if size is None else size for size in shape[first:])
        restate(node, "axis", -1)
        return _Form(node, shapes=((*[0] * first, -1), (*[0] * first, *behind)))
    restate(node, "axis", wide[0] if wide and wide[0] < len(shape) - 1 else -1)
    return _Form(node)
