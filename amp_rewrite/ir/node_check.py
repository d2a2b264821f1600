"""Schema checks of nodes beyond types: the numbers of inputs and outputs, and the kinds of attributes.

Violations are errors here, so that other modules may read `op.inputs[1]` or an attribute's `i` without a check.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import onnx
from onnx import AttributeProto

from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, Signature, contrib_schemas, onnx_schema

_ANY = 1 << 31


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """The numbers of inputs and outputs, the required slots, and the kinds of attributes."""

    inputs: tuple[int, int] = (0, _ANY)
    outputs: tuple[int, int] = (0, _ANY)
    needed_inputs: Collection[int] = ()
    needed_outputs: Collection[int] = ()
    attributes: Mapping[str, int] = field(default_factory=dict)
    needed_attributes: Collection[str] = ()
    dtype_attribute: str | None = None


@cache
def node_check(domain: str, op_type: str, since: int) -> NodeCheck:
    """Return the checks of a schema version; for an operator of the runtime alone, those of the inputs."""
    schema = onnx_schema(domain, op_type, since)
    if schema is None:
        row = contrib_schemas().get(f"{domain or 'ai.onnx'}::{op_type}")
        needed = [i for i, p in enumerate(row["inputs"]) if p[2] == "Single"] if row else []
        return NodeCheck((max(needed, default=-1) + 1, _ANY), needed_inputs=frozenset(needed))
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return NodeCheck(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        frozenset(i for i, p in enumerate(schema.inputs) if p.option == single),
        frozenset(i for i, p in enumerate(schema.outputs) if p.option == single),
        {name: int(a.type.value) for name, a in schema.attributes.items()},  # type: ignore[attr-defined]
        tuple(name for name, a in schema.attributes.items() if a.required),
        DTYPE_ATTRIBUTES.get((domain, op_type)),
    )


def violation(
    signature: Signature, inputs: Sequence[str], outputs: Sequence[str], stated: Sequence[AttributeProto]
) -> str | None:
    """Return how a node of a graph (not of a function's body) breaks its schema, and the remedy; None if it is valid.

    `inputs` and `outputs` are the names in the node, `stated` its attributes.
    """
    terms = node_check(signature.domain, signature.op_type, signature.since)
    return (
        _ports("input", inputs, terms.inputs, terms.needed_inputs)
        or _ports("output", outputs, terms.outputs, terms.needed_outputs)
        or (_attributes(stated, terms) if stated or terms.needed_attributes else None)
        or _undeclared(signature.op_type, len(inputs), stated)
    )


def _ports(side: str, names: Sequence[str], counts: tuple[int, int], needed: Collection[int]) -> str | None:
    count = len(names)
    if count < counts[0]:
        return f"has {count} {side}s, but needs {counts[0]}; add what is missing"
    if count > counts[1]:
        return f"has more {side}s than its schema; remove {side} {counts[1]}"
    for slot, name in enumerate(names) if "" in names else ():
        if not name and slot in needed:
            return f"leaves out {side} {slot}, which is not optional; name it"
    return None


def _attributes(stated: Sequence[AttributeProto], terms: NodeCheck) -> str | None:
    named = {a.name: a for a in stated}
    if len(named) < len(stated):
        return "states an attribute twice; keep one"
    for name in terms.needed_attributes:
        if name not in named:
            return f"lacks the attribute {name!r}; add it"
    if fault := missing_value(stated):
        return fault
    for name, a in named.items():
        kind = terms.attributes.get(name)
        if kind is not None and a.type not in (kind, AttributeProto.UNDEFINED):
            spelled = AttributeProto.AttributeType.Name
            return f"has the attribute {name!r} as {spelled(a.type)}, not as {spelled(kind)}; export it again"
        if name == "axis" and abs(a.i) >= 1 << 31:  # onnx's shape inference crashes at some of them
            return f"has the attribute 'axis' be {a.i}, which no tensor has; export it again"
        if name == terms.dtype_attribute and not _names_type(a):
            return f"has the attribute {name!r} be {a.s[:80] or a.i!r}, which is not an element type; export it again"
    return None


def missing_value(stated: Sequence[AttributeProto]) -> str | None:
    """Return an error for the first attribute without a value; None if all have one. Needs no schema."""
    for a in stated:
        if a.ref_attr_name:
            return f"has the attribute {a.name!r} refer to one of a function, but stands in none; state its value"
        if a.type in _HELD and not a.HasField(_HELD[a.type]):
            return f"has the attribute {a.name!r} hold nothing; export it again"
    return None


# Fields of attributes that hold a message. A reader of a missing message would see an empty one.
_HELD = {AttributeProto.GRAPH: "g", AttributeProto.TENSOR: "t"}


def _names_type(a: AttributeProto) -> bool:
    """True if an attribute states an element type: by its number, or in text as Cast did before opset 6."""
    if a.type == AttributeProto.STRING:
        return a.s.decode("utf-8", "replace") in _TYPE_NAMES
    return not a.s and a.i in _TYPE_CODES


_TYPE_NAMES = frozenset(onnx.TensorProto.DataType.keys())
_TYPE_CODES = frozenset(onnx.TensorProto.DataType.values())


def _undeclared(op_type: str, inputs: int, stated: Sequence[AttributeProto]) -> str | None:
    """Return a violation of a rule in the description of a schema."""
    if op_type == "Constant":
        return None if stated else "holds no value; export it again"
    if op_type == "Transpose":
        perm = next((list(a.ints) for a in stated if a.name == "perm"), [])
        valid = sorted(perm) == list(range(len(perm)))
        return None if valid else f"turns the axes by {perm[:10]}, which is not a permutation; correct perm"
    if op_type == "Scan":
        scanned = next((a.i for a in stated if a.name == "num_scan_inputs"), 1)
        return None if 0 < scanned <= inputs else f"scans {scanned} of its {inputs} inputs; correct num_scan_inputs"
    return None
