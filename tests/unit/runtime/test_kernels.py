"""Kernel tables: registrations, contents of the shipped tables, and limits of other runtimes."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.runtime.kernels import (
    LIMITS,
    Kernels,
    Registration,
    installed_release,
    kernels_of,
    known_release,
    load_kernels,
    release_number,
    releases,
)
from support import stub
from support.paths import ROOT

F16, BF16, F32 = "tensor(float16)", "tensor(bfloat16)", "tensor(float)"


def kernels(*registrations: Registration, aliases: dict[int, int] | None = None) -> Kernels:
    return Kernels("made up 1.0", "cuda", {"ai.onnx::Op": registrations}, {"ai.onnx::Op": aliases or {}})


def registration(since: int, last: int | None, **types: str) -> Registration:
    return Registration(since, last, {name: frozenset({allowed}) for name, allowed in types.items()})


def test_registrations_serve_their_versions_aliases_and_types_together() -> None:
    closed, opened = kernels(registration(7, 12)), kernels(registration(13, None))
    assert [version for version in range(20) if closed.has("", "Op", version)] == [7, 8, 9, 10, 11, 12]
    assert [version for version in range(20) if opened.has("", "Op", version)] == [13]
    table = kernels(registration(1, None, T=F32, U=F32), registration(1, None, T=F16, U=F16))
    both = [table.runs("", "Op", 1, {"T": t, "U": u}) for t in (F32, F16) for u in (F32, F16)]
    assert both == [True, False, False, True]
    table = kernels(registration(24, None), aliases={25: 24})
    assert [table.has("", "Op", version) for version in (23, 24, 25, 26)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("op_type", "version", "types", "runs"),
    [
        ("MaxPool", 12, {"T": F16}, True),
        ("MaxPool", 12, {"T": BF16}, False),
        ("MaxPool", 22, {"T": F32}, False),
        ("BatchNormalization", 15, {"T": F16, "T1": F16, "T2": F16}, True),
        ("BatchNormalization", 15, {"T": F16, "T1": F32, "T2": F32}, False),
        ("BatchNormalization", 15, {"T": BF16, "T1": BF16, "T2": BF16}, False),
        ("Pow", 15, {"T": F16, "T1": F32}, True),
        ("GridSample", 16, {"T1": F16, "T2": F16}, False),
        ("Conv", 11, {"T": BF16}, False),
        ("Conv", 22, {"T": BF16}, True),
        ("LayerNormalization", 17, {"T": F16, "U": F32}, True),
        ("LayerNormalization", 17, {"T": F16, "U": F16}, False),
        ("LayerNormalization", 1, {"T": F16, "U": F32, "V": F16}, True),
        ("Dropout", 13, {"T": F16}, True),
        ("Resize", 19, {"T1": F16, "T2": F32}, True),
        ("Attention", 25, {"T1": F16, "T2": F16, "U": F32}, False),
        ("ConcatFromSequence", 11, {"S": "seq(tensor(float16))"}, True),
        ("Tan", 7, {"T": F32}, False),
    ],
)
def test_the_cuda_table_answers_for_onnx_operators(
    op_type: str, version: int, types: dict[str, str], runs: bool
) -> None:
    table = load_kernels()
    assert table.runs("", op_type, version, types) is runs
    assert table.runs("ai.onnx", op_type, version, types) is runs


@pytest.mark.parametrize(
    ("domain", "op_type", "version", "to", "refusal"),
    [
        ("", "Tan", 7, F16, "no cuda kernel for Tan"),
        ("", "MaxPool", 22, F16, "no cuda kernel for MaxPool of version 22"),
        ("com.microsoft", "BiasSoftmax", 1, BF16, f"no cuda kernel for com.microsoft.BiasSoftmax with T={BF16}"),
        ("", "Conv", 11, F16, None),
    ],
)
def test_a_refusal_says_if_operator_version_or_types_are_missing(
    domain: str, op_type: str, version: int, to: str, refusal: str | None
) -> None:
    assert load_kernels().refusal(domain, op_type, version, {"T": to}) == refusal


# -- documented limits of runtimes --


@pytest.mark.parametrize(
    ("op_type", "half", "brain"),
    [("Unique", "Unique", "Unique"), ("RoiAlign", None, "RoiAlign in bfloat16")],
)
def test_ops_that_tensorrt_lacks_in_a_type_are_named(op_type: str, half: str | None, brain: str | None) -> None:
    refusals = [LIMITS["tensorrt"].refusal(op_type, dtype) for dtype in (DType.FLOAT16, DType.BFLOAT16)]
    assert refusals == [why and f"TensorRT does not support {why}" for why in (half, brain)]
    assert LIMITS["qnn"].refusal(op_type, DType.FLOAT16) is None


# -- tables by release --------------------------------------------------------------------------------


def test_each_release_since_1_20_has_a_table_or_the_one_before_it() -> None:
    minor = sorted({release_number(release)[:2] for release in releases()})
    assert minor == [(1, number) for number in range(20, minor[-1][1] + 1)]
    assert minor[-1] >= (1, 31)
    assert [*map(known_release, ("1.20", "1.20.1", "1.24.4"))] == ["1.20.2", "1.20.0", "1.24.4"]
    for release, words in (("1.19.2", "use release 1.20.0 or later"), ("new", "not a release")):
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
def test_tables_distinguish_releases(release: str, limits: tuple[int, int], attention: bool, rms_norm: bool) -> None:
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
    assert old.contrib_refusal(name, 1, 1, []) == f"onnxruntime-gpu 1.20.0 does not have com.microsoft.{name}"
    assert new.contrib_refusal(name, 1, 1, []) is None
    refusal = old.contrib_refusal("FusedMatMul", 2, 1, ["novel"])
    assert refusal == "FusedMatMul in onnxruntime-gpu 1.20.0 does not have the attribute 'novel'"
    refusal = old.contrib_refusal("FusedMatMul", 9, 1, [])
    assert refusal == "FusedMatMul in onnxruntime-gpu 1.20.0 has at most 2 inputs, not 9"


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
def test_the_gpu_packages_release_takes_precedence(
    packages: dict[str, str], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in packages:
            raise metadata.PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(metadata, "version", version)
    assert installed_release.__wrapped__() == release


@pytest.mark.stub
def test_the_shipped_table_matches_the_installed_wheel(cuda_stub: Path) -> None:
    program = (
        f"import sys, json; sys.path[:0] = {[str(ROOT), str(ROOT / 'tools')]!r};"
        " from registry import kernel_registry, table_of;"
        " print(json.dumps(table_of({'runtime': 'here 0', **kernel_registry()})))"
    )
    done = stub.on_cuda(cuda_stub, program)
    found, shipped = kernels_of(json.loads(done.stdout)), load_kernels()
    assert found.registrations == shipped.registrations
    assert (found.opset, found.ir, found.contrib) == (shipped.opset, shipped.ir, shipped.contrib)
