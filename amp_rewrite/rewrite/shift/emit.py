"""Application of a shift plan: scaled constants and attributes, and Muls between different exponents."""

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
    constant_fits,
    is_exact,
    solve_ports,
    value_at,
    value_fits,
)

KIND = "shifted"
PRODUCT_FACTORS = ("alpha", "scale")
"""Multiplicative attributes of products."""
MAX_DUPLICATED = 1 << 12
"""Maximum number of elements of a constant to store more than once."""
_SUMMAND_SLOTS = {
    **dict.fromkeys(("Add", "Sub", "Sum", "Max", "Min", "Mean", "Concat", "Clip", "Where", "Pad"), range(1 << 16)),
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "LayerNormalization", "InstanceNormalization"), (2,)),
    **dict.fromkeys(("GroupNormalization", "BatchNormalization"), (2,)),
    **dict.fromkeys(COMPARISONS, (0, 1)),
}
"""Slots of constants in sums and comparisons; their precision matters less."""


class Origin(NamedTuple):
    """A value of the original view, and the exponent e: the new value is the original times 2⁻ᵉ."""

    value: ValueId
    exponent: int


@dataclass(frozen=True)
class Shift:
    """A shifted view and its relation to the original.

    `origins` maps the name of each new value to its origin, `results` maps replaced ops to the new names of their
    results, and `muls` maps ops to the results of the Muls added before or after them.
    """

    view: View
    plan: ShiftPlan
    origins: Mapping[str, Origin] = field(default_factory=dict)
    results: Mapping[OpId, tuple[str, ...]] = field(default_factory=dict)
    muls: Mapping[OpId, list[Origin]] = field(default_factory=dict)


def apply_shift(equations: Equations, plan: ShiftPlan, fits: Mapping[ValueId, Fit], request: ShiftRequest) -> Shift:
    """Return the view shifted by a plan. O(nodes + weights read).

    `fits`: how the measured values round to the low type.
    """
    emitter = _ShiftEmitter(equations, plan, fits, request)
    after, _ = run_round(equations.view, (lambda view, context: emitter.replacements(),), emitter.context)
    return Shift(after, plan, emitter.origins, emitter.results, emitter.muls)


