"""List files: YAML, or a mapping of the same form, read into entries with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amp_rewrite.errors import ListError, advice
from amp_rewrite.files.disk import read_text
from amp_rewrite.ir.ops import Need
from amp_rewrite.settings.list_entry import Color, Condition, Entry, parse_name

if TYPE_CHECKING:
    import yaml

SHIPPED = ("float16", "bfloat16", "tensorflow")


@dataclass(frozen=True, slots=True)
class ListFile:
    """Statements of one file: its base and its entries."""

    name: str
    base: str | None = None
    base_place: str = ""
    entries: tuple[Entry, ...] = ()


def read_file(path: Path) -> ListFile:
    """Return the statements of a YAML file. ListError names file and line."""
    if not path.exists():
        hint = advice(path, SHIPPED, f"the shipped lists are {', '.join(SHIPPED)}")
        raise ListError(f"{path}: no such list file; {hint}")
    return _statements(path.name, _parse(read_text(path, _MAX_BYTES, "a YAML file of ops", ListError), path.name))


def read_mapping(mapping: Mapping[str, object]) -> ListFile:
    """Return the statements of a mapping of the same form as a file; errors name "<mapping>" as the place."""
    return _statements("<mapping>", _wrap(mapping, 0))


class _ListNode(NamedTuple):
    """A piece of a list file, and its place. Numbers are text, as attributes are compared with their words."""

    value: str | list[_ListNode] | dict[str, _ListNode] | None
    place: str

    def __str__(self) -> str:
        kinds = {list: "a list", dict: "a mapping", type(None): "nothing"}
        return kinds.get(type(self.value), repr(self.value))


_KEYS = ("base", *(color.value for color in Color))
_NO_REASON = "no reason given"
_MAX_BYTES = 1 << 20
_MAX_DEPTH = 8


def _too_deep(place: str) -> ListError:
    return ListError(f"{place}: nested too deeply for an op list")


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
        if "nesting depth" in problem:  # some versions of libyaml have a limit of their own
            raise _too_deep(where) from error
        raise ListError(f"{where}: not valid YAML: {problem}") from error
    if len(roots) > 1:
        raise ListError(f"{roots[1].place}: a second YAML document; a list file is one mapping")
    return roots[0] if roots else None


def _node(event: yaml.NodeEvent, events: Iterator[yaml.Event], name: str, depth: int) -> _ListNode:
    import yaml

    mark = event.start_mark
    place = name if mark is None else f"{name}:{mark.line + 1}"
    if event.anchor or getattr(event, "tag", None):  # an alias has an anchor, too
        raise ListError(f"{place}: YAML anchors, aliases and tags are refused; write the entry out")
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


def _expect(node: _ListNode, kind: type, fact: str, advice: str) -> Any:
    if not isinstance(node.value, kind) or node.value == {}:
        raise ListError(f"{node.place}: {fact} {node}; {advice}")
    return node.value


def _text(node: _ListNode, what: str) -> str:
    text: str = _expect(node, str, f"{what} is", "write text")
    return text


def _statements(name: str, root: _ListNode | None) -> ListFile:
    if root is None or not root.value:
        return ListFile(name)
    keys = _expect(root, dict, "a list file is", f"write a mapping with the keys {', '.join(_KEYS)}")
    _check_keys(keys, _KEYS)
    base = keys.get("base")
    if base is not None and base.value not in (*SHIPPED, "empty"):
        raise ListError(f"{base.place}: unknown base {base}; use one of empty, {', '.join(SHIPPED)}")
    entries = [_entry(node, color) for color in Color for node in _items(keys, color.value)]
    _refuse_repeated(entries)
    return ListFile(name, base and base.value, base.place if base else "", tuple(entries))


def _check_keys(pairs: Mapping[str, _ListNode], known: tuple[str, ...]) -> None:
    for key, node in pairs.items():
        if key not in known:
            raise ListError(f"{node.place}: unknown key {key!r}; {_nearest(key, known)}")


def _nearest(word: str, known: Iterable[str]) -> str:
    return advice(word, known, f"use one of {', '.join(known)}")


def _items(keys: Mapping[str, _ListNode], key: str) -> list[_ListNode]:
    node = keys.get(key)
    if node is None or node.value is None:
        return []
    items: list[_ListNode] = _expect(node, list, f"{key!r} holds", "give a list of ops")
    return items


def _entry(node: _ListNode, color: Color) -> Entry:
    parts = node.value if isinstance(node.value, dict) else {"op": node}
    _check_keys(parts, ("op", "when", "need", "because"))
    if "op" not in parts:
        raise ListError(f"{node.place}: an entry without 'op'; write {{op: Exp, because: a reason}}")
    op = parse_name(_text(parts["op"], "an op"), node.place)
    because = " ".join(_text(parts["because"], "'because'").split()) if "because" in parts else _NO_REASON
    condition = _condition(parts["when"]) if "when" in parts else None
    need = _need(parts["need"], color) if "need" in parts else None
    return Entry(*op, color, because, node.place, condition, need)


def _need(node: _ListNode, color: Color) -> Need:
    if color not in (Color.DENY, Color.UNLISTED):
        raise ListError(f"{node.place}: 'need' in '{color.value}'; only ops of deny and unlisted wait for one")
    names = {need.name.lower(): need for need in Need}
    name = _text(node, "'need'")
    if name not in names:
        raise ListError(f"{node.place}: unknown need {name!r}; {_nearest(name, names)}")
    return names[name]


def _condition(node: _ListNode) -> Condition:
    pairs = _expect(node, dict, "'when' holds", "write when: {mode: nearest}")
    words = {name: _words(part, name) for name, part in sorted(pairs.items())}
    least = words.pop("operands", ("0",))
    if len(least) > 1 or not re.fullmatch(r"[0-9]{1,4}", least[0]):
        raise ListError(f"{node.place}: 'operands' is {'|'.join(least)!r}; write the least number of inputs, as in 2")
    return Condition(tuple(words.items()), int(least[0]))


def _words(node: _ListNode, name: str) -> tuple[str, ...]:
    alternatives = node.value if isinstance(node.value, list) else [node]
    if not alternatives:
        raise ListError(f"{node.place}: {name!r} has no value to test for; give one or a list of them")
    return tuple(_text(part, f"a value of {name!r}") for part in alternatives)


def _refuse_repeated(entries: list[Entry]) -> None:
    seen: dict[object, Entry] = {}
    for entry in entries:
        other = seen.setdefault((entry.domain, entry.op_type, entry.condition), entry)
        if other is not entry:
            both = f"on '{other.color.value}' ({other.source}) and on '{entry.color.value}'"
            when = f" when {entry.condition}" if entry.condition else ""
            raise ListError(f"{entry.source}: op {entry.name!r} is {both}{when}; keep one")
