"""A check for fast half precision on this machine and in a model, with a remedy for each finding.

The sources are the driver, the loader, onnxruntime, the kernel tables, and the types and shapes of the model.
Everything else is reported as unknown.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import numpy as np
import onnx.defs

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.gate import kernel_types
from amp_rewrite.decide.reasons import Strength
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.dataflow import computes
from amp_rewrite.ir.op_classes import HEAVY, QUANTIZERS
from amp_rewrite.ir.schema import signature, unknown
from amp_rewrite.ir.versions import OLDEST_MOVED
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.pipeline.conversion import Draft
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.findings import unfit_here
from amp_rewrite.reports.diff import live
from amp_rewrite.reports.render import blocks, count, shortened, size
from amp_rewrite.reports.report_builder import inventory_view, report_of
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import FLOATING
from amp_rewrite.reports.work import better_size, misaligned
from amp_rewrite.runtime.faults import CUDA
from amp_rewrite.runtime.gpu import DRIVER, MIN_CAPABILITY, Gpu, Hardware
from amp_rewrite.runtime.installation import DEFAULT, Package, find_fault, install, packages, reinstall, uninstall
from amp_rewrite.runtime.kernels import Kernels, known_release, load_kernels
from amp_rewrite.runtime.probes import Answer, query_hardware, query_onnxruntime
from amp_rewrite.runtime.providers import CONTRIB_DOMAIN, CUDA_ONLY, cuda_options, own_operators
from amp_rewrite.settings.choices import LowType, Target, low_type
from amp_rewrite.settings.option import checked
from amp_rewrite.settings.request import Request

OK, FINDING, ADVICE, UNKNOWN = "ok", "finding", "advice", "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its topic, its state ("ok", "finding", "advice", "unknown"), the fact, and the remedy."""

    topic: str
    state: str
    fact: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Checkup(Result):
    """The results of all checks, in order. Advice and unknown facts are not findings.

    Attributes:
        checks: the checks.
    """

    checks: tuple[Check, ...]

    @property
    def well(self) -> bool:
        """True if there is no finding."""
        return all(check.state != FINDING for check in self.checks)

    @property
    def brief(self) -> str:
        """The number of findings, or, if there are none, of pieces of advice."""
        findings, advice = (sum(check.state == state for check in self.checks) for state in (FINDING, ADVICE))
        if findings:
            return count(findings, "finding")
        if any(check.topic == "values" for check in self.checks):
            no_gpu = any(check.topic == "GPU" and check.state == ADVICE for check in self.checks)
            return "no obstacle in the model; its values were not checked" + "; this machine has no GPU" * no_gpu
        return f"no obstacle; {count(advice, 'piece of advice', 'pieces of advice')}" if advice else "all well"

    def text(self) -> str:
        """Return a line for each check, followed by its remedy if there is one."""
        rows = blocks([("FINDING" if c.state == FINDING else c.state, c.topic, c.fact) for c in self.checks], indent=0)
        remedies = ([f"{'':{_INDENT}}{check.remedy}"] if check.remedy else [] for check in self.checks)
        lines = [line for row, remedy in zip(rows, remedies, strict=True) for line in (*row, *remedy)]
        return "\n".join([*lines, "", self.brief])

    def to_json(self) -> str:
        """Return `{"well": …, "checks": [{"topic", "state", "fact", "remedy"}, …]}`."""
        return json.dumps({"well": self.well, "checks": [asdict(check) for check in self.checks]}, indent=2)


_INDENT = 9


@checked
def doctor(model: ModelSource | None = None, *, to: LowType | None = None) -> Checkup:
    """Find obstacles to fast half precision on this machine, and in a model if one is given.

    If there is a model but no GPU, findings about this machine become advice. The driver and onnxruntime are queried in
    subprocesses, because they may crash.

    Args:
        model: anything that `convert` accepts.
        to: the low type; None: the low type of a half-precision model, else float16.

    Returns:
        All checks, with remedies.

    Raises:
        PolicyError: the type is unknown.
        AmpRewriteError: `convert` raises it for the model.

    Example:
        >>> import amp_rewrite
        >>> checks = amp_rewrite.doctor("model.onnx").checks
    """
    requested = low_type(to) if to is not None else None
    low = requested or DType.FLOAT16
    machine = query_hardware()
    checks = list(_machine(machine, low, query_onnxruntime()))
    if model is not None and not machine.gpus:  # the model is for another machine
        checks = [replace(check, state=ADVICE) if check.state == FINDING else check for check in checks]
    if model is not None:
        source = Model.load(model)
        for package in packages()[:1]:
            if (unfit := unfit_here(source, package.version, CUDA)) is not None:
                fact, _, remedy = unfit.partition("; ")
                checks.append(Check("release", FINDING, fact, remedy))
        checks += model_checks(source, requested)
    return Checkup(tuple(checks))


