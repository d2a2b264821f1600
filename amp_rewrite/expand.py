"""What is spelled out before painting: functions, a model's own and those that the target has no kernel for; the Casts
behind CastLike; the selections behind masks that are added."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx.checker
import onnx.helper
import onnx.inliner
import onnx.numpy_helper
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto
from onnx.helper import make_tensor_type_proto

from amp_rewrite.biased_masks import scored
from amp_rewrite.dtypes import DType
from amp_rewrite.entry import Color
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import Array
from amp_rewrite.finding import Finding
from amp_rewrite.index import bodies
from amp_rewrite.kernels import load_kernels
from amp_rewrite.lists import OpLists
from amp_rewrite.names import unused
from amp_rewrite.painting.painter import paint
from amp_rewrite.policy import Target
from amp_rewrite.schema import attribute, normal_domain, signature
from amp_rewrite.view import MAIN, Op, OpId, ValueId, View


def inline_functions(model: Model, *, low: bool = False) -> tuple[Model, tuple[Finding, ...]]:
    """The model with the local functions inlined that handle float32, so that what is in them is painted too.

    `low`: those that handle a low type as well, so that what is in them can be raised.
    """
    if not model.proto.functions:
        return model, ()
    wanted = sorted(_float_functions(View.of(model), (DType.FLOAT, *(d for d in DType if d.low and low))))
    note = "a local function, inlined so that what is inside it is painted too"
    return inlined(model, wanted), tuple(Finding("inlined", f"{domain}::{name}", note) for domain, name in wanted)


def inlined(model: Model, functions: Sequence[tuple[str, str]]) -> Model:
    """The model with calls of these local functions, by domain and name, replaced by their bodies.

    ModelError for functions that call each other in a circle, stand twice, or do not fit their calls.
    """
    if not functions:
        return model
    try:
        return replace(model, proto=onnx.inliner.inline_selected_functions(_one_opset(model.proto), list(functions)))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as cause:
        raise ModelError(f"the model's local functions cannot be inlined: {' '.join(str(cause).split())}") from cause


def _one_opset(proto: ModelProto) -> ModelProto:
    """The model with functions of another opset labelled with its own, where that means the same for their ops.

    Of those that it calls the standard asks no less (IR.md, "Model Local Functions"); onnx's inliner wants one label.
    """
    own = {normal_domain(imported.domain): imported.version for imported in proto.opset_import}
    labelled = ModelProto()
    labelled.CopyFrom(proto)
    for function in labelled.functions:
        for imported in function.opset_import:
            domain, old = normal_domain(imported.domain), imported.version
            new = own.get(domain, old)
            ops = {node.op_type for node in _nodes(function.node) if normal_domain(node.domain) == domain}
            if new != old and all(_since(domain, op, old) == _since(domain, op, new) for op in ops):
                imported.version = new
    return labelled


def _since(domain: str, op_type: str, opset: int) -> int | None:
    found = signature(domain, op_type, opset)
    return None if found is None else found.since


def _float_functions(view: View, dtypes: Collection[DType]) -> set[tuple[str, str]]:
    """The functions that some call gives or takes these types, or one that is unknown, and those that they call."""
    called = {(f.domain, f.name): {(n.domain, n.op_type) for n in _nodes(f.node)} for f in view.model.proto.functions}
    found: set[tuple[str, str]] = set()
    pending = [(op.node.domain, op.op_type) for op in view.ops if op.signature is None and _handles(view, op, dtypes)]
    while pending:
        name = pending.pop()
        if name in called and name not in found:
            found.add(name)
            pending.extend(called[name])
    return found


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for _, body in bodies(node):
            yield from _nodes(body.node)


def _handles(view: View, op: Op, dtypes: Collection[DType]) -> bool:
    types = (view.types[v] for v in (*op.inputs, *op.outputs) if v is not None)
    return any(t is None or t.dtype is None or t.dtype in dtypes for t in types)


def inline_schema_functions(view: View, lists: OpLists, to: DType, target: Target) -> tuple[View, tuple[Finding, ...]]:
    """A view in which ops that the target runs only as function bodies are those bodies.

    Only where painting gains by it: op types of which some node would be lowered if there were a kernel, and
    whose body holds no denied op, which would bring the Casts inside instead of sparing them.
    """
    if target is not Target.ORT_CUDA:
        return view, ()
    candidates = [op for op in view.ops if _runs_as_body(op)]
    if not candidates:
        return view, ()
    wished = paint(view, lists, to, target=Target.ONNX)
    lowered = [op for op in candidates if (found := wished.of(op.id)) is not None and found.dtype is to]
    wanted = sorted({op.op_type for op in lowered if not _holds_denied(view, op, lists)})
    note = "no CUDA kernel: the runtime runs its function body, so that was painted"
    findings = []
    for name in wanted:
        expanded = _expanded(view, name)
        if expanded is not None:
            view = expanded
            findings.append(Finding("inlined", name, note))
    return view, tuple(findings)


def _expanded(view: View, op_type: str) -> View | None:
    """A view with the ops of one type inlined; None where onnx cannot build their body, or builds a broken one.

    What is new bears the type's name, so that it is called the same whatever else is inlined: ranges are found by it.
    """
    try:
        proto = onnx.inliner.inline_selected_functions(view.model.proto, [("", op_type)], inline_schema_functions=True)
        made = {name for node in _nodes(proto.graph.node) for name in node.output if name and name not in view.names}
        _rename(proto.graph, {name: _fresh(view, f"{op_type}/{name}") for name in made})
        return View.of(replace(view.model, proto=proto))
    except (RuntimeError, ModelError):
        return None


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename values in a graph and its bodies, in place. No two values that differ may have one of the old names."""
    for named in (*graph.value_info, *graph.input, *graph.output):
        named.name = names.get(named.name, named.name)
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
        for _, body in bodies(node):
            _rename(body, names)


