"""The emulation, op by op, against onnx.reference: in float16 and bfloat16, with overflow and subnormals.

Three judges. `low`: the reference evaluates the low model in numpy's own float16 or ml_dtypes' bfloat16. `wide`: it
evaluates the float32 model on the rounded inputs, and the result is rounded. `kernel`: onnxruntime does the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import RuntimeImplementationError, RuntimeTypeError

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.settings.list_entry import Color, Entry
from amp_rewrite.settings.op_lists import load_lists
from support.objections import refusals
from support.one_op import Case, apart, cases, fed, holds_low_values, lowered, widened
from support.rounded_once import rounded_once

# By what the inputs are multiplied: results overflow; inputs and results are subnormal.
FACTORS = {
    DType.FLOAT16: {"plain": 1.0, "overflow": 3e4, "subnormal": 1e-6},
    DType.BFLOAT16: {"plain": 1.0, "overflow": 2e38, "subnormal": 1e-39},
}
pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in version("onnx").split(".")[:2]) < (1, 23),
    reason="what is listed below was found with the cases of onnx 1.23 and onnxruntime 1.31",
)

PLAIN, OVERFLOW, SUBNORMAL = "plain", "overflow", "subnormal"

# Functions of which float32 libraries differ in the last bit, and sums of products in another order: one step.
CLOSE = {
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Conv", "ConvTranspose", "Cos", "Cosh"),
    *("DeformConv", "Einsum", "Elu", "Erf", "Exp", "Log", "Pow", "Sin", "Sinh", "Tan", "Tanh"),
}
# The reference rounds to the low type inside of these too, or adds up in it; the emulation rounds the result only.
# Steps at the largest magnitude of the result, on plain inputs. On others, where what overflows inside is inf in one
# and finite in the other, only `wide` judges.
INSIDE: dict[str, float] = {
    **dict.fromkeys(
        ("AffineGrid", "BatchNormalization", "Col2Im", "DFT", "Det", "Gelu", "Gemm", "GlobalAveragePool"), 1
    ),
    **dict.fromkeys(
        ("GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "InstanceNormalization", "LSTM"), 1
    ),
    **dict.fromkeys(("LeakyRelu", "LogSoftmax", "LpNormalization", "LpPool", "MatMul", "Mean", "Mish", "RNN"), 1),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "RMSNormalization", "ReduceL1", "ReduceL2", "ReduceLogSum"), 1),
    **dict.fromkeys(("ReduceLogSumExp", "ReduceMean", "ReduceSum", "ReduceSumSquare", "RotaryEmbedding", "STFT"), 1),
    **dict.fromkeys(("Selu", "Sigmoid", "SoftmaxCrossEntropyLoss", "Softplus", "Softsign", "Sum", "Swish"), 1),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"), 2),
    **dict.fromkeys(("Attention", "LayerNormalization", "ReduceProd", "Softmax"), 2),
    **dict.fromkeys(("AveragePool", "CumProd", "CumSum"), 3),
    "GRU": 6,
    "QuantizeLinear": np.inf,  # a quotient that is rounded before it is rounded to a whole number
}
# Where onnxruntime's and the reference's float32 results differ by themselves: infinities meet in another order, or
# an exponential of a subnormal is 0. In bfloat16 what overflows overflows float32 too.
KERNEL = {
    **dict.fromkeys(
        ("AffineGrid", "AveragePool", "BatchNormalization", "DFT", "GRU", "GridSample", "LRN"), (OVERFLOW,)
    ),
    **dict.fromkeys(("InstanceNormalization", "LayerNormalization", "LogSoftmax", "Resize", "STFT"), (OVERFLOW,)),
    **dict.fromkeys(("RotaryEmbedding", "SoftmaxCrossEntropyLoss"), (OVERFLOW,)),
    **dict.fromkeys(("Elu", "QLinearMatMul", "Selu"), (SUBNORMAL,)),
    "RNN": (OVERFLOW, SUBNORMAL),
    "QuantizeLinear": (PLAIN, OVERFLOW),  # the reference wraps around instead of saturating
    "MaxUnpool": (PLAIN, OVERFLOW, SUBNORMAL),  # the given output_shape is read in another way
}
NOT_COMPARED = {
    **dict.fromkeys(
        ("CausalConvWithState", "LinearAttention", "SwiGLU"), "of opset 27, which onnxruntime does not open"
    ),
    **dict.fromkeys(("GlobalLpPool", "Scatter", "SimplifiedLayerNormalization"), "the reference has no such op"),
    "MeanVarianceNormalization": "the reference mixes float32 with its low types and stops",
}
# In `test_emulate.py`, as a chain of them is needed.
SEQUENCES = frozenset(f"Sequence{name}" for name in ("At", "Construct", "Empty", "Erase", "Insert", "Length"))
CHAINED = SEQUENCES | {"ConcatFromSequence"}
LOW = (DType.FLOAT16, DType.BFLOAT16)
NO_LIST = ("AffineGrid", "BlackmanWindow", "Cast", "Constant", "Cos", "DequantizeLinear", "EyeLike", "GridSample")
NO_LIST += ("HammingWindow", "HannWindow", "LRN", "MelWeightMatrix", "Mod", "OptionalGetElement", "QLinearMatMul")
NO_LIST += ("OptionalHasElement", "QuantizeLinear", "Sin", "Unique", "Upsample")

# The reference itself stops on these.
BROKEN = {("Det", DType.FLOAT16)}
BROKEN_REFERENCE = (
    AttributeError,
    IndexError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    RuntimeImplementationError,
    RuntimeTypeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Trial:
    """What the emulation and the three judges gave for one case on one kind of input."""

    case: str
    kind: str
    found: Sequence[object]
    unoptimized: Sequence[object]
    low: Sequence[object]
    wide: Sequence[object]
    kernel: Sequence[object]
    outputs: Sequence[onnx.ValueInfoProto]


def session(model: onnx.ModelProto, level: str = "ORT_ENABLE_ALL") -> object:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def trials(case: Case, low: DType) -> Iterator[Trial]:
    """One for each kind of input; none if the case cannot be lowered, fed, run in float32, or run by the reference."""
    try:
        made = lowered(case, low)
        original = session(case.model)
    except (ModelError, *refusals()):
        return
    if made is None:
        return
    model, names = made
    twin = rounded_once(model, io="float32").proto
    fast, plain = session(twin), session(twin, "ORT_DISABLE_ALL")
    for kind, factor in FACTORS[low].items():
        feeds = fed(case, names, low, factor)
        wide = {name: widened(value) for name, value in feeds.items()}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # overflow is on purpose
            try:
                kernel = original.run(None, wide)  # type: ignore[attr-defined]
                low_outputs = ReferenceEvaluator(model).run(None, feeds)
                wide_outputs = ReferenceEvaluator(case.model).run(None, wide)
            except (*BROKEN_REFERENCE, *refusals()):
                continue
        found = fast.run(None, wide)  # type: ignore[attr-defined]
        unoptimized = plain.run(None, wide)  # type: ignore[attr-defined]
        yield Trial(case.name, kind, found, unoptimized, low_outputs, wide_outputs, kernel, model.graph.output)


def listed() -> list[str]:
    """The ai.onnx ops on the lists for either type, and some that are on none."""
    keys = {key for low in LOW for key, entries in load_lists(low).entries.items() if _coloured(entries)}
    return sorted({op_type for domain, op_type in keys if domain == ""} | set(NO_LIST))


def _coloured(entries: Sequence[Entry]) -> bool:
    return any(entry.color is not Color.UNLISTED for entry in entries)


def admits(case: Case, low: DType) -> bool:
    try:
        return lowered(case, low) is not None
    except ModelError:
        return False


@pytest.mark.parametrize("low", LOW, ids=lambda low: low.spelling)
@pytest.mark.parametrize("op_type", [op for op in listed() if op not in CHAINED | NOT_COMPARED.keys()])
def test_an_op_gives_what_the_reference_gives(op_type: str, low: DType) -> None:
    of_op = [case for case in cases() if case.op_type == op_type]
    found = [trial for case in of_op for trial in trials(case, low)]
    assert found or (of_op and not any(admits(case, low) for case in of_op)) or (op_type, low) in BROKEN
    assert [objection for trial in found for objection in objections_to(op_type, trial, low)] == []


def objections_to(op_type: str, trial: Trial, low: DType) -> Iterator[str]:
    where = f"{trial.case}, {trial.kind}:"
    if not holds_low_values(trial.found, trial.outputs, low):
        yield f"{where} a value is not of the low type"
    if apart(trial.found, trial.unoptimized, low):
        yield f"{where} optimized and unoptimized differ"
    if apart(trial.found, trial.kernel, low):
        yield f"{where} not the rounded result of the float32 kernel"
    if apart(trial.kernel, trial.wide, low, scaled=True) > 1:
        if trial.kind not in KERNEL.get(op_type, ()):
            yield f"{where} the float32 kernel itself is more than a step from the reference"
        return
    steps = INSIDE.get(op_type, 1 if op_type in CLOSE else 0)
    if trial.kind == PLAIN or op_type not in INSIDE:
        off = apart(trial.found, trial.low, low, scaled=op_type in INSIDE)
        if off > steps:
            yield f"{where} {off} steps from the reference, more than {steps}"


@pytest.mark.parametrize("op_type", NOT_COMPARED)
def test_an_op_that_is_not_compared_can_not_be(op_type: str) -> None:
    of_op = [case for case in cases() if case.op_type == op_type]
    assert [trial for low in LOW for case in of_op for trial in trials(case, low)] == []


def test_a_step_too_many_is_seen() -> None:
    ours, theirs = np.float32([1.0, 2.0]), np.float16([1.0, 2.002])
    assert apart([ours], [theirs], DType.FLOAT16) == 1
    assert apart([ours], [theirs.astype(np.float32)], DType.FLOAT16) == 1
    assert apart([np.float32([np.inf])], [np.float16([65504])], DType.FLOAT16) == 1
    assert apart([np.float32([np.nan])], [np.float16([0])], DType.FLOAT16) == np.inf
    assert apart([np.float32([1e-4, 1.0])], [np.float16([2e-4, 1.0])], DType.FLOAT16) == 1024
    assert apart([np.float32([1e-4, 1.0])], [np.float16([2e-4, 1.0])], DType.FLOAT16, scaled=True) < 1
    assert apart([ours], [], DType.FLOAT16) == np.inf
