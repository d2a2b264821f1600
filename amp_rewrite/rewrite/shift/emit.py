"""Nodes that carry a plan of exponents out: scaled constants and attributes, and Muls where ports disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Fit
from amp_rewrite.files.model import scaled
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import exposed
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.op_classes import COMPARISONS, HEAVY
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import MAIN, Op, OpId, ScopeId, ValueId, View
from amp_rewrite.rewrite.builder import NewNodes, new_node, set_attribute
from amp_rewrite.rewrite.replacement import Context, Replacement, run_round
from amp_rewrite.rewrite.shift.laws import OpPort, attribute_value
from amp_rewrite.rewrite.shift.plan import (
    Equations,
    PortProblem,
    ShiftPlan,
    ShiftRequest,
    constant_keeps,
    is_exact,
    solve_ports,
    value_at,
    value_keeps,
)

KIND = "shifted"
FACTORS = ("alpha", "scale")
"""Attributes that multiply a product."""
SMALL = 1 << 12
"""Elements of a constant that may be stored more than once."""
_SUMMANDS = {
    **dict.fromkeys(("Add", "Sub", "Sum", "Max", "Min", "Mean", "Concat", "Clip", "Where", "Pad"), range(1 << 16)),
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "LayerNormalization", "InstanceNormalization"), (2,)),
    **dict.fromkeys(("GroupNormalization", "BatchNormalization"), (2,)),
    **dict.fromkeys(COMPARISONS, (0, 1)),
}
"""Constants that are added to other numbers, or compared with them: their own digits count for less."""


class Origin(NamedTuple):
    """The origin of a new value: a value of the view before the shift, times 2⁻ᵉ."""

    value: ValueId
    exponent: int


@dataclass(frozen=True)
class Shift:
    """A shifted view and how it came about.

    `origins`: what each new value is; `results`: the names of what the replaced ops make now; `muls`: what the Muls
    before or after an op make.
    """

    view: View
    plan: ShiftPlan
    origins: Mapping[str, Origin] = field(default_factory=dict)
    results: Mapping[OpId, tuple[str, ...]] = field(default_factory=dict)
    muls: Mapping[OpId, list[Origin]] = field(default_factory=dict)


def shifted_by(equations: Equations, plan: ShiftPlan, fits: Mapping[ValueId, Fit], want: ShiftRequest) -> Shift:
    """Return the view shifted by a plan. O(nodes + weights read).

    `fits`: how known values round to the low type.
    """
    emitter = _ShiftEmitter(equations, plan, fits, want)
    after, _ = run_round(equations.view, (lambda view, context: emitter.replacements(),), emitter.context)
    return Shift(after, plan, emitter.origins, emitter.results, emitter.muls)


def refusal(view: View) -> str | None:
    """Return why no part of a model may be shifted; None if one may."""
    proto = view.model.proto
    if proto.training_info:
        return "the model carries its training"
    if proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return "its weights are inputs (IR version 3)"
    for op in view.ops:
        if op.kind == "BatchNormalization" and (int_attribute(op.node, "training_mode", 0) or len(op.results) > 1):
            return f"{op.name} is in training mode"
        if op.kind == "Dropout" and len(op.inputs) > 2 and op.inputs[2] is not None:
            mode = view.array(op.inputs[2])
            if mode is None or mode.any():
                return f"{op.name} may be in training mode"
    return None


class _ShiftEmitter:
    """One walk over the ops. `natural`: the exponents at which values are made."""

    def __init__(self, equations: Equations, plan: ShiftPlan, fits: Mapping[ValueId, Fit], want: ShiftRequest) -> None:
        self.equations, self.view, self.plan, self.fits, self.want = equations, equations.view, plan, fits, want
        self.natural: dict[ValueId, int] = {}
        self.taken = set(self.view.names)
        self.names: dict[tuple[ValueId, int, ScopeId], str] = {}
        self.constants: dict[tuple[ValueId, int], TensorProto] = {}
        self.context = Context(want.to)
        self.origins: dict[str, Origin] = {}
        self.results: dict[OpId, tuple[str, ...]] = {}
        self.muls: dict[OpId, list[Origin]] = {}

    def replacements(self) -> Iterator[Replacement]:
        for op_id, laws in self.equations.laws.items():
            op = self.view.ops[op_id]
            read, made = map(self.natural.get, op.operands), map(self.plan.exponents.get, op.results)
            if op.bodies or not (any(read) or any(made) or any(map(self._found, op.operands))):
                continue
            asked = self._asked(op, [port for law in laws for _, port in law])
            ports = solve_ports(laws, asked)
            for port in asked.wanted:
                value = op.outputs[port.slot]
                if value is not None and ports[port]:
                    self.natural[value] = ports[port]
            yield from self._replaced(op, ports)

    # -- exponents ---------------------------------------------------------------------------------------

    def _asked(self, op: Op, ports: list[OpPort]) -> PortProblem:
        given, wanted, knobs, fits = dict[OpPort, int](), dict[OpPort, int](), list[OpPort](), dict[OpPort, Fit]()
        for port in dict.fromkeys(ports):
            value = value_at(op, port)
            if value is None or self.view.constant(value) is not None:
                knobs.append(port)
            elif port.side == "x":
                given[port], fits[port] = self._found(value), self.fits.get(value, Fit())
            else:
                wanted[port] = self.plan.exponents.get(value, 0)
        more, want = max(wanted.values(), default=0), self.want
        poor = {port for port, e in given.items() if not value_keeps(fits[port], e + more, want.to, flush=want.flush)}
        order = sorted(given, key=lambda port: (fits[port].count or 1 << 62, port.slot))
        return PortProblem(given, wanted, knobs, order, lambda port, e: self._allowed(op, port, e), poor)

    def _found(self, value: ValueId) -> int:
        """Return the exponent of a computed value at an op: the planned one if the value is fed beyond the type."""
        natural, fit = self.natural.get(value, 0), self.fits.get(value, Fit())
        beyond = math.ldexp(fit.absmax, -natural) * self.want.headroom > self.want.to.max
        return self.plan.exponents.get(value, natural) if beyond else natural

    def _allowed(self, op: Op, port: OpPort, exponent: int) -> bool:
        """True if a constant or an attribute may be stored times 2⁻ᵉ."""
        if not exponent:
            return True
        if port.is_attribute:
            return self._scaled_attribute(op, port.side, exponent) is not None
        value = value_at(op, port)
        tensor = self.view.constant(value)
        if value is None or tensor is None or self.view.dtype(value) is not DType.FLOAT:
            return False
        fit, model = self.view.fit(value, self.want.to), self.view.model
        stored_twice = fit.count > SMALL and len(self.view.uses[value]) > 1
        if stored_twice or not is_exact(fit, model.chunks(tensor), exponent):
            return False
        keeps = port.slot in _SUMMANDS.get(op.kind, ())
        return keeps or constant_keeps(model.chunks(tensor), fit, exponent, self.want.to, flush=self.want.flush)

    def _scaled_attribute(self, op: Op, name: str, exponent: int) -> float | None:
        """Return the number in an attribute times 2⁻ᵉ; None if it is not known, or no normal float32 number then."""
        if op.kind == "Attention" and exponent % 2:
            return None  # runtimes multiply queries and keys by its root
        number = attribute_value(op, name, self.context.shape(self.view, op.inputs[0]))
        if number is None:
            return None
        before = np.float32(number)
        with np.errstate(over="ignore", under="ignore"):
            after = np.ldexp(before, -exponent)
        if name in FACTORS and op.kind in HEAVY and 1.0 in (before, after):
            return None  # kernels for rows add up in another order where there is nothing to multiply by
        normal = not before or float(np.finfo(np.float32).tiny) <= abs(float(after)) <= DType.FLOAT.max
        return float(after) if normal else None

    # -- nodes -------------------------------------------------------------------------------------------

    def _replaced(self, op: Op, ports: Mapping[OpPort, int]) -> Iterator[Replacement]:
        node, new = clone(op.node), NewNodes(self.view, op)
        for port, exponent in ports.items():
            value = value_at(op, port)
            if port.is_attribute:
                if exponent:
                    set_attribute(node, port.side, self._scaled_attribute(op, port.side, exponent))
            elif value is None:
                continue
            elif port.side == "y":
                if self.natural.get(value):
                    node.output[port.slot] = self._name(value)
                    if self._is_kept(value):
                        new.behind.append(self._mul(op, Origin(value, 0), self.view.value_name(value), new))
            elif self.view.constant(value) is not None:
                if exponent:
                    tensor = self._constant(value, exponent)
                    new.weights.append(tensor)
                    node.input[port.slot] = tensor.name
            elif exponent == self.natural.get(value, 0):
                node.input[port.slot] = self._name(value)
            elif not exponent and self._is_kept(value):
                node.input[port.slot] = self.view.value_name(value)
            else:  # the value does not exist at this exponent
                name = self._new_name(value, exponent, op.scope)
                if name not in node.input:
                    new.ahead.append(self._mul(op, Origin(value, exponent), name, new))
                node.input[port.slot] = name
        for slot, value in enumerate(op.inputs):  # ports of any exponent
            if value is not None and OpPort("x", slot) not in ports and self.natural.get(value):
                node.input[slot] = self._name(value)
        if node != op.node:
            self.results[op.id] = tuple(node.output)
            yield Replacement(KIND, (op.id,), op.id, node, findings=(), **new.parts())

    def _name(self, value: ValueId) -> str:
        natural, scope = self.natural.get(value, 0), self.view.values[value].scope
        return self._new_name(value, natural, scope) if natural else self.view.value_name(value)

    def _new_name(self, value: ValueId, exponent: int, scope: ScopeId) -> str:
        key = value, exponent, scope
        if key not in self.names:
            how = f"shifted_{exponent}" if exponent else "restored"
            own = self.view.values[value].scope == scope
            name = f"{self.view.value_name(value)}_{how}" + ("" if own or scope == MAIN else f"_{scope}")
            self.names[key] = claimed(name, self.taken)
            self.origins[self.names[key]] = Origin(value, exponent)
        return self.names[key]

    def _constant(self, value: ValueId, exponent: int) -> TensorProto:
        key = value, exponent
        if key not in self.constants:
            name = claimed(f"{self.view.value_name(value)}_shifted_{exponent}".replace("-", "m"), self.taken)
            tensor = self.view.constant(value)
            assert tensor is not None
            self.constants[key] = scaled(tensor, exponent, name=name, model=self.view.model)
        return self.constants[key]

    def _mul(self, op: Op, made: Origin, result: str, new: NewNodes) -> NodeProto:
        """Return the Mul to another exponent of a value."""
        self.muls.setdefault(op.id, []).append(made)
        by = self.natural.get(made.value, 0) - made.exponent
        factor = new.constant(f"shift_by_{by}".replace("-", "m"), np.array(math.ldexp(1.0, by), np.float32))
        return new_node("Mul", [self._name(made.value), factor], result, f"{result}_Mul")

    def _is_kept(self, value: ValueId) -> bool:
        """True if the name of a value must stay, so that a Mul restores a shifted one."""
        return exposed(self.view, value) or any(self.view.ops[use.op].bodies for use in self.view.uses[value])
