"""The parts of a view: ops, values, uses, scopes, type variables. Ids are positions in the view's tuples.

What there are hundreds of thousands of in a large model are named tuples: a frozen dataclass takes four times as long
to make and three times as long to hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from onnx import GraphProto, NodeProto, TensorProto

from amp_rewrite.ir.schema import Signature, ValueType

OpId = NewType("OpId", int)
ValueId = NewType("ValueId", int)
ScopeId = NewType("ScopeId", int)

MAIN = ScopeId(0)


class Role(Enum):
    """Where a value comes from."""

    INPUT = "input"
    INITIALIZER = "initializer"
    RESULT = "result"


class Use(NamedTuple):
    """One place where an op reads a value: `op.inputs[slot]`."""

    op: OpId
    slot: int


class Op(NamedTuple):
    """A node. `None` in inputs and outputs is an optional one left out."""

    id: OpId
    scope: ScopeId
    domain: str
    op_type: str
    name: str
    """The node's own name, or a stable one made from scope, type and position when it has none."""
    node: NodeProto
    inputs: tuple[ValueId | None, ...]
    outputs: tuple[ValueId | None, ...]
    bodies: tuple[ScopeId, ...]
    signature: Signature | None
    kind: str
    """The type with its domain, as lists spell it: "Conv", "com.microsoft::FusedMatMul"."""


class Value(NamedTuple):
    """A named value of one scope.

    `public`: an input or output of the model itself. `overridable`: an initializer that is also an input
    of a model of IR version 4 or later, so that a caller may feed another value. `tensor` is the constant
    behind an initializer or a Constant node.
    """

    id: ValueId
    scope: ScopeId
    name: str
    role: Role
    producer: OpId | None
    public: bool
    overridable: bool
    tensor: TensorProto | None


@dataclass(frozen=True, slots=True)
class Scope:
    """A graph: the main one, or a body. `owner` is the op that the body belongs to."""

    id: ScopeId
    parent: ScopeId | None
    owner: OpId | None
    attribute: str
    path: str
    graph: GraphProto
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    ops: tuple[OpId, ...]


class Variable(NamedTuple):
    """A type variable of one op: the ports that share it and the type that they have."""

    op: OpId
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    type: ValueType | None
