"""A model at another opset: the one that its target serves best, or one that is asked for.

From opset 13 on, operators change by new types, new attributes and new optional inputs, whose defaults mean what was
before; the few that change otherwise are rewritten here, or hold the model where it is. Nodes, names, weights and
whatever else a model carries stay as they are: no part goes through another representation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx.defs
import onnx.helper
from onnx import GraphProto, ModelProto, NodeProto
from onnx.defs import OpSchema

from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, ModelError, one_line, spelled
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.builder import restate
from amp_rewrite.ir.graphs import bodies
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.schema import normal_domain, onnx_schema, signature
from amp_rewrite.ir.versions import FIRST_FUSED, MEANING_CHANGES, NEWEST_MOVED, OLDEST_MOVED
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.attention.build import KIND as ATTENTION
from amp_rewrite.rewrite.attention.fuse import sites
from amp_rewrite.rewrite.check import examined
from amp_rewrite.rewrite.fusions import FUSIONS
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.settings.choices import Opset, Target


def at_opset(
    view: View, opset: Opset, to: DType, target: Target, *, fusing: bool = True
) -> tuple[View, tuple[Finding, ...]]:
    """Return the view at another ai.onnx opset, and a finding about gains, losses or obstacles.

    "auto": the opset at which the target serves most ops, never one at which it serves fewer of any kind; the view
    itself if that is its own. A number: that opset. ModelError if the model cannot be moved there, saying why.
    `fusing`: what is written out op by op will be fused where the opset has one op for it, which counts as served.
    """
    current = view.opsets.get("", 0)
    if opset == current or not current:
        return view, ()
    most = target.opset
    if isinstance(opset, int) and most is not None and opset > most:
        raise ModelError(
            f"the model cannot be moved to opset {opset}: target {target.value} opens models up to opset {most}; use"
            f" {spelled('opset', most)} or a newer target"
        )
    if not isinstance(opset, int):
        return _best(view, _KernelCheck.of(view, to, target, fusing))
    model = moved_to(view, opset)
    moved = model if isinstance(model, str) else _indexed(model)
    if isinstance(moved, str):
        raise ModelError(
            f"the model cannot be moved to opset {opset}: {moved}; leave {spelled('opset')} out, or export again"
        )
    return moved, (_compared(view, moved, _KernelCheck.of(view, to, target, fusing)),)


# -- which one -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KernelCheck:
    """The low type and the target of a model.

    `whole`: for each op that will be fused with others, what they are together. Ids are the same at every opset.
    """

    to: DType
    target: Target
    whole: Mapping[OpId, str]

    @classmethod
    def of(cls, view: View, to: DType, target: Target, fusing: bool) -> _KernelCheck:
        return cls(to, target, dict(_wholes(view, to, target)) if fusing else {})

    def covers(self, view: View) -> _Coverage:
        """Return the kind of each op, and how often it is served: for the types that it has, and for the low type."""
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


def _wholes(view: View, to: DType, target: Target) -> Iterator[tuple[OpId, str]]:
    """Yield the ops that some opset has one op for, and what that computes."""
    if target.family is not Target.TENSORRT:
        for _, site in sites(view, Context(to)):
            if not isinstance(site, str):
                yield from ((op, ATTENTION) for op in site.form.ops)
    for cluster in clusters(view):
        if cluster.kind in _ONE_OP:
            yield from ((op, cluster.kind) for op in cluster.ops)


_Coverage = Sequence[tuple[str, int]]


def _gained(before: _Coverage, after: _Coverage) -> list[str]:
    """Return the kinds of ops that are served more after."""
    return sorted({kind for (kind, a), (_, b) in zip(before, after, strict=True) if a < b})


def _served(coverage: _Coverage) -> int:
    return sum(times for _, times in coverage)


_ONE_OP = {rule.name: first for rule in FUSIONS if (first := FIRST_FUSED.get(rule.operator, 0)) > OLDEST_MOVED}
"""The opset from which the standard has one operator for what a cluster computes, where a move may reach it."""


def _best(view: View, judge: _KernelCheck) -> tuple[View, tuple[Finding, ...]]:
    """Return the view at the opset that serves most ops; among equals its own, then the nearest."""
    current = view.opsets[""]
    own = judge.covers(view)
    best: Model | None = None
    most = _served(own)
    barred: list[str] = []
    for opset in sorted(_candidates(view, judge), key=lambda n: (abs(n - current), n)):
        moved = moved_to(view, opset)
        if isinstance(moved, str):
            barred += [f"opset {opset}: {moved}"] if opset > current else []
            continue
        then = judge.covers(_relabelled(view, opset))
        gained, lost = _gained(own, then), _gained(then, own)
        if gained and lost:
            barred.append(f"opset {opset} serves {_listed(gained)} better, but not {_listed(lost)}")
        elif _served(then) > most:  # nothing is lost, or the sum would be less
            best, most = moved, _served(then)
    if best is not None and not isinstance(after := _indexed(best), str):
        return after, (_compared(view, after, judge),)
    note = f"opset {current} stays: no other one serves more of the model without serving some of it less"
    return view, (Finding("opset", "ai.onnx", "; ".join((note, *barred[:_SHOWN]))),)


_SHOWN = 3  # reasons


def _candidates(view: View, judge: _KernelCheck) -> Iterator[int]:
    """Yield the opsets at which some op of the model is another than at its own, or a cluster becomes one op."""
    current = view.opsets[""]
    types = sorted({op.op_type for op in view.ops if not op.domain})
    steps = sorted({_ONE_OP[kind] for kind in judge.whole.values()})
    unknown = NEWEST_MOVED if judge.target.limits is None else current  # operators that it may not have
    newest = min(NEWEST_MOVED, judge.target.opset or unknown)
    seen = set() if current > newest else {_versions(types, current, steps)}
    for opset in (*range(current + 1, newest + 1), *range(min(current - 1, newest), OLDEST_MOVED - 1, -1)):
        versions = _versions(types, opset, steps)
        if versions not in seen:
            seen.add(versions)
            yield opset


def _versions(types: Sequence[str], opset: int, steps: Sequence[int]) -> tuple[int, ...]:
    """Return the schema versions of op types at an opset, and the steps that it has passed."""
    schemas = (onnx_schema("", op_type, opset) for op_type in types)
    return (*(s.since_version if s is not None else 0 for s in schemas), *(int(opset >= s) for s in steps))


def _compared(view: View, moved: View, judge: _KernelCheck) -> Finding:
    own, then = judge.covers(view), judge.covers(moved)
    words = [f"opset {view.opsets['']} became {moved.opsets['']}"]
    if gained := _gained(own, then):
        words.append(f"the target serves {_listed(gained)} better")
    if lost := _gained(then, own):
        words.append(f"it no longer serves {_listed(lost)} as well")
    return Finding("opset", "ai.onnx", "; ".join(words))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6]) or "nothing"
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


# -- the move --------------------------------------------------------------------------------------


def _relabelled(view: View, opset: int) -> View:
    """Return the view with the schemas of another opset: its ids, values and types suffice to ask the target."""
    ops = tuple(op if op.domain else op._replace(signature=signature("", op.op_type, opset)) for op in view.ops)
    return replace(view, opsets={**view.opsets, "": opset}, ops=ops)


def moved_to(view: View, opset: int) -> Model | str:
    """Return the model at another opset, which onnx's checker and inference pass; or why it cannot be moved there."""
    current = view.opsets[""]
    if current < OLDEST_MOVED:
        return f"opset {current} is older than {OLDEST_MOVED}"
    if view.model.proto.functions or view.model.proto.training_info:
        return "it has local functions or carries its training, which state opsets of their own"
    proto = clone(view.model.proto)
    fault = _OpsetWalk(current, opset, proto, set(view.names)).graph(proto.graph)
    if fault:
        return fault
    for imported in proto.opset_import:
        if normal_domain(imported.domain) == "":
            imported.version = opset
    least = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)], ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, least)
    moved = replace(view.model, proto=proto)
    refusal, _ = examined(moved)
    return moved if refusal is None else _refused(refusal)


