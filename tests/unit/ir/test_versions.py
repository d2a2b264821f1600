"""Facts about opsets and IR versions stand in `ir/versions` alone: no other module compares one with a number."""

import ast
from collections.abc import Iterator
from pathlib import Path

import onnx.defs
import onnx.helper
import pytest

import amp_rewrite
from amp_rewrite.ir import versions

PACKAGE = Path(amp_rewrite.__file__).parent
VERSIONS = ("opset", "opsets", "since", "ir_version", "current")


def compared(tree: ast.AST) -> Iterator[int]:
    """The lines that compare an opset or an IR version with a number of 2 or more."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            names = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}
            numbers = [n.value for n in (node.left, *node.comparators) if isinstance(n, ast.Constant)]
            if names.intersection(VERSIONS) and any(isinstance(n, int) and n > 1 for n in numbers):
                yield node.lineno


def test_no_module_compares_a_version_with_a_number() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in compared(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, found


@pytest.mark.parametrize(
    "text",
    ['x = view.opsets.get("", 1) < 9', "x = op.signature.since >= 11", "x = 4 > proto.ir_version"],
)
def test_a_comparison_is_seen(text: str) -> None:
    assert list(compared(ast.parse(text))) == [1]


def inputs(op_type: str, opset: int) -> int:
    return len(onnx.defs.get_schema(op_type, opset, "").inputs)


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
