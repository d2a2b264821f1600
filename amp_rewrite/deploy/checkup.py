"""Checks of the doctor: data, text and JSON; and ops of a converted model off tensor cores or off the GPU.

Everything derives from shapes, types and tables, not from measurement.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import onnx.defs

from amp_rewrite.decide.coloring.gate import kernel_types
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.schema import signature, unknown
from amp_rewrite.ir.shapes import shape_of
from amp_rewrite.ir.versions import OLDEST_MOVED
from amp_rewrite.ir.view import Op, View
from amp_rewrite.reports.render import blocks, count
from amp_rewrite.reports.result import Result
from amp_rewrite.runtime.kernels import Kernels

OK, FINDING, ADVICE, UNKNOWN = "ok", "finding", "advice", "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its state ("ok", "finding", "advice", "unknown"), the fact, and the remedy."""

    topic: str
    state: str
    fact: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Checkup(Result):
    """All checks, in order. Advice and unknown facts are not findings.

    Attributes:
        checks: one per topic.
    """

    checks: tuple[Check, ...]

    @property
    def well(self) -> bool:
        """True without a finding."""
        return all(check.state != FINDING for check in self.checks)

    @property
    def brief(self) -> str:
        """Number of findings; without any, number of pieces of advice."""
        findings, advice = (sum(check.state == state for check in self.checks) for state in (FINDING, ADVICE))
        if findings:
            return count(findings, "finding")
        if any(check.topic == "values" for check in self.checks):
            lacks = any(check.topic == "GPU" and check.state == ADVICE for check in self.checks)
            return "no obstacle in the model; its values were not seen" + "; this machine has no GPU" * lacks
        return f"no obstacle; {count(advice, 'piece of advice', 'pieces of advice')}" if advice else "all well"

    def text(self) -> str:
        """Return a line per check, followed by its remedy if any."""
        rows = blocks([(_MARKS[c.state], c.topic, c.fact) for c in self.checks], indent=0)
        remedies = ([f"{'':{_INDENT}}{check.remedy}"] if check.remedy else [] for check in self.checks)
        lines = [line for row, remedy in zip(rows, remedies, strict=True) for line in (*row, *remedy)]
        return "\n".join([*lines, "", self.brief])

    def to_json(self) -> str:
        """Return `{"well": …, "checks": [{"topic", "state", "fact", "remedy"}, …]}`."""
        return json.dumps({"well": self.well, "checks": [asdict(check) for check in self.checks]}, indent=2)


_MARKS = {OK: "ok", FINDING: "FINDING", ADVICE: "advice", UNKNOWN: "unknown"}
_INDENT = 9


# -- ops ---------------------------------------------------------------------------------------------

# A row of this many 16-bit elements is 16 bytes, the unit of tensor core loads: NVIDIA, Matrix Multiplication
# Background User's Guide, "Tensor Core Requirements".
ALIGNED = 8

Dimensions = tuple[tuple[str, int | None], ...]


def aligned_dimensions(view: View, op: Op) -> Dimensions:
    """Return the dimensions of a matrix product or convolution to align for tensor cores."""
    weight = shape_of(view, op.inputs[1]) if op.kind in _NAMED and len(op.inputs) > 1 else None
    if weight is None or len(weight) < 2:
        return ()
    if op.kind in ("Conv", "ConvTranspose"):
        depthwise = weight[1] == 1  # off tensor cores
        return () if depthwise else tuple(zip(_NAMED[op.kind], weight[:2], strict=True))
    names = reversed(_NAMED[op.kind]) if int_attribute(op.node, "transB", 0) else _NAMED[op.kind]
    return tuple(zip(names, weight[-2:], strict=True))


_NAMED = {"MatMul": ("k", "n"), "Gemm": ("k", "n"), "Conv": ("out", "in"), "ConvTranspose": ("in", "out")}
"""Names of the dimensions of a weight: the last two of a matrix, the first two of a convolution."""


def misaligned(view: View, low: DType) -> dict[tuple[str, str, int], list[str]]:
    """Return the names of low products with a fixed dimension off multiples of 8, in order. O(nodes).

    Keys are the kind of op, the dimension and its size.
    """
    groups = defaultdict[tuple[str, str, int], list[str]](list)
    for op in view.ops:
        for dimension, size in aligned_dimensions(view, op) if _main(view, op) is low else ():
            if size is not None and size % ALIGNED:
                groups[op.kind, dimension, size].append(op.name)
    return groups


def better_size(size: int) -> int:
    """Return the next good size for tensor cores: a power of two below 256, else a multiple of 8."""
    power = 1 << max(size - 1, ALIGNED - 1).bit_length()
    return power if size < _LARGE else -(-size // ALIGNED) * ALIGNED


_LARGE = 256
"""From this size on, NVIDIA asks for multiples of 8 only (TensorFlow's mixed precision guide)."""


def on_cpu(view: View, kernels: Kernels) -> dict[tuple[str, int | None], list[str]]:
    """Return the names of float ops without a kernel in the CUDA provider, in order. O(nodes).

    Keys are the reason and the nearest ai.onnx opset with a kernel. Functions, ops with bodies, unknown ones are
    skipped.
    """
    groups = defaultdict[tuple[str, int | None], list[str]](list)
    for op in view.ops:
        if op.signature is None or op.bodies or op.kind == "Constant" or op.signature.expandable:
            continue
        floats = any(v.type and v.type.dtype and v.type.dtype.floating for v in view.variables[op.id])
        if not floats or any(unknown(view.types[value]) for value in op.ports):
            continue
        types = kernel_types(view, op)
        why = kernels.refusal(op.domain, op.op_type, op.signature.since, types)
        if why is not None:
            groups[why, _served_at(op, types, kernels, view.opset)].append(op.name)
    return groups


def _served_at(op: Op, types: Mapping[str, str], kernels: Kernels, opset: int) -> int | None:
    known = range(OLDEST_MOVED, onnx.defs.onnx_opset_version() + 1) if op.domain == "" else ()
    for other in sorted(known, key=lambda other: abs(other - opset)):
        schema = signature("", op.op_type, other)
        if schema is not None and kernels.runs("", op.op_type, schema.since, types):
            return other
    return None


def _main(view: View, op: Op) -> DType | None:
    types = (v.type.dtype for v in view.variables[op.id] if v.type is not None)
    return next((dtype for dtype in types if dtype is not None and dtype.floating), None)
