"""A model at another opset: the one that its target serves best, or one that is asked for.

Most operators change by new types, new attributes and new optional inputs, whose defaults mean what was before. A node
that is valid at the new opset as it stands, and means the same, stays; any other is restated (`restated`), or holds the
model where it is. Names, weights and whatever else a model carries stay as they are.
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
from amp_rewrite.rewrite.attention.legality import sites
from amp_rewrite.rewrite.builder import restate
from amp_rewrite.rewrite.check import examined
from amp_rewrite.rewrite.contrib.multi_head_attention import multi_head_attentions
from amp_rewrite.rewrite.fusions import FUSIONS
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.rewrite.replacement import ATTENTION, Context, Replacement, replaced
from amp_rewrite.rewrite.restated import RESTATED, Restatement
from amp_rewrite.settings.choices import Fuse, Opset, Target


def at_opset(
    view: View, opset: Opset | None, to: DType, target: Target, *, fuse: Fuse = "basic"
) -> tuple[View, tuple[Finding, ...]]:
    """Return the view at another ai.onnx opset, and a finding about gains, losses or obstacles.

    "auto": the opset at which the target serves most ops, never one at which it serves fewer of any kind; the view
    itself if that is its own. A number: that opset. ModelError if the model cannot be moved there, saying why.
    `fuse`: what is written out op by op will be fused where the opset has one op for it, which counts as served; unless
    onnxruntime's own operator stands for it at any opset.
    None: nobody asked, so only an old model is moved, for kernels alone, and one that gains nothing goes unmentioned.
    """
    current = view.opsets.get("", 0)
    if opset == current or not current or (opset is None and current >= versions.OLDEST_MOVED):
        return view, ()
    most = target.opset
    if isinstance(opset, int) and most is not None and opset > most:
        raise ModelError(
            f"the model cannot be moved to opset {opset}: target {target.value} opens models up to opset {most}; use"
            f" {spelled('opset', most)} or a newer target"
        )
    wholes = {} if opset is None or fuse == "none" else dict(_wholes(view, to, target, fuse))
    judge = _KernelCheck(to, target, wholes)
    if not isinstance(opset, int):
        best, obstacles = _best(view, judge)
        if best is not view:
            return best, (_compared(view, best.opset, judge),)
        note = f"opset {current} stays: no other one serves more of the model without serving some of it less"
        told = Finding("opset", "ai.onnx", "; ".join((note, *obstacles[:3])))
        return view, (told,) if opset is not None or obstacles else ()
    moved = moved_to(view, opset)
    if isinstance(moved, str):
        raise ModelError(
            f"the model cannot be moved to opset {opset}: {moved}; leave {spelled('opset')} out, or export again"
        )
    return moved, (_compared(view, opset, judge),)


# -- which one -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KernelCheck:
    """The low type and the target of a model.

    `whole`: for each op that will be fused with others, what they are together. Ids are the same at every opset.
    """

    to: DType
    target: Target
    whole: Mapping[OpId, str]

    def covers(self, view: View) -> _Coverage:
        """Return the kind of each op, and how often it is served: in its own types, and in the low type."""
        gate = Gate(self.target, self.to)
        opened = self.target.opset is None or view.opset <= self.target.opset
        coverage = []
        for op in view.ops:
            kind = self.whole.get(op.id)
            apart = kind is not None and view.opsets[""] < _ONE_OP[kind]
            known = op.signature is not None and not op.bodies
            low = known and not apart and bool(gate.lowerable_groups(view, op).groups)
            served = (gate.runs(view, op, ()) + low) if known and opened else 0
            coverage.append((f"{kind.replace('_', ' ')} as one op" if kind is not None else op.kind, served))
        return coverage


def _wholes(view: View, to: DType, target: Target, fuse: Fuse) -> Iterator[tuple[OpId, str]]:
    if target.family != Target.TENSORRT:
        context = Context(to)
        own = multi_head_attentions(view, context) if fuse in ("contrib", "diffusion") else ()
        taken = {op for outcome in own if isinstance(outcome, Replacement) for op in outcome.ops}
        for _, site in sites(view, context):
            if not isinstance(site, str) and taken.isdisjoint(site.form.ops):
                yield from ((op, ATTENTION) for op in site.form.ops)
    for cluster in clusters(view):
        if cluster.kind in _ONE_OP:
            yield from ((op, cluster.kind) for op in cluster.ops)


_Coverage = Sequence[tuple[str, int]]


def _gained(before: _Coverage, after: _Coverage) -> list[str]:
    return sorted({kind for (kind, a), (_, b) in zip(before, after, strict=True) if a < b})


_ONE_OP = {
    rule.name: first
    for rule in FUSIONS
    if (first := versions.FIRST_FUSED.get(rule.operator, 0)) >= versions.OLDEST_MOVED
}
"""The opset from which the standard has one operator for what a cluster computes, where a move may reach it."""


def _best(view: View, judge: _KernelCheck) -> tuple[View, list[str]]:
    """Return the view at the opset with most served ops, among equals its own, then the nearest; and obstacles."""
    current = view.opsets[""]
    own = judge.covers(view)
    best, most = view, sum(times for _, times in own)
    barred: dict[str, str] = {}
    unknown = versions.NEWEST_MOVED if judge.target.limits is None else current  # operators that it may not have
    newest = min(versions.NEWEST_MOVED, judge.target.opset or unknown)
    for opset in sorted(range(versions.OLDEST_MOVED, newest + 1), key=lambda n: (abs(n - current), n)):
        then = judge.covers(relabelled(view, opset))
        gained, lost, served_then = _gained(own, then), _gained(then, own), sum(times for _, times in then)
        if gained and lost:
            served = f"serves {', '.join(gained)} better, but not {', '.join(lost)}"
            barred.setdefault(served, f"opset {opset} {served}")
        elif served_then > most:  # nothing is lost, or the sum would be less
            move = moved_to(view, opset)
            if isinstance(move, str):
                barred.setdefault(move, f"opset {opset}: {move}")
            else:
                best, most = move, served_then
    return best, list(barred.values())


def _compared(view: View, opset: int, judge: _KernelCheck) -> Finding:
    own, then = judge.covers(view), judge.covers(relabelled(view, opset))
    words = [f"opset {view.opsets['']} became {opset}"]
    if gained := _gained(own, then):
        words.append(f"the target serves {', '.join(gained)} better")
    if lost := _gained(then, own):
        words.append(f"it no longer serves {', '.join(lost)} as well")
    return Finding("opset", "ai.onnx", "; ".join(words))


# -- the move --------------------------------------------------------------------------------------


_SUCCESSORS = {"Scatter": "ScatterElements", "Upsample": "Resize"}
"""Operators that later opsets have under another name."""


def relabelled(view: View, opset: int) -> View:
    """Return a view with the operators of another opset, for a look at their types and kernels alone."""

    def schema(op_type: str) -> Signature | None:
        return signature("", op_type, opset) or signature("", _SUCCESSORS.get(op_type, op_type), opset)

    ops = [op if op.domain else op._replace(signature=schema(op.op_type)) for op in view.ops]
    return replace(view, opsets={**view.opsets, "": opset}, ops=ops)


def moved_to(view: View, opset: int) -> View | str:
    """Return the view at another opset, checked by onnx; or why it cannot be moved there.

    Local functions are inlined, since they state opsets of their own.
    """
    current = view.opsets[""]
    if current < versions.OLDEST_SOURCE:
        return f"opset {current} is older than {versions.OLDEST_SOURCE}"
    if view.model.proto.training_info:
        return "it carries its training, which states opsets of its own"
    try:
        view = View.of(inlined(view.model)) if view.model.proto.functions else view
    except ModelError as cause:
        return one_line(cause)
    changes = _changes(view, opset)
    if isinstance(changes, str):
        return changes
    moved = replaced(view, changes)
    proto = moved.proto
    for imported in proto.opset_import:
        if normal_domain(imported.domain) == "":
            imported.version = opset
    if proto.ir_version < versions.FIRST_IR_WITH_FREE_INITIALIZERS:  # its weights are inputs because they had to be
        held = {tensor.name for tensor in proto.graph.initializer}
        refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in held])
    least = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)], ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, least)
    refusal: Exception | None = examined(moved)[0]
    try:
        if refusal is None:
            return View.of(moved)
    except ModelError as cause:
        refusal = cause
    return f"onnx refuses it there: {one_line(refusal)[:120]}"


def _changes(view: View, opset: int) -> list[Replacement] | str:
    """Return the changed ops of a view at another opset; or the obstacle to it.

    A node that is valid there as it stands, and means the same, stays.
    """
    changes, restatement = list[Replacement](), Restatement(view, opset)
    for op in view.ops:
        if op.domain:
            continue
        node = clone(op.node)
        fault = _fault(node, view.opset, opset)
        if fault:
            form = restatement.of(op)
            if isinstance(form, str):
                return ": ".join(filter(None, (f"{op.op_type} {op.name!r} {fault}", form)))
            changes.append(form)
        elif node != op.node:
            changes.append(Replacement(RESTATED, (op.id,), op.id, node))
    return changes


def _fault(node: NodeProto, current: int, opset: int) -> str | None:
    """Return why a node is not the same at another opset; None if it is, less attributes that say what holds anyway."""
    old, new = onnx_schema("", node.op_type, current), onnx_schema("", node.op_type, opset)
    if new is None or new.deprecated:
        return f"does not exist at opset {opset}"
    if old is None or old.since_version == new.since_version:
        return None
    low, high = sorted((current, opset))
    if any(low < changed <= high for changed in versions.MEANING_CHANGES.get(node.op_type, ())):
        return f"means something else at opset {opset}"
    if node.op_type == "Split" and low < versions.FIRST_NUM_OUTPUTS <= high and len(node.input) == 1:
        return "has to say there into how many parts"
    value_of = onnx.helper.get_attribute_value
    for a in [a for a in node.attribute if a.name not in new.attributes]:
        default = old.attributes[a.name].default_value if a.name in old.attributes else None
        if default is None or not default.name or value_of(default) != value_of(a):
            return f"states {a.name}, which is not one of its attributes there"
        restate(node, a.name)
    if len(node.input) > new.max_input or len([o for o in node.output if o]) > new.max_output:
        return "has more inputs or outputs than it has there"
    missing = [n for n, a in new.attributes.items() if a.required and n not in {s.name for s in node.attribute}]
    return f"lacks {missing[0]}, which it needs there" if missing else None
