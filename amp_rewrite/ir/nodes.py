"""The parts of a view: ops, values, uses, scopes, type variables. Ids are positions in the view's tuples.

Parts that a large model has by the hundred thousand are named tuples: a frozen dataclass takes four times as long to
create and three times as long to hash.
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
    """The origin of a value."""

    INPUT = "input"
    INITIALIZER = "initializer"
    RESULT = "result"


class Use(NamedTuple):
    """A read of a value by an op: `op.inputs[slot]`."""

    op: OpId
    slot: int


class Op(NamedTuple):
    """A node. `None` in inputs and outputs stands for an omitted optional one."""

    id: OpId
    scope: ScopeId
    domain: str
    op_type: str
    name: str
    """The node's name, or a stable one from scope, type and position if it has none."""
    node: NodeProto
    inputs: tuple[ValueId | None, ...]
    outputs: tuple[ValueId | None, ...]
    bodies: tuple[ScopeId, ...]
    signature: Signature | None
    kind: str
    """The type with its domain, in the spelling of lists: "Conv", "com.microsoft::FusedMatMul"."""

    @property
    def operands(self) -> tuple[ValueId, ...]:
        """The inputs but the omitted ones."""
        return tuple([value for value in self.inputs if value is not None])

    @property
    def results(self) -> tuple[ValueId, ...]:
        """The outputs but the omitted ones."""
        return tuple([value for value in self.outputs if value is not None])

    @property
    def ports(self) -> tuple[ValueId, ...]:
        """The operands, then the results."""
        return (*self.operands, *self.results)


class Value(NamedTuple):
    """A named value of one scope.

    `public`: an input or output of the model. `overridable`: an initializer that is also an input of a model of IR
    version 4 or later, so that a caller may feed another value. `tensor`: the constant of an initializer or Constant.
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
    """A graph: the main one, or a body. `owner` is the op with the body."""

    id: ScopeId
    parent: ScopeId | None
    owner: OpId | None
    attribute: str
    path: str
    graph: GraphProto
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    ops: tuple[OpId, ...]


class TypeVariable(NamedTuple):
    """A type variable of one op: its ports, and their type."""

    op: OpId
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    type: ValueType | None
