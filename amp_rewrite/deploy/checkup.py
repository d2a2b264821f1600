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
from amp_rewrite.ir.schema import signature, unknown
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