def refusal(view: View) -> str | None:
    """Return why a model cannot be shifted; None if it can."""
    proto = view.model.proto
    if proto.training_info:
        return "the model contains training information"
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
    """Rewriter of ops in a single pass. `natural`: the exponents of the values as computed."""

    def __init__(
        self, equations: Equations, plan: ShiftPlan, fits: Mapping[ValueId, Fit], request: ShiftRequest
    ) -> None:
        self.equations, self.view, self.plan, self.fits, self.request = equations, equations.view, plan, fits, request
        self.natural: dict[ValueId, int] = {}
        self.taken = set(self.view.names)
        self.names: dict[tuple[ValueId, int, ScopeId], str] = {}
        self.constants: dict[tuple[ValueId, int], TensorProto] = {}
        self.context = Context(request.to)
        self.origins: dict[str, Origin] = {}
        self.results: dict[OpId, tuple[str, ...]] = {}
        self.muls: dict[OpId, list[Origin]] = {}

    def replacements(self) -> Iterator[Replacement]:
        for op_id, laws in self.equations.laws.items():
            op = self.view.ops[op_id]
            before, after = map(self.natural.get, op.operands), map(self.plan.exponents.get, op.results)
            if op.bodies or not (any(before) or any(after) or any(map(self._actual_exponent, op.operands))):
                continue
            problem = self._port_problem(op, [port for law in laws for _, port in law])
            ports = solve_ports(laws, problem)
            for port in problem.results:
                value = op.outputs[port.slot]
                if value is not None and ports[port]:
                    self.natural[value] = ports[port]
            yield from self._replacement(op, ports)

    # -- exponents ---------------------------------------------------------------------------------------

    def _port_problem(self, op: Op, ports: list[OpPort]) -> PortProblem:
        inputs, results, free, fits = dict[OpPort, int](), dict[OpPort, int](), list[OpPort](), dict[OpPort, Fit]()
        for port in dict.fromkeys(ports):
            value = value_at(op, port)
            if value is None or self.view.constant(value) is not None:
                free.append(port)
            elif port.side == "x":
                inputs[port], fits[port] = self._actual_exponent(value), self.fits.get(value, Fit())
            else:
                results[port] = self.plan.exponents.get(value, 0)
        margin, request = max(results.values(), default=0), self.request
        to, flush = request.to, request.flush
        lossy = {port for port, e in inputs.items() if not value_fits(fits[port], e + margin, to, flush=flush)}
        order = sorted(inputs, key=lambda port: (fits[port].count or 1 << 62, port.slot))
        return PortProblem(inputs, results, free, order, lambda port, e: self._allowed(op, port, e), lossy)

    def _actual_exponent(self, value: ValueId) -> int:
        """Return the exponent of a value for its readers: the planned one if the computed value exceeds the range."""
        natural, fit = self.natural.get(value, 0), self.fits.get(value, Fit())
        beyond = math.ldexp(fit.absmax, -natural) * self.request.headroom > self.request.to.max
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
        fit, model = self.view.fit(value, self.request.to), self.view.model
        stored_twice = fit.count > MAX_DUPLICATED and len(self.view.uses[value]) > 1
        if stored_twice or not is_exact(fit, model.chunks(tensor), exponent):
            return False
        summand = port.slot in _SUMMAND_SLOTS.get(op.kind, ())
        return summand or constant_fits(model.chunks(tensor), fit, exponent, self.request.to, flush=self.request.flush)

    def _scaled_attribute(self, op: Op, name: str, exponent: int) -> float | None:
        """Return an attribute times 2⁻ᵉ; None if it is unknown, or the product is not a normal float32 number."""
        if op.kind == "Attention" and exponent % 2:
            return None  # runtimes multiply queries and keys by the square root of the scale
        number = attribute_value(op, name, self.context.shape(self.view, op.inputs[0]))
        if number is None:
            return None
        before = np.float32(number)
        with np.errstate(over="ignore", under="ignore"):
            after = np.ldexp(before, -exponent)
        if name in PRODUCT_FACTORS and op.kind in HEAVY and 1.0 in (before, after):
            return None  # with a factor of 1, kernels sum in another order
        normal = not before or float(np.finfo(np.float32).tiny) <= abs(float(after)) <= DType.FLOAT.max
        return float(after) if normal else None

    # -- nodes -------------------------------------------------------------------------------------------

    def _replacement(self, op: Op, ports: Mapping[OpPort, int]) -> Iterator[Replacement]:
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
                    if self._keeps_name(value):
                        new.trailing.append(self._mul(op, Origin(value, 0), self.view.value_name(value), new))
            elif self.view.constant(value) is not None:
                if exponent:
                    tensor = self._constant(value, exponent)
                    new.weights.append(tensor)
                    node.input[port.slot] = tensor.name
            elif exponent == self.natural.get(value, 0):
                node.input[port.slot] = self._name(value)
            elif not exponent and self._keeps_name(value):
                node.input[port.slot] = self.view.value_name(value)
            else:  # the value is not computed at this exponent
                name = self._new_name(value, exponent, op.scope)
                if name not in node.input:
                    new.leading.append(self._mul(op, Origin(value, exponent), name, new))
                node.input[port.slot] = name
        for slot, value in enumerate(op.inputs):  # ports without a constraint
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
            suffix = f"shifted_{exponent}" if exponent else "restored"
            local = self.view.values[value].scope == scope
            name = f"{self.view.value_name(value)}_{suffix}" + ("" if local or scope == MAIN else f"_{scope}")
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

    def _mul(self, op: Op, target: Origin, result: str, new: NewNodes) -> NodeProto:
        self.muls.setdefault(op.id, []).append(target)
        exponent = self.natural.get(target.value, 0) - target.exponent
        factor = new.constant(f"shift_by_{exponent}".replace("-", "m"), np.array(math.ldexp(1.0, exponent), np.float32))
        return new_node("Mul", [self._name(target.value), factor], result, f"{result}_Mul")

    def _keeps_name(self, value: ValueId) -> bool:
        """True if a value must keep its name, so a Mul restores it from the shifted value."""
        return exposed(self.view, value) or any(self.view.ops[use.op].bodies for use in self.view.uses[value])
