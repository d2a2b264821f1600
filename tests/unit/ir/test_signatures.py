"""Type variables of inputs and outputs: those of the formal ones, numbered in lists of mixed types."""

from __future__ import annotations

import pytest

from amp_rewrite.ir.schema import signature


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs"),
    [
        ("Add", ["T", "T", None], ["T", None]),
        ("Cast", ["T1", None], ["T2", None]),
        ("Slice", ["T", "Tind", "Tind", "Tind", "Tind", None], ["T", None]),
        ("Concat", ["T", "T", "T"], ["T", None]),
        ("Split", ["T", "tensor(int64)", None], ["T", "T", "T"]),
        ("Loop", ["I", "B", "V[0]", "V[1]"], ["V[0]", "V[1]"]),
        ("If", ["B", None], ["V[0]", "V[1]"]),
    ],
)
def test_each_slot_has_the_variable_of_its_formal_one(
    kind: str, inputs: list[str | None], outputs: list[str | None]
) -> None:
    known = signature("", kind, 21)
    assert known is not None
    assert [known.input_variable(slot) for slot in range(len(inputs))] == inputs
    assert [known.output_variable(slot) for slot in range(len(outputs))] == outputs
