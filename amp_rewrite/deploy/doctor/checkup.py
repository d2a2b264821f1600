"""Checkup of this machine, and of a model on it, for fast half precision, with a remedy for each finding.

Every fact comes from the driver, the loader, onnxruntime or a table; other facts are reported as unknown.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

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
from amp_rewrite.deploy.doctor.isolated import Asked, asked, machine_asked, opened, runtimes, webgpu_asked
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError, spelled
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.render import blocks, count, shortened, size
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import Totals
from amp_rewrite.runtime.features import ONNX, ONNXRUNTIME, Feature, lacking
from amp_rewrite.runtime.gpu import FAST_FROM, Gpu, Hardware, Loader, hardware, libraries, pip_line
from amp_rewrite.runtime.hazards import CPU, CUDA, HAZARDS
from amp_rewrite.runtime.installation import (
    DEFAULT,
    Fault,
    Package,
    faults,
    install,
    installation_faults,
    uninstall,
)
from amp_rewrite.runtime.kernels import Kernels, load_kernels, load_webgpu_kernels, release_number
from amp_rewrite.runtime.releases import known_release
from amp_rewrite.runtime.roofline import COMMON, ROOFS, Roof, roof_of
from amp_rewrite.runtime.webgpu import REQUIREMENT
from amp_rewrite.settings.choices import Target, TargetName
from amp_rewrite.settings.policy import LowType, low_type

if TYPE_CHECKING:
    from amp_rewrite.reports.page.figure import Figure

OK, FINDING, ADVICE, UNKNOWN = "ok", "finding", "advice", "unknown"

_ENOUGH = 0.8  # share of a model's ops with known shapes that a bound requires


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
        """Number of findings; without any, that of pieces of advice."""
        findings, advice = (sum(check.state == state for check in self.checks) for state in (FINDING, ADVICE))
        if findings:
            return count(findings, "finding")
        if any(check.topic == "GPU" and check.state == ADVICE for check in self.checks):
            return "the model is fine; this machine has no GPU to run it fast"
        return f"no obstacle; {count(advice, 'piece of advice', 'pieces of advice')}" if advice else "all well"

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the checks as dictionaries."""
        return map(asdict, self.checks)

    def figures(self) -> Sequence[Figure]:
        """Return the checks as a list."""
        from amp_rewrite.reports.page.words import checks_figure  # late: few runs draw

        return (checks_figure([asdict(check) for check in self.checks], self.brief, self.to_dict()),)

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


def doctor(
    model: ModelSource | None = None,
    *,
    to: LowType = "float16",
    target: TargetName | Target | None = None,
    gpu: str | None = None,
    dimensions: Mapping[str, int] | None = None,
    load: Loader | None = None,
    ask: Callable[[], Asked] | None = None,
    installed: Callable[[str], str | None] | None = None,
) -> Checkup:
    """Check what keeps half precision from being fast on this machine, and in a model if given.

    With a model, and without a GPU here, what this machine lacks is advice, not a finding. By default the driver, too,
    is queried in a process of its own, because it may crash.

    Args:
        model: as `convert` takes it.
        to: the low type, as `convert` takes it.
        target: "webgpu" looks at the WebGPU provider in place of CUDA; None: CUDA.
        gpu: a GPU whose speed is estimated instead of the one here.
        dimensions: sizes of the model's free dimensions by name ("?": all without one); 1 for others.
        load: replaces the loader of libraries.
        ask: replaces onnxruntime in a process of its own.
        installed: replaces the installed packages.

    Returns:
        All checks, with remedies.

    Raises:
        PolicyError: the type or the GPU is unknown.
        AmpRewriteError: as `convert` raises it for the model.

    Example:
        >>> import amp_rewrite
        >>> checks = amp_rewrite.doctor("model.onnx", gpu="A100").checks
    """
    low = low_type(to)
    if gpu is not None and gpu not in ROOFS:
        raise PolicyError(f"no data sheet of a GPU {gpu!r} is known here; use one of {', '.join(ROOFS)}")
    if target is not None and Target.parse(target) is Target.WEBGPU:
        own = _on_webgpu(Model.load(model), low) if model is not None else ()
        return Checkup((*_webgpu((ask or webgpu_asked)()), *own))
    machine = machine_asked() if load is None else hardware(load)
    checks = list(_machine(machine, low, load or ctypes.CDLL, (ask or asked)(), installed))
    if model is not None and not machine.gpus:  # the model is for another machine
        checks = [replace(check, state=ADVICE) if check.state == FINDING else check for check in checks]
    if model is not None:
        roofs = _roofs(gpu, machine, low)
        checks += _model(Model.load(model), low, roofs, dict(dimensions or {}))
    return Checkup(tuple(checks))


