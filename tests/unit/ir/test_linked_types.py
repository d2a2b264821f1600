"""Variables of an operator that name one element type twice: bare, and in a container."""

from __future__ import annotations

import onnx.defs

from amp_rewrite.ir.schema import _LINKED


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
