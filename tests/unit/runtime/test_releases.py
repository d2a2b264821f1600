"""Kernel tables by release: the shipped ones, those of files, and releases without one."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from amp_rewrite.errors import PolicyError
from amp_rewrite.runtime.kernels import (
    installed_release,
    known_release,
    load_kernels,
    read_kernels,
    release_number,
    releases,
)

F16, F32 = "tensor(float16)", "tensor(float)"
CUDA = "CUDAExecutionProvider"


def test_there_is_a_table_of_each_minor_release_since_1_20() -> None:
    minor = sorted({release_number(release)[:2] for release in releases()})
    assert minor == [(1, number) for number in range(20, minor[-1][1] + 1)]
    assert minor[-1] >= (1, 31)


@pytest.mark.parametrize(
    ("asked", "served"),
    [("1.22", "1.22.0"), ("1.20", "1.20.2"), ("1.20.1", "1.20.0"), ("1.24.4", "1.24.4"), ("1.28.3", "1.28.0")],
)
def test_a_release_is_served_by_its_table_or_the_one_before_it(asked: str, served: str) -> None:
    assert known_release(asked) == served


@pytest.mark.parametrize(
    ("release", "words"), [("1.19.2", "tables begin at 1.20.0"), ("0.9", "no kernel table"), ("new", "not a release")]
)
def test_a_release_without_any_table_says_what_to_do(release: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        known_release(release)


@pytest.mark.parametrize(
    ("release", "limits", "attention", "rms_norm"),
    [
        ("1.20.0", (21, 10), False, False),
        ("1.22.0", (22, 10), False, False),
        ("1.23.2", (23, 11), False, True),
        ("1.24.4", (25, 13), False, True),
        ("1.25.0", (26, 13), True, True),
    ],
)
def test_tables_tell_releases_apart(release: str, limits: tuple[int, int], attention: bool, rms_norm: bool) -> None:
    table = load_kernels(release)
    assert table.runtime == f"onnxruntime-gpu {release}"
    assert (table.opset, table.ir) == limits
    assert table.runs("", "Attention", 23, {"T1": F16, "T2": F16}) is attention
    assert table.runs("", "RMSNormalization", 23, {"T": F16, "V": F16}) is rms_norm
    assert table.runs("", "MatMul", 13, {"T": F16})


def test_an_older_release_lacks_operators_and_attributes_of_onnxruntime() -> None:
    old, new = load_kernels("1.20.0"), load_kernels()
    assert old.contrib_refusal("FusedMatMul", 2, 1, ["alpha"]) is None
    assert old.contrib is not None and new.contrib is not None
    (name, *_) = sorted(set(new.contrib) - set(old.contrib))
    assert old.contrib_refusal(name, 1, 1, []) == f"onnxruntime-gpu 1.20.0 has no com.microsoft.{name}"
    assert new.contrib_refusal(name, 1, 1, []) is None
    refusal = old.contrib_refusal("FusedMatMul", 2, 1, ["novel"])
    assert refusal == "FusedMatMul of onnxruntime-gpu 1.20.0 has no attribute 'novel'"
    assert old.contrib_refusal("FusedMatMul", 9, 1, []) == "FusedMatMul of onnxruntime-gpu 1.20.0 has 2 inputs, not 9"


# -- the installed release -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packages", "release"),
    [
        ({"onnxruntime-gpu": "1.22.0"}, "1.22.0"),
        ({"onnxruntime": "1.23.2"}, "1.23.2"),
        ({"onnxruntime-gpu": "1.24.1", "onnxruntime": "1.20.0"}, "1.24.1"),
        ({"onnxruntime-gpu": "1.19.0", "onnxruntime": "1.21.0"}, "1.21.0"),
        ({"onnxruntime": "1.19.2"}, ""),
        ({}, ""),
    ],
)
def test_the_installed_release_is_that_of_the_gpu_package_first(
    packages: dict[str, str], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in packages:
            raise metadata.PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(metadata, "version", version)
    assert installed_release.__wrapped__() == release


# -- files ---------------------------------------------------------------------------------------------


def kernel(op: str, versions: list[int], provider: str = CUDA, **types: list[str]) -> dict[str, Any]:
    return {"provider": provider, "domain": "ai.onnx", "op": op, "versions": versions, "types": types}


def dump(*kernels: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"runtime": "onnxruntime-gpu 1.33.0", "kernels": list(kernels), **more}


def saved(folder: Path, text: Any) -> Path:
    file = folder / "registry.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return file


def test_a_dump_is_a_table(tmp_path: Path) -> None:
    rows = [
        kernel("Relu", [14, 2**31 - 1], T=[F32]),
        kernel("Relu", [14, 2**31 - 1], T=[F16]),
        kernel("Relu", [6, 13], T=[F32]),
        kernel("Tan", [7, 21], provider="CPUExecutionProvider", T=[F32]),
    ]
    table = read_kernels(saved(tmp_path, dump(*rows, opset=27, ir=14)))
    assert (table.runtime, table.opset, table.ir) == ("onnxruntime-gpu 1.33.0", 27, 14)
    assert table.runs("", "Relu", 14, {"T": F16}) and table.runs("", "Relu", 13, {"T": F32})
    assert not table.runs("", "Relu", 13, {"T": F16})
    assert table.refusal("", "Tan", 7, {"T": F32}) == "no cuda kernel for Tan"


def test_a_dump_with_schemas_resolves_names_by_them(tmp_path: Path) -> None:
    schema = {
        "domain": "ai.onnx",
        "op": "Novel",
        "since": 27,
        "inputs": [["x", "T", "Single"], ["size", "tensor(int64)", "Single"]],
        "outputs": [["y", "T", "Single"]],
        "types": {"T": [F16, F32]},
        "attributes": [],
    }
    rows = [kernel("Novel", [27, 2**31 - 1], T=[F16], size=["tensor(int64)"])]
    table = read_kernels(saved(tmp_path, dump(*rows, opset=27, schemas=[schema])))
    assert table.runs("", "Novel", 27, {"T": F16})
    assert not table.runs("", "Novel", 27, {"T": F32})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "not a dump of a kernel registry"),
        ({"kernels": []}, "not a dump of a kernel registry"),
        (dump(), "has no kernel of the CUDAExecutionProvider"),
        (dump(kernel("Relu", [14, 2**31 - 1], Q=[F16])), "parameter 'Q' is not in schema 14"),
        (dump(kernel("Relu", [14], T=[F16])), "not a dump of a kernel registry"),
        (dump(kernel("Unheard", [1, 2], T=[F16])), "no schema has a version in that range"),
    ],
)
def test_another_file_is_refused_with_what_is_wrong(text: Any, words: str, tmp_path: Path) -> None:
    file = saved(tmp_path, text)
    with pytest.raises(PolicyError, match=words) as error:
        read_kernels(file)
    assert str(file) in str(error.value)
