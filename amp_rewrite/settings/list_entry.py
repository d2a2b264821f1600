"""Entries of op lists (the color of an op with its condition, source and reason), and their YAML files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amp_rewrite.errors import ListError, advice
from amp_rewrite.files.disk import read_text
from amp_rewrite.ir.names import normal_domain
from amp_rewrite.ir.ops import Need

if TYPE_CHECKING:
    import yaml


class Color(Enum):
    """The list of an op. UNLISTED ops are never converted, and stop every traversal of the graph."""

    ALLOW = "allow"
    GRAY = "gray"
    CLEAR = "clear"
    DENY = "deny"
    UNLISTED = "unlisted"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs Python code


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a node: each attribute has one of its listed values, and there are at least `operands` inputs."""

    attributes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    operands: int = 0

    def holds(self, domain: str, op_type: str, attributes: Mapping[str, object], operands: int) -> bool:
        """True if a node meets the condition. A missing attribute takes its ONNX default, if there is one."""
        if operands < self.operands:
            return False
        for name, values in self.attributes:
            actual = attributes[name] if name in attributes else onnx_default(domain, op_type, name)
            if not any(_same(actual, value) for value in values):
                return False
        return True

    def __str__(self) -> str:
        tests = [f"{name}={'|'.join(values)}" for name, values in self.attributes]
        return ", ".join([*tests, f"operands>={self.operands}"] if self.operands else tests)


@dataclass(frozen=True, slots=True)
class Entry:
    """The color of an op in a list.

    `domain`: "" for ai.onnx. `source`: for example "float16.yaml:12", "<mapping>", or the name of an environment
    variable. `need`: a denied or unlisted op counts as gray unless a reader has this need.
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
        """`Op`, or `domain::Op` outside ai.onnx."""
        return spell(self.domain, self.op_type)


def spell(domain: str, op_type: str) -> str:
    """Return `Op`, or `domain::Op` outside ai.onnx."""
    return f"{domain}::{op_type}" if normal_domain(domain) else op_type


def parse_name(text: str, where: str) -> tuple[str, str]:
    """Return the (domain, op type) of `Op` or `domain::Op`; raise ListError for anything else."""
    match = re.fullmatch(r"(?:([^\s:,]+)::)?([^\s:,]+)", text.strip())
    if match is None:
        raise ListError(f"{where}: {text!r} is not an op; write Op or domain::Op")
    return normal_domain(match[1] or ""), match[2]


def check_op(domain: str, op_type: str, where: str, others: Iterable[tuple[str, str]]) -> None:
    """Raise ListError for an op of ONNX's domains or com.microsoft that is neither in onnx nor in `others`."""
    import onnx.defs

    names = set(others)
    if domain not in _KNOWN_DOMAINS or onnx.defs.has(op_type, domain) or (domain, op_type) in names:
        return
    names |= {(normal_domain(schema.domain), schema.name) for schema in onnx.defs.get_all_schemas()}
    spellings = {name.casefold(): spell(domain, name) for domain, name in sorted(names, reverse=True)}
    other = "a custom op needs its domain, as in my.domain::Op"
    hint = advice(op_type.casefold(), spellings, other, shown=spellings)
    raise ListError(f"{where}: unknown op {spell(domain, op_type)!r}; {hint}")


def check_attribute(domain: str, op_type: str, attribute: str, where: str) -> None:
    """Raise ListError if a standard ONNX op has no such attribute at any opset; other ops are not checked."""
    import onnx.defs

    history = onnx.defs.get_all_schemas_with_history()
    schemas = [s for s in history if s.name == op_type and normal_domain(s.domain) == domain]
    names = sorted({name for schema in schemas for name in schema.attributes})
    if schemas and attribute not in names:
        hint = advice(attribute, names, f"use one of {', '.join([*names, 'operands'])} (the number of inputs)")
        raise ListError(f"{where}: {spell(domain, op_type)} has no attribute {attribute!r}; {hint}")


