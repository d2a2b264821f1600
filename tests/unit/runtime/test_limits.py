"""Documented limits of runtimes: their low types and opsets, and what they lack in which."""

from __future__ import annotations

import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.runtime.kernels import LIMITS

HALF, BRAIN = DType.FLOAT16, DType.BFLOAT16


def test_each_runtime_computes_in_float16_and_two_in_bfloat16() -> None:
    low = {word: limits.low for word, limits in LIMITS.items()}
    assert low == {
        "tensorrt": {HALF, BRAIN},
        "directml": {HALF},
        "openvino": {HALF, BRAIN},
        "coreml": {HALF},
        "qnn": {HALF},
    }
    assert {word: limits.opset for word, limits in LIMITS.items() if limits.opset} == {"tensorrt": 24, "directml": 20}


@pytest.mark.parametrize(
    ("op_type", "half", "brain"),
    [
        ("Unique", "has no Unique", "has no Unique"),
        ("SequenceAt", "has no SequenceAt", "has no SequenceAt"),
        ("STFT", "has no STFT in float16", "has no STFT in bfloat16"),
        ("RoiAlign", None, "has no RoiAlign in bfloat16"),
        ("MatMul", None, None),
    ],
)
def test_what_tensorrt_lacks_in_a_type_is_told(op_type: str, half: str | None, brain: str | None) -> None:
    told = [LIMITS["tensorrt"].refusal(op_type, dtype) for dtype in (HALF, BRAIN)]
    assert told == [why and f"TensorRT {why}" for why in (half, brain)]
    assert LIMITS["qnn"].refusal(op_type, HALF) is None