def spell_out_casts(view: View) -> View:
    """A view in which each CastLike is the Cast that it amounts to, so that its model tensor is not read.

    No runtime of note has a kernel for CastLike: it runs as this very Cast.
    """
    wanted = {op.id: dtype for op in view.ops if op.kind == "CastLike" and (dtype := _like(view, op)) is not None}
    if not wanted:
        return view
    proto = onnx.ModelProto()
    proto.CopyFrom(view.model.proto)
    copies = _nodes_by_op(view, proto.graph)
    for op, dtype in wanted.items():
        node = copies[op]
        del node.input[1:]
        if view.dtype(_input(view.ops[op])) is dtype:
            node.op_type = "Identity"
            del node.attribute[:]
        else:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", dtype.code))
    return View.of(replace(view.model, proto=proto))


def select_masks(view: View) -> tuple[View, tuple[Finding, ...]]:
    """A view in which scores to which a mask of 0 and −3.4e38 is added are selected by that mask instead.

    In float32 both give the same: beside 1e30 scores are lost, whatever they are. In the low type a sum leaves the
    range once more, to −inf, and makes NaN of a row that is masked throughout; a selection keeps every score finite.
    For a sum that a softmax reads whose mask is made by a Where between two scalars, or is a constant. One that never
    changes and masks no row throughout is still added, with a fill that stays in range: runtimes fuse such a sum with
    the softmax.
    """
    if view.opsets.get("", 1) < _FIRST_WHERE or view.model.proto.ir_version < _FIRST_FREE_INITIALIZERS:
        return view, ()
    sums = {op.id: mask for op in scored(view) if (mask := _mask_of(view, op)) is not None}
    if not sums:
        return view, ()
    proto = onnx.ModelProto()
    proto.CopyFrom(view.model.proto)
    copies = _nodes_by_op(view, proto.graph)
    chosen: dict[ValueId, tuple[str, str]] = {}
    bounded: dict[ValueId, str] = {}
    for op_id, mask in sums.items():
        node = copies[op_id]
        if mask.added:
            if mask.value not in bounded:
                bounded[mask.value] = _bounded(view, mask, proto.graph)
            node.input[mask.slot] = bounded[mask.value]
            continue
        if mask.value not in chosen:
            chosen[mask.value] = _condition(view, mask, proto.graph)
        condition, fill = chosen[mask.value]
        scores = node.input[1 - mask.slot]
        del node.input[:]
        node.input.extend((condition, scores, fill) if mask.shows else (condition, fill, scores))
        node.op_type = "Where"
    _drop_unread(view, {**chosen, **bounded}, sums.keys(), proto.graph)
    notes = [(value, "it selects them instead, which gives the same numbers in any type") for value in chosen]
    notes += [
        (value, f"{_BOUNDED_FILL:g} in place of its fill gives the same numbers in any type") for value in bounded
    ]
    told = ((view.value_name(value), f"is added to scores before a softmax: {note}") for value, note in notes)
    return View.of(replace(view.model, proto=proto)), tuple(Finding("selected", *words) for words in told)


