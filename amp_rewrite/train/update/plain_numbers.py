"""Numbers of users as Python's own: counts, and the fields of optimizers, parameter groups and schedules."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral
from typing import Any

import numpy as np

from amp_rewrite.errors import TrainingError


def whole_number(name: str, value: object, least: int) -> int:
    """Return a count of Python or numpy as an int. TrainingError unless it is whole and at least so much."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise TrainingError(f"{name} is {value!r}; use a whole number ≥ {least}")
    return int(value)


def settle(record: Any) -> None:
    """Turn numpy's numbers among the fields of a frozen dataclass into Python's, which JSON can hold."""
    for part in fields(record):
        value = getattr(record, part.name)
        if isinstance(value, np.generic):
            object.__setattr__(record, part.name, value.item())
