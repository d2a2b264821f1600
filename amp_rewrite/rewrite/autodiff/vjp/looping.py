"""VJPs of If, Scan and Loop. A Scan from the last step to the first recomputes and differentiates each step.

The op gets additional outputs with the values at the start of each step: the carried values and a Loop's counter.
Therefore, each step keeps its carried values in memory rather than all its values. The length of these outputs is the
number of steps of a Loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnx import GraphProto, NodeProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import bodies, clone, names_read, needed, refill
from amp_rewrite.ir.nodes import ScopeId, ValueId
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.rewrite.autodiff.builder import Builder, values_in
from amp_rewrite.rewrite.autodiff.vjp.rule import (
    ALL_OUTPUTS,
    Call,
    GradientRule,
    Joint,
    Rows,
    Stop,
    nested_scopes,
    paths,
)
from amp_rewrite.rewrite.builder import declared


def check_no_random_ops(v: Call, scope: ScopeId, where: str) -> None:
    """Raise GradientError if a body draws random numbers, because its recomputation would draw different ones."""
    view = v.b.view
    for op in (view.ops[op_id] for body in nested_scopes(view, [scope]) for op_id in view.scopes[body].ops):
        if op.op_type in RANDOM or (op.op_type == "Dropout" and len(op.inputs) > 2):
            raise v.error(
                f"its {where} contains {op.op_type} {op.name!r}, which would draw different numbers in the backward"
                f" pass; move it out of the {where}"
            )


def output_gradients(v: Call, pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the gradients of a body's outputs by name.

    Raises GradientError if the body outputs a value twice, because onnxruntime does not write the second copy.
    """
    by_name: dict[str, str] = {}
    for name, gradient in pairs:
        if name in by_name:
            raise v.error(f"its body outputs {name!r} twice, which onnxruntime does not support; output an Identity")
        if gradient is not None:
            by_name[name] = gradient
    return by_name


def declared_like(b: Builder, name: str, like: str, dtype: DType | None = None) -> ValueInfoProto:
    """Declare a name with the shape and type of the value `like`, or with another type."""
    return declared(name, dtype or b.element_type(like), b.shape(like))


def identity(source: str, name: str) -> NodeProto:
    return NodeProto(op_type="Identity", input=[source], output=[name], name=name)


def body_graph(b: Builder, results: Iterable[tuple[str, ValueInfoProto]]) -> GraphProto:
    """Return a builder's graph with copies of some values as its outputs, and with only the necessary nodes.

    `results` contains the name of each value and a declaration of its type and shape.
    """
    outputs = []
    for source, like in results:
        outputs.append(clone(like))
        outputs[-1].name = b.fresh(f"{like.name}_out")
        b.nodes.append(identity(source, outputs[-1].name))
    graph = b.finished()
    refill(graph, "output", outputs)
    refill(graph, "node", needed(graph.node, [end.name for end in outputs]))
    return graph


# -- If --------------------------------------------------------------------------------------------


def _if_rule(v: Call, slots: Sequence[int], names: Sequence[str]) -> Sequence[str]:
    """Append the gradients of the captured values. Each branch returns zeros for values it does not read."""
    branches: dict[str, GraphProto] = {}
    for scope, (attribute, _) in zip(v.op.bodies, bodies(v.op.node), strict=True):
        check_no_random_ops(v, scope, "branch")
        b = v.b.body(scope)
        results = [o.name for o in b.graph.output]
        gradients = v.backward(b, output_gradients(v, zip(results, v.gradients, strict=True)), names)
        branches[attribute] = body_graph(b, [(gradients[name], declared_like(b, name, name)) for name in names])
    return v.b.ops("If", v.x(0), results=len(names), **branches)


# -- Scan and Loop ---------------------------------------------------------------------------------


class _Carried(NamedTuple):
    """A value carried from step to step: its input and output names in the body, and its input and output slots."""

    before: str
    after: str
    slot: int
    output: int


class _Sliced(NamedTuple):
    """A tensor read or written one slice per step, from the front (direction 0) or from the back (1).

    `inner` is the name of the slice in the body, and `slot` is the index among the op's inputs or outputs.
    """

    inner: str
    slot: int
    axis: int = 0
    direction: int = 0


