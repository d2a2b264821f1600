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
    ("first", "op_types"),
    [
        (versions.FIRST_CLIP_WITH_INPUTS, ["Clip"]),
        (versions.FIRST_PAD_WITH_INPUTS, ["Pad"]),
        (versions.FIRST_RESIZE_WITH_REGION, ["Resize"]),
        (versions.FIRST_AXES_INPUT, ["Squeeze", "Unsqueeze", "Split", "ReduceSum"]),
        (versions.FIRST_REDUCTION_AXES_INPUT, ["ReduceMax", "ReduceMean", "ReduceL2", "ReduceProd"]),
    ],
)
def test_inputs_come_with_their_opset(first: int, op_types: list[str]) -> None:
    assert all(inputs(op_type, first) > inputs(op_type, first - 1) for op_type in op_types)


@pytest.mark.parametrize(
    ("first", "op_type", "attribute"),
    [
        (versions.FIRST_ALLOWZERO, "Reshape", "allowzero"),
        (versions.FIRST_SCATTER_ADD, "ScatterND", "reduction"),
        (versions.FIRST_TRAINING_MODE["BatchNormalization"], "BatchNormalization", "training_mode"),
    ],
)
def test_attributes_come_with_their_opset(first: int, op_type: str, attribute: str) -> None:
    at, before = (onnx.defs.get_schema(op_type, opset, "").attributes for opset in (first, first - 1))
    assert attribute in at and attribute not in before


@pytest.mark.parametrize(("op_type", "first"), [("Where", versions.FIRST_WHERE), *versions.FIRST_FUSED.items()])
def test_operators_come_with_their_opset(op_type: str, first: int) -> None:
    assert onnx.defs.get_schema(op_type, first, "").since_version == first


@pytest.mark.parametrize(
    ("op_type", "opset"), [(op_type, opset) for op_type, opsets in versions.MEANING_CHANGES.items() for opset in opsets]
)
def test_a_change_of_meaning_is_a_new_version(op_type: str, opset: int) -> None:
    assert onnx.defs.get_schema(op_type, opset, "").since_version == opset


def test_casts_come_with_their_opset() -> None:
    types = onnx.defs.get_schema("Cast", versions.FIRST_BFLOAT16_CAST, "").type_constraints[1].allowed_type_strs
    before = onnx.defs.get_schema("Cast", versions.FIRST_BFLOAT16_CAST - 1, "").type_constraints[1].allowed_type_strs
    assert "tensor(bfloat16)" in types and "tensor(bfloat16)" not in before
    words, codes = (
        onnx.defs.get_schema("Cast", opset, "").attributes["to"].type
        for opset in (versions.FIRST_CAST_BY_CODE - 1, versions.FIRST_CAST_BY_CODE)
    )
    assert (words, codes) == (onnx.defs.OpSchema.AttrType.STRING, onnx.defs.OpSchema.AttrType.INT)


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
        *((first, [op_type]) for op_type, first in versions.FIRST_TRAINING_MODE.items()),
        *((first, [op_type]) for op_type, first in versions.FIRST_STASHED.items()),
    ],
)
def test_an_opset_that_changes_an_operator_is_one_of_its_versions(first: int, op_types: list[str]) -> None:
    assert {onnx.defs.get_schema(op_type, first, "").since_version for op_type in op_types} == {first}
