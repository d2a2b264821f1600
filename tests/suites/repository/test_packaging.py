"""The wheel: its contents, and its use outside the checkout."""

import re
import sys
import tomllib
import zipfile
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from support.commands import output_of
from support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOOK = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]
WHERE = ("-c", "import pathlib, amp_rewrite; print(pathlib.Path(amp_rewrite.__file__).parent)")
LISTS = ("-m", "amp_rewrite", "explain", "MatMul")


run = partial(output_of, PYTHONPATH="")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-index", "--target", target, wheel),
        cwd=target,
    )
    return target


def names(folder: Path, pattern: str) -> set[str]:
    return {path.name for path in folder.glob(pattern)}


def test_the_wheel_holds_the_modules_lists_tables_models_and_the_typing_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("amp_rewrite/")}
    package = ROOT / "amp_rewrite"
    suffixes = (".py", ".pyi", ".onnxtxt", ".css", ".js", ".bash", ".zsh", ".fish")
    modules = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.suffix in suffixes}
    lists = {f"amp_rewrite/_lists/{name}" for name in names(ROOT / "lists", "*.yaml")}
    tables = {f"amp_rewrite/runtime/_tables/{name}" for name in names(package / "runtime" / "_tables", "*.json")}
    models = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.onnxtxt")}
    texts = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.md")}
    assert {"amp_rewrite/_lists/float16.yaml", "amp_rewrite/_lists/bfloat16.yaml"} <= lists
    assert tables
    assert models and texts
    assert packed == modules | lists | tables | models | texts | {"amp_rewrite/py.typed"}


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        by_name = {Path(name).name: archive.read(name).decode() for name in archive.namelist()}
    assert by_name["LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "amp-rewrite = amp_rewrite.__main__:main" in by_name["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in by_name["METADATA"]


def test_an_installed_wheel_finds_its_own_lists_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    package = installed / "amp_rewrite"
    away = {"cwd": str(tmp_path), "PYTHONPATH": str(installed)}
    assert run(sys.executable, *WHERE, **away).strip() == str(package)
    assert "MatMul" in run(sys.executable, *LISTS, **away)
    # It must fail without them, and not read the checkout's.
    hidden = (package / "_lists").rename(package / "_hidden")
    try:
        with pytest.raises(AssertionError, match="exit"):
            run(sys.executable, *LISTS, **away)
    finally:
        hidden.rename(package / "_lists")


def test_a_checkout_finds_the_lists_at_its_top(tmp_path: Path) -> None:
    assert not (ROOT / "amp_rewrite" / "_lists").exists()
    away = {"cwd": str(tmp_path), "PYTHONPATH": str(ROOT)}
    assert run(sys.executable, *WHERE, **away).strip() == str(ROOT / "amp_rewrite")
    assert "MatMul" in run(sys.executable, *LISTS, **away)


@pytest.mark.parametrize("requirement", [*HOOK["dependencies"], *chain.from_iterable(HOOK["runtime"].values())])
def test_every_runtime_dependency_states_its_lowest_version(requirement: str) -> None:
    assert re.match(r"[A-Za-z0-9_-]+>=\d+(\.\d+)*(; |$)", requirement)


def test_macos_gets_the_onnxruntime_that_exists_there() -> None:
    needs = HOOK["runtime"]["cuda"]
    marked = {need.split(">=")[0]: need.partition("; ")[2] for need in needs if need.startswith("onnxruntime")}
    assert marked == {"onnxruntime-gpu": "sys_platform != 'darwin'", "onnxruntime": "sys_platform == 'darwin'"}


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel except RECORD, which has the digests of the others."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


@pytest.mark.parametrize("runtime", ["cpu", "none"])
def test_builds_for_other_runtimes_differ_only_in_their_dependencies(wheel: Path, tmp_path: Path, runtime: str) -> None:
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    # `run` drops this package's variables, so `env` sets it.
    run("env", f"AMP_REWRITE_RUNTIME={runtime}", *build, cwd=ROOT)
    (built,) = tmp_path.glob("*.whl")
    other, default = contents(built), contents(wheel)
    (metadata,) = {name for name in default if other[name] != default[name]}
    assert other.keys() == default.keys()
    assert built.name == wheel.name
    changed, before = (files[metadata].decode().splitlines() for files in (other, default))
    needs = [line for line in changed if line.startswith("Requires-Dist: onnxruntime")]
    assert [line for line in changed if line not in needs] == [
        line for line in before if not line.startswith("Requires-Dist: onnxruntime")
    ]
    assert [need.partition(">")[0] for need in needs] == ["Requires-Dist: onnxruntime"] * (runtime == "cpu")


def test_an_unknown_runtime_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    with pytest.raises(AssertionError, match="AMP_REWRITE_RUNTIME=gpu is not a runtime; use one of cuda, cpu, none"):
        run("env", "AMP_REWRITE_RUNTIME=gpu", *build, cwd=ROOT)
    assert list(tmp_path.iterdir()) == []