_FIRST_WHERE = 9
_FIRST_SOFTMAX_OF_ROWS = 13  # whose axis is the last one unless it says otherwise
_FIRST_FREE_INITIALIZERS = 4  # the IR version from which an initializer need not be a graph input
_LOST = -1e30
"""At or below it a float32 number swallows whatever it is added to, as far as that is below 1e22."""
_LARGEST_MASK = 1 << 24  # elements of a constant mask that is looked at
_BOUNDED_FILL = -DType.FLOAT16.max / 2
"""A sum with it stays in range if the score does, and its exponential is 0 beside any score in that range."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """The operand `slot` of a sum: 0 where the condition holds and the fill elsewhere, or (not `shows`) the reverse.

    `added`: it may stay a summand, since no row is masked throughout.
    """

    value: ValueId
    slot: int
    shows: bool
    added: bool


def _mask_of(view: View, op: Op) -> _Mask | None:
    """The mask among the operands of a scored sum."""
    for slot, value in enumerate(op.inputs):
        shows = _shows(view, value) if value is not None and value != op.inputs[1 - slot] else None
        if value is not None and shows is not None:
            return _Mask(value, slot, shows, _in_each_row(view, op, value, shows))
    return None


def _in_each_row(view: View, op: Op, value: ValueId, shows: bool) -> bool:
    """Whether a mask never changes and shows something in each row of every softmax that reads the sum."""
    shown, result = _shown(view, value, shows), op.outputs[0]
    if shown is None or result is None:
        return False
    for reader in view.readers(result):
        axis = attribute(reader.node, "axis")
        last = axis is None or axis.i == -1
        if reader.kind != "Softmax" or view.opsets.get("", 1) < _FIRST_SOFTMAX_OF_ROWS or not last:
            return False
    return bool(shown.any(axis=-1).all())


def _shown(view: View, value: ValueId, shows: bool) -> Array | None:
    """Where a mask is 0, if it never changes: a constant, or a Where by a constant condition."""
    made_by = view.producer(value)
    chosen = made_by is not None and made_by.kind == "Where"
    tensor = view.constant(made_by.inputs[0] if made_by is not None and chosen else value)
    if tensor is None or len(tensor.dims) == 0 or not 0 < math.prod(tensor.dims) <= _LARGEST_MASK:
        return None
    shown: Array = view.model.array(tensor) == (shows if chosen else 0)
    return shown


def _shows(view: View, value: ValueId) -> bool | None:
    """Whether a mask is 0 where its condition holds; None for what is no such mask."""
    made_by = view.producer(value)
    if made_by is not None and made_by.kind == "Where":
        branches = [number for branch in made_by.inputs[1:] if (number := _scalar(view, branch)) is not None]
        two = len(branches) == 2 and 0 in branches and min(branches) <= _LOST
        return branches[0] == 0 if two else None
    tensor = view.constant(value)
    if tensor is None or not 0 < math.prod(tensor.dims) <= _LARGEST_MASK or len(tensor.dims) == 0:
        return None
    values = view.model.array(tensor)
    least = float(values.min())
    return True if -math.inf < least <= _LOST and bool(((values == 0) | (values == least)).all()) else None


def _scalar(view: View, value: ValueId | None) -> float | None:
    """The one finite number that a constant holds."""
    tensor = view.constant(value)
    if tensor is None or list(tensor.dims) not in ([], [1]):
        return None
    number = float(view.model.array(tensor).item())
    return number if math.isfinite(number) else None


def _condition(view: View, mask: _Mask, main: GraphProto) -> tuple[str, str]:
    """The names of a mask's condition and of its fill, made if the mask is a constant."""
    made_by = view.producer(mask.value)
    if made_by is not None and made_by.kind == "Where":
        return made_by.node.input[0], made_by.node.input[2 if mask.shows else 1]
    tensor = view.constant(mask.value)
    assert tensor is not None
    values = view.model.array(tensor)
    names = [_fresh(view, f"{view.value_name(mask.value)}_{part}") for part in ("shown", "fill")]
    for name, array in zip(names, (values == 0, values.min()), strict=True):
        main.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return names[0], names[1]


