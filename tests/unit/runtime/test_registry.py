"""Kernels of a registry: which types of a schema their parameters constrain."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from amp_rewrite.runtime.registry import OPEN, Formals, resolved

ADD = Formals({"A": "T", "B": "T", "C": "T"}, frozenset({"T"}))
CAST = Formals({"input": "T1", "output": "T2"}, frozenset({"T1", "T2"}))
SHAPE = Formals({"data": "T", "size": "tensor(int64)"}, frozenset({"T"}))
SCHEMAS: Mapping[str, Mapping[int, Formals]] = {
    "ai.onnx::Op": {1: ADD, 7: CAST, 13: SHAPE, 15: ADD},
}
ANY = ["tensor(float)"]


@pytest.mark.parametrize(
    ("first", "last", "names", "constraints"),
    [
        (1, 6, "T", "T"),
        (1, 7, "T", None),  # schema 7 has another variable
        (7, 12, "T1 T2", "T1 T2"),
        (7, OPEN, "T1", "T1"),  # an open range is that of the first version
        (13, 14, "T", "T"),
        (13, 15, "T", "T"),
        (13, 13, "T size", None),  # int64 is not admitted
        (2, 6, "T", None),  # no version of the schema
        (2, OPEN, "T", None),
    ],
)
def test_parameters_are_variables_of_every_schema_in_range(
    first: int, last: int, names: str, constraints: str | None
) -> None:
    types = dict.fromkeys(names.split(), ANY)
    if constraints is None:
        with pytest.raises(ValueError, match=rf"^ai\.onnx::Op {first}\.\.{last}: "):
            resolved("ai.onnx::Op", first, last, types, SCHEMAS)
    else:
        assert resolved("ai.onnx::Op", first, last, types, SCHEMAS) == dict.fromkeys(constraints.split(), ANY)


def test_a_parameter_of_fixed_type_is_no_constraint_if_it_admits_that() -> None:
    types = {"T": ANY, "size": ["tensor(int64)"]}
    assert resolved("ai.onnx::Op", 13, 14, types, SCHEMAS) == {"T": ANY}
