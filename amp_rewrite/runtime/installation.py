"""The installed onnxruntime: packages of its folder, faults seen without importing it, the import, and its errors.

onnxruntime is one module in many packages (onnxruntime, onnxruntime-gpu, one for each vendor). pip knows of no conflict
between them: a second one overwrites the files of the first, and removing one takes away files of the other.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amp_rewrite.errors import MachineError, ModelError, count, one_line

_MODULE = "onnxruntime"
_INIT = f"{_MODULE}/__init__.py"
DEFAULT = "onnxruntime-gpu"
"""The package that is named where none is installed."""
_LIBRARY = re.compile(r"\.(so(\.[\d.]+)?|pyd|dll|dylib)$")


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the module's folder.

    `lost`: files that it installed and that are missing. `init`: its `__init__.py`; None if the package does not say.
    """

    name: str
    version: str
    lost: tuple[str, ...] = ()
    init: Path | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class InstallationFault:
    """A fault of the installation, and the command to fix it."""

    fact: str
    remedy: str


def packages(folders: Sequence[str] | None = None) -> tuple[Package, ...]:
    """Return all installed packages of the module's folder, those with CUDA first, then by name.

    `folders`: where packages are looked for; None: where Python looks for modules.
    """
    found: dict[tuple[str, str], Package] = {}
    for distribution in metadata.distributions(path=list(sys.path if folders is None else folders)):
        record = distribution.read_text("RECORD") or ""
        name = distribution.metadata["Name"]
        if name and f"\n{_INIT}," in f"\n{record}":  # not one of that name inside another package
            package = _package(distribution, name.lower().replace("_", "-"), record)
            found.setdefault((package.name, package.version), package)  # a path may be listed twice
    return tuple(sorted(found.values(), key=lambda p: (p.name != DEFAULT, "gpu" not in p.name, p.name, p.version)))


def _package(distribution: metadata.Distribution, name: str, record: str) -> Package:
    paths = [row[0] for row in csv.reader(record.splitlines()) if row and row[0].startswith(f"{_MODULE}/")]
    files = [path for path in paths if not path.endswith(".pyc")]
    lost = [path for path in files if not Path(str(distribution.locate_file(path))).exists()]
    return Package(name, distribution.version, tuple(lost), Path(str(distribution.locate_file(_INIT))))


def faults(installed: Sequence[Package], origin: str | None) -> Iterator[InstallationFault]:
    """Yield the faults of packages, the worst first; `origin`: the module in use."""
    names = list(dict.fromkeys(package.name for package in installed))
    if len(installed) > 1:
        listed = " and ".join(map(str, installed))
        yield InstallationFault(
            f"{listed} are installed over each other, and one of them is broken by that",
            f"{uninstall(*sorted(names))}; {install(names[0])}",
        )
        return
    for package in installed:
        again = install(f"{package.name}=={package.version}", again=True)
        if package.lost:
            files = f"{count(len(package.lost), 'file')} of it {'is' if len(package.lost) == 1 else 'are'} missing"
            yield InstallationFault(f"{package}: {files} ({_some(package.lost)})", again)
        elif origin is not None and package.init is not None and not _same(Path(origin), package.init):
            fact = f"{package} is installed, and Python finds another module of that name first: {origin}"
            yield InstallationFault(fact, f"rename {origin}, or take its folder out of PYTHONPATH or start elsewhere")


def _some(files: Sequence[str]) -> str:
    libraries = [Path(file).name for file in files if _LIBRARY.search(file)] or [Path(file).name for file in files]
    return f"{', '.join(libraries[:2])}{' …' if len(files) > len(libraries[:2]) else ''}"


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def module_origin() -> str | None:
    """Return the file of the module in use, or its folder without an `__init__.py`; None without any."""
    try:
        spec = find_spec(_MODULE)
    except (ImportError, ValueError):  # a module that a program made itself
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def installation_faults() -> tuple[InstallationFault, ...]:
    """Return the faults of this installation, from its files alone, the worst first."""
    installed, origin = packages(), module_origin()
    found = list(faults(installed, origin))
    if not installed and origin is not None and not origin.endswith(".py"):
        found.append(
            InstallationFault(
                f"the folder {origin} is left of a package of onnxruntime that was removed",
                f'python -c "import shutil; shutil.rmtree({origin!r})"; {install(DEFAULT)}',
            )
        )
    return tuple(found)


def install(package: str, *, again: bool = False) -> str:
    """Return the command to install a package, with the tool of this environment; `again`: over itself."""
    tool = "python -m pip install" if find_spec("pip") else "uv pip install"
    quoted = f"'{package}'" if re.search(r"[<>~! ]", package) else package
    return f"{tool}{' --force-reinstall --no-deps' if again else ''} {quoted}"


def uninstall(*names: str) -> str:
    """Return the command to remove packages without a question."""
    return f"{'python -m pip uninstall -y' if find_spec('pip') else 'uv pip uninstall'} {' '.join(names)}"


