"""Objections to converted models. Every function returns sentences; an empty list means that all is well."""

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.view import Role, View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.apply import apply

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
LEVELS = ("BASIC", "ALL")


# -- a conversion as a whole -------------------------------------------------------------------------


def of_convert(
    model: ModelProto,
    options: Mapping[str, Any],
    levels: Sequence[str] = LEVELS,
    again: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return all objections to converting a model except to its numbers; `again`: options of the second conversion."""
    before = written(model)
    try:
        result = convert(model, **options)
        same = convert(model, **options)
        twice = convert(result.model, **(options if again is None else again))
        unplanned = apply(View.of(Model.load(model)), Plan(result.coloring.to)).to_proto()
    except (AmpRewriteError, RuntimeError) as error:
        return [f"fails: {error}"]
    found = of_result(model, result, levels)
    found += ["the argument was changed"] if written(model) != before else []
    found += ["an empty plan changed the model"] if written(unplanned) != before else []
    found += ["a second conversion wrote different bytes"] if written(same.model) != written(result.model) else []
    found += ["converting the result changes it"] if written(twice.model) != written(result.model) else []
    if again is None and not twice.plan.casts == twice.plan.bakes == ():
        found.append("converting the result adds Casts")
    return found


def of_result(before: ModelProto, result: Converted, levels: Sequence[str] = LEVELS) -> list[str]:
    """Return all objections to a converted model except to its numbers.

    Objections to the source are not counted against the result. `levels`: optimization levels at which it must open.
    """
    after = result.model
    inserted = Counter((cast.value, cast.to) for cast in result.plan.casts)
    found = [f"{count} casts of one value to one type" for count in inserted.values() if count > 1]
    known = of_names(before)
    found += [text for text in of_names(after) if text not in known]
    found += of_io(before, after)
    if of_checker(before) == []:
        invalid = of_checker(after)
        found += invalid or of_casts(after, before)
        found += [] if invalid or result.plan.empty else of_types(result.view, result.plan, after)
    if of_loading(before, levels) == []:
        found += of_loading(after, levels)
    return found


def written(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


# -- validity and outputs ----------------------------------------------------------------------------


def of_checker(model: ModelProto) -> list[str]:
    """Return the error of onnx.checker's full check."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return [f"checker: {error}"]
    return []


def of_loading(model: ModelProto, levels: Sequence[str] = LEVELS) -> list[str]:
    """Return errors of onnxruntime's CPU provider at each optimization level."""
    found = []
    for level in levels:
        try:
            session(model, level)
        except refusals() as error:
            found.append(f"onnxruntime at {level}: {error}")
    return found


def session(model: ModelProto, level: str = "ALL") -> object:
    """Create an onnxruntime session on the CPU provider; `level`: "BASIC" and so on, or "DISABLE_ALL"."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(
        ort.GraphOptimizationLevel, f"ORT_{level}" if level.startswith("DISABLE") else f"ORT_ENABLE_{level}"
    )
    options.log_severity_level = 4
    options.enable_mem_reuse = False
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def refusals() -> tuple[type[Exception], ...]:
    """Return onnxruntime's own exceptions, which share no base class below Exception."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))


def run(model: ModelProto, feeds: Mapping[str, object], level: str = "ALL") -> list[object]:
    """Return the outputs in order. The feeds are copied: BatchNormalization writes running statistics into them."""
    return list(session(model, level).run(None, copy.deepcopy(dict(feeds))))  # type: ignore[attr-defined]


def of_outputs(before: Sequence[object], after: Sequence[object], *, bound: float) -> list[str]:
    """Object to floats that differ by more than `bound` times the original's largest magnitude and to other changes."""
    found = []
    if len(before) != len(after):
        return [f"{len(after)} outputs instead of {len(before)}"]
    for at, (left, right) in enumerate(zip(before, after, strict=True)):
        pairs = zip(left, right, strict=True) if isinstance(left, list) else ((left, right),)
        for a, b in pairs:
            found.extend(f"output {at}: {text}" for text in _array_objections(a, b, bound))
    return found


def _array_objections(before: object, after: object, bound: float) -> Iterator[str]:
    a, b = np.asarray(before), np.asarray(after)
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"is {b.dtype}{b.shape} instead of {a.dtype}{a.shape}"
    elif a.size == 0:
        return
    elif not np.issubdtype(a.dtype, np.floating):
        if not np.array_equal(a, b):
            yield "differs and is not floating"
    elif not np.isfinite(a).all():
        yield "the original is not finite, so nothing is compared"
    elif not np.isfinite(b).all():
        yield "is not finite"
    elif (off := float(np.max(np.abs(a - b)))) > bound * max(float(np.max(np.abs(a))), 1e-3):
        yield f"is off by {off:g}, more than {bound:g} of {float(np.max(np.abs(a))):g}"


# -- types -------------------------------------------------------------------------------------------


def of_types(view: View, plan: Plan, after: ModelProto) -> list[str]:
    """Object to values whose type by strict inference differs from the plan."""
    found = inferred_types(after)
    at_first = inferred_types(view.model.proto)
    lost = [n for n in planned_types(view, plan) if n in at_first and n not in found]
    objections = [f"{name!r} lost its type" for name in sorted(lost)]
    for name, planned in sorted(planned_types(view, plan).items()):
        wrong = found.get(name, set()) - planned
        if wrong:
            actual = ", ".join(sorted(DType.of(code).spelling for code in wrong if DType.of(code)))  # type: ignore[union-attr]
            objections.append(f"{name!r} is {actual}, planned {sorted(map(str, planned))}")
    return objections


def planned_types(view: View, plan: Plan) -> dict[str, set[int]]:
    """Return the planned element type codes of each name; several if sibling scopes share the name."""
    planned: dict[str, set[int]] = defaultdict(set)
    gone = {v for op in plan.drop for v in view.ops[op].outputs}
    baked = {bake.value: bake for bake in plan.bakes}
    for value in view.values:
        fed = plan.io.get(value.id) if value.role is Role.INPUT else None
        dtype = plan.retype.get(value.id) or fed or view.dtype(value.id)
        bake = baked.get(value.id)
        if bake is not None:
            planned[bake.name].add(bake.to.code)
            if not bake.keeps_original:
                continue
        if dtype is not None and value.id not in gone:
            planned[plan.rename.get(value.id, value.name)].add(dtype.code)
    for cast in plan.casts:
        planned[cast.name].add(cast.to.code)
    return planned


def inferred_types(model: ModelProto) -> dict[str, set[int]]:
    """Infer element type codes by value name in all scopes, strictly and without value_info."""
    found: dict[str, set[int]] = defaultdict(set)
    for graph in graphs(inferred(model).graph):
        for name, codes in _stated_types(graph).items():
            found[name] |= codes
    return found


def inferred(model: ModelProto) -> ModelProto:
    """Apply onnx's strict inference, keeping value_info only for operators without a schema."""
    bare = clone(model)
    for graph in graphs(bare.graph):
        foreign = {name for node in graph.node if node.domain == "com.microsoft" for name in node.output}
        stated = [value for value in graph.value_info if value.name in foreign]
        del graph.value_info[:]
        graph.value_info.extend(stated)
    return onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=False)


