"""What a fusion is: the ops that go, the node that comes, the weights that it brings; and what stands in its way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from onnx import NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.errors import Finding
from amp_rewrite.ir.view import OpId, ValueId, View


@dataclass(frozen=True, slots=True)
class Fusion:
    """Ops that one node replaces. The node stands where `last` stood and makes the values that `last` made.

    `kind` is what the ops computed together ("layer_normalization", "constant" …). `weights` are new initializers that
    the node reads. `place`: the op where it stands instead, if it makes a value that is read before `last`.
    `declared`: types of what it makes, where onnx cannot infer them. `ahead` and `behind`: nodes right before and
    after it; one whose result another fusion of the same graph has ahead, too, comes once.
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Ops that compute something together and yet stay apart: why, in one clause."""

    kind: str
    last: OpId
    why: str


Outcome = Fusion | Refusal


def too_old(opset: int, op_type: str, first: int) -> str:
    """Why ops stay apart that one operator of a newer opset replaces."""
    return f"opset {opset} has no {op_type}; opset {first} has, and --opset auto takes the model there"


def findings(view: View, outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """A finding for each fusion, one for all folded constants, and one for each kind and reason of refusal."""
    fused = [o for o in outcomes if isinstance(o, Fusion)]
    made = [_made(view, fusion) for fusion in fused if fusion.kind != "constant"]
    return (*made, *_folded(view, [f for f in fused if f.kind == "constant"]), *_refused(view, outcomes))


def _made(view: View, fusion: Fusion) -> Finding:
    words = fusion.kind.replace("_", " ")
    parts = ", ".join(view.ops[op].name for op in fusion.ops)
    return Finding("fused", view.ops[fusion.last].name, f"{words}: one {fusion.node.op_type} in place of {parts}")


def _folded(view: View, fusions: Sequence[Fusion]) -> Iterable[Finding]:
    if fusions:
        names = ", ".join(view.ops[fusion.last].name for fusion in fusions)
        yield Finding("fused", "constants", f"computed now, each to the bit what it would be at run time: {names}")


def _refused(view: View, outcomes: Sequence[Outcome]) -> Iterable[Finding]:
    found: dict[tuple[str, str], list[OpId]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            found.setdefault((outcome.kind, outcome.why), []).append(outcome.last)
    for (kind, why), ops in found.items():
        more = f" and {len(ops) - 1} more" if len(ops) > 1 else ""
        yield Finding("not_fused", kind, f"the one that ends in {view.ops[ops[0]].name}{more}: {why}")


def outside(view: View, ops: Collection[OpId]) -> dict[ValueId, None]:
    """The values that ops read and do not make, in order of first use."""
    made = {value for op in ops for value in view.ops[op].outputs}
    read = (value for op in sorted(ops) for value in view.ops[op].inputs)
    return dict.fromkeys(value for value in read if value is not None and value not in made)