# -- the machine -------------------------------------------------------------------------------------


def _machine(machine: Hardware, low: DType, answer: Answer) -> Iterator[Check]:
    installed = packages()
    if not installed and "version" in answer:
        installed = (Package("onnxruntime", answer["version"]),)  # a custom build without a package
    major = str(answer.get("cuda") or "").partition(".")[0]
    built = int(major) if major.isdecimal() else None
    if not machine.gpus:
        yield Check("GPU", FINDING, str(machine.unavailable_reason), f"on a CPU, {low.spelling} is slower, not faster")
    for gpu in machine.gpus:
        memory = f", {size(gpu.memory)}" if gpu.memory else ""
        state = OK if gpu.capability >= MIN_CAPABILITY[low] else FINDING
        yield Check("GPU", state, f"{gpu}{memory}: {_fast(gpu)}")
    if machine.cuda is None:
        yield Check("driver", UNKNOWN, "CUDA version unknown")
    else:
        supported = f"supports CUDA up to {machine.cuda[0]}.{machine.cuda[1]}"
        if built is not None and machine.cuda[0] < built:
            fact = f"{supported}, but this onnxruntime is built for CUDA {built}"
            yield Check("driver", FINDING, fact, "update the driver")
        else:
            yield Check("driver", OK, supported)
    yield _runtime(installed, answer)
    unloaded = answer.get("unloaded")
    if unloaded and not unloaded.startswith(DRIVER):  # the check of the GPU reports a missing driver
        yield Check("libraries", FINDING, unloaded, install(f"{DEFAULT}[cuda,cudnn]=={answer['version']}"))
    if "failure" in answer:
        yield Check("provider", UNKNOWN, "onnxruntime did not answer")
    elif answer["opens"]:
        yield Check("provider", OK, "CUDAExecutionProvider loads")
    else:
        yield Check("provider", FINDING, "CUDAExecutionProvider does not load, so models run on the CPU")
    yield from _plugins(answer)
    table = installed_kernels().runtime
    fact = f"the kernel table is for {table}"
    if not installed or any(table.endswith(f" {package.version}") for package in installed):
        yield Check("kernels", OK, fact)
    else:
        fact += f", but {' and '.join(map(str, installed))} is installed, and its kernels may differ"
        yield Check("kernels", FINDING, fact, install(table.replace(" ", "==")))


def _fast(gpu: Gpu) -> str:
    slow = [f"{t.spelling} needs {a}.{b}" for t, (a, b) in MIN_CAPABILITY.items() if gpu.capability < (a, b)]
    fast = [t.spelling for t, first in MIN_CAPABILITY.items() if gpu.capability >= first]
    speed = f"fast in {' and '.join(fast)}" if fast else "not fast in any low type"
    return f"{speed} ({', '.join(slow)})" if slow else speed


def _runtime(installed: Sequence[Package], answer: Answer) -> Check:
    if (fault := find_fault(installed)) is not None:
        return Check("onnxruntime", FINDING, fault.fact, fault.remedy)
    if not installed:
        return Check("onnxruntime", FINDING, "not installed", f"{install(DEFAULT)}; converting does not need it")
    package = installed[0]
    if "failure" in answer:
        return Check("onnxruntime", FINDING, f"{package}: {answer['failure']}", reinstall(package))
    if answer["cuda"] is None:
        swap = f"{uninstall(package.name)}; {install(DEFAULT)}"
        return Check("onnxruntime", FINDING, f"{package} is built without CUDA", swap)
    return Check("onnxruntime", OK, f"{package}, built for CUDA {answer['cuda']}")


def _plugins(answer: Answer) -> Iterator[Check]:
    for plugin in answer.get("plugins", ()):
        named = f"{plugin['package']} {plugin['release']}"
        if plugin["failure"]:
            yield Check("plugin", UNKNOWN, f"{named}: {plugin['failure']}", "see the plugin's requirements")
        else:
            offered = f"{', '.join(plugin['providers'])} on {', '.join(plugin['devices'])}"
            yield Check("plugin", OK, f"{named} offers {offered}")


# -- a model -----------------------------------------------------------------------------------------