def _stated_types(graph: GraphProto) -> dict[str, set[int]]:
    values = (*graph.input, *graph.value_info, *graph.output)
    found = {value.name: {code} for value in values if (code := element(value.type))}
    return found | {tensor.name: {tensor.data_type} for tensor in graph.initializer}


def element(proto: onnx.TypeProto) -> int:
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return proto.tensor_type.elem_type
    if kind == "sequence_type":
        return element(proto.sequence_type.elem_type)
    return element(proto.optional_type.elem_type) if kind == "optional_type" else 0


# -- casts -------------------------------------------------------------------------------------------


def of_casts(after: ModelProto, before: ModelProto | None = None) -> list[str]:
    """Object to Casts that do nothing, cancel, are duplicates, or repeat in a loop for a loop-invariant value.

    Those already in `before` do not count, whatever value they read now.
    """
    known = Counter(map(_nameless, of_casts(before))) if before is not None else Counter()
    types = inferred_types(after)
    found: list[str] = []
    for (graph, in_loop), typed in zip(looped_graphs(after.graph), graphs(inferred(after).graph), strict=True):
        # A name without a type here may have one in a sibling body.
        own = {name: set() for node in graph.node for name in node.output} | _stated_types(typed)
        found.extend(_of_graph_casts(graph, {**types, **own}, in_loop))
    kinds = Counter(map(_nameless, found)) - known
    return sorted(text for text in found if kinds[_nameless(text)])


