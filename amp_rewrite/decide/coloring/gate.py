"""The gate: which type variables of an op may be lowered, or raised, alone or only together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import onnx.defs

from amp_rewrite.decide import reasons
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.schema import KEPT_VARIABLES, Signature, attribute, signature, unknown
from amp_rewrite.ir.versions import FIRST_BFLOAT16_CAST, FIRST_STASHED
from amp_rewrite.ir.view import Op, Variable, View
from amp_rewrite.runtime.kernels import Kernels, load_kernels
from amp_rewrite.settings.choices import Target

# Their schema lets input and scale differ, and onnx's own inference then objects to the result.
_TIED = ("RMSNormalization",)

_READS_BITS = "BitCast reads bits, not numbers"
_NEVER = {
    "BitCast": _READS_BITS,
    "Constant": "a constant is baked for the readers that want it low",
    "MeanVarianceNormalization": "its function body holds float32 constants",
}


def computes_float32_inside(op: Op) -> bool:
    """Whether an op runs as a body that casts what it reads to float32, whatever type comes: one more Cast is lost."""
    if op.domain or op.signature is None or op.signature.since < FIRST_STASHED.get(op.op_type, op.signature.since + 1):
        return False
    stashed = attribute(op.node, "stash_type")
    return stashed is None or DType.of(stashed.i) is DType.FLOAT


def _versions(op: Op, opsets: Iterable[int]) -> Iterator[tuple[int, Signature]]:
    """The schemas of an ai.onnx op at other opsets."""
    for opset in opsets if op.domain == "" else ():
        schema = signature(op.domain, op.op_type, opset)
        if schema is not None:
            yield opset, schema


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a variable stays float32: the rule ("schema_gate", "kernel_gate" …) and one line for people."""

    rule: str
    note: str


@dataclass(frozen=True, slots=True)
class Passage:
    """What the gate says of one op: groups of variables that are lowered together, and refusals by variable."""

    groups: tuple[tuple[str, ...], ...]
    refusals: Mapping[str, Refusal]


