"""Replacement of ops with new nodes, and the driver for rounds of passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import onnx.helper
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, count
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import bodies, clone, refill
from amp_rewrite.ir.op_classes import UNREPEATABLE
from amp_rewrite.ir.schema import normal_domain
from amp_rewrite.ir.shapes import Shape, fixed, known_dims
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, Scope, ValueId, View


@dataclass(frozen=True, slots=True)
class Replacement:
    """Ops replaced by one node, at the position of `last` and with its results.

    `kind` names what the ops compute together ("layer_normalization", "constant" …). `weights` are new initializers for
    the node. `place` is the op whose position the node takes if its results are read before `last`. `declared` contains
    the types of results that onnx cannot infer. `leading` and `trailing` are nodes directly before and after it; a node
    that precedes several replacements in one graph is written once. `substitutes` maps other replaced ops to nodes at
    their positions. `findings` are added to the report; None means one finding that names the fused ops.
    """

    kind: str
    ops: tuple[OpId, ...]
    last: OpId
    node: NodeProto
    weights: tuple[TensorProto, ...] = ()
    place: OpId | None = None
    declared: tuple[ValueInfoProto, ...] = ()
    leading: tuple[NodeProto, ...] = ()
    trailing: tuple[NodeProto, ...] = ()
    substitutes: Mapping[OpId, NodeProto] = field(default_factory=dict)
    findings: tuple[Finding, ...] | None = None

    @property
    def nodes(self) -> tuple[NodeProto, ...]:
        """The node and its neighbors, in order."""
        return (*self.leading, self.node, *self.trailing)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A match of a fusion to leave unfused; `reason` is one clause."""

    kind: str
    last: OpId
    reason: str


Outcome = Replacement | Refusal
ATTENTION, GROUPED_ATTENTION, DECOMPOSED_ATTENTION = "attention", "group_query_attention", "decomposed_attention"
BATCH_NORM, CONSTANT, GROUP_NORM = "batch_normalization", "constant", "group_normalization"
"""Kinds of replacements with special rules for targets."""


def as_outcome(kind: str, last: OpId, outcome: Outcome | str) -> Outcome:
    """Wrap a bare reason in a Refusal for the ops ending at `last`; return any other outcome unchanged."""
    return Refusal(kind, last, outcome) if isinstance(outcome, str) else outcome


@dataclass(slots=True)
class Context:
    """The low type, and the shapes of a view, inferred once for all passes of a round.

    `opset_chosen`: the model is at its best opset, so refusals do not recommend another. `low_only`: allow operators
    for which the target has only low kernels. `every_row_attends`: assume that no row of a mask hides every key.
    """

    to: DType
    opset_chosen: bool = False
    low_only: bool = False
    every_row_attends: bool = False

    def shape(self, view: View, value: ValueId | None) -> Shape | None:
        """Return the shape of a value, with None for unknown dimensions; None if the rank is unknown."""
        dims = known_dims(view).get(value)
        return fixed(dims) if dims is not None else None


Pass = Callable[[View, Context], Iterable[Outcome]]
"""Generator of replacements and refusals for a view. If two replacements share an op, the first wins."""


@dataclass(frozen=True, slots=True)
class LazyPass:
    """A pass named "module:function", imported and run only for views that contain an op from every set in `kinds`.

    The module is relative to `amp_rewrite.rewrite`. `when` is a further condition on the view.
    """

    name: str
    kinds: tuple[Container[str], ...] = ()
    when: Callable[[View, Context], object] = lambda view, context: True

    def __call__(self, view: View, context: Context) -> Iterable[Outcome]:
        missing = any(not any(kind in kinds for kind in view.by_kind) for kinds in self.kinds)
        return () if missing or not self.when(view, context) else self.resolve()(view, context)

    def resolve(self) -> Pass:
        """Import the pass."""
        module, _, function = self.name.partition(":")
        resolved: Pass = getattr(import_module(f"amp_rewrite.rewrite.{module}"), function)
        return resolved


def too_old(opset: int, op_type: str, first: int, context: Context) -> str:
    """Return the reason not to fuse ops at an opset without the operator."""
    newer = f"--opset auto, unless other ops lose a kernel at opset {first}"
    faster = (
        f"opset {first} has one, but other ops lose a kernel there" if context.opset_chosen else f"faster with {newer}"
    )
    return f"opset {opset} has no {op_type} · left unfused: same results, more kernel launches · {faster}"


