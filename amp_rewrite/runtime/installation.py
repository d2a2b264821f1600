"""The installed onnxruntime: its packages and their faults, the import, its providers and errors.

Many packages contain the `onnxruntime` module (onnxruntime, onnxruntime-gpu, one for each vendor). pip does not detect
this conflict: installing a second package overwrites files of the first, and removing one deletes files of the other.
"""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amp_rewrite.errors import MachineError, ModelError, PolicyError, count, one_line
from amp_rewrite.runtime.faults import CPU

_MODULE = "onnxruntime"
_INIT = f"{_MODULE}/__init__.py"
DEFAULT = "onnxruntime-gpu"
"""The package to recommend if none is installed."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package with the `onnxruntime` module. `missing`: its missing files."""

    name: str
    version: str
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class InstallationFault:
    """A fault of the installation, and the command to fix it."""

    fact: str
    remedy: str


def packages(folders: Sequence[str] | None = None) -> tuple[Package, ...]:
    """Return all installed packages with the `onnxruntime` module: first those for CUDA, then by name.

    `folders`: the folders to search; None for `sys.path`.
    """
    found: dict[tuple[str, str], Package] = {}
    for distribution in metadata.distributions(path=list(sys.path if folders is None else folders)):
        record = distribution.read_text("RECORD") or ""
        name = distribution.metadata["Name"]
        if name and f"\n{_INIT}," in f"\n{record}":  # at the top level, not inside another package
            paths = [row[0] for row in csv.reader(record.splitlines()) if row and row[0].startswith(f"{_MODULE}/")]
            files = (path for path in paths if not path.endswith(".pyc"))
            missing = tuple(path for path in files if not Path(str(distribution.locate_file(path))).exists())
            package = Package(name.lower().replace("_", "-"), distribution.version, missing)
            found.setdefault((package.name, package.version), package)  # a path may be listed twice
    return tuple(sorted(found.values(), key=lambda p: (p.name != DEFAULT, "gpu" not in p.name, p.name, p.version)))


def find_fault(installed: Sequence[Package]) -> InstallationFault | None:
    """Return the fault in the files of these packages; None if there is none."""
    names = sorted({package.name for package in installed})
    if len(installed) > 1:
        listed = " and ".join(map(str, installed))
        return InstallationFault(
            f"{listed} overwrite each other's files, and one of them is broken",
            f"{uninstall(*names)}; {install(installed[0].name)}",
        )
    for package in installed:
        if package.missing:
            files = f"{count(len(package.missing), 'file')} missing, for example {Path(package.missing[0]).name}"
            return InstallationFault(f"{package} is damaged: {files}", reinstall(package))
    return None


def install(package: str, options: str = "") -> str:
    """Return the command to install a package with pip or uv."""
    tool = "python -m pip install" if find_spec("pip") else "uv pip install"
    quoted = f"'{package}'" if re.search(r"[<>~!\[ ]", package) else package
    return f"{tool}{options} {quoted}"


def reinstall(package: Package) -> str:
    """Return the command to reinstall a package."""
    return install(f"{package.name}=={package.version}", " --force-reinstall --no-deps")


def uninstall(*names: str) -> str:
    """Return the command to uninstall packages without confirmation."""
    return f"{'python -m pip uninstall -y' if find_spec('pip') else 'uv pip uninstall'} {' '.join(names)}"


def onnxruntime(feature: str | None = None) -> Any:
    """Import onnxruntime for a feature and return it.

    MachineError names the feature, the fault, and the command that fixes it. The import can raise any exception: a
    library may fail to load, a file may be missing, or a module may belong to another package.
    """
    try:
        import onnxruntime as ort

        _ = ort.InferenceSession, ort.SessionOptions, ort.get_available_providers
    except Exception as cause:
        fault = _import_fault(cause)
        what = f"{feature} runs models" if feature else "models run"
        raise MachineError(f"{what} in onnxruntime, but {fault.fact}; to fix this, run: {fault.remedy}") from cause
    return ort


def require(feature: str) -> None:
    """Raise MachineError with the feature's name if onnxruntime cannot be imported. Call it before long work."""
    onnxruntime(feature)


def _import_fault(cause: Exception) -> InstallationFault:
    installed = packages()
    if (fault := find_fault(installed)) is not None:
        return fault
    if not installed and isinstance(cause, ModuleNotFoundError) and cause.name == _MODULE:
        return InstallationFault("it is not installed", f"{install(DEFAULT)} (or onnxruntime, for CPUs only)")
    named = " and ".join(map(str, installed)) or "a module of that name"
    fact = f"{named} cannot be imported: {type(cause).__name__}: {one_line(cause)[:300]}"
    return InstallationFault(fact, reinstall(installed[0]) if installed else install(DEFAULT))


# -- providers ----------------------------------------------------------------------------------------


