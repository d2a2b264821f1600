"""Kernel tables by release: the shipped ones, those of files, and releases without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from amp_rewrite.errors import PolicyError
from amp_rewrite.runtime.kernels import (
    installed_release,
    kernels_of,
    known_release,
    load_kernels,
    release_number,
    releases,
)
from support import stub
from support.paths import ROOT

F16, F32 = "tensor(float16)", "tensor(float)"


def test_there_is_a_table_of_each_minor_release_since_1_20() -> None:
    minor = sorted({release_number(release)[:2] for release in releases()})
    assert minor == [(1, number) for number in range(20, minor[-1][1] + 1)]
    assert minor[-1] >= (1, 31)


def test_a_release_is_served_by_its_table_or_the_one_before_it() -> None:
    assert [*map(known_release, ("1.20", "1.20.1", "1.24.4"))] == ["1.20.2", "1.20.0", "1.24.4"]
    for release, words in (("1.19.2", "tables begin at 1.20.0"), ("new", "not a release")):
        with pytest.raises(PolicyError, match=words):
            known_release(release)


@pytest.mark.parametrize(
    ("release", "limits", "attention", "rms_norm"),
    [
        ("1.20.0", (21, 10), False, False),
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
        ({"onnxruntime": "1.23.2"}, "1.23.2"),
        ({"onnxruntime-gpu": "1.24.1", "onnxruntime": "1.20.0"}, "1.24.1"),
        ({"onnxruntime-gpu": "1.19.0", "onnxruntime": "1.21.0"}, "1.21.0"),
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


@pytest.mark.stub
def test_the_shipped_table_is_that_of_the_installed_wheel() -> None:
    libraries, reason = stub.folder()
    if libraries is None:
        pytest.skip(reason)
    program = (
        f"import sys, json; sys.path[:0] = {[str(ROOT), str(ROOT / 'tools')]!r};"
        " from registry import kernel_registry, table_of;"
        " print(json.dumps(table_of({'runtime': 'here 0', **kernel_registry()})))"
    )
    path = os.pathsep.join(filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH"))))
    command, environment = [sys.executable, "-c", program], {**os.environ, "LD_LIBRARY_PATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    found, shipped = kernels_of(json.loads(done.stdout)), load_kernels()
    assert found.registrations == shipped.registrations
    assert (found.opset, found.ir, found.contrib) == (shipped.opset, shipped.ir, shipped.contrib)
