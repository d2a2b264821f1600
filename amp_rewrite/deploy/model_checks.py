"""Checks of a converted model: ops in the low type, ops left to the CPU, dimensions; and of a half model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import Strength
from amp_rewrite.decide.sizes import better_size, misaligned
from amp_rewrite.deploy.checkup import ADVICE, FINDING, OK, UNKNOWN, Check, on_cpu
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import computes
from amp_rewrite.ir.op_classes import HEAVY, QUANTIZERS
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.reports.diff import live
from amp_rewrite.reports.render import count, shortened
from amp_rewrite.reports.report_builder import inventory_view, report_of
from amp_rewrite.reports.rows import FLOATING, Totals
from amp_rewrite.runtime.installation import packages
from amp_rewrite.runtime.kernels import Kernels, known_release, load_kernels
from amp_rewrite.runtime.providers import cuda_options
from amp_rewrite.settings.choices import Target
from amp_rewrite.settings.request import Request


def model_checks(source: Model, to: DType | None) -> Iterator[Check]:
    """Check a model as converted to a type; a half model as it is, and the changes by a conversion.

    `to`: None for the model's own low type, or float16.
    """
    own = half_type(source)
    low = to or own or DType.FLOAT16
    yield type_of(source)
    converted = convert(source, to=low, target=Target.ORT_CUDA)
    checked = source if own is low else converted.result
    view = View.of(checked)
    yield _lowered(converted.report.totals, low)
    if own is low:
        yield from kept_by_conversion(source, low)
    for finding in converted.report.findings:
        if finding.kind == "runtime_hazard":
            fact, _, remedy = finding.message.partition(" · ")
            yield Check("runtime", FINDING, f"{fact} ({finding.subject})", remedy)
    yield from _fallen(view, installed_kernels())
    if kinds := Counter(op.kind for op in view.ops if op.signature is None):
        described = f"{count(kinds.total(), 'op')} that no schema here describes ({shortened(list(kinds))})"
        remedy = "a runtime without that op does not open the model"
        yield Check("placement", UNKNOWN, f"{described}: where it runs is not known", remedy)
    yield from _unaligned(view, low)
    yield from _opening(checked)
    yield VALUES


def _opening(model: Model) -> Iterator[Check]:
    options = cuda_options(model)
    if options.line:
        yield Check("session", ADVICE, "its convolutions run faster with channels last and a fused bias", options.line)
    elif options.cost:
        fact, _, remedy = options.cost.partition("; ")
        yield Check("session", ADVICE, fact, remedy)


def _lowered(totals: Totals, low: DType) -> Check:
    if not totals.compute_ops:
        return Check("model", ADVICE, "no op in it gains from a low type")
    fact = f"{totals.compute_lowered} of {count(totals.compute_ops, 'compute op')} in {low.spelling}"
    state = OK if totals.compute_lowered == totals.compute_ops else ADVICE
    return Check("model", state, fact, "" if state == OK else "`amp-rewrite convert` says why for each")


def _fallen(view: View, kernels: Kernels) -> Iterator[Check]:
    by_reason = on_cpu(view, kernels)
    for (why, opset), names in by_reason.items():
        fact = f"{why}: {count(len(names), 'op')} would run on the CPU ({shortened(names)})"
        way = f"at opset {opset} there is one" if opset else "it has none at any opset: spell it out in other ops"
        yield Check("placement", FINDING, fact, way)
    if not by_reason:
        yield Check("placement", OK, "by the kernel table, no float op runs on the CPU")


def _unaligned(view: View, low: DType) -> Iterator[Check]:
    groups = misaligned(view, low)
    for (kind, dimension, wide), ops in groups.items():
        yield Check(
            "alignment",
            ADVICE,
            f"{count(len(ops), kind)} with {dimension} = {wide}, not a multiple of 8 ({shortened(ops)})",
            f"tensor cores run best on multiples of 8: pad {dimension} to {better_size(wide)}",
        )
    if not groups:
        yield Check("alignment", OK, "all fixed dimensions of low-precision products are multiples of 8")


def installed_kernels() -> Kernels:
    """Return the kernel table of the installed onnxruntime; the newest if it has none."""
    for package in packages():
        with suppress(PolicyError):
            return load_kernels(known_release(package.version))
    return load_kernels()


# -- models that are half already ----------------------------------------------------------------------

VALUES = Check(
    "values",
    UNKNOWN,
    "not seen: types, shapes and constants were checked, and not what the model computes",
    "`amp-rewrite verify FLOAT32 MODEL --data FILE` compares outputs; without the float32 original of a half model,"
    " name MODEL twice",
)
_FEW = 1 << 24  # elements of a constant that is searched for infinity
_BY_CHOICE = {reasons.FOLDED, reasons.NO_GAIN, reasons.QUANTIZED, reasons.CLUSTER}
"""Rules that spare Casts, digits or time, and protect no number from leaving the type."""


def half_type(source: Model) -> DType | None:
    """Return the low type of most compute ops of a model, if any; without compute ops, of most ops."""
    view = View.of(source)
    for ops in (view.of_kinds(HEAVY), view.ops):
        found = Counter(dtype for op in ops for dtype in view.low_types if computes(view, op, (dtype,)))
        if found:
            return found.most_common(1)[0][0]
        if ops:
            return None
    return None


def type_of(source: Model) -> Check:
    """Return the real types of a model, of ops and of weights."""
    view = inventory_view(source)
    report = report_of(view)
    rows = [report.rows[at] for at in live(report)]
    floats = Counter(row.dtype for row in rows if row.dtype in FLOATING)
    quantized = any(op.kind in QUANTIZERS for op in view.ops) or report.totals.integer_ops > 0
    named = [dtype for dtype, _ in floats.most_common()]
    words = "no floats" if not named else named[0] if len(named) == 1 else f"mixed {' and '.join(named)}"
    counted = [f"{number} {dtype}" for dtype, number in floats.most_common()]
    if quantized:
        words = f"quantized, beside {words}"
        counted.append(count(report.totals.integer_ops, "integer op"))
    held = {dtype: size for dtype, size in report.weights.items() if size}
    stored = ", ".join(f"{100 * size / sum(held.values()):.3g} % {dtype}" for dtype, size in held.items())
    facts = [f"ops: {', '.join(counted)}"] if counted else []
    return Check("type", OK, "; ".join([words, *facts, *([f"weights: {stored}"] if stored else [])]))


def kept_by_conversion(source: Model, low: DType) -> Iterator[Check]:
    """Yield a check per reason to keep ops in float32 in a conversion of the float32 model, though low here."""
    view = View.of(source)
    lowered = {name: op for op in view.ops if computes(view, op, (low,)) for name in op.node.output}
    draft = Draft.of(source, Request.of(to=low, target=Target.ORT_CUDA), widen=True)
    found = defaultdict[str, dict[str, str]](dict)
    for (op_id, _), paint in draft.paint().paints.items():
        op = next((lowered[name] for name in draft.view.ops[op_id].node.output if name in lowered), None)
        if op is not None and paint.dtype is not low:
            found[paint.rule].setdefault(op.name, paint.note)
    yield from _harmed(found, low)
    if denied := found.get(reasons.DENY):
        fact = f"{count(len(denied), 'op')} of the deny list in {low.spelling} ({shortened(list(denied))})"
        yield Check("deny list", ADVICE, fact, "a conversion of the float32 model keeps such ops in float32")
    for finding in draft.expansions:
        if finding.kind in ("saturated", "selected", "bias"):
            fact = f"{finding.subject}: a conversion changes it: {finding.message}"
            yield Check("constants", FINDING if finding.kind == "saturated" else ADVICE, fact, _MEND)
    infinite = [view.value_name(v) for v in view.constants if view.dtype(v) is low and _infinite(view, v)]
    if infinite:
        fact = f"{count(len(infinite), 'constant')} of {low.spelling} with infinity ({shortened(infinite)})"
        remedy = "if the float32 model has a finite number there, it overflowed: convert that model"
        yield Check("constants", ADVICE, fact, remedy)


_MEND = "convert the float32 model; without one, `amp-rewrite MODEL --keep PATTERN --data FILE` repairs this one"


def _harmed(found: Mapping[str, Mapping[str, str]], low: DType) -> Iterator[Check]:
    broken = {rule: ops for rule, ops in found.items() if rule == reasons.RUNTIME_FAULT or _protects(rule)}
    for rule, ops in broken.items():
        note = next(filter(None, ops.values()), "")
        example = f"; {note}" if note else ""
        fact = f"{count(len(ops), 'op')} in {low.spelling} ({shortened(list(ops))}): {reasons.words(rule)}{example}"
        yield Check(f"rule {rule}", FINDING, fact, _MEND)
    if not broken:
        fact = f"no op in {low.spelling} that a safety rule keeps in float32, as far as constants and shapes tell"
        yield Check("rules", OK, fact)


def _protects(rule: str) -> bool:
    reason = reasons.reason_of(rule)
    return reason is not None and reason.strength is Strength.SAFETY and rule not in _BY_CHOICE


def _infinite(view: View, value: ValueId) -> bool:
    numbers = view.array(value, _FEW)
    return numbers is not None and bool(np.isinf(numbers.astype(np.float32)).any())