_PREFIX = "onnxruntime-ep-"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A package with a provider library. `failure`: why it cannot be used; "" if it can."""

    package: str
    release: str
    library: str = ""
    providers: tuple[str, ...] = ()
    failure: str = ""


def plugins() -> tuple[Plugin, ...]:
    """Return the installed packages with a provider library, sorted by name."""
    named = ((d.metadata["Name"] or "").lower().replace("_", "-") for d in metadata.distributions())
    return tuple(_plugin(name) for name in sorted({name for name in named if name.startswith(_PREFIX)}))


def _plugin(package: str) -> Plugin:
    release = metadata.version(package)
    try:
        module: Any = importlib.import_module(package.replace("-", "_"))
        names = module.get_ep_names() if hasattr(module, "get_ep_names") else [module.get_ep_name()]
        return Plugin(package, release, str(module.get_library_path()), tuple(map(str, names)))
    except (ImportError, AttributeError, OSError, RuntimeError) as cause:
        return Plugin(package, release, failure=one_line(f"{type(cause).__name__}: {cause}"))


@cache
def register_plugins(ort: Any) -> tuple[Plugin, ...]:
    """Register the libraries of all plugins; return the plugins, each with its failure if there is one."""
    return tuple(_register(ort, plugin) for plugin in plugins())


def _register(ort: Any, plugin: Plugin) -> Plugin:
    if plugin.failure or any(devices(ort, provider) for provider in plugin.providers):
        return plugin  # already registered
    try:
        ort.register_execution_provider_library(plugin.package, plugin.library)
    except Exception as cause:  # noqa: BLE001 - classes of onnxruntime's extension
        return replace(plugin, failure=one_line(cause))
    offered = any(devices(ort, provider) for provider in plugin.providers)
    return plugin if offered else replace(plugin, failure="it offers no device on this machine")


def devices(ort: Any, provider: str) -> Sequence[Any]:
    """Return the devices of a plugin's provider; none for onnxruntime's own providers."""
    return [device for device in ort.get_ep_devices() if device.ep_name == provider != CPU]


def describe(device: Any) -> str:
    """Return a description of a device: vendor, kind and name."""
    kind = str(device.device.type).rpartition(".")[2]
    name = dict(device.device.metadata).get("Description", "")
    return " ".join(filter(None, (device.device.vendor, kind, name)))


def has_provider(name: str) -> bool:
    """True if the installed onnxruntime has a provider, even if no session can be opened on it."""
    ort = onnxruntime()
    return name in ort.get_available_providers() or bool(devices(ort, name))


def offered_device(provider: str) -> str:
    """Return a description of the device of a plugin's provider; "" for other providers."""
    return next(map(describe, devices(onnxruntime(), provider)), "")


def check_providers(providers: Sequence[str]) -> None:
    """Raise PolicyError for an unknown provider, and for a plugin combined with providers other than the CPU."""
    ort = onnxruntime()
    available = ort.get_available_providers()
    if any(provider not in available for provider in providers):
        usable = [name for plugin in register_plugins(ort) if not plugin.failure for name in plugin.providers]
        available = list(dict.fromkeys((*available, *usable)))
    for position, provider in enumerate(providers or ("",)):
        plugin_devices = devices(ort, provider)
        if provider not in available and not plugin_devices:
            failed = (p for p in register_plugins(ort) if p.failure and (provider in p.providers or not p.providers))
            causes = "".join(f" ({plugin.package} {plugin.release}: {plugin.failure})" for plugin in failed)
            legal = ", ".join(available)
            raise PolicyError(f"this onnxruntime has no provider {provider!r}{causes}; use one of {legal}")
        if plugin_devices and (position or set(providers[1:]) - {CPU}):
            raise PolicyError(f"{provider} is a plugin, and only {CPU} may follow it; remove all other providers")


# -- errors --------------------------------------------------------------------------------------------


NO_KERNEL = "to run ops without a CPU kernel, use emulate(model)"
"""The remedy for a valid op without a kernel of the CPU provider in the op's type."""
_PLACE = re.compile(r"/onnxruntime_src/\S+:\d+ [^)]*\)(?: const)? ")


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Turn errors from onnxruntime into one-line ModelErrors with a remedy. `what`: "open" or "run"."""
    try:
        yield
    except _error_types() as cause:
        text = _message(cause)
        found = (remedy for pattern, remedy in _REMEDY_BY_PATTERN.items() if re.search(pattern, text))
        remedy = next(found, _DEFAULT_REMEDIES[what])
        raise ModelError(f"onnxruntime cannot {what} the model: {text}; {remedy}") from cause


_DEFAULT_REMEDIES = {
    "open": "to see its ops and types, run `amp-rewrite report MODEL`",
    "run": "check the data against the model's inputs",
}
_NEWER = "install a newer onnxruntime, or convert the model to an older opset with onnx.version_converter"
_REMEDY_BY_PATTERN = {
    "is not a registered function/op": "give the model a local function of that name, or use ops of onnxruntime",
    "No Op registered for": "check the name of the op, or import the opset that defines it",
    "No opset import for domain": "add the domain to opset_import",
    "Could not find an implementation|Kernel not found": NO_KERNEL,
    "official support for domain|is under development": _NEWER,
    "provider option": "see onnxruntime's documentation of that provider, or remove the option",
    "graph (capture )?feature as requested by the user as ": "turn off CUDA graphs (cuda_graph, enable_cuda_graph)",
    "max supported IR version": "install a newer onnxruntime, or export the model for an older one",
}
"""Remedies by a pattern in onnxruntime's message."""


def _message(cause: Exception) -> str:
    text = " ".join(str(cause).split())
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    text = _PLACE.sub("", text)
    return f"{text[:400].rstrip('. ')}{' …' if len(text) > 400 else ''}"


def _error_types() -> tuple[type[Exception], ...]:
    """Return onnxruntime's own exceptions (without a common base class) and those raised by its Python code."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))
    return (*own, ValueError, RuntimeError, TypeError)