def model_checks(source: Model, to: DType | None) -> Iterator[Check]:
    """Check the result of converting a model to a type, or a half-precision model as it is.

    For the latter, also check what a conversion would change. `to`: None for the model's own low type, or float16.
    """
    current = half_type(source)
    low = to or current or DType.FLOAT16
    yield type_of(source)
    converted = convert(source, to=low, target=Target.ORT_CUDA)
    checked_model = source if current is low else converted.result
    view = View.of(checked_model)
    totals = converted.report.totals
    if totals.compute_ops:
        fact = f"{totals.compute_lowered} of {count(totals.compute_ops, 'compute op')} in {low.spelling}"
        whole = totals.compute_lowered == totals.compute_ops
        yield Check("model", OK if whole else ADVICE, fact, "" if whole else "`amp-rewrite convert` gives the reasons")
    else:
        yield Check("model", ADVICE, "no op would benefit from a low type")
    if current is low:
        yield from kept_by_conversion(source, low)
    for finding in converted.report.findings:
        if finding.kind == "runtime_hazard":
            fact, _, remedy = finding.message.partition(" · ")
            yield Check("runtime", FINDING, f"{fact} ({finding.subject})", remedy)
    yield from _ops_on_cpu(view, installed_kernels())
    if cuda_only := [name for name in own_operators(view) if name in CUDA_ONLY]:
        fact = f"only {CUDA} has kernels for {', '.join(cuda_only)} of {CONTRIB_DOMAIN}"
        remedy = "for a file that also runs elsewhere, convert the source with --fuse contrib"
        yield Check("operators", ADVICE, fact, remedy)
    if kinds := Counter(op.kind for op in view.ops if op.signature is None):
        described = f"{count(kinds.total(), 'op')} without a known schema ({shortened(list(kinds))})"
        remedy = "a runtime without these ops does not load the model"
        yield Check("placement", UNKNOWN, f"{described}, so their provider is unknown", remedy)
    yield from _alignment(view, low)
    options = cuda_options(checked_model)
    if options.line:
        yield Check("session", ADVICE, "its convolutions run faster with channels last and a fused bias", options.line)
    elif options.cost:
        fact, _, remedy = options.cost.partition("; ")
        yield Check("session", ADVICE, fact, remedy)
    yield VALUES


def _ops_on_cpu(view: View, kernels: Kernels) -> Iterator[Check]:
    by_reason = on_cpu(view, kernels)
    for (reason, opset), names in by_reason.items():
        fact = f"{reason}: {count(len(names), 'op')} would run on the CPU ({shortened(names)})"
        remedy = f"opset {opset} has one" if opset else "no opset has one; write it with other ops"
        yield Check("placement", FINDING, fact, remedy)
    if not by_reason:
        yield Check("placement", OK, "according to the kernel table, no float op runs on the CPU")


def on_cpu(view: View, kernels: Kernels) -> dict[tuple[str, int | None], list[str]]:
    """Return the names of float ops without a CUDA kernel, in order, by reason and nearest opset with a kernel.

    Functions, ops with bodies and unknown ops are skipped. O(nodes).
    """
    groups = defaultdict[tuple[str, int | None], list[str]](list)
    for op in view.ops:
        if op.signature is None or op.bodies or op.kind == "Constant" or op.signature.expandable:
            continue
        floats = any(v.type and v.type.dtype and v.type.dtype.floating for v in view.variables[op.id])
        if not floats or any(unknown(view.types[value]) for value in op.ports):
            continue
        types = kernel_types(view, op)
        reason = kernels.refusal(op.domain, op.op_type, op.signature.since, types)
        if reason is not None:
            groups[reason, _served_at(op, types, kernels, view.opset)].append(op.name)
    return groups


def _served_at(op: Op, types: Mapping[str, str], kernels: Kernels, opset: int) -> int | None:
    opsets = range(OLDEST_MOVED, onnx.defs.onnx_opset_version() + 1) if op.domain == "" else ()
    for other in sorted(opsets, key=lambda other: abs(other - opset)):
        schema = signature("", op.op_type, other)
        if schema is not None and kernels.runs("", op.op_type, schema.since, types):
            return other
    return None


def _alignment(view: View, low: DType) -> Iterator[Check]:
    groups = misaligned(view, low)
    for (kind, dimension, wide), ops in groups.items():
        yield Check(
            "alignment",
            ADVICE,
            f"{count(len(ops), kind)} with {dimension} = {wide}, not a multiple of 8 ({shortened(ops)})",
            f"tensor cores are fastest on multiples of 8: pad {dimension} to {better_size(wide)}",
        )
    if not groups:
        yield Check("alignment", OK, "all fixed dimensions of low-precision products are multiples of 8")


def installed_kernels() -> Kernels:
    """Return the kernel table of the installed onnxruntime, or the newest table if there is none for it."""
    for package in packages():
        with suppress(PolicyError):
            return load_kernels(known_release(package.version))
    return load_kernels()


