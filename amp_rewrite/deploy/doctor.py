"""Checkup of this machine, and of a model on it, for fast half precision, with a remedy for each finding.

Every fact comes from the driver, the loader, onnxruntime or a table; other facts are reported as unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from amp_rewrite.deploy.checkup import ADVICE, FINDING, OK, UNKNOWN, Check, Checkup
from amp_rewrite.deploy.model_checks import installed_kernels, model_checks
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.findings import unfit_here
from amp_rewrite.reports.render import size
from amp_rewrite.runtime.faults import CPU, CUDA, FAULTS, WEBGPU
from amp_rewrite.runtime.gpu import FAST_FROM, Gpu, Hardware, libraries, pip_line
from amp_rewrite.runtime.installation import (
    DEFAULT,
    InstallationFault,
    Package,
    install,
    installation_faults,
    packages,
    uninstall,
)
from amp_rewrite.runtime.kernels import Kernels, load_webgpu_kernels
from amp_rewrite.runtime.plugins import REQUIREMENT
from amp_rewrite.runtime.probes import Asked, asked, machine_asked, opened, webgpu_asked
from amp_rewrite.settings.choices import Target, TargetName
from amp_rewrite.settings.policy import LowType, low_type


def doctor(
    model: ModelSource | None = None,
    *,
    to: LowType | None = None,
    target: TargetName | Target | None = None,
) -> Checkup:
    """Find obstacles to fast half precision on this machine, and in a model if given.

    With a model, and without a GPU here, what this machine lacks is advice, not a finding. The driver and onnxruntime
    are queried in processes of their own, because they may crash.

    Args:
        model: as `convert` takes it.
        to: the low type, as `convert` takes it; None: that of a model that is half already, else float16.
        target: "webgpu" looks at the WebGPU provider in place of CUDA; None: CUDA.

    Returns:
        All checks, with remedies.

    Raises:
        PolicyError: the type or the target is unknown.
        AmpRewriteError: as `convert` raises it for the model.

    Example:
        >>> import amp_rewrite
        >>> checks = amp_rewrite.doctor("model.onnx").checks
    """
    asked_for = low_type(to) if to is not None else None
    low = asked_for or DType.FLOAT16
    if target is not None and Target.parse(target) == Target.WEBGPU:
        checks = list(_webgpu(webgpu_asked()))
        if model is not None:
            source = Model.load(model)
            checks += [*_fits(source, WEBGPU), *model_checks(source, low, Target.WEBGPU)]
        return Checkup(tuple(checks))
    machine = machine_asked()
    checks = list(_machine(machine, low, asked()))
    if model is not None and not machine.gpus:  # the model is for another machine
        checks = [replace(check, state=ADVICE) if check.state == FINDING else check for check in checks]
    if model is not None:
        source = Model.load(model)
        checks += [*_fits(source, CUDA), *model_checks(source, asked_for)]
    return Checkup(tuple(checks))


def opening(model: Path) -> Checkup:
    """Open a model file unchanged, in separate processes: on the CPU, and on CUDA if CUDA opens here.

    A finding names the signal that ends the process, or onnxruntime's objection, and the optimizers without which it
    opens. ModelError for a path that is not a file.
    """
    if not model.is_file():
        raise ModelError(f"cannot read {model}: not a file; name a model file")
    cuda = asked().get("opens", False)
    return Checkup(tuple(_opens(model, provider) for provider in (CPU, *((CUDA,) if cuda else ()))))


def _fits(model: Model, provider: str) -> Iterator[Check]:
    for package in packages()[:1]:
        if (unfit := unfit_here(model, package.version, provider)) is not None:
            fact, _, remedy = unfit.partition("; ")
            yield Check("release", FINDING, fact, remedy)


def _opens(model: Path, provider: str) -> Check:
    failure = opened(model, provider)
    if failure is None:
        return Check("open", OK, f"opens with {provider}")
    for fault in (fault for fault in FAULTS if fault.skip):
        if opened(model, provider, fault.skip) is None:
            return Check("open", FINDING, f"{provider}: {failure}", f"pass disabled_optimizers={list(fault.skip)}")
    return Check("open", FINDING, f"{provider}: {failure}", "no known workaround; try other optimization levels")


def _machine(machine: Hardware, low: DType, answer: Asked) -> Iterator[Check]:
    here = packages()
    if not here and "version" in answer:
        here = (Package("onnxruntime", answer["version"]),)  # a build of its own, which no package owns
    major = str(answer.get("cuda") or "").partition(".")[0]
    built = int(major) if major.isdecimal() else None
    yield from _gpus(machine, low)
    yield _driver(machine, built)
    yield from _runtime(here, answer, installation_faults())
    if built is not None:
        yield from _libraries(built)
    if "failure" in answer:
        yield Check("provider", UNKNOWN, "onnxruntime could not be asked")
    elif answer["opens"]:
        yield Check("provider", OK, "CUDAExecutionProvider opens")
    else:
        yield Check("provider", FINDING, "CUDAExecutionProvider does not open: models run on the CPU")
    yield from _plugins(answer)
    yield _table([str(package) for package in here], installed_kernels())


def _webgpu(answer: Asked) -> Iterator[Check]:
    if "failure" in answer:
        yield Check("provider", FINDING, answer["failure"], "install onnxruntime and its plugin anew")
        return
    absence = answer["absence"]
    if absence is None:
        yield Check("provider", OK, "WebGpuExecutionProvider opens, and takes float16")
    else:
        fact, _, remedy = absence.partition("; ")
        yield Check("provider", FINDING, f"WebGpuExecutionProvider does not open: {fact}", remedy)
    yield _table([f"{REQUIREMENT} {answer['release']}"] if answer["release"] else [], load_webgpu_kernels())


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
    if machine.cuda is None:
        return Check("driver", UNKNOWN, "CUDA version unknown")
    served = f"serves CUDA up to {machine.cuda[0]}.{machine.cuda[1]}"
    if built is not None and machine.cuda[0] < built:
        return Check(
            "driver", FINDING, f"{served}, and this onnxruntime is built for CUDA {built}", "update the driver"
        )
    return Check("driver", OK, served)


def _runtime(packages: Sequence[Package], answer: Asked, known: Sequence[InstallationFault]) -> Iterator[Check]:
    for fault in known:
        yield Check("onnxruntime", FINDING, fault.fact, fault.remedy)
    if known:
        return
    named = " and ".join(map(str, packages))
    if not packages:
        line = f"{install(DEFAULT)}; converting does not need it"
        yield Check("onnxruntime", FINDING, "not installed", line)
    elif "failure" in answer:
        again = install(f"{packages[0].name}=={packages[0].version}", again=True)
        yield Check("onnxruntime", FINDING, f"{named}: {answer['failure']}", again)
    elif answer["cuda"] is None:
        swap = f"{uninstall(packages[0].name)}; {install(DEFAULT)}"
        yield Check("onnxruntime", FINDING, f"{named} is built without CUDA", swap)
    else:
        yield Check("onnxruntime", OK, f"{named}, built for CUDA {answer['cuda']}")


def _libraries(built: int) -> Iterator[Check]:
    known = libraries(built)
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


def _plugins(answer: Asked) -> Iterator[Check]:
    for plugin in answer.get("plugins", ()):
        named = f"{plugin['package']} {plugin['release']}"
        if plugin["failure"]:
            yield Check("plugin", UNKNOWN, f"{named}: {plugin['failure']}", "its documentation names what it needs")
        else:
            offered = f"{', '.join(plugin['providers'])} on {', '.join(plugin['devices'])}"
            yield Check("plugin", OK, f"{named} offers {offered}")


def _table(here: Sequence[str], kernels: Kernels) -> Check:
    said = f"the kernel table is that of {kernels.runtime}"
    if not here or kernels.runtime.rpartition(" ")[2] in (name.rpartition(" ")[2] for name in here):
        return Check("kernels", OK, said)
    fact = f"{said}, and {' and '.join(here)} is installed: its kernels may differ"
    return Check("kernels", FINDING, fact, f"python -m pip install '{kernels.runtime.replace(' ', '==')}'")
