"""Documented limits of runtimes whose kernels cannot be listed here: types, opsets, operators, with their sources.

They stand in `_tables/limits.json`. Statements of a page hold for the release that it names. None was found by running;
docs/reference/targets.md says which of them ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_rewrite.dtypes import DType
from amp_rewrite.runtime.kernels import stored


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a runtime.

    `runtime`: its name in messages. `low`: the low types that it computes in. `opset`: the newest ai.onnx opset that
    it reads; None if no page says. `absent`: ai.onnx operators that it lacks. `without`: operators that it has in
    float32, and not in the given low type. `source`: the page.
    """

    runtime: str
    low: frozenset[DType]
    opset: int | None
    source: str
    absent: frozenset[str] = frozenset()
    without: Mapping[DType, frozenset[str]] = field(default_factory=dict)

    def refusal(self, op_type: str, dtype: DType) -> str | None:
        """Return why an ai.onnx operator has no kernel in a low type; None if no limit of it is known."""
        if op_type in self.absent:
            return f"{self.runtime} has no {op_type}"
        if op_type in self.without.get(dtype, ()):
            return f"{self.runtime} has no {op_type} in {dtype.spelling}"
        return None


def _read(row: Mapping[str, Any]) -> Limits:
    return Limits(
        row["runtime"],
        frozenset(map(DType.parse, row["low"])),
        row["opset"],
        row["source"],
        frozenset(row.get("absent", ())),
        {DType.parse(low): frozenset(operators) for low, operators in row.get("without", {}).items()},
    )


LIMITS: Mapping[str, Limits] = {word: _read(row) for word, row in stored("limits")["limits"].items()}
"""The limits by the word of the target."""