def opening(model: Path, ask: Callable[[], Asked] | None = None) -> Checkup:
    """Open a model file as it is in processes of its own: on the CPU, and on CUDA if that opens here.

    A finding names the signal that ends the process, or onnxruntime's objection, and the optimizers without which it
    opens. `ask` replaces the query of onnxruntime. ModelError for a path that is not a file.
    """
    if not model.is_file():
        raise ModelError(f"cannot read {model}: not a file; name a model file")
    cuda = (ask or asked)().get("opens", False)
    return Checkup(tuple(_opens(model, provider) for provider in (CPU, *((CUDA,) if cuda else ()))))


def _opens(model: Path, provider: str) -> Check:
    failure = opened(model, provider)
    if failure is None:
        return Check("open", OK, f"opens with {provider}")
    for hazard in (hazard for hazard in HAZARDS if hazard.skip):
        if opened(model, provider, hazard.skip) is None:
            return Check("open", FINDING, f"{provider}: {failure}", f"pass disabled_optimizers={list(hazard.skip)}")
    return Check("open", FINDING, f"{provider}: {failure}", "no known way round; try other optimization levels")


def _machine(
    machine: Hardware, low: DType, load: Loader, told: Asked, installed: Callable[[str], str | None] | None
) -> Iterator[Check]:
    packages = runtimes(installed)
    if not packages and "version" in told:
        packages = (Package("onnxruntime", told["version"]),)  # a build of its own, which no package owns
    major = str(told.get("cuda") or "").partition(".")[0]
    built = int(major) if major.isdecimal() else None
    yield from _gpus(machine, low)
    yield _driver(machine, built)
    yield from _runtime(packages, told, tuple(faults(packages, None)) if installed else installation_faults())
    yield from _older(packages, installed or _version)
    if built is not None:
        yield from _libraries(built, load)
    if "failure" in told:
        yield Check("provider", UNKNOWN, "onnxruntime could not be asked")
    elif told["opens"]:
        yield Check("provider", OK, "CUDAExecutionProvider opens")
    else:
        yield Check("provider", FINDING, "CUDAExecutionProvider does not open: models run on the CPU")
    yield from _plugins(told)
    yield _table(packages, _kernels(packages))


def _webgpu(told: Asked) -> Iterator[Check]:
    """Check the WebGPU provider, which comes as a plugin of onnxruntime."""
    kernels = load_webgpu_kernels()
    if "failure" in told:
        yield Check("provider", FINDING, told["failure"], "install onnxruntime and its plugin anew")
        return
    absence = told["absence"]
    if absence is None:
        yield Check("provider", OK, "WebGpuExecutionProvider opens, and takes float16")
    else:
        fact, _, remedy = absence.partition("; ")
        yield Check("provider", FINDING, f"WebGpuExecutionProvider does not open: {fact}", remedy)
    installed = f"{REQUIREMENT} {told['release']}"
    if told["release"] is None or installed == kernels.runtime:
        yield Check("kernels", OK, f"the kernel table is that of {kernels.runtime}")
    else:
        fact = f"the kernel table is that of {kernels.runtime}, and {installed} is installed: its kernels may differ"
        yield Check("kernels", FINDING, fact, f"python -m pip install '{kernels.runtime.replace(' ', '==')}'")


