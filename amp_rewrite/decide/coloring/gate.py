"""Gate: type variables of an op to lower or raise on a target, individually or only together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import onnx.defs

from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import Paint, float32
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.op_classes import DEQUANTIZES, QUANTIZERS
from amp_rewrite.ir.ops import row_of
from amp_rewrite.ir.schema import TENSOR, signature, unknown
from amp_rewrite.ir.versions import FIRST_BFLOAT16_CAST, FIRST_LOW_SCALES, FIRST_STASHED
from amp_rewrite.ir.view import Op, TypeVariable, View
from amp_rewrite.runtime.kernels import Kernels
from amp_rewrite.settings.choices import Target

# Their schemas let input, scale and result differ in type, but onnx's own inference rejects a normalization with
# different types, and GPUs have no kernel for such a quantizer.
_TIED = ("RMSNormalization", "QuantizeLinear", "DequantizeLinear")

_NEVER = {
    "BitCast": "BitCast reads bits, not numbers",
    "Constant": "a constant is stored in the low type for the readers that need it low",
    "MeanVarianceNormalization": "its function body contains float32 constants",
}


def computes_float32_inside(op: Op) -> bool:
    """True if the function body of an op casts its inputs to float32; no kernel restricts such an op."""
    if op.domain or op.signature is None or op.signature.since < FIRST_STASHED.get(op.op_type, op.signature.since + 1):
        return False
    stashed = attribute(op.node, "stash_type")
    return stashed is None or DType.of(stashed.i) is DType.FLOAT


class Lowerable(NamedTuple):
    """Groups of variables of one op to lower together, and refusals of the other float32 variables."""

    groups: tuple[tuple[str, ...], ...]
    refusals: Mapping[str, Paint]


@dataclass(frozen=True)
class Gate:
    """The gate of one target and one low type. Each answer is O(1)."""

    target: Target
    to: DType
    _answers: dict[tuple[object, ...], Lowerable] = field(default_factory=dict, repr=False)

    @cached_property
    def kernels(self) -> Kernels | None:
        return self.target.kernels

    # -- lowering ------------------------------------------------------------------------------------

    def lowerable_groups(self, view: View, op: Op) -> Lowerable:
        variables = view.variables[op.id]
        stashed = computes_float32_inside(op)
        key = (op.domain, op.op_type, stashed, *[(v.name, v.type, len(v.inputs) > 0) for v in variables])
        if key not in self._answers:
            self._answers[key] = self._lowerable(view, op, variables)
        return self._answers[key]

    def _lowerable(self, view: View, op: Op, variables: tuple[TypeVariable, ...]) -> Lowerable:
        floats = [v for v in variables if v.type is not None and v.type.dtype is DType.FLOAT]
        refusal = self._type_refusal(view, op, "to", self.to)
        if refusal is not None:
            return Lowerable((), {v.name: refusal for v in floats})
        refusals = {v.name: why for v in floats if (why := self._schema_refusal(op, v)) is not None}
        candidates = tuple(v.name for v in floats if v.name not in refusals)
        if not candidates or self.target.limits is not None:
            return Lowerable((candidates,) if candidates else (), refusals)
        unions = (u for size in range(1, len(candidates) + 1) for u in combinations(candidates, size))
        if op.kind not in _TIED and all(self.runs(view, op, union) for union in unions):
            groups: tuple[tuple[str, ...], ...] = tuple((name,) for name in candidates)
        elif self.runs(view, op, candidates):
            groups = (candidates,)
        else:
            groups = tuple((name,) for name in candidates if self.runs(view, op, (name,)))[:1]
        for name in candidates:
            if not any(name in group for group in groups):
                refusals[name] = float32(reasons.KERNEL_GATE, None, self._kernel_note(view, op, candidates, self.to))
        return Lowerable(groups, refusals)

    def _type_refusal(self, view: View, op: Op, way: str, dtype: DType | None) -> Paint | None:
        """Refuse an unknown type, an optional, and bfloat16 at an opset without Casts to it; None for other cases."""
        if any(unknown(v.type) for v in view.variables[op.id]):
            return float32(reasons.UNKNOWN_TYPE, None, "the element type of an input is unknown")
        if any((t := view.types[v]) is not None and "optional" in t.container for v in op.ports):
            return float32(reasons.BOUNDARY, None, "optional values keep their type")
        if dtype is DType.BFLOAT16 and view.opsets.get("", FIRST_BFLOAT16_CAST) < FIRST_BFLOAT16_CAST:
            note = f"no Cast {way} bfloat16 before opset {FIRST_BFLOAT16_CAST}"
            return float32(reasons.SCHEMA_GATE, None, note)
        return None

    def _schema_refusal(self, op: Op, variable: TypeVariable) -> Paint | None:
        assert op.signature is not None
        if variable.name == row_of(op.kind).kept:
            note = f"the kernels of {op.kind} compute {variable.name} in float32"
            return float32(reasons.KEPT_VARIABLE, None, note)
        if op.kind in _NEVER:
            return float32(reasons.SCHEMA_GATE, None, _NEVER[op.kind])
        if op.domain == "ai.onnx.ml":
            return float32(reasons.SCHEMA_GATE, None, f"{op.op_type} stores its parameters in float32 attributes")
        limits = self.target.limits
        if limits is not None and op.domain:
            return float32(reasons.SCHEMA_GATE, None, f"{limits.runtime} has no {op.kind}")
        if limits is not None and (why := limits.refusal(op.op_type, self.to)) is not None:
            return float32(reasons.KERNEL_GATE, None, f"{why} ({limits.source})")
        if op.signature.admits(variable.name, self.to):
            return None
        note = f"{op.kind} version {op.signature.since} does not allow {self.to.spelling} for {variable.name}"
        if self.kernels is not None or op.domain:  # with kernels, a finding names the opset that helps the whole model
            return float32(reasons.SCHEMA_GATE, None, note)
        opsets = range(op.signature.since + 1, onnx.defs.onnx_opset_version() + 1)
        newer = (known for opset in opsets if (known := signature("", op.op_type, opset)) is not None)
        first = next((known.since for known in newer if known.admits(variable.name, self.to)), None)
        return float32(reasons.SCHEMA_GATE, None, f"{note}; opset {first} does" if first else note)

    def runs(self, view: View, op: Op, changed: tuple[str, ...], dtype: DType | None = None) -> bool:
        """True if the target runs the op with exactly these variables in the low type, or in `dtype`."""
        if self.kernels is None or op.signature is None or computes_float32_inside(op):
            return True
        types = kernel_types(view, op, changed, dtype or self.to)
        runs = self.kernels.runs(op.domain, op.op_type, op.signature.since, types)
        return runs or not self.kernels.covers(op.domain)

    def rescale_refusal(self, view: View) -> str | None:
        """Return why a quantizer keeps float32 scales; None if all can have scales of the low type.

        Dequantizers of an int32 constant, a bias, do not count. Their scale is a product of two scales, often below the
        normal range of float16, and onnxruntime would quantize a float bias again by that product in float16. O(nodes).
        """
        for op in view.of_kinds(QUANTIZERS):
            value, refusals = op.inputs[0], self.lowerable_groups(view, op).refusals
            stored = op.kind in DEQUANTIZES and view.constant(value) is not None
            if refusals and not (stored and view.dtype(value) is DType.INT32):
                why = next(iter(refusals.values())).note
                if view.opset < FIRST_LOW_SCALES:
                    why = f"quantizers accept low scales only from opset {FIRST_LOW_SCALES} on"
                return f"ops between quantizers stay as they are, because {op.name!r} keeps its float32 scale: {why}"
        return None

    # -- raising -------------------------------------------------------------------------------------

    def raisable(self, view: View, op: Op) -> tuple[str, ...] | Paint:
        """Return the low variables to raise in an op: as many as may change together.

        An op that has no kernel in its present types has none to lose, so kernels do not restrict it.
        """
        assert op.signature is not None
        variables = view.variables[op.id]
        low = [v for v in variables if v.type is not None and v.type.dtype in LOW_TYPES]
        bfloat16 = any(v.type is not None and v.type.dtype is DType.BFLOAT16 for v in low)
        refusal = self._type_refusal(view, op, "from", DType.BFLOAT16 if bfloat16 else None)
        if refusal is not None:
            return refusal
        if any((t := view.types[v]) is not None and t.container != TENSOR for v in op.ports):
            return float32(reasons.BOUNDARY, None, "a sequence has one element type for all ops that share it")
        if op.kind == "BitCast":
            return float32(reasons.SCHEMA_GATE, None, _NEVER[op.kind])
        names = tuple(v.name for v in low if op.signature.admits(v.name, DType.FLOAT))
        if not names or (self.target.limits is not None and len(names) < len(low)):
            refused = next(v.name for v in low if v.name not in names)
            note = f"{op.kind} version {op.signature.since} does not allow float32 for {refused}"
            return float32(reasons.SCHEMA_GATE, None, note)
        unions = (u for size in range(len(names), 0, -1) for u in combinations(names, size))
        union = next((u for u in unions if self.runs(view, op, u, DType.FLOAT)), None)
        if union is None and self.runs(view, op, (), DType.FLOAT):
            return float32(reasons.KERNEL_GATE, None, self._kernel_note(view, op, names, DType.FLOAT))
        return union or names

    # -- kernels -------------------------------------------------------------------------------------

    def _kernel_note(self, view: View, op: Op, changed: tuple[str, ...], dtype: DType) -> str:
        assert self.kernels is not None and op.signature is not None
        types = kernel_types(view, op, changed, dtype)
        refusal = self.kernels.refusal(op.domain, op.op_type, op.signature.since, types)
        return f"{self.kernels.runtime}: {refusal}"


def kernel_types(view: View, op: Op, changed: tuple[str, ...] = (), to: DType = DType.FLOAT) -> dict[str, str]:
    """Return the type of each schema variable in the spelling of kernel tables, with `to` for `changed` ones."""
    assert op.signature is not None
    types: dict[str, str] = {}
    for values, formal_at in ((op.inputs, op.signature.input), (op.outputs, op.signature.output)):
        for slot, value in enumerate(values):
            formal = formal_at(slot)
            now = view.types[value] if value is not None else None
            if formal is None or now is None or formal.fixed is not None:
                continue
            changes = formal.variable in changed and now.dtype is not None and now.dtype.floating
            types.setdefault(formal.type, now.of(to if changes else now.dtype).onnx_spelling)
    return types