def _nameless(text: str) -> str:
    return re.sub("'.*'", "…", text)


def _of_graph_casts(graph: GraphProto, types: Mapping[str, set[int]], in_loop: bool) -> Iterator[str]:
    casts = [n for n in graph.node if n.op_type == "Cast"]
    maker = {n.output[0]: n for n in casts}
    own = {v.name for v in graph.input} | {o for n in graph.node for o in n.output}
    for node in casts:
        source, to = node.input[0], _target(node)
        if types.get(source) == {to}:
            yield f"Cast of {source!r} to its own type {to}"
        before = maker.get(source)
        if (
            before is not None
            and to in HALVES
            and _target(before) == TensorProto.FLOAT
            and types.get(before.input[0]) == {to}
        ):
            yield f"Cast of {before.input[0]!r} to float and back"
        if in_loop and source not in own and to in (TensorProto.FLOAT, *HALVES):
            yield f"Cast of the loop invariant {source!r} inside the loop"
    for (source, to), count in Counter((n.input[0], _target(n)) for n in casts).items():
        if count > 1:
            yield f"{count} Casts of {source!r} to {to}"


def _target(node: NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "to"), 0)


# -- edges -------------------------------------------------------------------------------------------


def of_io(before: ModelProto, after: ModelProto) -> list[str]:
    """Object to changes of inputs and outputs in name, order, type, shape, doc string or metadata."""
    found = []
    for side in ("input", "output"):
        old, new = _callers(before, side), _callers(after, side)
        if [v.SerializeToString(deterministic=True) for v in old] != [
            v.SerializeToString(deterministic=True) for v in new
        ]:
            found.append(f"{side}s changed: {[v.name for v in old]} to {[v.name for v in new]}")
    return found


def _callers(model: ModelProto, side: str) -> list[onnx.ValueInfoProto]:
    """Return the values of one side, without constants, which no caller can feed before IR 4."""
    filled = {t.name for t in model.graph.initializer} if model.ir_version < 4 else set()
    return [value for value in getattr(model.graph, side) if side == "output" or value.name not in filled]


def of_names(model: ModelProto) -> list[str]:
    """Object to duplicate node names, and to duplicate value names in one graph."""
    found = []
    names = Counter(n.name for g in graphs(model.graph) for n in g.node if n.name)
    found.extend(f"nodes share the name {name!r}" for name, count in sorted(names.items()) if count > 1)
    for graph in graphs(model.graph):
        defined = Counter(o for n in graph.node for o in n.output if o)
        defined.update(v.name for v in graph.input)
        defined.update({t.name for t in graph.initializer} - {v.name for v in graph.input})
        found.extend(f"{name!r} is defined {count} times" for name, count in sorted(defined.items()) if count > 1)
    return found


# -- graphs ------------------------------------------------------------------------------------------


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and all bodies below it."""
    return (found for found, _ in looped_graphs(graph))


def looped_graphs(graph: GraphProto, in_loop: bool = False) -> Iterator[tuple[GraphProto, bool]]:
    """Yield the same, with whether a graph runs more than once per run of its outer graph."""
    yield graph, in_loop
    for node in graph.node:
        again = node.op_type in ("Loop", "Scan", "SequenceMap")
        for a in node.attribute:
            for body in (a.g,) if a.type == AttributeProto.GRAPH else a.graphs:
                yield from looped_graphs(body, again)
