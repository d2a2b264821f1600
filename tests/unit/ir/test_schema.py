"""Schemas: type variables of inputs and outputs, and opsets at which operators changed."""

from __future__ import annotations

import onnx.defs
import onnx.helper
import pytest

from amp_rewrite.ir import versions
from amp_rewrite.ir.schema import _LINKED, signature


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs"),
    [
        ("Add", ["T", "T", None], ["T", None]),
        ("Slice", ["T", "Tind", "Tind", "Tind", "Tind", None], ["T", None]),
        ("Concat", ["T", "T", "T"], ["T", None]),
        ("Split", ["T", "tensor(int64)", None], ["T", "T", "T"]),
        ("Loop", ["I", "B", "V[0]", "V[1]"], ["V[0]", "V[1]"]),
        ("If", ["B", None], ["V[0]", "V[1]"]),
    ],
)
def test_a_slot_has_the_variable_of_its_formal(kind: str, inputs: list[str | None], outputs: list[str | None]) -> None:
    known = signature("", kind, 21)
    assert known is not None
    assert [known.input_variable(slot) for slot in range(len(inputs))] == inputs
    assert [known.output_variable(slot) for slot in range(len(outputs))] == outputs


def test_variables_are_linked_where_the_schema_has_a_container_of_each_type() -> None:
    linked: dict[tuple[str, str], dict[str, str]] = {}
    for schema in (schema for schema in onnx.defs.get_all_schemas() if not schema.domain):
        allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
        for outer, held in allowed.items():
            for inner, bare in allowed.items():
                for box in ("seq(", "optional("):
                    if {name for name in held if name.startswith(box)} == {f"{box}{name})" for name in bare}:
                        linked["", schema.name] = {outer: inner}
    assert linked == _LINKED


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