class _Steps(NamedTuple):
    """The common form of Scan and Loop: a body run once per step."""

    carried: tuple[_Carried, ...]
    inputs: tuple[_Sliced, ...]
    outputs: tuple[_Sliced, ...]
    control: tuple[str, ...]
    """Other inputs of a Loop's body: the step number and the condition."""


def _steps(v: Call) -> _Steps:
    graph = v.b.view.scopes[v.op.bodies[0]].graph
    before, after = [i.name for i in graph.input], [o.name for o in graph.output]
    first = 0  # slot of the first carried value
    if v.op.op_type == "Loop":
        first, control, before, after = 2, tuple(before[:2]), before[2:], after[1:]
        count = len(before)
    else:
        control, count = (), len(before) - v.attr("num_scan_inputs")

    def sliced(names: Sequence[str], kind: str) -> tuple[_Sliced, ...]:
        axes, directions = (v.attr(f"scan_{kind}_{field}") or [0] * len(names) for field in ("axes", "directions"))
        tensors = enumerate(zip(names, axes, directions, strict=True), start=count)
        return tuple(_Sliced(name, slot, axis, direction) for slot, (name, axis, direction) in tensors)

    pairs = enumerate(zip(before[:count], after[:count], strict=True))
    carried = tuple(_Carried(b, a, first + i, i) for i, (b, a) in pairs)
    return _Steps(carried, sliced(before[count:], "input"), sliced(after[count:], "output"), control)


def _carried_with_gradients(v: Call, steps: _Steps, slots: Sequence[int], names: Sequence[str]) -> tuple[_Carried, ...]:
    """Return the carried tensors affected by a differentiated value, in the same step or after several."""
    view, scope = v.b.view, v.op.bodies[0]
    ids, ends = values_in(view)[scope], view.scopes[scope].outputs
    sources = [*names, *[s.inner for s in steps.inputs if s.slot in slots]]
    current = [c for c in steps.carried if c.slot in slots]
    while True:
        wrt = [ids[name] for name in (*sources, *[c.before for c in current])]
        reached = paths(view, scope, ends, wrt, {}).reached
        tensors = [c for c in steps.carried if _is_tensor(v, ids[c.before])]
        extended = [c for c in tensors if c in current or ids[c.after] in reached]
        if len(extended) == len(current):
            return tuple(current)
        current = extended


def _is_tensor(v: Call, value: ValueId) -> bool:
    vtype = v.b.view.types[value]
    return vtype is None or vtype.container == TENSOR


def _scan_rule(v: Call, slots: Sequence[int], names: Sequence[str]) -> Sequence[str]:
    """Append the backward Scan; return the gradients of the inputs in `slots`, then those of the captured `names`."""
    steps, b = _steps(v), v.b.body(v.op.bodies[0])
    check_no_random_ops(v, v.op.bodies[0], "body")
    carried, inputs = _carried_with_gradients(v, steps, slots, names), [s for s in steps.inputs if s.slot in slots]
    outputs = [s for s in steps.outputs if v.gradients[s.slot] is not None]
    states = [_new_input(b, c.before) for c in carried]
    sums = [_new_input(b, name, sum_dtype(b, name)) for name in names]
    slices = [_new_input(b, s.inner) for s in outputs]
    ends = [*[c.after for c in carried], *[s.inner for s in outputs]]
    gradients = v.backward(
        b,
        output_gradients(v, zip(ends, [formal.name for formal in (*states, *slices)], strict=True)),
        [*[c.before for c in carried], *names, *[s.inner for s in inputs]],
    )
    results = [(gradients[c.before], formal) for c, formal in zip(carried, states, strict=True)]
    for name, formal in zip(names, sums, strict=True):
        term = b.cast(gradients[name], sum_dtype(b, name), of=b.dtype(name))
        results.append((b.op("Add", formal.name, term), formal))
    results += [(gradients[s.inner], declared_like(b, s.inner, s.inner)) for s in inputs]
    graph = body_graph(b, results)
    required = {o.name for o in graph.output}.union(names_read(graph.node))
    if not outputs:  # the Scan needs a value with one slice per step
        required.add(next(iter((*[s.inner for s in steps.inputs], *steps.control))))
    saved = _saved_values(v, steps, required)
    reread_inputs = [s for s in steps.inputs if s.inner in required]
    formals = [declared_like(b, name, name) for name in (*saved, *[s.inner for s in reread_inputs])]
    refill(graph, "input", [*states, *sums, *formals, *slices])
    _hoist(b, graph, v.b)
    initial = [v.gradients[c.output] or v.zeros(c.slot) for c in carried]
    initial += [v.b.zeros_like(name, sum_dtype(v.b, name)) for name in names]
    scanned = [*saved.values(), *[v.x(s.slot) for s in reread_inputs], *[v.gradients[s.slot] or "" for s in outputs]]
    graph.name = f"{v.op.name}_grad"
    sliced = [_Sliced("", 0)] * len(saved) + reread_inputs + outputs
    last = v.b.ops(
        "Scan",
        *initial,
        *scanned,
        results=len(results),
        body=graph,
        num_scan_inputs=len(scanned),
        scan_input_axes=[s.axis for s in sliced],
        scan_input_directions=[1 - s.direction for s in sliced],
        scan_output_axes=[s.axis for s in inputs] or None,
        scan_output_directions=[1 - s.direction for s in inputs] or None,
    )
    first, end = len(carried), len(carried) + len(names)
    by_slot = dict(
        zip([*[c.slot for c in carried], *[s.slot for s in inputs]], [*last[:first], *last[end:]], strict=True)
    )
    totals = zip(names, last[first:end], strict=True)
    sums_over_steps = [v.b.cast(total, v.b.element_type(name), of=sum_dtype(v.b, name)) for name, total in totals]
    return [*[by_slot[slot] for slot in slots], *sums_over_steps]