def onnx_default(domain: str, op_type: str, attribute: str) -> object:
    """Return the default of an attribute in ONNX's newest schema; None if it has none."""
    import onnx.defs
    import onnx.helper

    attributes = onnx.defs.get_schema(op_type, domain).attributes if onnx.defs.has(op_type, domain) else {}
    default = attributes[attribute].default_value if attribute in attributes else None
    return onnx.helper.get_attribute_value(default) if default is not None and default.type else None


def _same(actual: object, expected: str) -> bool:
    if isinstance(actual, bytes):
        actual = actual.decode("utf-8", "replace")
    if isinstance(actual, float):
        with suppress(ValueError):
            return math.isclose(actual, float(expected), rel_tol=2.0**-23)
    return str(actual) == expected


_KNOWN_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft")


# -- files ---------------------------------------------------------------------------------------------------


SHIPPED = ("float16", "bfloat16", "tensorflow")


@dataclass(frozen=True, slots=True)
class ListFile:
    """The contents of a list file: its base and its entries."""

    name: str
    base: str | None = None
    entries: tuple[Entry, ...] = ()


def read(source: str | Path | Mapping[str, object]) -> ListFile:
    """Read a YAML file, or a mapping of the same form. A ListError names file and line."""
    if isinstance(source, Mapping):
        return _list_file("<mapping>", _wrap(source, 0))
    path = Path(source)
    if not path.exists():
        hint = advice(path, SHIPPED, f"the shipped lists are {', '.join(SHIPPED)}")
        raise ListError(f"{path}: no such list file; {hint}")
    return _list_file(path.name, _parse(read_text(path, _MAX_BYTES, "a YAML file of ops", ListError), path.name))


class _ListNode(NamedTuple):
    """A node of a list file and its place. Numbers are kept as text, since attributes are compared as text."""

    value: str | list[_ListNode] | dict[str, _ListNode] | None
    place: str

    def __str__(self) -> str:
        kinds = {list: "a list", dict: "a mapping", type(None): "nothing"}
        return kinds.get(type(self.value), repr(self.value))


_KEYS = ("base", *(color.value for color in Color))
_MAX_BYTES = 1 << 20
_MAX_DEPTH = 8


def _too_deep(place: str) -> ListError:
    return ListError(f"{place}: the op list is nested too deeply; flatten it")


def _wrap(value: object, depth: int) -> _ListNode:
    place = "<mapping>"
    if depth > _MAX_DEPTH:
        raise _too_deep(place)
    if isinstance(value, Mapping):
        return _ListNode({str(name): _wrap(part, depth + 1) for name, part in value.items()}, place)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return _ListNode([_wrap(part, depth + 1) for part in value], place)
    return _ListNode(None if value is None else str(value), place)


def _parse(text: str, name: str) -> _ListNode | None:
    import yaml

    events = yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        roots = [_node(event, events, name, 0) for event in events if isinstance(event, yaml.NodeEvent)]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        if "nesting depth" in problem:  # some versions of libyaml have their own limit
            raise _too_deep(where) from error
        raise ListError(f"{where}: invalid YAML: {problem}") from error
    if len(roots) > 1:
        raise ListError(f"{roots[1].place}: a second YAML document starts here; a list file must be a single mapping")
    return roots[0] if roots else None


def _node(event: yaml.NodeEvent, events: Iterator[yaml.Event], name: str, depth: int) -> _ListNode:
    import yaml

    mark = event.start_mark
    place = name if mark is None else f"{name}:{mark.line + 1}"
    if event.anchor or getattr(event, "tag", None):  # an alias also has an anchor
        raise ListError(f"{place}: YAML anchors, aliases and tags are not supported; write the entry out")
    if isinstance(event, yaml.ScalarEvent):
        empty = event.implicit[0] and event.value in ("", "~", "null")
        return _ListNode(None if empty else event.value, place)
    if depth >= _MAX_DEPTH:
        raise _too_deep(place)
    children = []
    while isinstance(inner := next(events), yaml.NodeEvent):
        children.append(_node(inner, events, name, depth + 1))
    return _ListNode(_pairs(children) if isinstance(event, yaml.MappingStartEvent) else children, place)


