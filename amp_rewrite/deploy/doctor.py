"""Checkup of this machine, and of a model on it, for fast half precision, with a remedy for each finding.

Every fact comes from the driver, the loader, onnxruntime or a table; other facts are reported as unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from amp_rewrite.deploy.checkup import ADVICE, FINDING, OK, UNKNOWN, Check, Checkup
from amp_rewrite.deploy.model_checks import installed_kernels, model_checks
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.findings import unfit_here
from amp_rewrite.reports.render import size
from amp_rewrite.runtime.faults import CUDA
from amp_rewrite.runtime.gpu import DRIVER, FAST_FROM, Gpu, Hardware
from amp_rewrite.runtime.installation import (
    DEFAULT,
    Package,
    again,
    install,
    installation_fault,
    packages,
    uninstall,
)
from amp_rewrite.runtime.kernels import Kernels
from amp_rewrite.runtime.probes import Asked, asked, machine_asked
from amp_rewrite.settings.choices import LowType, low_type
from amp_rewrite.settings.option import checked


@checked
def doctor(model: ModelSource | None = None, *, to: LowType | None = None) -> Checkup:
    """Find obstacles to fast half precision on this machine, and in a model if given.

    With a model, and without a GPU here, what this machine lacks is advice, not a finding. The driver and onnxruntime
    are queried in processes of their own, because they may crash.

    Args:
        model: as `convert` takes it.
        to: the low type, as `convert` takes it; None: that of a model that is half already, else float16.

    Returns:
        All checks, with remedies.

    Raises:
        PolicyError: the type is unknown.
        AmpRewriteError: as `convert` raises it for the model.

    Example:
        >>> import amp_rewrite
        >>> checks = amp_rewrite.doctor("model.onnx").checks
    """
    asked_for = low_type(to) if to is not None else None
    low = asked_for or DType.FLOAT16
    machine = machine_asked()
    checks = list(_machine(machine, low, asked()))
    if model is not None and not machine.gpus:  # the model is for another machine
        checks = [replace(check, state=ADVICE) if check.state == FINDING else check for check in checks]
    if model is not None:
        source = Model.load(model)
        checks += [*_fits(source), *model_checks(source, asked_for)]
    return Checkup(tuple(checks))


def _fits(model: Model) -> Iterator[Check]:
    for package in packages()[:1]:
        if (unfit := unfit_here(model, package.version, CUDA)) is not None:
            fact, _, remedy = unfit.partition("; ")
            yield Check("release", FINDING, fact, remedy)


def _machine(machine: Hardware, low: DType, answer: Asked) -> Iterator[Check]:
    here = packages()
    if not here and "version" in answer:
        here = (Package("onnxruntime", answer["version"]),)  # a build of its own, which no package owns
    major = str(answer.get("cuda") or "").partition(".")[0]
    built = int(major) if major.isdecimal() else None
    yield from _gpus(machine, low)
    yield _driver(machine, built)
    yield _runtime(here, answer)
    unloaded = answer.get("unloaded")
    if unloaded and not unloaded.startswith(DRIVER):  # that it is missing was said of the GPU
        yield Check("libraries", FINDING, unloaded, install(f"{DEFAULT}[cuda,cudnn]=={answer['version']}"))
    if "failure" in answer:
        yield Check("provider", UNKNOWN, "onnxruntime could not be asked")
    elif answer["opens"]:
        yield Check("provider", OK, "CUDAExecutionProvider opens")
    else:
        yield Check("provider", FINDING, "CUDAExecutionProvider does not open: models run on the CPU")
    yield from _plugins(answer)
    yield _table(here, installed_kernels())


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


def _runtime(here: Sequence[Package], answer: Asked) -> Check:
    if (fault := installation_fault(here)) is not None:
        return Check("onnxruntime", FINDING, fault.fact, fault.remedy)
    if not here:
        return Check("onnxruntime", FINDING, "not installed", f"{install(DEFAULT)}; converting does not need it")
    if "failure" in answer:
        return Check("onnxruntime", FINDING, f"{here[0]}: {answer['failure']}", again(here[0]))
    if answer["cuda"] is None:
        swap = f"{uninstall(here[0].name)}; {install(DEFAULT)}"
        return Check("onnxruntime", FINDING, f"{here[0]} is built without CUDA", swap)
    return Check("onnxruntime", OK, f"{here[0]}, built for CUDA {answer['cuda']}")


def _plugins(answer: Asked) -> Iterator[Check]:
    for plugin in answer.get("plugins", ()):
        named = f"{plugin['package']} {plugin['release']}"
        if plugin["failure"]:
            yield Check("plugin", UNKNOWN, f"{named}: {plugin['failure']}", "its documentation names what it needs")
        else:
            offered = f"{', '.join(plugin['providers'])} on {', '.join(plugin['devices'])}"
            yield Check("plugin", OK, f"{named} offers {offered}")


def _table(here: Sequence[Package], kernels: Kernels) -> Check:
    said = f"the kernel table is that of {kernels.runtime}"
    if not here or any(kernels.runtime.endswith(f" {package.version}") for package in here):
        return Check("kernels", OK, said)
    fact = f"{said}, and {' and '.join(map(str, here))} is installed: its kernels may differ"
    return Check("kernels", FINDING, fact, install(kernels.runtime.replace(" ", "==")))
