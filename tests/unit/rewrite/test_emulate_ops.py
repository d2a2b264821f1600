"""The emulation of each op on onnx's own cases: the float32 kernel's result on rounded inputs, rounded once.

This is tested in float16 and bfloat16, with overflow and subnormals, with and without optimizations.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import version

import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.settings.list_entry import Color, Entry
from amp_rewrite.settings.op_lists import load_lists
from support.objections import refusals, session
from support.one_op import Case, cases, fed, holds_low_values, largest_distance, lowered, widened
from support.rounded_once import rounded_once

# Factors of the inputs, for overflowing results and for subnormal inputs and results.
FACTORS = {
    DType.FLOAT16: {"plain": 1.0, "overflow": 3e4, "subnormal": 1e-6},
    DType.BFLOAT16: {"plain": 1.0, "overflow": 2e38, "subnormal": 1e-39},
}
pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in version("onnx").split(".")[:2]) < (1, 23),
    reason="the lists below were collected with the cases of onnx 1.23 and onnxruntime 1.31",
)

NOT_COMPARED = {"CausalConvWithState", "LinearAttention", "SwiGLU"}
NOT_COMPARED |= {"GlobalLpPool", "Scatter", "SimplifiedLayerNormalization"}
"""Ops of opset 27, which onnxruntime does not open, and ops without an onnx case."""
# Tested in chains, in `test_emulate.py`.
CHAINED = {"ConcatFromSequence", *(f"Sequence{name}" for name in ("At", "Construct", "Empty", "Erase", "Insert"))}
CHAINED |= {"SequenceLength"}
LOW = (DType.FLOAT16, DType.BFLOAT16)
NO_LIST = ("AffineGrid", "BlackmanWindow", "Cast", "Constant", "Cos", "DequantizeLinear", "EyeLike", "GridSample")
NO_LIST += ("HammingWindow", "HannWindow", "LRN", "MelWeightMatrix", "Mod", "OptionalGetElement", "QLinearMatMul")
NO_LIST += ("OptionalHasElement", "QuantizeLinear", "Sin", "Unique", "Upsample")


def listed() -> list[str]:
    """Return the ai.onnx ops on the list for either type, and some unlisted ones."""
    keys = {key for low in LOW for key, entries in load_lists(low).entries.items() if _colored(entries)}
    return sorted({op_type for domain, op_type in keys if domain == ""} | set(NO_LIST))


def _colored(entries: Sequence[Entry]) -> bool:
    return any(entry.color is not Color.UNLISTED for entry in entries)


def objections(case: Case, low: DType) -> Iterator[str]:
    """Yield one per kind of input, "" for no objection; nothing if the case cannot be lowered, or run in float32."""
    try:
        low_case = lowered(case, low)
        original = session(case.model)
    except (ModelError, *refusals()):
        return
    if low_case is None:
        return
    model, names = low_case
    twin = rounded_once(model, io="float32").proto
    fast, plain = session(twin), session(twin, "DISABLE_ALL")
    for kind, factor in FACTORS[low].items():
        wide = {name: widened(value) for name, value in fed(case, names, low, factor).items()}
        try:
            kernel = original.run(None, wide)  # type: ignore[attr-defined]
        except refusals():
            continue
        optimized, unoptimized = (one.run(None, wide) for one in (fast, plain))  # type: ignore[attr-defined]
        if not holds_low_values(optimized, model.graph.output, low):
            yield f"{case.name}, {kind}: a value is not of the low type"
        elif largest_distance(optimized, unoptimized, low):
            yield f"{case.name}, {kind}: optimized and unoptimized differ"
        elif largest_distance(optimized, kernel, low):
            yield f"{case.name}, {kind}: not the rounded result of the float32 kernel"
        else:
            yield ""


def admits(case: Case, low: DType) -> bool:
    try:
        return lowered(case, low) is not None
    except ModelError:
        return False


@pytest.mark.parametrize("low", LOW, ids=lambda low: low.spelling)
@pytest.mark.parametrize("op_type", [op for op in listed() if op not in CHAINED | NOT_COMPARED])
def test_an_op_gives_the_rounded_result_of_its_float32_kernel(op_type: str, low: DType) -> None:
    of_op = [case for case in cases() if case.op_type == op_type]
    raised = [objection for case in of_op for objection in objections(case, low)]
    assert raised or (of_op and not any(admits(case, low) for case in of_op))
    assert list(filter(None, raised)) == []


def test_an_extra_rounding_is_noticed() -> None:
    ours, theirs = np.float32([1.0, 2.0]), np.float16([1.0, 2.002])
    assert largest_distance([ours], [theirs], DType.FLOAT16) == 1
    assert largest_distance([np.float32([np.inf])], [np.float16([65504])], DType.FLOAT16) == 1
    assert largest_distance([np.float32([np.nan])], [np.float16([0])], DType.FLOAT16) == np.inf
    assert largest_distance([np.float32([1e-4, 1.0])], [np.float16([2e-4, 1.0])], DType.FLOAT16, scaled=True) < 1
    assert largest_distance([ours], [], DType.FLOAT16) == np.inf
