"""The request of a conversion: its options, read and checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from amp_rewrite.dtypes import DType
from amp_rewrite.settings.choices import Fuse, Level, Opset, Placement, Quantized, Safety, Shift, Target
from amp_rewrite.settings.option import Stated, Values
from amp_rewrite.settings.options import KEYWORDS, STATED, from_environment

if TYPE_CHECKING:
    from amp_rewrite.settings.op_lists import OpLists
    from amp_rewrite.settings.signatures import Options


class Request:
    """A conversion's options, read from keywords and environment and checked; patterns are as `convert` takes them."""

    to: DType
    lists: OpLists
    level: Level
    target: Target
    safety: Safety
    keep: tuple[str, ...]
    lower: tuple[str, ...]
    io: str | Sequence[str] | None
    kv: DType | None
    gray_follows_allow: bool | None
    quantized: Quantized
    fuse: Fuse
    opset: Opset | None
    shift: Shift
    placement: Placement
    log_path: Path | None

    def __init__(self, values: Values) -> None:
        vars(self).update(values)

    @classmethod
    def of(cls, **options: Unpack[Options]) -> Request:
        """Return the request. Raises what `convert` raises, and TypeError for an unknown keyword."""
        unknown = next((name for name in options if name not in KEYWORDS), None)
        if unknown is not None:
            raise TypeError(
                f"unexpected keyword argument {unknown!r}; the options of a conversion are {', '.join(KEYWORDS)}"
            )
        environment = from_environment(os.environ)
        log_path = environment.get("log_path")
        values: dict[str, Any] = {"log_path": None if log_path is None else Path(str(log_path))}
        for name, option in KEYWORDS.items():
            value = cast(Values, options).get(name, option.default)
            if option.environment and (value is None or (isinstance(value, (list, tuple)) and not value)):
                value = environment.get(name, option.unset)
            values[name] = option.read(option.default if value is None else value, values)
        return cls(values)

    @property
    def safe(self) -> bool:
        """True if this project's rules hold on top of TensorFlow's."""
        return self.safety is Safety.DEFAULT

    @property
    def settings(self) -> dict[str, str]:
        """Spellings of the options that report and metadata state."""
        values = vars(self)
        spelled = {name: _spelled(values[name]) for name in STATED}
        return {
            name: text
            for name, text in spelled.items()
            if KEYWORDS[name].stated is Stated.ALWAYS
            or text != _spelled(KEYWORDS[name].read(KEYWORDS[name].unset, values))
        }


def _spelled(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else "" if value is None else str(value)