def findings(view: View, outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """Return one finding per fusion, one for all folded constants, and one per kind and reason of refusals."""
    replacements = [o for o in outcomes if isinstance(o, Replacement)]
    listed = [r.findings if r.findings is not None else (_fusion(view, r),) for r in replacements if r.kind != CONSTANT]
    names = ", ".join(view.ops[r.last].name for r in replacements if r.kind == CONSTANT)
    folded = Finding("fused", "constants", f"computed ahead of time, bit-identical to the run-time result: {names}")
    fused = dict.fromkeys(finding for each in listed for finding in each)
    return (*fused, *([folded] if names else []), *_refused(view, outcomes))


def _fusion(view: View, fusion: Replacement) -> Finding:
    phrase = fusion.kind.replace("_", " ")
    parts = ", ".join(view.ops[op].name for op in fusion.ops)
    return Finding("fused", view.ops[fusion.last].name, f"{phrase}: one {fusion.node.op_type} in place of {parts}")


def _refused(view: View, outcomes: Sequence[Outcome]) -> Iterable[Finding]:
    refused: dict[tuple[str, str], list[OpId]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            refused.setdefault((outcome.kind, outcome.reason), []).append(outcome.last)
    for (kind, reason), ops in refused.items():
        which = "the first ends" if len(ops) > 1 else "it ends"
        where = f"{which} at {view.ops[ops[0]].name}"
        unfused = f"{count(len(ops), 'match is', 'matches are')} not fused"
        yield Finding("not_fused", kind, f"{unfused} ({where}): {reason}")


def fused_node(
    op_type: str,
    last: Op,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Any],
    domain: str | None = None,
) -> NodeProto:
    """Return a node with the name and metadata of the last replaced op, without trailing empty inputs.

    A domain of None leaves the field unset, as in other standard ONNX nodes.
    """
    node = onnx.helper.make_node(op_type, inputs, outputs, last.node.name, domain=domain)
    while node.input and not node.input[-1]:
        node.input.pop()
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    node.metadata_props.extend(last.node.metadata_props)
    return node


def external_inputs(view: View, ops: Collection[OpId]) -> dict[ValueId, None]:
    """Return the inputs of these ops from outside the group, in order of first use."""
    results = {value for op in ops for value in view.ops[op].outputs}
    inputs = (value for op in sorted(ops) for value in view.ops[op].inputs)
    return dict.fromkeys(value for value in inputs if value is not None and value not in results)


def only_float32(view: View, ops: Iterable[OpId]) -> bool:
    """True if all floating-point operands and results of the ops are float32."""
    values = (value for op in ops for value in view.ops[op].ports)
    dtypes = {view.dtype(value) for value in values}
    return all(dtype is DType.FLOAT for dtype in dtypes if dtype is not None and dtype.floating)


# -- the driver ------------------------------------------------------------------------------------

Objection = Callable[[View, Replacement], str | None]


def run_round(
    view: View, passes: Iterable[Pass], context: Context, objection: Objection = lambda view, replacement: None
) -> tuple[View, list[Outcome]]:
    """Run passes on one view and apply their replacements; return the new view and the outcomes.

    `objection` returns a reason not to apply a replacement, or None. The model is indexed again, once for all passes,
    only if something was replaced.
    """
    replacements: list[Replacement] = []
    refusals: list[Outcome] = []
    replaced_ops: set[OpId] = set()
    for outcome in (outcome for each in passes for outcome in each(view, context)):
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        elif (reason := objection(view, outcome)) is not None:
            refusals.append(Refusal(outcome.kind, outcome.last, reason))
        elif replaced_ops.isdisjoint(outcome.ops):
            replaced_ops.update(outcome.ops)
            replacements.append(outcome)
    return View.of(replaced(view, replacements)) if replacements else view, [*replacements, *refusals]


def replaced(view: View, replacements: Sequence[Replacement]) -> Model:
    """Return a copy of the view's model with disjoint replacements applied.

    Everything else is preserved, including names, order and declarations.
    """
    proto = clone(view.model.proto)
    _ReplacementWriter(view, replacements).graph(proto.graph, view.scopes[MAIN])
    proto.graph.initializer.extend({w.name: w for each in replacements for w in each.weights}.values())
    imported = {normal_domain(i.domain) for i in proto.opset_import}
    for domain in sorted({normal_domain(each.node.domain) for each in replacements} - imported):
        proto.opset_import.add(domain=domain, version=1)
    return replace(view.model, proto=proto)


def _unread(view: View, replacements: Sequence[Replacement]) -> tuple[set[OpId], set[ValueId]]:
    """Return the ops to remove, and the newly unread initializers. O(ops visited).

    Ops are also removed if only removed ops read their results.
    """
    removed = {op for each in replacements for op in each.ops}
    needed = {name for r in replacements for node in (*r.nodes, *r.substitutes.values()) for name in node.input}
    annotations = view.model.proto.graph.quantization_annotation
    needed.update(a.tensor_name for a in annotations)
    needed.update(entry.value for a in annotations for entry in a.quant_parameter_tensor_names)
    needed.update(formal.name for formal in view.model.proto.graph.input)
    values: set[ValueId] = set()
    pending = [v for op in removed for v in view.ops[op].operands]
    while pending:
        value = pending.pop()
        if value in values or not _removable(view, value, removed, needed):
            continue
        op = view.producer(value)
        if op is None:
            values.add(value)
            continue
        repeatable = op.signature is not None and not op.bodies and op.kind not in UNREPEATABLE
        pure = op.kind == "Constant" or repeatable
        if pure and op.id not in removed and all(_removable(view, v, removed, needed) for v in op.results):
            removed.add(op.id)
            pending.extend(op.operands)
    return removed, values


def _removable(view: View, value: ValueId, removed: Collection[OpId], needed: Collection[str]) -> bool:
    entry = view.values[value]
    if entry.public or entry.overridable or value in view.yielded or entry.name in needed or entry.role is Role.INPUT:
        return False
    return all(use.op in removed for use in view.uses[value])


class _ReplacementWriter:
    def __init__(self, view: View, replacements: Sequence[Replacement]) -> None:
        self.view = view
        self.removed, initializers = _unread(view, replacements)
        self.places = {each.last if each.place is None else each.place: each for each in replacements}
        self.removed_names = {(view.values[v].scope, view.value_name(v)) for v in initializers}
        for op in (view.ops[op_id] for op_id in self.removed):
            self.removed_names.update((op.scope, view.value_name(v)) for v in op.results)
        self.substitutes = {op: node for each in replacements for op, node in each.substitutes.items()}
        written = ((r, node) for r in replacements for node in (*r.nodes, *r.substitutes.values()))
        self.removed_names -= {(view.ops[r.last].scope, name) for r, node in written for name in node.output}

    def graph(self, graph: GraphProto, scope: Scope) -> None:
        """Rewrite a copied graph in place; `scope` is the index of the original."""
        nodes: list[NodeProto] = []
        written: set[str] = set()
        for op_id, node in zip(scope.ops, graph.node, strict=True):
            if op_id in self.places:
                replacement = self.places[op_id]
                nodes += [n for n in replacement.nodes if n is replacement.node or not written.intersection(n.output)]
                written.update(name for n in replacement.leading for name in n.output)
            elif op_id in self.substitutes:
                nodes.append(self.substitutes[op_id])
            elif op_id not in self.removed:
                for body, (_, inner) in zip(self.view.ops[op_id].bodies, bodies(node), strict=True):
                    self.graph(inner, self.view.scopes[body])
                nodes.append(node)
        refill(graph, "node", nodes)
        new = {v.name: v for op in scope.ops if op in self.places for v in self.places[op].declared}
        for output in graph.output:
            if output.name in new and not output.HasField("type"):  # the output of a branch may have no type
                output.type.CopyFrom(new[output.name].type)
        declared = {v.name for v in (*graph.value_info, *graph.output)}
        graph.value_info.extend(v for v in new.values() if v.name not in declared)
        for name in ("value_info", "initializer"):
            refill(graph, name, [v for v in getattr(graph, name) if (scope.id, v.name) not in self.removed_names])
