"""What stands between this machine, or a model on it, and fast half precision, and the way out of each.

Nothing is claimed that was not asked of the driver, the loader, onnxruntime or a table; what cannot be known is said
to be unknown.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from amp_rewrite.convert import convert
from amp_rewrite.doctor.advice import Bound, OnCpu, bound, free_dimensions, misaligned, on_cpu, with_dimensions
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import MachineError, PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.hardware import FAST_FROM, Gpu, Hardware, Loader, hardware, libraries, pip_line
from amp_rewrite.kernels import Kernels, load_kernels
from amp_rewrite.policy import Policy, low_type
from amp_rewrite.reports.render import count, shortened, size, table
from amp_rewrite.roofline import ROOFS, Roof, roof_of
from amp_rewrite.view import View

OK, FINDING, ADVICE, UNKNOWN = "ok", "finding", "advice", "unknown"

_PACKAGES = ("onnxruntime-gpu", "onnxruntime")
_ENOUGH = 0.8  # of a model's ops must have known shapes before a bound is told
_SECONDS = 300.0  # for a process that only opens a tiny model


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: its state ("ok", "finding", "advice", "unknown"), the fact, and the way out."""

    topic: str
    state: str
    fact: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything that was looked at, in order. Advice and what is unknown are no findings."""

    checks: tuple[Check, ...]

    @property
    def well(self) -> bool:
        """Whether there is no finding."""
        return all(check.state != FINDING for check in self.checks)

    def text(self) -> str:
        """A line for each check, and below it the way out where there is one."""
        lines = table([(_MARKS[c.state], c.topic, c.fact) for c in self.checks], indent=0)
        told = []
        for check, line in zip(self.checks, lines, strict=True):
            told.append(line)
            told += [f"{'':{_INDENT}}{check.remedy}"] if check.remedy else []
        found = sum(check.state == FINDING for check in self.checks)
        return "\n".join([*told, "", count(found, "finding") if found else "all well"])

    def to_json(self) -> str:
        """`{"well": …, "checks": [{"topic", "state", "fact", "remedy"}, …]}`."""
        return json.dumps({"well": self.well, "checks": [asdict(check) for check in self.checks]}, indent=2)


_MARKS = {OK: "ok", FINDING: "FINDING", ADVICE: "advice", UNKNOWN: "unknown"}
_INDENT = 9

Asked = Mapping[str, Any]
"""What `session.probe` gives, or `{"failure": …}` where asking failed."""


def doctor(
    model: object = None,
    *,
    to: str | DType | Policy = "float16",
    gpu: str | None = None,
    dimensions: Mapping[str, int] | None = None,
    load: Loader = ctypes.CDLL,
    ask: Callable[[], Asked] | None = None,
    installed: Callable[[str], str | None] | None = None,
) -> Checkup:
    """What keeps half precision from being fast here; with a model (whatever `convert` takes), also in that model.

    `to`: as `convert` takes it. `gpu`: a GPU whose speed is estimated instead of the one here. `dimensions`: sizes
    of the model's free dimensions by name, for the estimate; 1 for those that are not named. `load`, `ask` and
    `installed` stand for the loader of libraries, onnxruntime in a process of its own, and the installed packages.

    PolicyError for an unknown type or GPU; what `convert` raises for the model.
    """
    low = low_type(to)
    if gpu is not None and gpu not in ROOFS:
        raise PolicyError(f"no data sheet of a GPU {gpu!r} is known here; use one of {', '.join(ROOFS)}")
    machine = hardware(load)
    checks = list(_machine(machine, low, load, (ask or asked)(), installed or _version))
    if model is not None:
        roofs = _roofs(gpu, machine, low)
        checks += _model(model if isinstance(model, Model) else Model.load(model), low, roofs, dict(dimensions or {}))
    return Checkup(tuple(checks))


# -- the machine ---------------------------------------------------------------------------------------


def _machine(
    machine: Hardware, low: DType, load: Loader, told: Asked, installed: Callable[[str], str | None]
) -> Iterator[Check]:
    packages = {name: version for name in _PACKAGES if (version := installed(name)) is not None}
    built = _release(told)
    yield from _gpus(machine, low)
    yield _driver(machine, built)
    yield _runtime(packages, told)
    if built is not None:
        yield from _libraries(built, load)
    yield _provider(told)
    yield _table(packages, load_kernels())


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
        return Check("driver", UNKNOWN, f"{machine.driver or 'none answers'}: which CUDA it serves cannot be asked")
    served = f"{version}, serves CUDA up to {machine.cuda[0]}.{machine.cuda[1]}"
    if built is not None and machine.cuda[0] < built:
        return Check(
            "driver", FINDING, f"{served}, and this onnxruntime is built for CUDA {built}", "update the driver"
        )
    return Check("driver", OK, served)


def _runtime(packages: Mapping[str, str], told: Asked) -> Check:
    named = " and ".join(f"{name} {version}" for name, version in packages.items())
    if not packages:
        return Check("onnxruntime", FINDING, "not installed", "python -m pip install onnxruntime-gpu")
    if len(packages) > 1:
        return Check(
            "onnxruntime",
            FINDING,
            f"{named} are installed over each other, and one of them is broken by that",
            "python -m pip uninstall -y onnxruntime onnxruntime-gpu; python -m pip install onnxruntime-gpu",
        )
    if "failure" in told:
        return Check("onnxruntime", FINDING, f"{named}: {told['failure']}", "install it anew")
    if told["cuda"] is None:
        return Check("onnxruntime", FINDING, f"{named} is built without CUDA", _SWAP)
    return Check("onnxruntime", OK, f"{named}, built for CUDA {told['cuda']}")


_SWAP = "python -m pip uninstall -y onnxruntime; python -m pip install onnxruntime-gpu"


def _release(told: Asked) -> int | None:
    major = str(told.get("cuda") or "").partition(".")[0]
    return int(major) if major.isdecimal() else None


def _libraries(built: int, load: Loader) -> Iterator[Check]:
    found = libraries(built, load)
    if not found:
        yield Check("libraries", UNKNOWN, f"what CUDA {built} needs on this system is not known here")
        return
    for needed, what in ((True, "the CUDA provider does not load without"), (False, "some ops do not run without")):
        lost = [f.library for f in found if f.where is None and f.library.needed is needed]
        if lost:
            names = ", ".join(library.name for library in lost)
            yield Check("libraries", FINDING, f"{what} {names}", pip_line(lost))
    here = [f for f in found if f.where is not None]
    if len(here) == len(found):
        by_pip = sum(f.where == "pip" for f in here)
        yield Check("libraries", OK, f"all {len(found)} of CUDA {built} and cuDNN are here, {by_pip} of them by pip")


def _provider(told: Asked) -> Check:
    if "failure" in told:
        return Check("provider", UNKNOWN, "onnxruntime could not be asked")
    if told["opens"]:
        return Check("provider", OK, "CUDAExecutionProvider opens")
    return Check("provider", FINDING, "CUDAExecutionProvider does not open: models run on the CPU")


def _table(packages: Mapping[str, str], kernels: Kernels) -> Check:
    here = [f"{name} {version}" for name, version in packages.items()]
    if not here or kernels.runtime in here:
        return Check("kernels", OK, f"the kernel table is that of {kernels.runtime}")
    return Check(
        "kernels",
        FINDING,
        f"the kernel table is that of {kernels.runtime}, and {' and '.join(here)} is installed: its kernels may differ",
        f"python -m pip install '{kernels.runtime.replace(' ', '==')}', or read its own registry with"
        " `amp-rewrite doctor --dump-kernels FILE`",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- onnxruntime in a process of its own ---------------------------------------------------------------


def asked() -> Asked:
    """What onnxruntime says of itself, asked in another process, which it may end."""
    return _child("probe")


def write_kernels(file: Path) -> int:
    """Write the kernel registry of the installed onnxruntime to a new JSON file; how many kernels stand in it.

    The form is that of `tools/build_tables.py dump`. MachineError where the registry cannot be read here, or the
    file is there already.
    """
    if file.exists():
        raise MachineError(f"{file} exists; name a new file")
    if not file.parent.is_dir():
        raise MachineError(f"cannot write {file}: the folder {file.parent} does not exist; make it first")
    versions = [f"{name} {version}" for name in _PACKAGES if (version := _version(name)) is not None]
    told = _child("kernel_registry")
    if "failure" in told:
        raise MachineError(
            f"the kernel registry cannot be read here: {told['failure']}; it can where the libraries of CUDA and of"
            " TensorRT are installed"
        )
    rows = told["rows"]
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps({"runtime": versions[0], "kernels": rows}, indent=0) + "\n", encoding="utf-8")
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)
    return len(rows)


def _child(question: str) -> Asked:
    """The answer of a function of `ort.runner` in a process of its own; `{"failure": …}` if that ends badly."""
    program = (
        f"import json, sys; from amp_rewrite.ort.runner import {question}; told = {question}();"
        " sys.stdout.write(json.dumps(told if isinstance(told, dict) else {'rows': told}))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failure": f"onnxruntime did not answer in {_SECONDS:.0f} seconds"}
    if done.returncode < 0:
        return {"failure": f"onnxruntime ended the process ({signal.Signals(-done.returncode).name})"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        return {"failure": f"onnxruntime cannot be imported: {said[-1]}"}
    found: Asked = json.loads(done.stdout[done.stdout.index("{") :])
    return found


# -- a model -------------------------------------------------------------------------------------------


def _model(source: Model, low: DType, roofs: Sequence[Roof], sizes: Mapping[str, int]) -> Iterator[Check]:
    free = free_dimensions(source)
    for name in sizes:
        if name not in free:
            known = f"it has {', '.join(free)}" if free else "it has none"
            raise PolicyError(f"the model has no free dimension {name!r}; {known}")
    converted = convert(source, to=low)
    totals = converted.report.totals
    view = View.of(converted.result)
    if not totals.compute_ops:
        yield Check("model", ADVICE, "no op in it gains from a low type")
    else:
        fact = f"{totals.compute_lowered} of {count(totals.compute_ops, 'compute op')} in {low.spelling}"
        state = OK if totals.compute_lowered == totals.compute_ops else ADVICE
        yield Check("model", state, fact, "" if state == OK else "`amp-rewrite convert` says why for each")
    yield from _fallen(on_cpu(view, load_kernels()))
    yield from _unaligned(view, low)
    yield _estimate(converted.result, low, roofs, sizes, free)


def _fallen(found: Iterable[OnCpu]) -> Iterator[Check]:
    """One finding for each reason."""
    by_reason: dict[tuple[str, int | None], list[str]] = {}
    for fallen in found:
        by_reason.setdefault((fallen.why, fallen.opset), []).append(fallen.op)
    for (why, opset), ops in by_reason.items():
        fact = f"{why}: {count(len(ops), 'op')} would run on the CPU ({shortened(ops)})"
        way = (
            "it has none at any opset: spell it out in other ops" if opset is None else f"at opset {opset} there is one"
        )
        yield Check("placement", FINDING, fact, way)
    if not by_reason:
        yield Check("placement", OK, "no float op falls to the CPU, as far as the kernel table tells")


def _unaligned(view: View, low: DType) -> Iterator[Check]:
    """One piece of advice for each kind of op, dimension and size."""
    groups: dict[tuple[str, str, int, int], list[str]] = {}
    for found in misaligned(view, low):
        groups.setdefault((found.kind, found.dimension, found.size, found.padded), []).append(found.op)
    for (kind, dimension, wide, padded), ops in groups.items():
        yield Check(
            "alignment",
            ADVICE,
            f"{count(len(ops), kind)} with {dimension} = {wide}, no multiple of 8 ({shortened(ops)})",
            f"tensor cores run best on multiples of 8: pad {dimension} to {padded}",
        )
    if not groups:
        yield Check("alignment", OK, "all fixed dimensions of low-precision products are multiples of 8")


def _roofs(gpu: str | None, machine: Hardware, low: DType) -> Sequence[Roof]:
    """The GPU that was named, else the first one here, else all that are known; none if the one here is not."""
    known = [roof for roof in ROOFS.values() if low is DType.FLOAT16 or roof.bfloat16]
    if gpu is not None:
        return [roof for roof in known if roof.gpu == gpu]
    if not machine.gpus:
        return known
    own = roof_of(machine.gpus[0].name)
    return [own] if own in known and own is not None else []


def _estimate(model: Model, low: DType, roofs: Sequence[Roof], sizes: Mapping[str, int], free: Sequence[str]) -> Check:
    """What the roofline says of the speed-up, with everything that it assumes."""
    if not roofs:
        return Check("speed", UNKNOWN, f"no data sheet with {low.spelling} of this GPU is known here", _NAME_ONE)
    view = View.of(with_dimensions(model, sizes, 1))
    found = [b for b in (bound(view, roof, low) for roof in roofs) if b is not None]
    if not found or found[0].counted < _ENOUGH * found[0].ops:
        known = f"{found[0].counted} of {found[0].ops}" if found else "none"
        return Check("speed", UNKNOWN, f"the shapes of {known} ops are known", "export the model with known shapes")
    return Check("speed", OK, _told(found), _assumed(found[0], sizes, free))


_NAME_ONE = f"--gpu names another: {', '.join(ROOFS)}"


def _told(found: Sequence[Bound]) -> str:
    ratios = ", ".join(f"{b.gpu} {b.ratio:.1f}x" for b in found)
    return f"the roofline says about {ratios} against float32 without TF32"


def _assumed(first: Bound, sizes: Mapping[str, int], free: Sequence[str]) -> str:
    shape = ", ".join(f"{name}={sizes.get(name, 1)}" for name in free)
    ops = "all" if first.counted == first.ops else f"{first.counted} of {first.ops}"
    return (
        f"assumes {f'{shape}, ' if shape else ''}data sheet peaks, no fusion, nothing in caches, no time to start"
        f" kernels; {ops} ops counted"
    )