def _new_input(b: Builder, name: str, dtype: DType | None = None) -> ValueInfoProto:
    return declared_like(b, b.fresh(f"{name}_back"), name, dtype)


def sum_dtype(b: Builder, name: str) -> DType:
    """Return the type of a sum of gradients over all steps: float32 for a low type, since the sum has many terms."""
    dtype = b.element_type(name)
    return DType.FLOAT if dtype.low else dtype


def _hoist(b: Builder, graph: GraphProto, outside: Builder) -> None:
    """Move appended nodes out of the body if they do not depend on the step, such as a weight's Transpose.

    Constants are not moved, because onnx does not infer shapes from captured ones. Original nodes are not moved either,
    because their names are in use outside.
    """
    inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    outputs = {o.name for o in graph.output}
    inner = list[NodeProto]()
    for node in graph.node:
        independent = inside.isdisjoint(node.input) and not any(b.original(name) for name in node.output)
        if independent and outputs.isdisjoint(node.output) and node.op_type != "Constant" and not list(bodies(node)):
            outside.nodes.append(node)
        else:
            inside.update(node.output)
            inner.append(node)
    refill(graph, "node", inner)


def _saved_values(v: Call, steps: _Steps, required: set[str]) -> dict[str, str]:
    """Add outputs with the stacked start values of all steps, for values read by the backward pass.

    Return the outputs by the names of the values in the body.
    """
    node = v.b.graph.node[v.position]
    graph = next(body for _, body in bodies(node))
    body_builder = v.b.body(v.op.bodies[0])
    saved = {}
    for name in (*steps.control, *[c.before for c in steps.carried]):
        if name in required:
            if not _is_tensor(v, body_builder.ids[name]):
                raise v.error(f"its carried value {name!r} is not a tensor and has no gradient; carry a tensor instead")
            output = declared_like(body_builder, v.b.fresh(f"{name}_before"), name)
            graph.node.append(identity(name, output.name))
            graph.output.append(output)
            saved[name] = v.b.extra_output(v.position, len(graph.output) - 1 - (v.op.op_type == "Loop"))
    for attribute in node.attribute:
        if attribute.name in ("scan_output_axes", "scan_output_directions"):
            attribute.ints.extend([0] * len(saved))
    return saved


ROWS: Rows = {
    "If": GradientRule((Stop("a condition"),), outputs=ALL_OUTPUTS, joint_rule=_if_rule),
    "Scan": GradientRule((Joint(),), outputs=ALL_OUTPUTS, joint_rule=_scan_rule),
    "Loop": GradientRule((Stop("a count"), Stop("a condition"), Joint()), outputs=ALL_OUTPUTS, joint_rule=_scan_rule),
}
