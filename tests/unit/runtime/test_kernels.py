"""Kernel tables: what a registration serves, what the shipped tables say, and limits of other runtimes."""

from __future__ import annotations

import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.runtime.kernels import LIMITS, Kernels, Registration, load_kernels

F16, BF16, F32, F64 = "tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"
I32, I64 = "tensor(int32)", "tensor(int64)"


def kernels(*registrations: Registration, aliases: dict[int, int] | None = None) -> Kernels:
    return Kernels("made up 1.0", "cuda", {"ai.onnx::Op": registrations}, {"ai.onnx::Op": aliases or {}})


def registration(since: int, last: int | None, **types: str) -> Registration:
    return Registration(since, last, {name: frozenset({allowed}) for name, allowed in types.items()})


def test_a_closed_registration_serves_its_range_and_an_open_one_its_first_version_alone() -> None:
    closed, opened = kernels(registration(7, 12)), kernels(registration(13, None))
    assert [version for version in range(20) if closed.has("", "Op", version)] == [7, 8, 9, 10, 11, 12]
    assert [version for version in range(20) if opened.has("", "Op", version)] == [13]


def test_one_registration_must_admit_all_types_together() -> None:
    table = kernels(registration(1, None, T=F32, U=F32), registration(1, None, T=F16, U=F16))
    assert [table.runs("", "Op", 1, {"T": t, "U": u}) for t in (F32, F16) for u in (F32, F16)] == [
        True,
        False,
        False,
        True,
    ]


def test_a_version_that_the_runtime_lacks_is_read_as_its_alias() -> None:
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
def test_a_refusal_says_whether_operator_version_or_types_are_missing(
    domain: str, op_type: str, version: int, to: str, refusal: str | None
) -> None:
    assert load_kernels().refusal(domain, op_type, version, {"T": to}) == refusal


# -- documented limits of runtimes --


@pytest.mark.parametrize(
    ("op_type", "half", "brain"),
    [("Unique", "has no Unique", "has no Unique"), ("RoiAlign", None, "has no RoiAlign in bfloat16")],
)
def test_what_tensorrt_lacks_in_a_type_is_told(op_type: str, half: str | None, brain: str | None) -> None:
    told = [LIMITS["tensorrt"].refusal(op_type, dtype) for dtype in (DType.FLOAT16, DType.BFLOAT16)]
    assert told == [why and f"TensorRT {why}" for why in (half, brain)]
    assert LIMITS["qnn"].refusal(op_type, DType.FLOAT16) is None