def _indexed(model: Model) -> View | str:
    try:
        return View.of(model)
    except ModelError as cause:
        return _refused(cause)


def _refused(cause: Exception) -> str:
    return f"onnx refuses it there: {one_line(cause)[:120]}"


@dataclass(slots=True)
class _OpsetWalk:
    current: int
    opset: int
    proto: ModelProto
    names: set[str]

    def graph(self, graph: GraphProto) -> str | None:
        """Move the nodes of a copied graph in place; return why one cannot be moved."""
        for node in graph.node:
            fault = self._node(node) if normal_domain(node.domain) == "" else None
            if fault:
                return f"{node.op_type} {node.name!r} {fault}"
            for _, body in bodies(node):
                fault = self.graph(body)
                if fault:
                    return fault
        return None

    def _node(self, node: NodeProto) -> str | None:
        old, new = onnx_schema("", node.op_type, self.current), onnx_schema("", node.op_type, self.opset)
        if new is None or new.deprecated:
            return f"does not exist at opset {self.opset}"
        if old is None or old.since_version == new.since_version:
            return None
        low, high = sorted((self.current, self.opset))
        if any(low < changed <= high for changed in MEANING_CHANGES.get(node.op_type, ())):
            return f"means something else at opset {self.opset}"
        if self.opset > self.current:
            self._spell_out(node, new)
        return _drop_defaults(node, old, new) or _misfit(node, new)

    def _spell_out(self, node: NodeProto, new: OpSchema) -> None:
        """State for opset 18: axes as an input, and into how many parts to split."""
        stated = {a.name: a for a in node.attribute}
        if node.op_type.startswith("Reduce") and "axes" in stated and "axes" not in new.attributes:
            axes = stated["axes"].ints
            node.input.append(claimed(f"{node.output[0]}_axes", self.names))
            tensor = onnx.helper.make_tensor(node.input[-1], onnx.TensorProto.INT64, [len(axes)], axes)
            self.proto.graph.initializer.append(tensor)
            restate(node, "axes")
        if node.op_type == "Split" and len(node.input) < _WITH_SIZES and "num_outputs" in new.attributes:
            node.attribute.append(onnx.helper.make_attribute("num_outputs", len(node.output)))


_WITH_SIZES = 2


def _drop_defaults(node: NodeProto, old: OpSchema, new: OpSchema) -> str | None:
    """Remove attributes that the new schema lacks, if they state its own behaviour; return one that states another."""
    value_of = onnx.helper.get_attribute_value
    for a in [a for a in node.attribute if a.name not in new.attributes]:
        default = old.attributes[a.name].default_value if a.name in old.attributes else None
        if default is None or not default.name or value_of(default) != value_of(a):
            return f"states {a.name}, which is not one of its attributes there"
        restate(node, a.name)
    return None


def _misfit(node: NodeProto, new: OpSchema) -> str | None:
    if len(node.input) > new.max_input or len([o for o in node.output if o]) > new.max_output:
        return "has more inputs or outputs than it has there"
    missing = [n for n, a in new.attributes.items() if a.required and n not in {s.name for s in node.attribute}]
    return f"lacks {missing[0]}, which it needs there" if missing else None
