"""Element types from schemas alone: what an op gives, from what it reads and from what its attributes state.

No shapes, and no trust in declarations: `value_info` may be absent or wrong. Where neither inputs nor
attributes tell (an unknown op, an untyped body input), the consumers may: `settle`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.ir.nodes import Op, OpId, Scope, Use, Value, ValueId
from amp_rewrite.ir.schema import TENSOR, Signature, ValueType, attribute, parse_type, stated_dtype, unknown
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN

Types = Sequence[ValueType | None]

_REMEMBERED = 1 << 12  # a model has few kinds of nodes, even where it has many nodes


def result_type(op: Op, slot: int, types: Types, scopes: Sequence[Scope]) -> ValueType | None:
    """The type of an op's output; None, or a dtype of None, where nothing tells it. ModelError on a clash."""
    if op.bodies and not op.domain:
        return _body_result(op, slot, types, scopes)
    if op.signature is None:
        return None
    given = _given(op, types)
    told = _told(op.signature, slot, given)
    if told is not None:
        return told
    formal = op.signature.output(slot)
    if formal is None:
        raise ModelError(f"node {op.name!r} ({op.kind}) has more outputs than its schema; remove output {slot}")
    bound(op, types)  # for its objections
    dtype = stated_dtype(op.node, list(given))
    if dtype is None:
        legal = {parse_type(t).dtype for t in op.signature.types[formal.type]}
        dtype = legal.pop() if len(legal) == 1 else None
    return ValueType(_container(op.signature, formal.type, None), dtype)


@lru_cache(maxsize=_REMEMBERED)
def _told(signature: Signature, slot: int, given: tuple[ValueType | None, ...]) -> ValueType | None:
    """The type of an output that follows from the schema and the inputs' types alone; None if it does not."""
    formal = signature.output(slot)
    if formal is None:
        return None
    if formal.type not in signature.types:
        return parse_type(formal.type)
    found = _binding(signature, given)
    match = None if isinstance(found, str) else found.get(signature.output_variable(slot) or "")
    return match and ValueType(_container(signature, formal.type, match), match.dtype)


@lru_cache(maxsize=_REMEMBERED)
def _container(signature: Signature, variable: str, match: ValueType | None) -> str:
    """What a result is in; some variables may be tensors, sequences or optionals alike."""
    legal = {parse_type(t).container for t in signature.types[variable]}
    if len(legal) == 1:
        return legal.pop()
    container = match.container if match else TENSOR
    if signature.op_type == "OptionalGetElement":
        return "seq" if "seq" in container else TENSOR
    if signature.op_type == "Optional":
        return "optional(seq)" if container == "seq" else "optional"
    return container


def _given(op: Op, types: Types) -> tuple[ValueType | None, ...]:
    return tuple([types[v] if v is not None else None for v in op.inputs])


def bound(op: Op, types: Types) -> Mapping[str, ValueType]:
    """The type of each variable that the op's inputs bind. ModelError when two inputs disagree."""
    if op.signature is None:
        return {}
    found = _binding(op.signature, _given(op, types))
    if isinstance(found, str):
        raise ModelError(f"node {op.name!r} ({op.kind}){found}")
    return found


@lru_cache(maxsize=_REMEMBERED)
def _binding(signature: Signature, given: tuple[ValueType | None, ...]) -> Mapping[str, ValueType] | str:
    """The type of each variable that inputs of these types bind; words for the error where they cannot be."""
    found: dict[str, ValueType] = {}
    first: dict[str, int] = {}
    for slot, actual in enumerate(given):
        formal = signature.input(slot)
        if formal is None:
            return f" has more inputs than its schema; remove input {slot}"
        if actual is None or actual.dtype is None or formal.type not in signature.types:
            continue
        if actual.onnx_spelling not in signature.types[formal.type]:
            versioned = f"version {signature.since} of {signature.kind}"
            return f": input {slot} is {actual}, which {versioned} does not admit; the model is invalid"
        variable = signature.input_variable(slot) or ""
        known = found.setdefault(variable, actual)
        if known.dtype is not actual.dtype:
            return (
                f": inputs {first[variable]} and {slot} must have one element type, "
                f"but they are {known} and {actual}; the model is invalid"
            )
        first.setdefault(variable, slot)
    return found


# -- bodies ------------------------------------------------------------------------------------------


