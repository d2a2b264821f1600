"""Documented limits of runtimes whose kernels cannot be listed here: types, opsets, operators, with their sources.

Statements of a page hold for the release that it names. None was found by running these runtimes;
docs/reference/targets.md says which of them ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_rewrite.dtypes import DType


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a runtime.

    `runtime`: its name in messages. `low`: the low types that it computes in. `opset`: the newest ai.onnx opset that
    it reads; None if no page says. `absent`: ai.onnx operators that it lacks. `without`: operators that it has in
    float32, and not in the given low type. `source`: the page.
    """

    runtime: str
    low: frozenset[DType]
    opset: int | None
    source: str
    absent: frozenset[str] = frozenset()
    without: Mapping[DType, frozenset[str]] = field(default_factory=dict)

    def refusal(self, op_type: str, dtype: DType) -> str | None:
        """Return why an ai.onnx operator has no kernel in a low type; None if no limit of it is known."""
        if op_type in self.absent:
            return f"{self.runtime} has no {op_type}"
        if op_type in self.without.get(dtype, ()):
            return f"{self.runtime} has no {op_type} in {dtype.spelling}"
        return None


_HALF, _BRAIN = DType.FLOAT16, DType.BFLOAT16
_ORT_DOCS = "https://onnxruntime.ai/docs/execution-providers"

_TENSORRT_LACKS = """
AffineGrid Bernoulli CenterCropPad Col2Im Compress ConcatFromSequence DFT Det DynamicQuantizeLinear
ImageDecoder MatMulInteger ConvInteger MaxRoiPool MaxUnpool MelWeightMatrix Multinomial
NegativeLogLikelihoodLoss Optional OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul SequenceAt
SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap
SoftmaxCrossEntropyLoss SplitToSequence Unique
"""
_TENSORRT_LACKS_IN_BFLOAT16 = """
BlackmanWindow DeformConv GridSample HammingWindow HannWindow Mish NonMaxSuppression NonZero RoiAlign STFT
"""

LIMITS: Mapping[str, Limits] = {
    "tensorrt": Limits(
        "TensorRT",
        frozenset({_HALF, _BRAIN}),
        24,
        "https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md (TensorRT 10.15)",
        absent=frozenset(_TENSORRT_LACKS.split()),
        without={_HALF: frozenset({"STFT"}), _BRAIN: frozenset(_TENSORRT_LACKS_IN_BFLOAT16.split())},
    ),
    "directml": Limits(
        "DirectML",
        frozenset({_HALF}),
        20,
        f"{_ORT_DOCS}/DirectML-ExecutionProvider (opset 20 and below)",
    ),
    "openvino": Limits(
        "OpenVINO",
        frozenset({_HALF, _BRAIN}),
        None,
        "https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference/precision-control.html",
    ),
    "coreml": Limits(
        "Core ML",
        frozenset({_HALF}),
        None,
        f"{_ORT_DOCS}/CoreML-ExecutionProvider; https://apple.github.io/coremltools/docs-guides/source/typed-execution.html",
    ),
    "qnn": Limits(
        "QNN",
        frozenset({_HALF}),
        None,
        f"{_ORT_DOCS}/QNN-ExecutionProvider",
    ),
}
"""The limits by the word of the target."""
