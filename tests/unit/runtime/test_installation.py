"""Faults of an installed onnxruntime: what is said of each, and that no command fails in any other way."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amp_rewrite.errors import MachineError
from amp_rewrite.runtime import installation
from amp_rewrite.runtime.installation import InstallationFault, Package, faults, packages, uninstall
from support.paths import ROOT

LIBRARY = "onnxruntime/capi/libonnxruntime_providers_cuda.so"


def installed(site: Path, name: str, version: str) -> Path:
    """Install a made-up package that owns the folder of onnxruntime."""
    files = {"onnxruntime/__init__.py": f'__version__ = "{version}"\n', LIBRARY: f"library of {name}"}
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    record = "".join(f"{path},sha256=x,{len(text)}\n" for path, text in files.items())
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(record)
    return site / "onnxruntime" / "__init__.py"


def found(site: Path, origin: Path | None = None) -> list[InstallationFault]:
    return list(faults(packages([str(site)]), None if origin is None else str(origin)))


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "ort-nightly"])
def test_a_sound_package_of_any_name_has_no_fault(tmp_path: Path, name: str) -> None:
    init = installed(tmp_path, name, "1.31.1")
    assert packages([str(tmp_path)]) == (Package(name, "1.31.1", init=init),)
    assert found(tmp_path, init) == []


def test_a_folder_of_that_name_inside_another_package_is_not_the_module(tmp_path: Path) -> None:
    info = tmp_path / "onnxscript-0.7.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxscript\nVersion: 0.7.2\n")
    (info / "RECORD").write_text("onnxscript/onnxruntime/__init__.py,sha256=x,1\n")
    assert packages([str(tmp_path)]) == ()


def test_two_packages_over_each_other_are_removed_and_the_one_with_cuda_installed(tmp_path: Path) -> None:
    installed(tmp_path, "onnxruntime-openvino", "1.24.1")
    installed(tmp_path, "onnxruntime-gpu", "1.31.1")
    (fault,) = found(tmp_path)
    assert fault.fact.startswith("onnxruntime-gpu 1.31.1 and onnxruntime-openvino 1.24.1 are installed over each other")
    assert fault.remedy.startswith(uninstall("onnxruntime-gpu", "onnxruntime-openvino"))
    assert fault.remedy.endswith("install onnxruntime-gpu")


def test_a_provider_library_that_is_missing_is_named(tmp_path: Path) -> None:
    init = installed(tmp_path, "onnxruntime-gpu", "1.31.1")
    (tmp_path / LIBRARY).unlink()
    (fault,) = found(tmp_path, init)
    assert fault.fact == "onnxruntime-gpu 1.31.1: 1 file of it is missing (libonnxruntime_providers_cuda.so)"
    assert fault.remedy.endswith("install --force-reinstall --no-deps onnxruntime-gpu==1.31.1")


def test_a_module_that_hides_the_installed_one_is_told_with_its_place(tmp_path: Path) -> None:
    installed(tmp_path, "onnxruntime", "1.31.1")
    other = tmp_path / "onnxruntime.py"
    other.write_text("")
    (fault,) = found(tmp_path, other)
    assert fault.fact.endswith(f"Python finds another module of that name first: {other}")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all installed packages but those of onnxruntime."""
    site = tmp_path_factory.mktemp("site")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if not entry.name.startswith("onnxruntime"):
                (site / entry.name).symlink_to(entry)
    return site