def onnxruntime(feature: str | None = None) -> Any:
    """Import onnxruntime for a feature and return it.

    Raise MachineError that names the feature, what is missing or broken, and the command that fixes it. Errors of the
    import have any class: a library that does not load, a file that is missing, a module of another package.
    """
    try:
        import onnxruntime as ort

        _ = ort.InferenceSession, ort.SessionOptions, ort.get_available_providers
    except Exception as cause:
        fault = _fault_of(cause)
        what = f"{feature} runs models" if feature else "models run"
        raise MachineError(f"{what} in onnxruntime, and {fault.fact}; {fault.remedy}") from cause
    return ort


def require(feature: str) -> None:
    """Raise MachineError, naming the feature, unless onnxruntime can be imported. Call it before long work."""
    onnxruntime(feature)


def _fault_of(cause: Exception) -> InstallationFault:
    known = installation_faults()
    if known:
        return known[0]
    installed = packages()
    if not installed and isinstance(cause, ModuleNotFoundError) and cause.name == _MODULE:
        return InstallationFault("it is not installed", f"{install(DEFAULT)} (or onnxruntime, for the CPU alone)")
    named = " and ".join(map(str, installed)) or f"the module at {module_origin()}"
    remedy = install(f"{installed[0].name}=={installed[0].version}", again=True) if installed else install(DEFAULT)
    return InstallationFault(f"{named} cannot be imported: {type(cause).__name__}: {one_line(cause)[:300]}", remedy)


# -- its errors ----------------------------------------------------------------------------------------


NO_KERNEL = "Could not find an implementation"
"""onnxruntime's words for a sound op in a type that it has no kernel for."""
_PLACE = re.compile(r"/onnxruntime_src/\S+:\d+ [^)]*\)(?: const)? ")


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Raise errors of onnxruntime as ModelError, with one line of text."""
    try:
        yield
    except _refusals() as cause:
        raise ModelError(f"onnxruntime cannot {what} the model: {error_text(what, cause)}") from cause


def error_text(what: str, cause: Exception) -> str:
    """Return the cause, in onnxruntime's words unless they are unclear, and a remedy. `what`: "open" or "run"."""
    text = _text(cause)
    for pattern, fact, remedy in _KNOWN:
        if match := re.search(pattern, text):
            return f"{fact.format(*match.groups()) if fact else text}; {remedy}"
    return f"{text}; {_REMEDIES[what]}"


_REMEDIES = {
    "open": "`amp-rewrite report MODEL` shows what it is made of",
    "run": "check what is fed against the model's inputs",
}
# Pattern of onnxruntime's text, a clearer text if needed, and a remedy.
_KNOWN = (
    (
        r"error: (.*):([^:]+)\(-?\d+\) is not a registered function/op",
        "it knows no op {1!r} of the domain {0!r}",
        "give the model a local function of that name, or put ops that it knows in its place",
    ),
    (
        r"No Op registered for (\S+) with domain_version of (\d+)",
        "it knows no op {0!r} in opset {1}",
        "check the spelling, or import the opset that has it",
    ),
    (
        r"No opset import for domain '([^']*)'",
        "the model uses the domain {0!r}, and imports no opset of it",
        "add it to opset_import",
    ),
    (
        r"two nodes with same node name \((.*)\)",
        "two of its nodes are named {0!r}",
        "give each a name of its own, or none",
    ),
    (r"Duplicate definition of name \((.*)\)", "two of its nodes make {0!r}", "rename what one of them makes"),
    (NO_KERNEL, "", "emulate(model) runs what no kernel of the CPU does"),
    (
        r"official support for domain (\S+) is till opset (\d+)",
        "it knows the opsets of {0} up to {1}",
        "install a newer onnxruntime, or bring the model to an older opset with onnx.version_converter",
    ),
    (
        r'Unknown provider option: "([^"]*)"',
        "a provider has no option {0!r}",
        "check the spelling against onnxruntime's page of that provider, or leave it out",
    ),
    (
        r'Failed to parse provider option "([^"]*)": (?:\S+:\d+ \S+ )?(.*)',
        "provider option {0!r} has a value that it does not take: {1}",
        "give another one, or leave it out",
    ),
    (
        r"Please install TensorRT libraries",
        "it cannot load the libraries of TensorRT",
        "install TensorRT (pip install tensorrt) where the loader finds it, or leave TensorrtExecutionProvider out",
    ),
    (
        r"graph (?:capture )?feature as requested by the user as ",
        "",
        "leave the CUDA graph out (cuda_graph, enable_cuda_graph)",
    ),
    (
        r"Opset (\d+) is under development",
        "it knows the opsets of ai.onnx below {0}",
        "install a newer onnxruntime, or bring the model to an older opset with onnx.version_converter",
    ),
    (r"max supported IR version", "", "install a newer onnxruntime, or export the model again for an older one"),
)


def _text(cause: Exception) -> str:
    text = " ".join(str(cause).split())
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    text = _PLACE.sub("", text)
    return f"{text[:400].rstrip('. ')}{' …' if len(text) > 400 else ''}"


def _refusals() -> tuple[type[Exception], ...]:
    """onnxruntime's own exceptions, without a common base class below Exception, and those of its Python side."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))
    return (*own, ValueError, RuntimeError, TypeError)
