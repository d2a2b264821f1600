"""Faults of an installed onnxruntime, with their messages, and its plugins."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx.parser
import pytest

from amp_rewrite.deploy.doctor import _plugins
from amp_rewrite.errors import MachineError, ModelError, PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.runtime import installation
from amp_rewrite.runtime.faults import CPU
from amp_rewrite.runtime.installation import (
    InstallationFault,
    Package,
    Plugin,
    find_fault,
    model_errors,
    packages,
    plugins,
    register_plugins,
    uninstall,
)
from amp_rewrite.runtime.runner import Runner, SessionOptions
from support.paths import ROOT

LIBRARY = "onnxruntime/capi/libonnxruntime_providers_cuda.so"


def installed(site: Path, name: str, version: str) -> None:
    """Install a fake package that owns the folder of onnxruntime."""
    files = {"onnxruntime/__init__.py": f'__version__ = "{version}"\n', LIBRARY: f"library of {name}"}
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    record = "".join(f"{path},sha256=x,{len(text)}\n" for path, text in files.items())
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(record)


def found(site: Path) -> InstallationFault | None:
    return find_fault(packages([str(site)]))


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu", "ort-nightly"])
def test_a_sound_package_of_any_name_has_no_fault(tmp_path: Path, name: str) -> None:
    installed(tmp_path, name, "1.31.1")
    assert packages([str(tmp_path)]) == (Package(name, "1.31.1"),)
    assert found(tmp_path) is None


def test_of_two_conflicting_packages_the_one_with_cuda_is_reinstalled(tmp_path: Path) -> None:
    installed(tmp_path, "onnxruntime-openvino", "1.24.1")
    installed(tmp_path, "onnxruntime-gpu", "1.31.1")
    fault = found(tmp_path)
    assert fault is not None
    assert fault.fact.startswith("onnxruntime-gpu 1.31.1 and onnxruntime-openvino 1.24.1 overwrite each other's files")
    assert fault.remedy.startswith(uninstall("onnxruntime-gpu", "onnxruntime-openvino"))
    assert fault.remedy.endswith("install onnxruntime-gpu")


def test_a_missing_provider_library_is_named(tmp_path: Path) -> None:
    installed(tmp_path, "onnxruntime-gpu", "1.31.1")
    (tmp_path / LIBRARY).unlink()
    fault = found(tmp_path)
    assert fault is not None
    assert fault.fact == (
        "onnxruntime-gpu 1.31.1 is damaged: 1 file missing, for example libonnxruntime_providers_cuda.so"
    )
    assert fault.remedy.endswith("install --force-reinstall --no-deps onnxruntime-gpu==1.31.1")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Link all installed packages except onnxruntime's into a folder."""
    site = tmp_path_factory.mktemp("site")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if not entry.name.startswith("onnxruntime"):
                (site / entry.name).symlink_to(entry)
    return site


def command(site: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package with only one folder's modules."""
    program = f"import sys; sys.path[:0] = {[str(site), str(ROOT)]!r}; from amp_rewrite.__main__ import main; main()"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = (sys.executable, "-S", "-P", "-c", program, *words)
    return subprocess.run(words, env=environ | extra, capture_output=True, text=True, check=False)


BROKEN = {
    "missing": (None, "it is not installed"),
    "leftover": ("", "a module of that name cannot be imported: AttributeError"),
    "raises": ("raise OSError('libfoo.so: cannot open')", "cannot be imported: OSError: libfoo.so: cannot open"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="the environment is made of links")
@pytest.mark.parametrize("state", BROKEN)
def test_a_broken_installation_is_named_by_runs_and_still_converts(bare: Path, tmp_path: Path, state: str) -> None:
    text, fact = BROKEN[state]
    site = tmp_path / "site"
    site.mkdir()
    for entry in bare.iterdir():
        (site / entry.name).symlink_to(entry)
    if text is not None:
        (site / "onnxruntime").mkdir()
    if text:
        (site / "onnxruntime" / "__init__.py").write_text(text)
    digits = str(ROOT / "examples" / "models" / "digits_cnn.onnx")
    if state == "raises":  # an attempted import would raise this
        converted = command(site, digits, "-o", str(tmp_path / "low.onnx"))
        assert converted.returncode == 0, converted.stderr
    verified = command(site, "verify", digits, digits, "--random", "--shape", "image=1,1,8,8", "--tolerance", "1")
    assert verified.returncode == 2
    assert verified.stderr.startswith("error: verify runs models in onnxruntime, but ")
    assert fact in verified.stderr
    assert "install onnxruntime" in verified.stderr
    assert "Traceback" not in verified.stderr


@pytest.mark.parametrize(
    ("packages", "cause", "words"),
    [
        ((), ModuleNotFoundError(name="onnxruntime"), "it is not installed; to fix this, run: python -m pip "),
        ((), ModuleNotFoundError(name="numpy"), "a module of that name cannot be imported: Mod"),
        ((), OSError("no\nlibrary"), "cannot be imported: OSError: no library; to fix this, run: python -m pip"),
        (
            (Package("onnxruntime", "1.31.1"),),
            OSError("broken"),
            "onnxruntime 1.31.1 cannot be imported: OSError: broken; to fix this, run: "
            "python -m pip install --force-reinstall --no-deps onnxruntime==1.31.1",
        ),
    ],
)
def test_a_failed_import_names_the_package_and_the_command(
    packages: Any, cause: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "packages", lambda: packages)
    monkeypatch.setattr(installation, "find_spec", lambda name: object())

    class Broken:
        def __getattr__(self, name: str) -> None:
            raise cause

    monkeypatch.setitem(sys.modules, "onnxruntime", Broken())
    for feature, start in (
        ("verify", "verify runs models in onnxruntime, but "),
        (None, "models run in onnxruntime, "),
    ):
        with pytest.raises(MachineError) as error:
            installation.onnxruntime(feature)
        assert str(error.value).startswith(start) and words in str(error.value)


@pytest.mark.parametrize(("pip", "tool"), [(None, "uv pip"), (object(), "python -m pip")])
def test_commands_use_the_environments_package_manager(pip: Any, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: pip)
    assert installation.install("onnxruntime>=1.23") == f"{tool} install 'onnxruntime>=1.23'"
    assert installation.reinstall(Package("o", "1")) == f"{tool} install --force-reinstall --no-deps o==1"
    yes = " -y" if pip else ""
    assert installation.uninstall("a", "b") == f"{tool} uninstall{yes} a b"


# -- errors of onnxruntime ----------------------------------------------------------------------------

LOOK = "to see its ops and types, run `amp-rewrite report MODEL`"
NEWER = "install a newer onnxruntime, or convert the model to an older opset with onnx.version_converter"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[ONNXRuntimeError] : 1 : FAIL : node 'a' : no such\n  shape.", f"node 'a' : no such shape; {LOOK}"),
        ("a : b : c : d", f"a : b : c : d; {LOOK}"),
        ("/onnxruntime_src/core/graph.cc:12 Status(int) const it ends", f"it ends; {LOOK}"),
        ("x" * 400, f"{'x' * 400}; {LOOK}"),
        ("x" * 401, f"{'x' * 400} …; {LOOK}"),
        ("Could not find an implementation for Sin", "Could not find an implementation for Sin; to run ops without"),
        (
            "official support for domain ai.onnx is till opset 26.",
            f"official support for domain ai.onnx is till opset 26; {NEWER}",
        ),
        ('Unknown provider option: "size"', 'Unknown provider option: "size"; see onnxruntime\'s documentation'),
        ("max supported IR version: 13", "max supported IR version: 13; install a newer onnxruntime"),
    ],
)
def test_an_error_is_a_clear_line_with_a_remedy(text: str, line: str) -> None:
    with pytest.raises(ModelError) as error, model_errors("open"):
        raise RuntimeError(text)
    assert str(error.value).startswith(f"onnxruntime cannot open the model: {line}")