def _pairs(children: list[_ListNode]) -> dict[str, _ListNode]:
    result: dict[str, _ListNode] = {}
    for key, value in zip(children[::2], children[1::2], strict=True):
        name = _text(key, "a key")
        if name in result:
            raise ListError(f"{key.place}: key {name!r} appears twice; keep one")
        result[name] = _ListNode(value.value, key.place)
    return result


def _expect(node: _ListNode, kind: type, what: str, legal: str) -> Any:
    if not isinstance(node.value, kind) or node.value == {}:
        raise ListError(f"{node.place}: {what} must be {legal}, not {node}")
    return node.value


def _text(node: _ListNode, what: str) -> str:
    text: str = _expect(node, str, what, "a string")
    return text


def _list_file(name: str, root: _ListNode | None) -> ListFile:
    if root is None or not root.value:
        return ListFile(name)
    keys = _expect(root, dict, "a list file", f"a mapping with keys among {', '.join(_KEYS)}")
    _check_keys(keys, _KEYS)
    base = keys.get("base")
    if base is not None and base.value not in (*SHIPPED, "empty"):
        raise ListError(f"{base.place}: unknown base {base}; use one of empty, {', '.join(SHIPPED)}")
    entries = []
    for color in Color:
        if (node := keys.get(color.value)) is not None and node.value is not None:
            ops = _expect(node, list, repr(color.value), "a list of ops")
            entries += [_entry(op, color) for op in ops]
    seen: dict[object, Entry] = {}
    for entry in entries:
        other = seen.setdefault((entry.domain, entry.op_type, entry.condition), entry)
        if other is not entry:
            both = f"on '{other.color.value}' ({other.source}) and on '{entry.color.value}'"
            when = f" when {entry.condition}" if entry.condition else ""
            raise ListError(f"{entry.source}: op {entry.name!r} is {both}{when}; keep one")
    return ListFile(name, base and base.value, tuple(entries))


def _check_keys(pairs: Mapping[str, _ListNode], legal: tuple[str, ...]) -> None:
    for key, node in pairs.items():
        if key not in legal:
            raise ListError(f"{node.place}: unknown key {key!r}; {advice(key, legal)}")


def _entry(node: _ListNode, color: Color) -> Entry:
    parts = node.value if isinstance(node.value, dict) else {"op": node}
    _check_keys(parts, ("op", "when", "need", "because"))
    if "op" not in parts:
        raise ListError(f"{node.place}: an entry is missing 'op'; for example, write {{op: Exp, because: a reason}}")
    op = parse_name(_text(parts["op"], "an op"), node.place)
    because = " ".join(_text(parts["because"], "'because'").split()) if "because" in parts else "no reason given"
    condition = _condition(parts["when"]) if "when" in parts else None
    need = _need(parts["need"], color) if "need" in parts else None
    return Entry(*op, color, because, node.place, condition, need)


def _need(node: _ListNode, color: Color) -> Need:
    if color not in (Color.DENY, Color.UNLISTED):
        raise ListError(f"{node.place}: 'need' is not allowed in '{color.value}', only in deny and unlisted; remove it")
    names = {need.name.lower(): need for need in Need}
    name = _text(node, "'need'")
    if name not in names:
        raise ListError(f"{node.place}: unknown need {name!r}; {advice(name, names)}")
    return names[name]


def _condition(node: _ListNode) -> Condition:
    pairs = _expect(node, dict, "'when'", "a mapping such as {mode: nearest}")
    tests = {name: _alternatives(part, name) for name, part in sorted(pairs.items())}
    minimum = tests.pop("operands", ("0",))
    if len(minimum) > 1 or not re.fullmatch(r"[0-9]{1,4}", minimum[0]):
        raise ListError(f"{node.place}: 'operands' must be a number of inputs, such as 2, not {'|'.join(minimum)!r}")
    return Condition(tuple(tests.items()), int(minimum[0]))


def _alternatives(node: _ListNode, name: str) -> tuple[str, ...]:
    alternatives = node.value if isinstance(node.value, list) else [node]
    if not alternatives:
        raise ListError(f"{node.place}: {name!r} has no value to test for; give one value, or a list")
    return tuple(_text(part, f"a value of {name!r}") for part in alternatives)
