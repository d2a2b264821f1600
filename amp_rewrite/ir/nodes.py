"""The parts of a view (ops, values, uses, scopes and type variables), and the element types of results.

Ids are positions in the view's sequences. Classes with hundreds of thousands of instances in a large model are named
tuples: a frozen dataclass takes four times as long to create and three times as long to hash.

Types are inferred only from schemas, input types and attributes. Shapes are not used, and declarations are not trusted,
since `value_info` may be missing or wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, NewType

from onnx import GraphProto, NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.schema import TENSOR, Signature, ValueType, explicit_dtype
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN

OpId = NewType("OpId", int)
ValueId = NewType("ValueId", int)
ScopeId = NewType("ScopeId", int)

MAIN = ScopeId(0)


class Role(Enum):
    """The origin of a value."""

    INPUT = "input"
    INITIALIZER = "initializer"
    RESULT = "result"


class Use(NamedTuple):
    """A use of a value by an op, as `op.inputs[slot]`."""

    op: OpId
    slot: int


class Op(NamedTuple):
    """A node. None in `inputs` or `outputs` marks an omitted port."""

    id: OpId
    scope: ScopeId
    domain: str
    op_type: str
    name: str
    """The node's name; for a node without one, a stable name from its scope, type and position."""
    node: NodeProto
    inputs: tuple[ValueId | None, ...]
    outputs: tuple[ValueId | None, ...]
    bodies: tuple[ScopeId, ...]
    signature: Signature | None
    kind: str
    """The op type with its domain, as in op lists: "Conv", "com.microsoft::FusedMatMul"."""

    @property
    def operands(self) -> tuple[ValueId, ...]:
        return tuple([value for value in self.inputs if value is not None])

    @property
    def results(self) -> tuple[ValueId, ...]:
        return tuple([value for value in self.outputs if value is not None])

    @property
    def ports(self) -> tuple[ValueId, ...]:
        return (*self.operands, *self.results)


class Value(NamedTuple):
    """A named value of one scope.

    `public`: an input or output of the model. `overridable`: an initializer that is also an input, so a caller may feed
    another value (from IR version 4 on). `tensor`: the value of an initializer or Constant.
    """

    id: ValueId
    scope: ScopeId
    name: str
    role: Role
    producer: OpId | None
    public: bool
    overridable: bool
    tensor: TensorProto | None


@dataclass(slots=True)
class Scope:
    """A graph: the main graph or a body. `owner`: the op of the body."""

    id: ScopeId
    parent: ScopeId | None
    path: str
    graph: GraphProto
    owner: OpId | None = None
    inputs: tuple[ValueId, ...] = ()
    outputs: tuple[ValueId, ...] = ()
    ops: tuple[OpId, ...] = ()


class TypeVariable(NamedTuple):
    """A type variable of one op: its ports, and their type."""

    op: OpId
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    type: ValueType | None


Types = Sequence[ValueType | None]

_CACHE_SIZE = 1 << 12  # even a model with many nodes has few kinds of nodes


def result_type(op: Op, slot: int, types: Types, scopes: Sequence[Scope]) -> ValueType | None:
    """Return the type of an op's output; None or a dtype of None if unknown. ModelError if the input types clash."""
    if op.bodies and not op.domain:
        return _body_result(op, slot, types, scopes)
    if op.signature is None:
        return None
    inputs = _input_types(op, types)
    vtype, settled = _by_schema(op.signature, slot, inputs)
    if settled:
        return vtype
    _bound(op, types)  # raises its errors
    return vtype and vtype.of(explicit_dtype(op.node, inputs) or vtype.dtype)


@lru_cache(maxsize=_CACHE_SIZE)
def _by_schema(signature: Signature, slot: int, inputs: tuple[ValueType | None, ...]) -> tuple[ValueType | None, bool]:
    """Return an output's type by the schema, and True unless an attribute may set another element type."""
    formal = signature.output(slot)
    if formal is None or formal.fixed is not None:
        return (formal.fixed, True) if formal is not None else (None, False)
    binding, legal = _binding(signature, inputs), signature.types[formal.type]
    match = None if isinstance(binding, str) else binding.get(formal.variable)
    containers, dtypes = {vtype.container for vtype in legal}, {vtype.dtype for vtype in legal}
    container = match.container if match else TENSOR
    if len(containers) == 1:
        container = containers.pop()
    elif signature.op_type == "OptionalGetElement":
        container = "seq" if "seq" in container else TENSOR
    elif signature.op_type == "Optional":
        container = "optional(seq)" if container == "seq" else "optional"
    dtype = match.dtype if match else dtypes.pop() if len(dtypes) == 1 else None
    return ValueType(container, dtype), match is not None