# -- half-precision models -----------------------------------------------------------------------------

VALUES = Check(
    "values",
    UNKNOWN,
    "not checked: doctor reads types, shapes and constants, not the values that a model computes",
    "`amp-rewrite verify FLOAT32 MODEL --data FILE` compares outputs; without the float32 original of a half-precision"
    " model, pass MODEL twice",
)
_MAX_SEARCHED = 1 << 24  # elements; a larger constant is not searched for infinity
_BY_CHOICE = {reasons.FOLDED, reasons.NO_GAIN, reasons.QUANTIZED, reasons.CLUSTER}
"""Rules that save Casts, digits or time, but do not prevent an overflow."""


def half_type(source: Model) -> DType | None:
    """Return the most frequent low type of the compute ops, or of all ops if there are none; None if it has none."""
    view = View.of(source)
    for ops in (view.of_kinds(HEAVY), view.ops):
        found = Counter(dtype for op in ops for dtype in view.low_types if computes(view, op, (dtype,)))
        if found:
            return found.most_common(1)[0][0]
        if ops:
            return None
    return None


def type_of(source: Model) -> Check:
    view = inventory_view(source)
    report = report_of(view)
    rows = [report.rows[at] for at in live(report)]
    floats = Counter(row.dtype for row in rows if row.dtype in FLOATING)
    quantized = any(op.kind in QUANTIZERS for op in view.ops) or report.totals.integer_ops > 0
    named = [dtype for dtype, _ in floats.most_common()]
    kind = "no floats" if not named else named[0] if len(named) == 1 else f"mixed {' and '.join(named)}"
    counted = [f"{number} {dtype}" for dtype, number in floats.most_common()]
    if quantized:
        kind = f"quantized, {'the rest ' if named else ''}{kind}"
        counted.append(count(report.totals.integer_ops, "integer op"))
    sizes = {dtype: size for dtype, size in report.weights.items() if size}
    shares = ", ".join(f"{100 * size / sum(sizes.values()):.3g}% {dtype}" for dtype, size in sizes.items())
    facts = [f"ops: {', '.join(counted)}"] if counted else []
    return Check("type", OK, "; ".join([kind, *facts, *([f"weights: {shares}"] if shares else [])]))


def kept_by_conversion(source: Model, low: DType) -> Iterator[Check]:
    """Yield a check for each reason of a conversion of the float32 model to keep low ops of this model in float32."""
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
        fact = f"{count(len(denied), 'op')} on the deny list in {low.spelling} ({shortened(list(denied))})"
        yield Check("deny list", ADVICE, fact, "a conversion of the float32 model keeps these ops in float32")
    for finding in draft.changes:
        if finding.kind in ("saturated", "selected", "bias"):
            fact = f"a conversion changes {finding.subject}: {finding.message}"
            yield Check("constants", FINDING if finding.kind == "saturated" else ADVICE, fact, _REPAIR)
    infinite = [view.value_name(v) for v in view.constants if view.dtype(v) is low and _infinite(view, v)]
    if infinite:
        fact = f"{count(len(infinite), f'{low.spelling} constant')} with infinity ({shortened(infinite)})"
        remedy = "if a constant is finite in the float32 model, it overflowed; convert the float32 model"
        yield Check("constants", ADVICE, fact, remedy)


_REPAIR = "convert the float32 model; without one, `amp-rewrite MODEL --keep PATTERN --data FILE` repairs this one"


def _harmed(found: Mapping[str, Mapping[str, str]], low: DType) -> Iterator[Check]:
    broken = {rule: ops for rule, ops in found.items() if rule == reasons.RUNTIME_FAULT or _protects(rule)}
    for rule, ops in broken.items():
        note = next(filter(None, ops.values()), "")
        example = f"; {note}" if note else ""
        fact = f"{count(len(ops), 'op')} in {low.spelling} ({shortened(list(ops))}): {reasons.words(rule)}{example}"
        yield Check(f"rule {rule}", FINDING, fact, _REPAIR)
    if not broken:
        fact = f"no safety rule would keep a {low.spelling} op in float32, judging by constants and shapes"
        yield Check("rules", OK, fact)


def _protects(rule: str) -> bool:
    reason = reasons.REASONS.get(rule)
    return reason is not None and reason.strength is Strength.SAFETY and rule not in _BY_CHOICE


def _infinite(view: View, value: ValueId) -> bool:
    numbers = view.array(value, _MAX_SEARCHED)
    return numbers is not None and bool(np.isinf(numbers.astype(np.float32)).any())
