"""Providers of onnxruntime: those of the build, and those of packages with a library of their own, such as WebGPU."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from typing import Any

from amp_rewrite.errors import PolicyError, one_line
from amp_rewrite.runtime.faults import CPU
from amp_rewrite.runtime.installation import onnxruntime

_PREFIX = "onnxruntime-ep-"
ASSIGNMENT = "session.record_ep_graph_assignment_info"
"""Session entry by which onnxruntime remembers the provider of each node."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A package with a provider library. `failure`: why it cannot be used, "" if it can."""

    package: str
    release: str
    library: str = ""
    providers: tuple[str, ...] = ()
    failure: str = ""


def plugins() -> tuple[Plugin, ...]:
    """Return the installed packages with a provider, by name."""
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
def registered(ort: Any) -> tuple[Plugin, ...]:
    """Register the libraries of all plugins, and return them with onnxruntime's objections."""
    return tuple(_registered(ort, plugin) for plugin in plugins())


def _registered(ort: Any, plugin: Plugin) -> Plugin:
    if plugin.failure or any(devices(ort, provider) for provider in plugin.providers):
        return plugin  # the process registered it before
    try:
        ort.register_execution_provider_library(plugin.package, plugin.library)
    except Exception as cause:  # noqa: BLE001 - classes of onnxruntime's extension
        return replace(plugin, failure=one_line(cause))
    offered = any(devices(ort, provider) for provider in plugin.providers)
    return plugin if offered else replace(plugin, failure="it offers no device on this machine")


def devices(ort: Any, provider: str) -> Sequence[Any]:
    """Return the devices of a provider in a registered library; none for providers of onnxruntime itself."""
    return [device for device in ort.get_ep_devices() if device.ep_name == provider != CPU]


def described(device: Any) -> str:
    """Return a device in words: vendor, kind and name."""
    kind = str(device.device.type).rpartition(".")[2]
    name = dict(device.device.metadata).get("Description", "")
    return " ".join(filter(None, (device.device.vendor, kind, name)))


def has_provider(name: str) -> bool:
    """True if this onnxruntime is built with a provider, even if the provider does not open."""
    ort = onnxruntime()
    return name in ort.get_available_providers() or bool(devices(ort, name))


def offered_device(provider: str) -> str:
    """Return the device of a plugin's provider in words; "" for other providers."""
    return next(map(described, devices(onnxruntime(), provider)), "")


def check_providers(providers: Sequence[str]) -> None:
    """Raise PolicyError for a provider unknown to this onnxruntime, and for a plugin beside others."""
    ort = onnxruntime()
    known = ort.get_available_providers()
    if any(provider not in known for provider in providers):
        usable = [name for plugin in registered(ort) if not plugin.failure for name in plugin.providers]
        known = list(dict.fromkeys((*known, *usable)))
    for number, provider in enumerate(providers or ("",)):
        plugged = devices(ort, provider)
        if provider not in known and not plugged:
            failed = (p for p in registered(ort) if p.failure and (provider in p.providers or not p.providers))
            why = "".join(f" ({plugin.package} {plugin.release}: {plugin.failure})" for plugin in failed)
            raise PolicyError(f"this onnxruntime has no provider {provider!r}{why}; use one of {', '.join(known)}")
        if plugged and (number or set(providers[1:]) - {CPU}):
            raise PolicyError(f"{provider} is a plugin, which runs alone before {CPU}; name no other provider with it")
