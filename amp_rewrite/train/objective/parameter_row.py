"""The row of a parameter in the report of a training step."""

from __future__ import annotations

import math
from dataclasses import dataclass

TRAINED, FROZEN, MERGED, FOLDED = "trained", "frozen", "merged", "constant"
"""Roles of a parameter."""


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """A parameter of a model and what becomes of it.

    Attributes:
        name: the initializer, or the parameter of the PyTorch module.
        role: "trained", "frozen", "merged" (with others, by an exporter) or "constant" (folded by an exporter).
        shape: the shape; that of the trained value.
        why: the reason.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    why: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
