"""A plan of changes to a model as data: retyped values, Casts, stored constants, rewired inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.view import OpId, Use, ValueId


@dataclass(frozen=True, slots=True)
class Cast:
    """An inserted Cast: it reads `value` as its producer makes it and writes `name`, right after the producer.

    `saturates`: values beyond the range of the type become its largest, not infinity.
    """

    value: ValueId
    to: DType
    name: str
    reason: str
    saturates: bool = False


@dataclass(frozen=True, slots=True)
class Bake:
    """A constant stored in another type, under its own name unless the original has readers, too."""

    value: ValueId
    to: DType
    name: str
    keeps_original: bool


@dataclass(frozen=True, repr=False)
class Plan:
    """The changes that `apply` carries out, as data; values and ops are those of one View.

    Attributes:
        to: the low type.
        retype: values whose element type changes at their producer.
        rename: those of them whose name must stay with the other type; `casts` then gives it back.
        casts: Casts to insert.
        bakes: constants to store in another type.
        rewire: inputs that read another value.
        attributes: ops whose attribute of the result type changes, with the new type.
        widened: ops whose attributes of an inner type become float32.
        drop: folded Casts.
        identities: Casts that became copies but make a public value.
        parted: Transposes to write between two Reshapes, which part them from what reads them.
        io: types of public values.
        findings: findings about the plan.
    """

    to: DType
    retype: Mapping[ValueId, DType] = field(default_factory=dict)
    rename: Mapping[ValueId, str] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    bakes: tuple[Bake, ...] = ()
    rewire: Mapping[Use, str] = field(default_factory=dict)
    attributes: Mapping[OpId, DType] = field(default_factory=dict)
    widened: frozenset[OpId] = frozenset()
    drop: frozenset[OpId] = frozenset()
    identities: frozenset[OpId] = frozenset()
    parted: frozenset[OpId] = frozenset()
    io: Mapping[ValueId, DType] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def __repr__(self) -> str:
        return f"<Plan {self.to.spelling}: {len(self.retype)} values retyped, {len(self.casts)} Casts>"

    @property
    def empty(self) -> bool:
        """True if applying the plan changes nothing."""
        return not (self.retype or self.casts or self.bakes or self.rewire or self.drop or self.identities)