def _on_webgpu(source: Model, low: DType) -> Iterator[Check]:
    """Check a model as it is converted for WebGPU: ops in the low type, long sums, ops on the CPU."""
    converted = convert(source, to=low, target=Target.WEBGPU)
    yield _lowered(converted.report.totals, low)
    long = [row.name for row in converted.report.rows if row.rule == LONG_SUM]
    if long:
        fact = f"{count(len(long), 'op')} in float32, since the device adds up in float16 ({shortened(long)})"
        yield Check("sums", ADVICE, fact, "`--lower PATTERN` lowers them all the same; verify the result on the device")
    yield from _fallen(View.of(converted.result), load_webgpu_kernels())


def _gpus(machine: Hardware, low: DType) -> Iterator[Check]:
    if not machine.gpus:
        yield Check("GPU", FINDING, str(machine.absence), f"on a CPU {low.spelling} is slower, not faster")
    for gpu in machine.gpus:
        memory = f", {size(gpu.memory)}" if gpu.memory else ""
        state = OK if gpu.capability >= FAST_FROM[low] else FINDING
        yield Check("GPU", state, f"{gpu}{memory}: {_fast(gpu)}")


def _fast(gpu: Gpu) -> str:
    slow = [f"{t.spelling} from {a}.{b} on" for t, (a, b) in FAST_FROM.items() if gpu.capability < (a, b)]
    fast = [t.spelling for t, first in FAST_FROM.items() if gpu.capability >= first]
    said = f"fast in {' and '.join(fast)}" if fast else "fast in no low type"
    return f"{said} ({', '.join(slow)})" if slow else said


def _driver(machine: Hardware, built: int | None) -> Check:
    version = machine.driver or "of unknown version"
    if machine.cuda is None:
        return Check("driver", UNKNOWN, f"{machine.driver or 'no driver found'}, CUDA version unknown")
    served = f"{version}, serves CUDA up to {machine.cuda[0]}.{machine.cuda[1]}"
    if built is not None and machine.cuda[0] < built:
        return Check(
            "driver", FINDING, f"{served}, and this onnxruntime is built for CUDA {built}", "update the driver"
        )
    return Check("driver", OK, served)