def command(site: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package with the modules of one folder alone."""
    program = f"import sys; sys.path[:0] = {[str(site), str(ROOT)]!r}; from amp_rewrite.__main__ import main; main()"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = (sys.executable, "-S", "-P", "-c", program, *words)
    return subprocess.run(words, env=kept | extra, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("missing", ["InferenceSession", "SessionOptions", "get_available_providers"])
def test_a_module_that_lacks_what_runs_models_is_broken(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"InferenceSession", "SessionOptions", "get_available_providers"} - {missing}
    module = ModuleType("onnxruntime")
    vars(module).update(dict.fromkeys(names))
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    with pytest.raises(MachineError, match=r"^verify runs models in onnxruntime, and "):
        installation.require("verify")


BROKEN = {
    "missing": (None, "it is not installed"),
    "leftover": ("", "is left of a package of onnxruntime that was removed"),
    "raises": ("raise OSError('libfoo.so: cannot open')", "cannot be imported: OSError: libfoo.so: cannot open"),
    "foreign": ("x = 1", "cannot be imported: AttributeError: module 'onnxruntime' has no attribute"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="the environment is made of links")
@pytest.mark.parametrize("state", BROKEN)
def test_a_broken_installation_names_itself_where_models_run_and_still_converts(
    bare: Path, tmp_path: Path, state: str
) -> None:
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
    if state == "raises":  # an import that is tried would fail most loudly
        converted = command(site, digits, "-o", str(tmp_path / "low.onnx"))
        assert converted.returncode == 0, converted.stderr
    verified = command(site, "verify", digits, digits, "--random", "--shape", "image=1,1,8,8", "--tolerance", "1")
    assert verified.returncode == 2
    assert verified.stderr.startswith("error: verify runs models in onnxruntime, and ")
    assert fact in verified.stderr
    assert "install onnxruntime" in verified.stderr
    assert "Traceback" not in verified.stderr


def spec(origin: str | None, *folders: str) -> SimpleNamespace:
    return SimpleNamespace(origin=origin, submodule_search_locations=list(folders) or None)


@pytest.mark.parametrize(
    ("found_spec", "origin"),
    [(None, None), (spec("a/b.py", "a"), "a/b.py"), (spec("b.py"), "b.py"), (spec(None, "a"), "a"), (spec(None), None)],
)
def test_the_module_is_its_file_or_else_its_folder(
    found_spec: Any, origin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: found_spec)
    assert installation.module_origin() == origin


@pytest.mark.parametrize(
    ("packages", "origin", "cause", "words"),
    [
        ((), None, ModuleNotFoundError(name="onnxruntime"), "it is not installed; python -m pip install onn"),
        ((), "o/__init__.py", ModuleNotFoundError(name="numpy"), "the module at o/__init__.py cannot be imported: Mod"),
        ((), "o/__init__.py", OSError("no\nlibrary"), "cannot be imported: OSError: no library; python -m pip install"),
        ((), "o", OSError(), "the folder o is left of a package of onnxruntime that was removed; python -c"),
        (
            (Package("onnxruntime", "1.31.1", init=None),),
            "o/__init__.py",
            OSError("broken"),
            "onnxruntime 1.31.1 cannot be imported: OSError: broken; "
            "python -m pip install --force-reinstall --no-deps onnxruntime==1.31.1",
        ),
    ],
)
def test_a_failed_import_says_what_is_missing_or_broken_and_the_command(
    packages: Any, origin: str | None, cause: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "packages", lambda: packages)
    monkeypatch.setattr(installation, "module_origin", lambda: origin)
    monkeypatch.setattr(installation, "find_spec", lambda name: spec("pip/__init__.py"))
    monkeypatch.setattr(installation, "faults", lambda *_: ())

    class Broken:
        def __getattr__(self, name: str) -> None:
            raise cause

    monkeypatch.setitem(sys.modules, "onnxruntime", Broken())
    for feature, start in (
        ("verify", "verify runs models in onnxruntime, and "),
        (None, "models run in onnxruntime, "),
    ):
        with pytest.raises(MachineError) as error:
            installation.onnxruntime(feature)
        assert str(error.value).startswith(start) and words in str(error.value)


@pytest.mark.parametrize(("pip", "tool"), [(None, "uv pip"), (object(), "python -m pip")])
def test_commands_use_the_tool_that_the_environment_has(pip: Any, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: pip)
    assert installation.install("onnxruntime>=1.23") == f"{tool} install 'onnxruntime>=1.23'"
    assert installation.install("onnxruntime", again=True) == f"{tool} install --force-reinstall --no-deps onnxruntime"
    yes = " -y" if pip else ""
    assert installation.uninstall("a", "b") == f"{tool} uninstall{yes} a b"
