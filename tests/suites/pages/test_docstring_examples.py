"""Docstrings of public names: their examples run, and their sections are complete and in order."""

import builtins
import dataclasses
import doctest
import inspect
import re
import shutil
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

import amp_rewrite
import amp_rewrite.train
from amp_rewrite import errors
from amp_rewrite.train import policy as policies
from support.paths import ROOT

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
HEADING = re.compile(r"(\w+):")
ENTRY = re.compile(r" {4}(\*{0,2}\w+): .")
ERRORS = frozenset(name for name in vars(errors) if name.endswith("Error"))


def objects() -> Iterator[tuple[str, object]]:
    """Yield the public functions and classes, and each class's public methods and properties."""
    found = {id(value): value for package in (amp_rewrite, amp_rewrite.train) for value in public(package)}
    for value in found.values():
        yield value.__qualname__, value
        for name, member in vars(value).items() if isinstance(value, type) else ():
            inner = member.__func__ if isinstance(member, classmethod) else member
            if isinstance(inner, (FunctionType, property, cached_property)) and not name.startswith("_"):
                yield f"{value.__qualname__}.{name}", inner


def public(package: object) -> list[object]:
    values = [getattr(package, name) for name in package.__all__]
    return [value for value in values if isinstance(value, (FunctionType, type))]


PUBLIC = dict(objects())
FUNCTIONS = [name for name, value in PUBLIC.items() if isinstance(value, FunctionType) and "." not in name]
METHODS = [name for name, value in PUBLIC.items() if isinstance(value, FunctionType) and "." in name]


def docs(name: str) -> str:
    """Return the docstring of a public object; a method may inherit it."""
    owner, _, member = name.rpartition(".")
    return inspect.getdoc(getattr(PUBLIC[owner], member) if owner in PUBLIC else PUBLIC[name]) or ""


EXAMPLES = [name for name in PUBLIC if ">>>" in docs(name)]


def sections(name: str) -> dict[str, list[str]]:
    """Return the lines below each heading in order."""
    found: dict[str, list[str]] = {}
    heading = None
    for line in docs(name).splitlines():
        if line and not line.startswith(" "):
            match = HEADING.fullmatch(line)
            heading = match[1] if match else None
            if heading:
                assert heading not in found
                found[heading] = []
        elif heading and line:
            found[heading].append(line)
    return found


def named(lines: list[str]) -> list[str]:
    """Return the names of entries; deeper lines continue the entry above."""
    matches = [ENTRY.match(line) for n, line in enumerate(lines) if n == 0 or not line.startswith(" " * 8)]
    assert all(matches), lines
    return [match[1] for match in matches if match]


def arguments(name: str) -> set[str]:
    """Return the arguments of a function, or the fields of a class and its constructor's arguments."""
    value = PUBLIC[name]
    function = inspect.unwrap(vars(value).get("__init__", value) if isinstance(value, type) else value)
    code = getattr(function, "__code__", None)
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    return {*fields, *getattr(value, "_fields", ()), *(code.co_varnames if code else ())}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with the examples' files, in a process without a policy."""
    models = ROOT / "examples" / "models"
    shutil.copy(models / "digits_mlp.onnx", tmp_path / "model.onnx")
    with np.load(models / "digits_test.npz") as digits:
        np.savez(tmp_path / "batches.npz", image=digits["x"][:64])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setattr(policies, "state", policies.ProcessSettings())
    return tmp_path


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_runs(name: str, folder: Path) -> None:
    for package in re.findall(r">>> (?:import|from) (torch|transformers|keras)\b", docs(name)):
        pytest.importorskip(package)
        pytest.importorskip("onnxscript")  # needed by torch's exporter
        warnings.simplefilter("ignore")  # from the exporter
    test = doctest.DocTestParser().get_doctest(docs(name), {}, name, name, 0)
    output: list[str] = []
    outcome = doctest.DocTestRunner().run(test, out=output.append)
    assert outcome.attempted
    assert not outcome.failed, "".join(output)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_documents_its_result_with_an_example(name: str) -> None:
    found = sections(name)
    returned = inspect.signature(PUBLIC[name]).return_annotation
    assert ("Returns" in found) == (returned not in (None, "None"))
    assert any(line.strip().startswith(">>>") for line in found["Example"])


@pytest.mark.parametrize("name", METHODS)
def test_a_public_method_documents_its_result(name: str) -> None:
    returned = inspect.signature(PUBLIC[name]).return_annotation
    assert returned in (None, "None") or re.search(r"\b([Rr]eturn|Yield|True)\b", docs(name))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_lists_exactly_the_arguments_and_errors(name: str) -> None:
    assert docs(name).partition("\n")[0].endswith((".", "`", ")"))
    found = sections(name)
    headings = [heading for heading in found if heading in SECTIONS]
    assert headings == sorted(headings, key=SECTIONS.index)
    listed = named(found.get("Args", []) + found.get("Attributes", []))
    assert {argument.lstrip("*") for argument in listed} <= arguments(name)
    raised = named(found.get("Raises", []))
    assert all(error in ERRORS or hasattr(builtins, error) for error in raised)
    assert set(re.findall(r"\b[A-Z]\w+Error\b", docs(name))) & ERRORS <= {name, *raised}
