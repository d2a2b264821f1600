"""Entries of op lists: the color of an op, its condition, its source and its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from amp_rewrite.errors import ListError, advice
from amp_rewrite.ir.names import normal_domain
from amp_rewrite.ir.ops import Need


class Color(Enum):
    """List of an op; UNLISTED ops are never converted and stop every walk."""

    ALLOW = "allow"
    GRAY = "gray"
    CLEAR = "clear"
    DENY = "deny"
    UNLISTED = "unlisted"

    __hash__ = object.__hash__  # members are singletons; Enum hashes the name, in Python


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition on a node: each attribute has one of its values, and there are at least so many operands."""

    attributes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    operands: int = 0

    def holds(self, domain: str, op_type: str, attributes: Mapping[str, object], operands: int) -> bool:
        """True if a node passes; an absent attribute counts as its ONNX default, if it has one."""
        if operands < self.operands:
            return False
        for name, wanted in self.attributes:
            actual = attributes[name] if name in attributes else default_of(domain, op_type, name)
            if not any(_same(actual, value) for value in wanted):
                return False
        return True

    def __str__(self) -> str:
        tests = [f"{name}={'|'.join(values)}" for name, values in self.attributes]
        return ", ".join([*tests, f"operands>={self.operands}"] if self.operands else tests)


@dataclass(frozen=True, slots=True)
class Entry:
    """One statement about an op.

    `domain` is "" for ai.onnx; `source` is "float16.yaml:12", "<mapping>", or an environment variable's name. An op on
    the deny list, or on none, counts as gray if no reader has the `need`.
    """

    domain: str
    op_type: str
    color: Color
    because: str
    source: str
    condition: Condition | None = None
    need: Need | None = None

    @property
    def name(self) -> str:
        """Return `Op`, or `domain::Op` outside ai.onnx."""
        return spell(self.domain, self.op_type)


def spell(domain: str, op_type: str) -> str:
    """`Op`, or `domain::Op` outside ai.onnx."""
    return f"{domain}::{op_type}" if normal_domain(domain) else op_type


def parse_name(text: str, where: str) -> tuple[str, str]:
    """Return the (domain, op type) of `Op` or `domain::Op`; ListError at a place for other text."""
    match = re.fullmatch(r"(?:([^\s:,]+)::)?([^\s:,]+)", text.strip())
    if match is None:
        raise ListError(f"{where}: {text!r} is not an op; write Op or domain::Op")
    return normal_domain(match[1] or ""), match[2]


def check_known(domain: str, op_type: str, where: str, known: Iterable[tuple[str, str]]) -> None:
    """Raise ListError for an op of ONNX's domains or com.microsoft unknown to onnx and to `known`."""
    import onnx.defs

    names = set(known)
    if domain not in _KNOWN_DOMAINS or onnx.defs.has(op_type, domain) or (domain, op_type) in names:
        return
    names |= {(normal_domain(schema.domain), schema.name) for schema in onnx.defs.get_all_schemas()}
    spellings = {name.casefold(): spell(domain, name) for domain, name in sorted(names, reverse=True)}
    other = "a custom op needs its domain, as in my.domain::Op"
    hint = advice(op_type.casefold(), spellings, other, shown=spellings)
    raise ListError(f"{where}: no such op as {spell(domain, op_type)!r}; {hint}")


def check_attribute(domain: str, op_type: str, attribute: str, where: str) -> None:
    """Raise ListError for an op of ONNX without this attribute at any opset; other ops pass."""
    import onnx.defs

    history = onnx.defs.get_all_schemas_with_history()
    own = [s for s in history if s.name == op_type and normal_domain(s.domain) == domain]
    names = sorted({name for schema in own for name in schema.attributes})
    if own and attribute not in names:
        hint = advice(attribute, names, f"it has {', '.join(names) or 'none'} (and `operands` counts inputs)")
        raise ListError(f"{where}: {spell(domain, op_type)} has no attribute {attribute!r}; {hint}")


def default_of(domain: str, op_type: str, attribute: str) -> object:
    """Return the default of an attribute in ONNX's newest schema; None without one."""
    import onnx.defs
    import onnx.helper

    if not onnx.defs.has(op_type, domain):
        return None
    described = onnx.defs.get_schema(op_type, domain).attributes.get(attribute)
    if described is None or not described.default_value.type:
        return None
    value: object = onnx.helper.get_attribute_value(described.default_value)
    return value


def _same(actual: object, wanted: str) -> bool:
    if isinstance(actual, bytes):
        actual = actual.decode("utf-8", "replace")
    if isinstance(actual, float):
        with suppress(ValueError):
            return math.isclose(actual, float(wanted), rel_tol=2.0**-23)
    return str(actual) == wanted


_KNOWN_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft")
