"""Schemas: type variables of inputs and outputs, and opsets at which operators changed."""

import onnx.defs
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
def test_a_slot_has_the_variable_of_its_parameter(
    kind: str, inputs: list[str | None], outputs: list[str | None]
) -> None:
    known = signature("", kind, 21)
    assert known is not None
    assert [known.input_variable(slot) for slot in range(len(inputs))] == inputs
    assert [known.output_variable(slot) for slot in range(len(outputs))] == outputs


def test_type_variables_are_linked_if_the_schema_has_containers_of_each_type() -> None:
    linked: dict[tuple[str, str], dict[str, str]] = {}
    for schema in (schema for schema in onnx.defs.get_all_schemas() if not schema.domain):
        allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
        for outer, types in allowed.items():
            for inner, bare in allowed.items():
                for box in ("seq(", "optional("):
                    if {name for name in types if name.startswith(box)} == {f"{box}{name})" for name in bare}:
                        linked["", schema.name] = {outer: inner}
    assert linked == _LINKED


@pytest.mark.parametrize(
    ("op_type", "opset"), [(op_type, opset) for op_type, opsets in versions.MEANING_CHANGES.items() for opset in opsets]
)
def test_a_change_of_meaning_is_a_new_version(op_type: str, opset: int) -> None:
    assert onnx.defs.get_schema(op_type, opset, "").since_version == opset