def _bounded(view: View, mask: _Mask, main: GraphProto) -> str:
    """The name of a constant mask whose fill stays in range, made here."""
    shown = _shown(view, mask.value, mask.shows)
    assert shown is not None
    name = _fresh(view, f"{view.value_name(mask.value)}_bounded")
    values = np.where(shown, np.float32(0), np.float32(_BOUNDED_FILL))
    main.initializer.append(onnx.numpy_helper.from_array(values, name))
    return name


def _fresh(view: View, name: str) -> str:
    return unused(name, view.names)


def _drop_unread(view: View, masks: Iterable[ValueId], sums: Collection[OpId], main: GraphProto) -> None:
    """Remove from the main graph the nodes and initializers of masks that nothing reads any more."""
    mine = [value for value in masks if _inner(view, value) and all(use.op in sums for use in view.uses[value])]
    gone = {view.value_name(value) for value in mine}
    makers = [op for value in mine if (op := view.producer(value)) is not None]
    last = {op.id for op in makers}
    for value in {v: None for op in makers for v in op.inputs if v is not None}:
        if view.constant(value) is not None and _inner(view, value) and all(u.op in last for u in view.uses[value]):
            gone.add(view.value_name(value))
    stay = (node for node in _nodes_by_op(view, main).values() if not gone.intersection(node.output))
    gone -= {name for node in stay for name in node.input}
    for at in reversed([i for i, node in enumerate(main.node) if gone.intersection(node.output)]):
        del main.node[at]
    for named in (main.initializer, main.value_info):
        for at in reversed([i for i, held in enumerate(named) if held.name in gone]):
            del named[at]


def _inner(view: View, value: ValueId) -> bool:
    """Whether a value of the main graph is nobody's outside of its nodes."""
    held = view.values[value]
    return held.scope == MAIN and not held.public and not held.overridable and value not in view.yielded


def _input(op: Op) -> ValueId:
    assert op.inputs[0] is not None
    return op.inputs[0]


def _like(view: View, op: Op) -> DType | None:
    return view.dtype(op.inputs[1]) if len(op.inputs) > 1 and op.inputs[1] is not None else None


def _nodes_by_op(view: View, main: GraphProto) -> dict[OpId, NodeProto]:
    """The nodes of a copied main graph and its bodies, by the ops of the original."""
    found: dict[OpId, NodeProto] = {}
    pending = [(MAIN, main)]
    while pending:
        scope, graph = pending.pop()
        for op_id, node in zip(view.scopes[scope].ops, graph.node, strict=True):
            found[op_id] = node
            pending.extend(zip(view.ops[op_id].bodies, (body for _, body in bodies(node)), strict=True))
    return found


def _runs_as_body(op: Op) -> bool:
    signature = op.signature
    if signature is None or op.domain or not signature.expandable or op.bodies:
        return False
    return not load_kernels("cuda").has("", op.op_type, signature.since)


def _holds_denied(view: View, op: Op, lists: OpLists) -> bool:
    body = _body(view, op)
    return body is None or any(
        lists.classify(node.domain, node.op_type, {}, len(node.input)).color is Color.DENY for node in body.node
    )


def _body(view: View, op: Op) -> FunctionProto | None:
    """The function body behind a node; None where onnx cannot build it from types alone."""
    schema = onnx.defs.get_schema(op.op_type, view.opsets.get("", 1), "")
    if schema.has_function:  # type: ignore[attr-defined]
        return schema.function_body
    types = [view.types[v] if v is not None else None for v in op.inputs]
    protos = [
        TypeProto() if t is None or t.dtype is None else make_tensor_type_proto(t.dtype.code, None) for t in types
    ]
    types_bytes = [p.SerializeToString() for p in protos]
    build = schema.get_context_dependent_function  # type: ignore[attr-defined]
    built = build(op.node.SerializeToString(), types_bytes)
    return FunctionProto.FromString(built) if built else None