def test_the_remedy_of_a_failed_run_concerns_its_inputs() -> None:
    with pytest.raises(ModelError) as error, model_errors("run"):
        raise RuntimeError("odd")
    words = "onnxruntime cannot run the model: odd; check the data against the model's inputs"
    assert str(error.value) == words


# -- providers in separate packages, with stubs; and real ones if they are installed ----------------------


NAME, PROVIDER = "onnxruntime-ep-stub", "StubExecutionProvider"


class Runtime:
    """A stub of onnxruntime's functions for plugins."""

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
    """Pretend that only a package with this provider is installed."""
    module = ModuleType("onnxruntime_ep_stub")
    module.get_library_path = lambda: Path("/there/libstub.so")  # type: ignore[attr-defined]
    module.get_ep_names = lambda: [PROVIDER]  # type: ignore[attr-defined]
    found = [SimpleNamespace(metadata={"Name": name}) for name in ("numpy", "onnxruntime_ep_stub", None)]
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    monkeypatch.setattr(metadata, "version", lambda _name: "0.4.0")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_stub", module)
    register_plugins.cache_clear()
    yield module
    register_plugins.cache_clear()


def test_packages_with_a_provider_are_found_and_broken_ones_have_a_reason(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugins() == (Plugin(NAME, "0.4.0", "/there/libstub.so", (PROVIDER,)),)
    monkeypatch.delattr(package, "get_library_path")
    (plugin,) = plugins()
    assert plugin.failure.startswith("AttributeError: ")


@pytest.mark.parametrize(
    ("runtime", "failure"),
    [(Runtime("wrong\nversion"), "wrong version"), (Runtime(offered=0), "it offers no device on this machine")],
)
def test_an_unusable_plugin_has_a_reason(package: ModuleType, runtime: Any, failure: str) -> None:
    (plugin,) = register_plugins(runtime)
    assert plugin.failure == failure


def test_an_unknown_provider_is_refused_with_the_reason_of_its_plugin(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub's library does not exist; the message is onnxruntime's own."""
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
def test_a_plugin_is_listed_alone_or_before_the_cpu(
    providers: str, alone: bool, package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    runtime.libraries[NAME] = "there"
    monkeypatch.setattr(installation, "onnxruntime", lambda: runtime)
    named = [name if name == PROVIDER else f"{name}ExecutionProvider" for name in providers.split()]
    with nullcontext() if alone else pytest.raises(PolicyError, match="only CPUExecutionProvider may follow"):
        installation.check_providers(named)
    assert installation.offered_device(CPU) == "" and installation.offered_device(PROVIDER) == "ACME GPU One"


def test_doctor_lists_plugins_with_their_devices() -> None:
    rows = [
        {"package": "a", "release": "1", "failure": "", "providers": [PROVIDER], "devices": ["ACME GPU"]},
        {"package": "b", "release": "2", "failure": "it offers no device on this machine"},
    ]
    works, fails = _plugins({"plugins": rows})
    assert (works.state, works.fact) == ("ok", f"a 1 offers {PROVIDER} on ACME GPU")
    assert (fails.state, fails.fact) == ("unknown", "b 2: it offers no device on this machine")
