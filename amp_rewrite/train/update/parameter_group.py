"""A group of parameters with a learning rate, a weight decay or a freeze of its own."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.train.update.schedules import settle

_BIAS = re.compile(r"(^|[./_])bias(:0)?$")


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings of the parameters whose names a glob matches. The first group that matches a parameter holds for it.

    Args:
        pattern: a glob on names of parameters, such as "*.bias".
        rate: factor of the learning rate.
        weight_decay: in place of the optimizer's; None keeps that.
        frozen: leave these parameters as they are.

    Raises:
        TrainingError: a setting is out of range.

    Example:
        >>> from amp_rewrite.train import AdamW, ParameterGroup
        >>> optimizer = AdamW(1e-3, groups=[ParameterGroup("head.*", rate=10.0), ParameterGroup("*", rate=0.5)])
        >>> optimizer.group_of("head.weight").rate
        10.0
    """

    pattern: str
    rate: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise TrainingError(f"the pattern of a parameter group is {self.pattern!r}; use a glob such as '*.bias'")
        if not isinstance(self.frozen, bool):
            raise TrainingError(f"frozen of parameter group {self.pattern!r} is {self.frozen!r}; use True or False")
        settle(self)
        for name in ("rate", "weight_decay"):
            value = getattr(self, name)
            real = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (real and 0 <= value < math.inf) and not (value is None and name == "weight_decay"):
                raise TrainingError(
                    f"{name} of parameter group {self.pattern!r} must be at least 0 and finite, not {value!r}"
                )

    def matches(self, name: str) -> bool:
        """Return True if the group's pattern is the name, or matches it."""
        return name == self.pattern or fnmatch.fnmatchcase(name, self.pattern)

    def get_config(self) -> dict[str, Any]:
        """Return the group as a plain dict."""
        return asdict(self)


def groups_of(groups: Iterable[ParameterGroup | Mapping[str, Any]]) -> tuple[ParameterGroup, ...]:
    """Return groups given as objects or as their configurations. TrainingError for anything that is not one."""
    try:
        return tuple(part if isinstance(part, ParameterGroup) else ParameterGroup(**part) for part in groups)
    except TypeError as cause:
        raise TrainingError(
            f"not parameter groups: {groups!r}; pass a list of ParameterGroup, such as [ParameterGroup('*.bias')]"
        ) from cause


def check_matched(groups: Sequence[ParameterGroup], names: Sequence[str]) -> None:
    """Raise TrainingError for a group that matches none of the trained parameters."""
    for group in groups:
        if not any(map(group.matches, names)):
            hint = advice(group.pattern, names, f"they are {', '.join(map(repr, names[:5]))}")
            raise TrainingError(f"parameter group {group.pattern!r} matches none of the trained parameters; {hint}")


def is_bias_or_norm(name: str, shape: Sequence[int]) -> bool:
    """Return True for biases, scales and other vectors, by shape, or by a name that ends in "bias".

    A vector has at most one dimension, or trailing dimensions of 1 for the axes of an image, as exporters write
    normalizations. A matrix stays one, also if it has a single row or column.
    """
    vector = len(shape) <= 1 or (len(shape) == 3 and all(size == 1 for size in shape[1:]))
    return vector or _BIAS.search(name) is not None