@dataclass(frozen=True, slots=True)
class Lift:
    """What the gate says of raising one op: the variables that become float32 together, or why none does."""

    variables: tuple[str, ...]
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Gate:
    """The gate of one target and one low type. Ask it op by op; O(1) for each."""

    target: Target
    to: DType
    kernels: Kernels | None
    _seen: dict[tuple[object, ...], Passage] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, target: Target, to: DType) -> Gate:
        return cls(target, to, load_kernels("cuda") if target is Target.ORT_CUDA else None)

    def passage(self, view: View, op: Op) -> Passage:
        """Which float32 variables of the op may be lowered."""
        variables = view.variables[op.id]
        stashed = computes_float32_inside(op)
        key = (op.domain, op.op_type, stashed, *[(v.name, v.type, len(v.inputs) > 0) for v in variables])
        if key not in self._seen:
            self._seen[key] = self._passage(view, op, variables)
        return self._seen[key]

    def _passage(self, view: View, op: Op, variables: tuple[Variable, ...]) -> Passage:
        assert op.signature is not None
        floats = [v for v in variables if v.type is not None and v.type.dtype is DType.FLOAT]
        if any(unknown(v.type) for v in variables):
            refusal = Refusal(reasons.UNKNOWN_TYPE, "the element type of an input is unknown")
            return Passage((), {v.name: refusal for v in floats})
        if self.to is DType.BFLOAT16 and view.opsets.get("", FIRST_BFLOAT16_CAST) < FIRST_BFLOAT16_CAST:
            refusal = Refusal(
                reasons.SCHEMA_GATE, f"no Cast to bfloat16 before opset {FIRST_BFLOAT16_CAST}: raise the opset"
            )
            return Passage((), {v.name: refusal for v in floats})
        refusals: dict[str, Refusal] = {}
        for variable in floats:
            found = self._schema_refusal(op, variable)
            if found is not None:
                refusals[variable.name] = found
        candidates = [v.name for v in floats if v.name not in refusals]
        if self.target is Target.TENSORRT or (self.kernels is None and op.kind in _TIED):
            return Passage((tuple(candidates),) if candidates else (), refusals)
        if self.kernels is None or not candidates:
            return Passage(tuple((c,) for c in candidates), refusals)
        groups = self._kernel_groups(view, op, candidates)
        passed = {name for group in groups for name in group}
        for name in candidates:
            if name not in passed:
                refusals[name] = Refusal(reasons.KERNEL_GATE, self._kernel_note(view, op, tuple(candidates), self.to))
        return Passage(groups, refusals)

    def _schema_refusal(self, op: Op, variable: Variable) -> Refusal | None:
        assert op.signature is not None
        if variable.name in KEPT_VARIABLES.get((op.domain, op.op_type), ()):
            return Refusal(reasons.KEPT_VARIABLE, f"{variable.name} of {op.kind} is computed in float32 by its kernels")
        if op.kind in _NEVER:
            return Refusal(reasons.SCHEMA_GATE, _NEVER[op.kind])
        if op.domain == "ai.onnx.ml":
            return Refusal(reasons.SCHEMA_GATE, f"{op.op_type} holds its parameters in float32 attributes")
        if variable.type is not None and "optional" in variable.type.container:
            return Refusal(reasons.BOUNDARY, "optional values keep their type")
        if self.target is Target.TENSORRT and op.domain not in ("", "ai.onnx.ml"):
            return Refusal(reasons.SCHEMA_GATE, f"TensorRT has no {op.kind}")
        if not op.signature.admits(variable.name, self.to):
            return Refusal(reasons.SCHEMA_GATE, self._schema_note(op, variable.name))
        return None

    def _schema_note(self, op: Op, variable: str) -> str:
        assert op.signature is not None
        fact = f"{op.kind} version {op.signature.since} does not admit {self.to.spelling} for {variable}"
        later = _versions(op, range(op.signature.since + 1, onnx.defs.onnx_opset_version() + 1))
        first = next((opset for opset, schema in later if schema.admits(variable, self.to)), None)
        return fact if first is None else f"{fact}; opset {first} does: raise the model's opset"

    def _kernel_groups(self, view: View, op: Op, candidates: list[str]) -> tuple[tuple[str, ...], ...]:
        """Singles where a kernel runs every mixture of them, else all together, else the first that runs alone."""
        unions = (u for size in range(1, len(candidates) + 1) for u in combinations(candidates, size))
        if op.kind not in _TIED and all(self.runs(view, op, union) for union in unions):
            return tuple((name,) for name in candidates)
        if self.runs(view, op, tuple(candidates)):
            return (tuple(candidates),)
        return tuple((name,) for name in candidates if self.runs(view, op, (name,)))[:1]

    def runs(self, view: View, op: Op, lowered: tuple[str, ...]) -> bool:
        """Whether the target runs the op with exactly these float32 variables lowered."""
        return self._runs_with(view, op, lowered, self.to)

    def _runs_with(self, view: View, op: Op, changed: tuple[str, ...], dtype: DType) -> bool:
        if self.kernels is None or op.signature is None or computes_float32_inside(op):
            return True
        types = self._types(view, op, changed, dtype)
        return self.kernels.runs(op.domain, op.op_type, op.signature.since, types)

    # -- the way back --------------------------------------------------------------------------------

    def lift(self, view: View, op: Op) -> Lift:
        """Which low variables of an op become float32 if it is raised: as many as schema and kernels admit together.

        An op that the target has no kernel for as it is loses nothing, so kernels do not hold it back.
        """
        assert op.signature is not None
        signature = op.signature
        variables = view.variables[op.id]
        low = [v for v in variables if v.type is not None and v.type.dtype is not None and v.type.dtype.low]
        if any(unknown(v.type) for v in variables):
            return Lift((), Refusal(reasons.UNKNOWN_TYPE, "the element type of an input is unknown"))
        if op.kind == "BitCast":
            return Lift((), Refusal(reasons.SCHEMA_GATE, _READS_BITS))
        bfloat16 = any(v.type is not None and v.type.dtype is DType.BFLOAT16 for v in low)
        if bfloat16 and view.opsets.get("", FIRST_BFLOAT16_CAST) < FIRST_BFLOAT16_CAST:
            note = f"no Cast from bfloat16 before opset {FIRST_BFLOAT16_CAST}: raise the opset"
            return Lift((), Refusal(reasons.SCHEMA_GATE, note))
        if any(v.type is not None and "optional" in v.type.container for v in low):
            return Lift((), Refusal(reasons.BOUNDARY, "optional values keep their type"))
        names = tuple(v.name for v in low if signature.admits(v.name, DType.FLOAT))
        if not names or (self.target is Target.TENSORRT and len(names) < len(low)):
            held = next(v.name for v in low if v.name not in names)
            note = f"{op.kind} version {signature.since} does not admit float32 for {held}"
            return Lift((), Refusal(reasons.SCHEMA_GATE, note))
        unions = (u for size in range(len(names), 0, -1) for u in combinations(names, size))
        run = next((u for u in unions if self._runs_with(view, op, u, DType.FLOAT)), None)
        if run is None and self._runs_with(view, op, (), DType.FLOAT):
            return Lift((), Refusal(reasons.KERNEL_GATE, self._kernel_note(view, op, names, DType.FLOAT)))
        return Lift(run or names)

    def _kernel_note(self, view: View, op: Op, changed: tuple[str, ...], dtype: DType) -> str:
        assert self.kernels is not None and op.signature is not None
        types = self._types(view, op, changed, dtype)
        said = self.kernels.refusal(op.domain, op.op_type, op.signature.since, types)
        opset = view.opsets.get(op.domain, 1)
        others = _versions(op, (*range(opset - 1, 0, -1), *range(opset + 1, onnx.defs.onnx_opset_version() + 1)))
        for other, schema in others:
            if self.kernels.runs(op.domain, op.op_type, schema.since, types) and schema.admits(changed[0], dtype):
                return f"{self.kernels.runtime}: {said}; at opset {other} there is one"
        return f"{self.kernels.runtime}: {said}"

    def _types(self, view: View, op: Op, changed: tuple[str, ...], to: DType) -> dict[str, str]:
        """The type string of each of the schema's variables if some get another type, as kernels name them."""
        assert op.signature is not None
        types: dict[str, str] = {}
        sides = (
            (op.inputs, op.signature.input, op.signature.input_variable),
            (op.outputs, op.signature.output, op.signature.output_variable),
        )
        for actual, formal_at, variable_at in sides:
            for slot, value in enumerate(actual):
                formal = formal_at(slot)
                found = view.types[value] if value is not None else None
                if formal is None or found is None or formal.type not in op.signature.types:
                    continue
                changes = variable_at(slot) in changed and found.dtype is not None and found.dtype.floating
                dtype = to if changes else found.dtype
                types.setdefault(formal.type, found.of(dtype).onnx_spelling)
        return types