def _input_types(op: Op, types: Types) -> tuple[ValueType | None, ...]:
    return tuple([types[v] if v is not None else None for v in op.inputs])


def types_read(op: Op, types: Types) -> Iterator[tuple[ValueId, ValueType]]:
    """Yield each input of unknown type, for example from an unknown op, with the only type that the op allows."""
    for slot, value in enumerate(op.inputs):
        if value is not None and types[value] is None and op.signature is not None:
            formal = op.signature.input(slot)
            vtype = (formal.fixed or _bound(op, types).get(formal.variable)) if formal is not None else None
            if vtype is not None and vtype.container == TENSOR:
                yield value, vtype


def _bound(op: Op, types: Types) -> Mapping[str, ValueType]:
    binding = _binding(op.signature, _input_types(op, types)) if op.signature is not None else {}
    if isinstance(binding, str):
        raise ModelError(f"node {op.name!r} ({op.kind}){binding}")
    return binding


@lru_cache(maxsize=_CACHE_SIZE)
def _binding(signature: Signature, inputs: tuple[ValueType | None, ...]) -> Mapping[str, ValueType] | str:
    """Return the type bound to each variable by these inputs, or an error message if they clash."""
    binding: dict[str, ValueType] = {}
    first: dict[str, int] = {}
    for slot, actual in enumerate(inputs):
        formal = signature.input(slot)
        if formal is None or actual is None or actual.dtype is None or formal.fixed is not None:
            continue
        if actual not in signature.types[formal.type]:
            versioned = f"version {signature.since} of {signature.kind}"
            return f": input {slot} is {actual}, which {versioned} does not allow; export the model again"
        bound = binding.setdefault(formal.variable, actual)
        if bound.dtype is not actual.dtype:
            return (
                f": inputs {first[formal.variable]} and {slot} must have the same element type, "
                f"but they are {bound} and {actual}; correct it, or export the model again"
            )
        first.setdefault(formal.variable, slot)
    return binding


# -- bodies ------------------------------------------------------------------------------------------

BODY_PORTS = {"If": (0, 0, 0), "Loop": (2, 2, 1), "Scan": (0, 0, 0), "SequenceMap": (0, 0, 0)}
"""The first input that an op passes to its body, the body's first input from the op, and the first output that the op
returns. A Loop's body also has the iteration number and the condition as inputs, and the condition as an output."""


def body_input_types(node: NodeProto, domain: str, types: Types, opset: int) -> Types:
    """Return the types of a body's formal inputs, based on the types of its owner's inputs."""
    if domain:
        return ()
    if node.op_type == "Loop":
        return (ValueType(TENSOR, DType.INT64), ValueType(TENSOR, DType.BOOL), *types[2:])
    if node.op_type == "Scan":
        return types[1:] if opset < FIRST_UNBATCHED_SCAN else types
    if node.op_type == "SequenceMap":
        return [ValueType(TENSOR, t.dtype) if t and t.container == "seq" else t for t in types]
    return ()


def state_pairs(node: NodeProto, domain: str, body: Scope) -> Iterable[tuple[ValueId, ValueId]]:
    """Return (body output, body input) for each state carried to the next iteration of a Loop or Scan."""
    if domain or node.op_type not in ("Loop", "Scan"):
        return ()
    _, first_input, first_output = BODY_PORTS[node.op_type]
    states = len(body.inputs) - int_attribute(node, "num_scan_inputs", 0)
    return zip(body.outputs[first_output:], body.inputs[first_input:states], strict=False)


def _body_result(op: Op, slot: int, types: Types, scopes: Sequence[Scope]) -> ValueType | None:
    at = slot + (op.op_type == "Loop")  # the condition comes first
    for body in op.bodies if op.op_type == "If" else op.bodies[:1]:
        outputs = scopes[body].outputs
        result = types[outputs[at]] if at < len(outputs) else None
        if result is not None and result.dtype is not None:
            return ValueType("seq", result.dtype) if op.op_type == "SequenceMap" else result
    return None
