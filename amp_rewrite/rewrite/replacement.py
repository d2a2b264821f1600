"""Replacements of ops by nodes, refusals, and the passes that yield them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx.helper
from onnx import NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.shapes import AllDims, Shape, fixed, known_dims, shape_at
from amp_rewrite.ir.view import Op, OpId, ValueId, View


@dataclass(frozen=True, slots=True)
class Replacement:
    """Ops replaced by one node, in the place of `last` and with its results.

    `kind` names what the ops computed together ("layer_normalization", "constant" …). `weights` are new initializers
    that the node reads. `place`: the op where the node stands instead, if its results are read before `last`.
    `declared`: types of its results, where onnx cannot infer them. `ahead` and `behind`: nodes right before and
    after it; a node ahead of several replacements in one graph is written once. `findings`: what the report says; None
    for a fusion, which names its parts.
    """

    kind: str
    ops: tuple[OpId, ...]
    last: OpId
    node: NodeProto
    weights: tuple[TensorProto, ...] = ()
    place: OpId | None = None
    declared: tuple[ValueInfoProto, ...] = ()
    ahead: tuple[NodeProto, ...] = ()
    behind: tuple[NodeProto, ...] = ()
    findings: tuple[Finding, ...] | None = None

    @property
    def nodes(self) -> tuple[NodeProto, ...]:
        """The node with its neighbours, in order."""
        return (*self.ahead, self.node, *self.behind)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Ops left separate, although they compute one thing together; `why` is one clause."""

    kind: str
    last: OpId
    why: str


Outcome = Replacement | Refusal


def judged(kind: str, last: OpId, found: Replacement | str) -> Outcome:
    """Return a replacement, or the refusal of the ops up to `last` for the reason in its place."""
    return Refusal(kind, last, found) if isinstance(found, str) else found


@dataclass(slots=True)
class Context:
    """The low type, and the shapes of a view, inferred once for all passes of a round.

    `tried`: the model is at the opset that serves it best, so that no refusal advises another. `grouped`: operators may
    be written that the target has in the low type alone.
    """

    to: DType
    tried: bool = False
    grouped: bool = False
    _known: tuple[View, AllDims] | None = field(default=None, repr=False)

    def dims(self, view: View) -> AllDims:
        """Return the known dimensions of each value. O(nodes) at the first call."""
        if self._known is None or self._known[0] is not view:
            self._known = view, known_dims(view)
        return self._known[1]

    def shape(self, view: View, value: ValueId | None) -> Shape | None:
        """Return the shape of a value, with None for each unknown dimension; None if the rank is unknown."""
        dims = shape_at(self.dims(view), view, value)
        return fixed(dims) if dims is not None else None


Pass = Callable[[View, Context], Iterable[Outcome]]
"""Finds what to replace in a view, and what to refuse. Of two replacements that share an op the first counts."""


def too_old(opset: int, op_type: str, first: int, context: Context) -> str:
    """Return the reason for ops apart at an opset, with one operator for them in a newer one."""
    newer = f"--opset auto, unless others lose a kernel at opset {first}"
    faster = f"opset {first} has one, at which other ops lose a kernel" if context.tried else f"faster with {newer}"
    return f"opset {opset} has no {op_type} · the same numbers, more kernels · {faster}"


def findings(view: View, outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """Return a finding for each fusion, one for all folded constants, and one for each kind and reason of refusal."""
    replacements = [o for o in outcomes if isinstance(o, Replacement)]
    own = [r.findings if r.findings is not None else (_fusion(view, r),) for r in replacements if r.kind != "constant"]
    names = ", ".join(view.ops[r.last].name for r in replacements if r.kind == "constant")
    folded = Finding("fused", "constants", f"computed now, to the same bits as at run time: {names}")
    fused = dict.fromkeys(finding for each in own for finding in each)
    return (*fused, *([folded] if names else []), *_refused(view, outcomes))


def _fusion(view: View, fusion: Replacement) -> Finding:
    words = fusion.kind.replace("_", " ")
    parts = ", ".join(view.ops[op].name for op in fusion.ops)
    return Finding("fused", view.ops[fusion.last].name, f"{words}: one {fusion.node.op_type} in place of {parts}")


def _refused(view: View, outcomes: Sequence[Outcome]) -> Iterable[Finding]:
    refused: dict[tuple[str, str], list[OpId]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            refused.setdefault((outcome.kind, outcome.why), []).append(outcome.last)
    for (kind, why), ops in refused.items():
        which = "the first ends" if len(ops) > 1 else "ends"
        where = f"{which} in {view.ops[ops[0]].name}"
        apart = f"{len(ops)} {'stay' if len(ops) > 1 else 'stays'} unfused"
        yield Finding("not_fused", kind, f"{apart} ({where}): {why}")


def fused_node(
    op_type: str,
    last: Op,
    reads: Sequence[str],
    results: Sequence[str],
    stated: Mapping[str, Any],
    domain: str | None = None,
) -> NodeProto:
    """Return a node under the name of the last replaced op; trailing "" inputs are dropped.

    Without `domain` the field stays unset, as other nodes of the standard have it.
    """
    node = onnx.helper.make_node(op_type, reads, results, last.node.name, domain=domain)
    while node.input and not node.input[-1]:
        node.input.pop()
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in stated.items())
    node.metadata_props.extend(last.node.metadata_props)
    return node


def outside(view: View, ops: Collection[OpId]) -> dict[ValueId, None]:
    """Return the values from outside of ops, in order of first use."""
    results = {value for op in ops for value in view.ops[op].outputs}
    read = (value for op in sorted(ops) for value in view.ops[op].inputs)
    return dict.fromkeys(value for value in read if value is not None and value not in results)


def only_float32(view: View, ops: Iterable[OpId]) -> bool:
    """True if all floating operands and results of ops are float32."""
    values = (value for op in ops for value in view.ops[op].ports)
    dtypes = {view.dtype(value) for value in values}
    return all(dtype is DType.FLOAT for dtype in dtypes if dtype is not None and dtype.floating)