def _runtime(packages: Sequence[Package], told: Asked, known: Sequence[Fault]) -> Iterator[Check]:
    """Yield one finding per fault of the installation; without any, the state of the runtime."""
    for fault in known:
        yield Check("onnxruntime", FINDING, fault.fact, fault.remedy)
    if known:
        return
    named = " and ".join(map(str, packages))
    if not packages:
        line = f"{install(DEFAULT)}; what only converts does without"
        yield Check("onnxruntime", FINDING, "not installed", line)
    elif "failure" in told:
        again = install(f"{packages[0].name}=={packages[0].version}", again=True)
        yield Check("onnxruntime", FINDING, f"{named}: {told['failure']}", again)
    elif told["cuda"] is None:
        swap = f"{uninstall(packages[0].name)}; {install(DEFAULT)}"
        yield Check("onnxruntime", FINDING, f"{named} is built without CUDA", swap)
    else:
        yield Check("onnxruntime", OK, f"{named}, built for CUDA {told['cuda']}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _older(packages: Sequence[Package], installed: Callable[[str], str | None]) -> Iterator[Check]:
    """Yield what an older onnx or onnxruntime lacks."""
    releases = [(ONNX, ONNX, installed(ONNX) or ""), *((ONNXRUNTIME, p.name, p.version) for p in packages[:1])]
    for package, name, release in releases:
        if missing := lacking(package, release):
            facts = "; ".join(f"{feature.what} (from {feature.version} on)" for feature in missing)
            remedy = f"if you need that, {install(f'{name}>={max(missing, key=_newest).version}')}"
            yield Check("versions", ADVICE, f"{name} {release} lacks: {facts}", remedy)


def _newest(feature: Feature) -> tuple[int, ...]:
    return release_number(feature.version)


def _libraries(built: int, load: Loader) -> Iterator[Check]:
    known = libraries(built, load)
    if not known:
        yield Check("libraries", UNKNOWN, f"what CUDA {built} needs on this system is not known here")
        return
    for needed, what in ((True, "the CUDA provider does not load without"), (False, "some ops do not run without")):
        lost = [library for library in known if library.where is None and library.needed is needed]
        if lost:
            names = ", ".join(library.name for library in lost)
            yield Check("libraries", FINDING, f"{what} {names}", pip_line(lost))
    if all(library.where for library in known):
        by_pip = sum(library.where == "pip" for library in known)
        yield Check("libraries", OK, f"all {len(known)} of CUDA {built} and cuDNN are here, {by_pip} of them by pip")


def _plugins(told: Asked) -> Iterator[Check]:
    """Return a check per package with a provider of its own."""
    for plugin in told.get("plugins", ()):
        named = f"{plugin['package']} {plugin['release']}"
        if plugin["failure"]:
            yield Check("plugin", UNKNOWN, f"{named}: {plugin['failure']}", "its documentation names what it needs")
        else:
            offered = f"{', '.join(plugin['providers'])} on {', '.join(plugin['devices'])}"
            yield Check("plugin", OK, f"{named} offers {offered}")


def _kernels(packages: Sequence[Package]) -> Kernels:
    """Return the kernel table that serves the installed onnxruntime; the newest where none does."""
    for package in packages:
        try:
            return load_kernels(known_release(package.version))
        except PolicyError:
            continue
    return load_kernels()


def _table(packages: Sequence[Package], kernels: Kernels) -> Check:
    here = [str(package) for package in packages]
    own = kernels.runtime.rpartition(" ")[2]
    if not here or any(own == package.version for package in packages):
        return Check("kernels", OK, f"the kernel table is that of {kernels.runtime}")
    return Check(
        "kernels",
        FINDING,
        f"the kernel table is that of {kernels.runtime}, and {' and '.join(here)} is installed: its kernels may differ",
        f"python -m pip install '{kernels.runtime.replace(' ', '==')}', or read its own registry with"
        " `amp-rewrite doctor --dump-kernels FILE`",
    )


def _model(source: Model, low: DType, roofs: Sequence[Roof], sizes: Mapping[str, int]) -> Iterator[Check]:
    free = free_dimensions(source)
    for name, number in sizes.items():
        if name not in free:
            known = f"it has {', '.join(free)}" if free else "it has none"
            raise PolicyError(f"the model has no free dimension {name!r}; {known}")
        if not 0 < number <= LARGEST:
            raise PolicyError(f"dimension {name!r} cannot be {number}; give a number from 1 to {LARGEST}")
    converted = convert(source, to=low)
    view = View.of(converted.result)
    yield _lowered(converted.report.totals, low)
    yield from _fallen(view, _kernels(runtimes()))
    if kinds := Counter(op.kind for op in view.ops if op.signature is None):
        described = f"{count(kinds.total(), 'op')} that no schema here describes ({shortened(list(kinds))})"
        remedy = "a runtime without that op does not open the model"
        yield Check("placement", UNKNOWN, f"{described}: where it runs is not known", remedy)
    yield from _unaligned(view, low)
    yield _estimate(converted.result, low, roofs, sizes, free)


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
        yield Check("placement", OK, "no float op falls to the CPU, as far as the kernel table tells")


def _unaligned(view: View, low: DType) -> Iterator[Check]:
    """Return one piece of advice per kind of op, dimension and size."""
    groups = misaligned(view, low)
    for (kind, dimension, wide), ops in groups.items():
        yield Check(
            "alignment",
            ADVICE,
            f"{count(len(ops), kind)} with {dimension} = {wide}, no multiple of 8 ({shortened(ops)})",
            f"tensor cores run best on multiples of 8: pad {dimension} to {_padded(wide)}",
        )
    if not groups:
        yield Check("alignment", OK, "all fixed dimensions of low-precision products are multiples of 8")


def _padded(size: int) -> str:
    """Spell the next multiple of 8, and the size that is better still."""
    aligned, better = -(-size // ALIGNED) * ALIGNED, better_size(size)
    return f"{aligned}" if aligned == better else f"{aligned}, or to {better}: below 256 powers of two run best"


def _roofs(gpu: str | None, machine: Hardware, low: DType) -> Sequence[Roof]:
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
        f"assumes {shape}{peaks}, no fusion, nothing in caches, no time to start kernels; {ops} ops counted",
    )
