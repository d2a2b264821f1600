"""Moves of a model to another opset: the best opset for its target, or a requested opset.

Most operators change by new types, attributes and optional inputs; the defaults preserve the old meaning. A node that
is valid at the new opset with the same meaning is not changed. Any other node is converted (`node_conversion`), or
prevents the move. Names, weights and everything else in the model are preserved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx.defs
import onnx.helper
from onnx import NodeProto

from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, ModelError, one_line, spelled
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir import versions
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.schema import Signature, normal_domain, onnx_schema, signature
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.attention.legality import fusible_attentions
from amp_rewrite.rewrite.builder import set_attribute
from amp_rewrite.rewrite.check import examine
from amp_rewrite.rewrite.contrib.multi_head_attention import multi_head_attentions
from amp_rewrite.rewrite.fusions import FUSIONS
from amp_rewrite.rewrite.node_conversion import CONVERTED, NodeConverter
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.rewrite.replacement import ATTENTION, Context, Replacement, replaced
from amp_rewrite.settings.choices import Fuse, Opset, Target


def at_opset(
    view: View, opset: Opset | None, to: DType, target: Target, *, fuse: Fuse = "basic"
) -> tuple[View, tuple[Finding, ...]]:
    """Return the view at another ai.onnx opset, and a finding about gains, losses or obstacles.

    Args:
        view: the index of the model.
        opset: a number; "auto" for the opset with the most kernels on the target, provided that no kind of op has fewer
            kernels than before; None to move only old models, and only if they gain kernels.
        to: the low type.
        target: the runtime whose kernels count.
        fuse: the fusions that will run. Ops that will be fused at an opset count as the fused operator, except ops that
            one of onnxruntime's own operators replaces at every opset.

    Raises:
        ModelError: the model cannot be moved to the requested opset.
    """
    current = view.opsets.get("", 0)
    if opset == current or not current or (opset is None and current >= versions.OLDEST_MOVED):
        return view, ()
    newest = target.opset
    if isinstance(opset, int) and newest is not None and opset > newest:
        raise ModelError(
            f"the model cannot be moved to opset {opset}: target {target.value} loads models up to opset {newest}; use"
            f" {spelled('opset', newest)} or a newer target"
        )
    fused_kinds = {} if opset is None or fuse == "none" else dict(_fused_kinds(view, to, target, fuse))
    kernels = _KernelCheck(to, target, fused_kinds)
    if not isinstance(opset, int):
        best, obstacles = _best(view, kernels)
        if best is not view:
            return best, (_compared(view, best.opset, kernels),)
        message = f"opset {current} is kept: no other opset supports more of the model without losing support elsewhere"
        finding = Finding("opset", "ai.onnx", "; ".join((message, *obstacles[:3])))
        return view, (finding,) if opset is not None or obstacles else ()
    moved = moved_to(view, opset)
    if isinstance(moved, str):
        raise ModelError(
            f"the model cannot be moved to opset {opset}: {moved}; omit {spelled('opset')}, or export the model again"
        )
    return moved, (_compared(view, opset, kernels),)


# -- the best opset --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KernelCheck:
    """The kernels of a target for ops in their own types and in a low type.

    `fused_kinds`: the kind of fusion for each op that will be part of one. Op ids are the same at every opset.
    """

    to: DType
    target: Target
    fused_kinds: Mapping[OpId, str]

    def coverage(self, view: View) -> _Coverage:
        """Return the kind of each op and the number of its kernels: one in its own types, and one in the low type."""
        gate = Gate(self.target, self.to)
        supported = self.target.opset is None or view.opset <= self.target.opset
        counts = []
        for op in view.ops:
            kind = self.fused_kinds.get(op.id)
            unfused = kind is not None and view.opsets[""] < _FIRST_WITH_OPERATOR[kind]
            plain = op.signature is not None and not op.bodies
            low = plain and not unfused and bool(gate.lowerable_groups(view, op).groups)
            served = (gate.runs(view, op, ()) + low) if plain and supported else 0
            counts.append((f"{kind.replace('_', ' ')} as one op" if kind is not None else op.kind, served))
        return counts


def _fused_kinds(view: View, to: DType, target: Target, fuse: Fuse) -> Iterator[tuple[OpId, str]]:
    if target.family != Target.TENSORRT:
        context = Context(to)
        contrib = multi_head_attentions(view, context) if fuse in ("contrib", "diffusion") else ()
        contrib_ops = {op for outcome in contrib if isinstance(outcome, Replacement) for op in outcome.ops}
        for _, attention in fusible_attentions(view, context):
            if not isinstance(attention, str) and contrib_ops.isdisjoint(attention.match.ops):
                yield from ((op, ATTENTION) for op in attention.match.ops)
    for cluster in clusters(view):
        if cluster.kind in _FIRST_WITH_OPERATOR:
            yield from ((op, cluster.kind) for op in cluster.ops)


_Coverage = Sequence[tuple[str, int]]
"""The kind and the number of kernels of each op."""


def _improved(before: _Coverage, after: _Coverage) -> list[str]:
    return sorted({kind for (kind, a), (_, b) in zip(before, after, strict=True) if a < b})


_FIRST_WITH_OPERATOR = {
    rule.name: first
    for rule in FUSIONS
    if (first := versions.FIRST_FUSED.get(rule.operator, 0)) >= versions.OLDEST_MOVED
}
"""For each kind of cluster, the first opset with its operator, if within the range of moves."""


def _best(view: View, kernels: _KernelCheck) -> tuple[View, list[str]]:
    """Return the view at the opset with the most kernels, and the obstacles to other opsets.

    Among equal opsets, the view's own opset wins, then the nearest.
    """
    current = view.opsets[""]
    now = kernels.coverage(view)
    best, most = view, sum(times for _, times in now)
    obstacles: dict[str, str] = {}
    fallback = versions.NEWEST_MOVED if kernels.target.limits is None else current  # newer operators may be missing
    newest = min(versions.NEWEST_MOVED, kernels.target.opset or fallback)
    for opset in sorted(range(versions.OLDEST_MOVED, newest + 1), key=lambda n: (abs(n - current), n)):
        coverage = kernels.coverage(relabeled(view, opset))
        gained, lost, served = _improved(now, coverage), _improved(coverage, now), sum(times for _, times in coverage)
        if gained and lost:
            mixed = f"supports {', '.join(gained)} better, but {', '.join(lost)} less"
            obstacles.setdefault(mixed, f"opset {opset} {mixed}")
        elif served > most:  # then nothing is lost
            move = moved_to(view, opset)
            if isinstance(move, str):
                obstacles.setdefault(move, f"opset {opset}: {move}")
            else:
                best, most = move, served
    return best, list(obstacles.values())


def _compared(view: View, opset: int, kernels: _KernelCheck) -> Finding:
    before, after = kernels.coverage(view), kernels.coverage(relabeled(view, opset))
    parts = [f"opset {view.opsets['']} became {opset}"]
    if gained := _improved(before, after):
        parts.append(f"the target supports {', '.join(gained)} better")
    if lost := _improved(after, before):
        parts.append(f"it supports {', '.join(lost)} less well")
    return Finding("opset", "ai.onnx", "; ".join(parts))


# -- the move --------------------------------------------------------------------------------------


_SUCCESSORS = {"Scatter": "ScatterElements", "Upsample": "Resize"}
"""Operators renamed by later opsets."""


def relabeled(view: View, opset: int) -> View:
    """Return a view with the schemas of another opset, to look up types and kernels; the nodes are not changed."""

    def schema(op_type: str) -> Signature | None:
        return signature("", op_type, opset) or signature("", _SUCCESSORS.get(op_type, op_type), opset)

    ops = [op if op.domain else op._replace(signature=schema(op.op_type)) for op in view.ops]
    return replace(view, opsets={**view.opsets, "": opset}, ops=ops)


def moved_to(view: View, opset: int) -> View | str:
    """Return the view at another opset, checked by onnx, or the reason why it cannot be moved.

    Local functions are inlined, since they import their own opsets.
    """
    current = view.opsets[""]
    if current < versions.OLDEST_SOURCE:
        return f"opset {current} is older than {versions.OLDEST_SOURCE}"
    if view.model.proto.training_info:
        return "it contains training information, which imports its own opsets"
    try:
        view = View.of(inlined(view.model)) if view.model.proto.functions else view
    except ModelError as error:
        return one_line(error)
    changes = _changes(view, opset)
    if isinstance(changes, str):
        return changes
    moved = replaced(view, changes)
    proto = moved.proto
    for imported in proto.opset_import:
        if normal_domain(imported.domain) == "":
            imported.version = opset
    if proto.ir_version < versions.FIRST_IR_WITH_FREE_INITIALIZERS:  # older models had to list their weights as inputs
        initializers = {tensor.name for tensor in proto.graph.initializer}
        refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in initializers])
    lowest = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)], ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, lowest)
    refusal: Exception | None = examine(moved)[0]
    try:
        if refusal is None:
            return View.of(moved)
    except ModelError as error:
        refusal = error
    return f"onnx rejects the moved model: {one_line(refusal)[:120]}"


def _changes(view: View, opset: int) -> list[Replacement] | str:
    """Return replacements for the ops with changes at another opset, or the obstacle to the move."""
    changes, converter = list[Replacement](), NodeConverter(view, opset)
    for op in view.ops:
        if op.domain:
            continue
        node = clone(op.node)
        fault = _fault(node, view.opset, opset)
        if fault:
            change = converter.of(op)
            if isinstance(change, str):
                return ": ".join(filter(None, (f"{op.op_type} {op.name!r} {fault}", change)))
            changes.append(change)
        elif node != op.node:
            changes.append(Replacement(CONVERTED, (op.id,), op.id, node))
    return changes


def _fault(node: NodeProto, current: int, opset: int) -> str | None:
    """Return why a node is invalid or has another meaning at another opset; None if its meaning is the same.

    Attributes missing from that opset are removed if they have their default values.
    """
    old, new = onnx_schema("", node.op_type, current), onnx_schema("", node.op_type, opset)
    if new is None or new.deprecated:
        return f"does not exist at opset {opset}"
    if old is None or old.since_version == new.since_version:
        return None
    low, high = sorted((current, opset))
    if any(low < changed <= high for changed in versions.MEANING_CHANGES.get(node.op_type, ())):
        return f"has another meaning at opset {opset}"
    if node.op_type == "Split" and low < versions.FIRST_NUM_OUTPUTS <= high and len(node.input) == 1:
        return f"requires the number of parts as an attribute at opset {opset}"
    value_of = onnx.helper.get_attribute_value
    for attribute in [attribute for attribute in node.attribute if attribute.name not in new.attributes]:
        default = old.attributes[attribute.name].default_value if attribute.name in old.attributes else None
        if default is None or not default.name or value_of(default) != value_of(attribute):
            return f"has the attribute {attribute.name}, which opset {opset} does not define"
        set_attribute(node, attribute.name)
    if len(node.input) > new.max_input or len([o for o in node.output if o]) > new.max_output:
        return f"has more inputs or outputs than opset {opset} allows"
    missing = [
        n for n, attribute in new.attributes.items() if attribute.required and n not in {s.name for s in node.attribute}
    ]
    return f"is missing the attribute {missing[0]}, which opset {opset} requires" if missing else None
