"""Facts about opsets: each is a version of the operator that it names."""

import onnx.defs
import onnx.helper
import pytest

from amp_rewrite.ir import versions


@pytest.mark.parametrize(
    ("op_type", "opset"), [(op_type, opset) for op_type, opsets in versions.MEANING_CHANGES.items() for opset in opsets]
)
def test_a_change_of_meaning_is_a_new_version(op_type: str, opset: int) -> None:
    assert onnx.defs.get_schema(op_type, opset, "").since_version == opset


@pytest.mark.parametrize(
    ("first", "op_types"),
    [
        (versions.FIRST_CAST_BY_CODE, ["Cast"]),
        (versions.FIRST_UNBATCHED_SCAN, ["Scan"]),
        (versions.FIRST_INFERENCE_BATCH_NORM, ["BatchNormalization"]),
        (versions.FIRST_CLIP_WITH_INPUTS, ["Clip"]),
        (versions.FIRST_PAD_WITH_INPUTS, ["Pad"]),
        (versions.FIRST_RESIZE_WITH_REGION, ["Resize"]),
        (versions.FIRST_AXES_INPUT, ["Squeeze", "Unsqueeze", "Split", "ReduceSum"]),
        (versions.FIRST_REDUCTION_AXES_INPUT, ["ReduceMean"]),
        (versions.FIRST_NUM_OUTPUTS, ["Split"]),
        (versions.FIRST_BFLOAT16_CAST, ["Cast"]),
        (versions.FIRST_ROW_SOFTMAX, ["Softmax", "LogSoftmax"]),
        (versions.FIRST_LOW_SCALES, ["QuantizeLinear", "DequantizeLinear"]),
        (versions.FIRST_ALLOWZERO, ["Reshape"]),
        (versions.FIRST_SCATTER_ADD, ["ScatterElements", "ScatterND"]),
        *((first, [op_type]) for op_type, first in versions.FIRST_STASHED.items()),
    ],
)
def test_an_opset_that_changes_an_operator_is_one_of_its_versions(first: int, op_types: list[str]) -> None:
    assert {onnx.defs.get_schema(op_type, first, "").since_version for op_type in op_types} == {first}
