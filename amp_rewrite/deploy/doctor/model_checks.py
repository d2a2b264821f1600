"""Checks of a converted model: ops in the low type, ops left to the CPU, dimensions, and the speed-up to expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from amp_rewrite.decide.reasons import LONG_SUM
from amp_rewrite.deploy.doctor.advice import (
    ALIGNED,
    LARGEST,
    better_size,
    bound,
    free_dimensions,
    misaligned,
    on_cpu,
    with_dimensions,
)
from amp_rewrite.deploy.doctor.check import ADVICE, FINDING, OK, UNKNOWN, Check
from amp_rewrite.deploy.doctor.half_checks import VALUES, half_type, kept_by_conversion, type_of
from amp_rewrite.deploy.doctor.isolated import runtimes
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, spelled
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.render import count, shortened
from amp_rewrite.reports.rows import Totals
from amp_rewrite.runtime.gpu import Hardware
from amp_rewrite.runtime.installation import Package
from amp_rewrite.runtime.kernels import Kernels, load_kernels, load_webgpu_kernels
from amp_rewrite.runtime.releases import known_release
from amp_rewrite.runtime.roofline import COMMON, ROOFS, Roof, roof_of
from amp_rewrite.settings.choices import Target

_ENOUGH = 0.8  # share of a model's ops with known shapes that a bound requires


def model_checks(
    source: Model, to: DType | None, roofs: Callable[[DType], Sequence[Roof]], sizes: Mapping[str, int]
) -> Iterator[Check]:
    """Check a model as it is converted to a type; one that is half already as it is, with what a conversion would do.

    `to`: None for the model's own low type, or float16. `roofs`: the GPUs for an estimate in a type.
    """
    free = free_dimensions(source)
    for name, number in sizes.items():
        if name not in free:
            known = f"it has {', '.join(free)}" if free else "it has none"
            raise PolicyError(f"the model has no free dimension {name!r}; {known}")
        if not 0 < number <= LARGEST:
            raise PolicyError(f"dimension {name!r} cannot be {number}; give a number from 1 to {LARGEST}")
    own = half_type(source)
    low = to or own or DType.FLOAT16
    yield type_of(source)
    converted = convert(source, to=low)
    checked = source if own is low else converted.result
    view = View.of(checked)
    yield _lowered(converted.report.totals, low)
    if own is low:
        yield from kept_by_conversion(source, low)
    for finding in converted.report.findings:
        if finding.kind == "runtime_hazard":
            fact, _, remedy = finding.message.partition(" · ")
            yield Check("runtime", FINDING, f"{fact} ({finding.subject})", remedy)
    yield from _fallen(view, installed_kernels(runtimes()))
    if kinds := Counter(op.kind for op in view.ops if op.signature is None):
        described = f"{count(kinds.total(), 'op')} that no schema here describes ({shortened(list(kinds))})"
        remedy = "a runtime without that op does not open the model"
        yield Check("placement", UNKNOWN, f"{described}: where it runs is not known", remedy)
    yield from _unaligned(view, low)
    yield _estimate(checked, low, roofs(low), sizes, free)
    yield VALUES


def _lowered(totals: Totals, low: DType) -> Check:
    if not totals.compute_ops:
        return Check("model", ADVICE, "no op in it gains from a low type")
    fact = f"{totals.compute_lowered} of {count(totals.compute_ops, 'compute op')} in {low.spelling}"
    state = OK if totals.compute_lowered == totals.compute_ops else ADVICE
    return Check("model", state, fact, "" if state == OK else "`amp-rewrite convert` says why for each")


def _fallen(view: View, kernels: Kernels) -> Iterator[Check]:
    """Return one finding per reason."""
    by_reason = on_cpu(view, kernels)
    for (why, opset), names in by_reason.items():
        fact = f"{why}: {count(len(names), 'op')} would run on the CPU ({shortened(names)})"
        way = f"at opset {opset} there is one" if opset else "it has none at any opset: spell it out in other ops"
        yield Check("placement", FINDING, fact, way)
    if not by_reason:
        yield Check("placement", OK, "by the kernel table, no float op runs on the CPU")


def _unaligned(view: View, low: DType) -> Iterator[Check]:
    """Return one piece of advice per kind of op, dimension and size."""
    groups = misaligned(view, low)
    for (kind, dimension, wide), ops in groups.items():
        yield Check(
            "alignment",
            ADVICE,
            f"{count(len(ops), kind)} with {dimension} = {wide}, not a multiple of 8 ({shortened(ops)})",
            f"tensor cores run best on multiples of 8: pad {dimension} to {_padded(wide)}",
        )
    if not groups:
        yield Check("alignment", OK, "all fixed dimensions of low-precision products are multiples of 8")


def _padded(size: int) -> str:
    """Spell the next multiple of 8, and the size that is better still."""
    aligned, better = -(-size // ALIGNED) * ALIGNED, better_size(size)
    return f"{aligned}" if aligned == better else f"{aligned}, or to {better}: below 256 powers of two run best"


def roofs_of(gpu: str | None, machine: Hardware, low: DType) -> Sequence[Roof]:
    """Return the named GPU, else the first one here, else all known GPUs; none if the one here is unknown."""
    known = [roof for roof in ROOFS.values() if low is DType.FLOAT16 or roof.bfloat16]
    if gpu is not None:
        return [roof for roof in known if roof.gpu == gpu]
    if not machine.gpus:
        return [roof for roof in known if roof.gpu in COMMON]
    own = roof_of(machine.gpus[0].name)
    return [own] if own in known and own is not None else []


def _estimate(model: Model, low: DType, roofs: Sequence[Roof], sizes: Mapping[str, int], free: Sequence[str]) -> Check:
    """Return the speed-up by the roofline, with its assumptions."""
    if not roofs:
        fact = f"no data sheet with {low.spelling} of this GPU is known here"
        return Check("speed", UNKNOWN, fact, f"{spelled('gpu')} names another: {', '.join(ROOFS)}")
    view = View.of(with_dimensions(model, sizes, 1))
    bounds = [b for b in (bound(view, roof, low) for roof in roofs) if b is not None]
    if not bounds or bounds[0].counted < _ENOUGH * bounds[0].ops:
        known = f"the shapes of {bounds[0].counted} of {bounds[0].ops} ops" if bounds else "no shapes"
        return Check("speed", UNKNOWN, f"{known} are known", "export the model with known shapes")
    ratios = ", ".join(f"{b.ratio:.1f}x on {b.gpu}" for b in bounds)
    shape = "".join(f"{name}={sizes.get(name, 1)}, " for name in free)
    measured = "peaks that large products reach" + ("" if all(roof.reached for roof in roofs) else ", where measured")
    peaks = measured if any(roof.reached for roof in roofs) else "data sheet peaks"
    ops = "all" if bounds[0].counted == bounds[0].ops else f"{bounds[0].counted} of {bounds[0].ops}"
    return Check(
        "speed",
        OK,
        f"roofline estimate: about {ratios}, against float32 without TF32",
        f"assumes {shape}{peaks}, no fusion, cold caches, instant kernel launches; {ops} ops counted",
    )


def webgpu_model_checks(source: Model, low: DType) -> Iterator[Check]:
    """Check a model as it is converted for WebGPU: ops in the low type, long sums, ops on the CPU."""
    converted = convert(source, to=low, target=Target.WEBGPU)
    yield type_of(source)
    yield _lowered(converted.report.totals, low)
    long = [row.name for row in converted.report.rows if row.rule == LONG_SUM]
    if long:
        fact = f"{count(len(long), 'op')} in float32, since the device accumulates in float16 ({shortened(long)})"
        yield Check("sums", ADVICE, fact, "`--lower PATTERN` lowers them anyway; verify the result on the device")
    if half_type(source) is low:
        yield from kept_by_conversion(source, low, Target.WEBGPU)
    yield from _fallen(View.of(converted.result), load_webgpu_kernels())
    yield VALUES


def installed_kernels(packages: Sequence[Package]) -> Kernels:
    """Return the kernel table that serves the installed onnxruntime; the newest where none does."""
    for package in packages:
        try:
            return load_kernels(known_release(package.version))
        except PolicyError:
            continue
    return load_kernels()
