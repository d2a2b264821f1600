"""Providers in packages of their own, with stubs of a package and of onnxruntime; and the real ones where they are."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx.parser
import onnxruntime
import pytest

from amp_rewrite.deploy.doctor import _plugins
from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.runtime import installation as plugins_module
from amp_rewrite.runtime.faults import CPU
from amp_rewrite.runtime.installation import (
    Plugin,
    plugins,
    registered,
)
from amp_rewrite.runtime.runner import Runner, SessionOptions

NAME, PROVIDER = "onnxruntime-ep-stub", "StubExecutionProvider"


class Runtime:
    """What this package asks of onnxruntime about plugins."""

    __version__ = "1.31.1"

    def __init__(self, objection: str = "", offered: int = 1) -> None:
        self.objection, self.offered = objection, offered
        self.libraries: dict[str, str] = {}

    def register_execution_provider_library(self, name: str, library: str) -> None:
        if self.objection:
            raise ValueError(self.objection)
        self.libraries[name] = library

    def get_available_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", CPU]

    def get_ep_devices(self) -> list[Any]:
        hardware = SimpleNamespace(type="OrtHardwareDeviceType.GPU", vendor="ACME", metadata={"Description": "One"})
        own = [SimpleNamespace(ep_name=CPU, device=hardware)]
        return own + [SimpleNamespace(ep_name=PROVIDER, device=hardware)] * (self.offered if self.libraries else 0)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed package with a provider, and no other."""
    module = ModuleType("onnxruntime_ep_stub")
    module.get_library_path = lambda: Path("/there/libstub.so")  # type: ignore[attr-defined]
    module.get_ep_names = lambda: [PROVIDER]  # type: ignore[attr-defined]
    found = [SimpleNamespace(metadata={"Name": name}) for name in ("numpy", "onnxruntime_ep_stub", None)]
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    monkeypatch.setattr(metadata, "version", lambda _name: "0.4.0")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_stub", module)
    registered.cache_clear()
    yield module
    registered.cache_clear()


def test_packages_with_a_provider_are_found_and_a_broken_one_says_why(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugins() == (Plugin(NAME, "0.4.0", "/there/libstub.so", (PROVIDER,)),)
    monkeypatch.delattr(package, "get_library_path")
    (plugin,) = plugins()
    assert plugin.failure.startswith("AttributeError: ")


@pytest.mark.parametrize(
    ("runtime", "failure"),
    [
        (Runtime("wrong\nversion"), "wrong version"),
        (Runtime(offered=0), "it offers no device on this machine"),
    ],
)
def test_a_plugin_that_cannot_be_used_says_why(package: ModuleType, runtime: Any, failure: str) -> None:
    (plugin,) = registered(runtime)
    assert plugin.failure == failure


def test_an_unknown_provider_is_refused_with_the_reason_of_its_plugin(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub's library does not exist, which onnxruntime itself says."""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 13]> g (float[1] x) => (float[1] y) {y=Neg(x)}')
    with pytest.raises(PolicyError, match=rf"has no provider '{PROVIDER}' \({NAME} 0\.4\.0: .*libstub\.so"):
        Runner.open(Model(model), SessionOptions(providers=(PROVIDER,)))


@pytest.mark.parametrize(
    ("providers", "alone"),
    [
        (PROVIDER, True),
        (f"{PROVIDER} CPU", True),
        ("CUDA CPU", True),
        (f"{PROVIDER} CUDA", False),
        (f"CUDA {PROVIDER}", False),
    ],
)
def test_a_plugin_is_named_alone_or_before_the_cpu(
    providers: str, alone: bool, package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    runtime.libraries[NAME] = "there"
    monkeypatch.setattr(plugins_module, "onnxruntime", lambda: runtime)
    named = [name if name == PROVIDER else f"{name}ExecutionProvider" for name in providers.split()]
    with nullcontext() if alone else pytest.raises(PolicyError, match="runs alone before CPUExecutionProvider"):
        plugins_module.check_providers(named)
    assert plugins_module.offered_device(CPU) == "" and plugins_module.offered_device(PROVIDER) == "ACME GPU One"


def test_doctor_lists_plugins_with_their_devices() -> None:
    rows = [
        {"package": "a", "release": "1", "failure": "", "providers": [PROVIDER], "devices": ["ACME GPU"]},
        {"package": "b", "release": "2", "failure": "it offers no device on this machine"},
    ]
    works, fails = _plugins({"plugins": rows})
    assert (works.state, works.fact) == ("ok", f"a 1 offers {PROVIDER} on ACME GPU")
    assert (fails.state, fails.fact) == ("unknown", "b 2: it offers no device on this machine")


# -- a real one ----------------------------------------------------------------------------------------


def real() -> str:
    """A provider of an installed plugin with a device; "" without one."""
    usable = (plugin for plugin in plugins_module.registered(onnxruntime) if not plugin.failure)
    return next((plugin.providers[0] for plugin in usable), "")