def handed_in(node: NodeProto, domain: str, given: list[ValueType | None], opset: int) -> list[ValueType | None]:
    """The types of a body's formal inputs, from the types that its owner reads."""
    if domain:
        return []
    if node.op_type == "Loop":
        return [ValueType(TENSOR, DType.INT64), ValueType(TENSOR, DType.BOOL), *given[2:]]
    if node.op_type == "Scan":
        return given[1:] if opset < FIRST_UNBATCHED_SCAN else given
    if node.op_type == "SequenceMap":
        return [ValueType(TENSOR, t.dtype) if t and t.container == "seq" else t for t in given]
    return []


def state_pairs(node: NodeProto, domain: str, body: Scope) -> Iterator[tuple[ValueId, ValueId]]:
    """(body output, body input) for each state that a Loop or Scan carries to its next iteration."""
    if domain or node.op_type not in ("Loop", "Scan"):
        return iter(())
    if node.op_type == "Loop":
        return zip(body.outputs[1:], body.inputs[2:], strict=False)
    scanned = attribute(node, "num_scan_inputs")
    states = len(body.inputs) - (scanned.i if scanned is not None else 0)
    return zip(body.outputs[:states], body.inputs[:states], strict=False)


def _body_result(op: Op, slot: int, types: Types, scopes: Sequence[Scope]) -> ValueType | None:
    at = slot + 1 if op.op_type == "Loop" else slot
    for body in op.bodies if op.op_type == "If" else op.bodies[:1]:
        outputs = scopes[body].outputs
        found = types[outputs[at]] if at < len(outputs) else None
        if found is not None and found.dtype is not None:
            return ValueType("seq", found.dtype) if op.op_type == "SequenceMap" else found
    return None


# -- what only consumers tell --------------------------------------------------------------------------


def settle(
    ops: Sequence[Op],
    values: Sequence[Value],
    uses: Sequence[Sequence[Use]],
    types: list[ValueType | None],
    scopes: Sequence[Scope],
) -> None:
    """Fill in the types that are still unknown, as far as consumers tell them; carry each discovery on.

    A consumer tells when its port has one fixed type, or when another input or a result binds the same variable.
    What stays unknown stays so: it is never guessed.
    """
    queue = deque(v.id for v in values if unknown(types[v.id]))
    queued = set(queue)
    told: set[tuple[OpId, str | None]] = set()  # variables of ops that a result has bound
    while queue:
        value = queue.popleft()
        queued.discard(value)
        made_by = values[value].producer
        found = _again(ops[made_by], value, types, scopes) if made_by is not None else None
        found = found if found is not None and found.dtype is not None else _demanded(ops, uses[value], types)
        if found is None or found.dtype is None or not unknown(types[value]):
            continue
        types[value] = found
        around = [use.op for use in uses[value]]
        if made_by is not None:
            binding = made_by, _result_variable(ops[made_by], value)
            around += [made_by] * (binding not in told)
            told.add(binding)
        for op in around:
            for near in (*ops[op].inputs, *ops[op].outputs):
                if near is not None and near not in queued and unknown(types[near]):
                    queue.append(near)
                    queued.add(near)


def _again(op: Op, value: ValueId, types: Types, scopes: Sequence[Scope]) -> ValueType | None:
    return result_type(op, op.outputs.index(value), types, scopes)


def _result_variable(op: Op, value: ValueId) -> str | None:
    return op.signature.output_variable(op.outputs.index(value)) if op.signature is not None else None


def _bound_by_result(op: Op, variable: str, types: Types) -> ValueType | None:
    """The type that a result of the op, which its readers told, binds the variable to."""
    if op.signature is None or not variable:
        return None
    for slot, result in enumerate(op.outputs):
        told = types[result] if result is not None else None
        if told is not None and told.dtype is not None and op.signature.output_variable(slot) == variable:
            return told
    return None


def _demanded(ops: Sequence[Op], uses: Sequence[Use], types: Types) -> ValueType | None:
    for use in uses:
        op = ops[use.op]
        formal = op.signature.input(use.slot) if op.signature else None
        if op.signature is None or formal is None:
            continue
        if formal.type not in op.signature.types:
            return parse_type(formal.type)
        variable = op.signature.input_variable(use.slot) or ""
        known = bound(op, types).get(variable) or _bound_by_result(op, variable, types)
        if known is not None and known.container == TENSOR:
            return known
        legal = op.signature.types[formal.type]
        if len(legal) == 1:
            return parse_type(next(iter(legal)))
    return None
