"""List files: YAML, or a mapping of the same form, read into checked entries with file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amp_rewrite.errors import ListError, advice
from amp_rewrite.files.disk import read_regular
from amp_rewrite.ir.ops import Need
from amp_rewrite.settings.list_entry import Color, Condition, Entry, Scalar, check_attribute, check_known, parse_name

if TYPE_CHECKING:
    import yaml

Known = Callable[[], Iterable[tuple[str, str]]]

SHIPPED = ("float16", "bfloat16", "tensorflow")


@dataclass(frozen=True, slots=True)
class ListFile:
    """Statements of one file: its base, its entries, and its removals."""

    name: str
    base: str | None = None
    base_place: str = ""
    entries: tuple[Entry, ...] = ()
    removed: tuple[Entry, ...] = ()


def read_file(path: Path, known: Known | None) -> ListFile:
    """Return the statements of a YAML file, names checked against onnx and `known` (None: not at all)."""
    try:
        content = read_regular(path, _MAX_BYTES)
    except FileNotFoundError:
        hint = advice(path, SHIPPED, f"the shipped lists are {', '.join(SHIPPED)}")
        raise ListError(f"{path}: no such list file; {hint}") from None
    except OSError as error:
        raise ListError(f"{path}: cannot be read ({error.strerror}); give a YAML file") from error
    if len(content) > _MAX_BYTES:
        raise ListError(f"{path}: larger than {_MAX_BYTES} bytes, which is not an op list; name a YAML file of ops")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ListError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from error
    return _statements(path.name, _parse(text, path), known)


def read_mapping(mapping: Mapping[str, object], known: Known | None) -> ListFile:
    """Return the statements of a mapping of the same form as a file; errors name "<mapping>" as the place."""
    return _statements("<mapping>", _wrap(mapping, 0), known)


class _ListNode(NamedTuple):
    """A piece of a list file, with its place for errors and its source for entries."""

    value: Scalar | list[_ListNode] | dict[str, _ListNode] | None
    where: str
    source: str

    def __str__(self) -> str:
        kinds = {list: "a list", dict: "a mapping", type(None): "nothing"}
        return kinds.get(type(self.value), repr(self.value))


_KEYS = ("base", *(color.value for color in Color), "remove")
_OTHER_NAMES = {
    **dict.fromkeys(("infer", "inferlist", "graylist", "grey"), "gray"),
    **dict.fromkeys(("white", "whitelist", "allowlist"), "allow"),
    **dict.fromkeys(("black", "blacklist", "denylist", "block"), "deny"),
    "clearlist": "clear",
    "none": "unlisted",
}
_NO_REASON = "no reason given"
_MAX_BYTES = 1_000_000
_MAX_DEPTH = 8


def _wrap(value: object, depth: int) -> _ListNode:
    place = "<mapping>"
    if depth > _MAX_DEPTH:
        raise ListError(f"{place}: nested too deeply for an op list")
    if value is None or isinstance(value, str | int | float):
        return _ListNode(_bounded(value, place), place, place)
    if isinstance(value, Mapping):
        return _ListNode({str(name): _wrap(part, depth + 1) for name, part in value.items()}, place, place)
    if isinstance(value, Iterable):
        return _ListNode([_wrap(part, depth + 1) for part in value], place, place)
    raise ListError(f"{place}: holds a {type(value).__name__}; use text, numbers, lists and mappings")


def _parse(text: str, path: Path) -> _ListNode | None:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        return _build(loader, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        if "nesting depth" in problem:  # some versions of libyaml have a limit of their own
            raise ListError(f"{where}: nested too deeply for an op list") from error
        raise ListError(f"{where}: not valid YAML: {problem}") from error
    finally:
        loader.dispose()


def _build(loader: yaml.SafeLoader, path: Path) -> _ListNode | None:
    import yaml

    events: Any = loader
    place, name = str(path), path.name

    def node(event: Any, depth: int) -> _ListNode:
        line = event.start_mark.line + 1
        where = f"{place}:{line}"
        if event.anchor:
            raise ListError(f"{where}: YAML anchors and aliases are refused; write the entry out")
        if tag := getattr(event, "tag", None):
            raise ListError(f"{where}: YAML tags are refused; remove {tag!r}")
        if isinstance(event, yaml.ScalarEvent):
            return _ListNode(_scalar(loader, event, where), where, f"{name}:{line}")
        if depth >= _MAX_DEPTH:
            raise ListError(f"{where}: nested too deeply for an op list")
        children = []
        while not isinstance(inner := events.get_event(), yaml.CollectionEndEvent):
            children.append(node(inner, depth + 1))
        value = _pairs(children) if isinstance(event, yaml.MappingStartEvent) else children
        return _ListNode(value, where, f"{name}:{line}")

    root: _ListNode | None = None
    for event in iter(events.get_event, None):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent) and root is not None:
            raise ListError(f"{place}:{line}: a second YAML document; a list file is one mapping")
        if isinstance(event, yaml.NodeEvent):
            root = node(event, 0)
    return root


def _scalar(loader: yaml.SafeLoader, event: yaml.ScalarEvent, where: str) -> Scalar | None:
    """Return a number, truth value or null by YAML's rules for plain scalars, else the text."""
    text: str = event.value
    if not event.implicit[0] or text[:1] not in loader.yaml_implicit_resolvers:
        return text
    import yaml

    tag: str = loader.resolve(yaml.ScalarNode, text, event.implicit)  # type: ignore[no-untyped-call]
    if tag.rpartition(":")[2] not in ("int", "float", "bool", "null"):
        return text
    try:
        value: Scalar | None = loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:  # a plain scalar that only looks like a number, such as 0b_
        return text
    return _bounded(value, where)


def _bounded(value: Scalar | None, where: str) -> Scalar | None:
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise ListError(f"{where}: an integer of more than 64 bits; write a smaller one")
    return value


def _pairs(children: list[_ListNode]) -> dict[str, _ListNode]:
    result: dict[str, _ListNode] = {}
    for key, value in zip(children[::2], children[1::2], strict=True):
        if not isinstance(key.value, str):
            raise ListError(f"{key.where}: key {key} is not text; quote it")
        if key.value in result:
            raise ListError(f"{key.where}: key {key.value!r} appears twice; keep one")
        result[key.value] = _ListNode(value.value, key.where, value.source)
    return result


def _statements(name: str, root: _ListNode | None, known: Known | None) -> ListFile:
    if root is None or root.value is None:
        return ListFile(name)
    if not isinstance(root.value, dict):
        raise ListError(f"{root.where}: a list file is a mapping with the keys {', '.join(_KEYS)}")
    for key, node in root.value.items():
        if key not in _KEYS:
            hint = advice(_OTHER_NAMES.get(key, key), _KEYS, f"use one of {', '.join(_KEYS)}")
            raise ListError(f"{node.where}: unknown key {key!r}; {hint}")
    base = root.value.get("base")
    if base is not None and base.value not in (*SHIPPED, "empty"):
        raise ListError(f"{base.where}: unknown base {base}; use one of empty, {', '.join(SHIPPED)}")
    entries = [(_entry(node, color, known), node.where) for color in Color for node in _items(root.value, color.value)]
    _refuse_contradictions(entries)
    removed: list[Entry] = []
    for node in _items(root.value, "remove"):
        op = _op(node, known)
        removed.append(Entry(*op, Color.UNLISTED, "removed from the lists", node.source))
        if clash := next((e for e, _ in entries if (e.domain, e.op_type) == op), None):
            raise ListError(f"{node.where}: op {clash.name!r} is in 'remove' and '{clash.color.value}'; keep one")
    return ListFile(
        name,
        None if base is None else str(base.value),
        "" if base is None else base.where,
        tuple(entry for entry, _ in entries),
        tuple(removed),
    )


def _items(root: Mapping[str, _ListNode], key: str) -> list[_ListNode]:
    node = root.get(key)
    if node is None or node.value is None:
        return []
    if not isinstance(node.value, list):
        raise ListError(f"{node.where}: {key!r} holds {node}; give a list of ops")
    return node.value


def _entry(node: _ListNode, color: Color, known: Known | None) -> Entry:
    if not isinstance(node.value, dict):
        return Entry(*_op(node, known), color, _NO_REASON, node.source)
    for key, part in node.value.items():
        if key not in ("op", "when", "need", "because"):
            raise ListError(f"{part.where}: unknown key {key!r} in an entry; use op, when, need and because")
    if "op" not in node.value:
        raise ListError(f"{node.where}: an entry without 'op'; write {{op: Exp, because: a reason}}")
    op = _op(node.value["op"], known)
    reason = node.value.get("because")
    if reason is not None and not isinstance(reason.value, str):
        raise ListError(f"{reason.where}: 'because' holds {reason}; give one line of text")
    because = _NO_REASON if reason is None else " ".join(str(reason.value).split())
    when, need = node.value.get("when"), node.value.get("need")
    condition = None if when is None else _condition(when, op, known)
    return Entry(*op, color, because, node.source, condition, None if need is None else _need(need, color))


def _need(node: _ListNode, color: Color) -> Need:
    if color not in (Color.DENY, Color.UNLISTED):
        raise ListError(f"{node.where}: 'need' in '{color.value}'; only ops of deny and unlisted wait for one")
    names = {need.name.lower(): need for need in Need}
    if not isinstance(node.value, str):
        raise ListError(f"{node.where}: 'need' holds {node}; write one of {', '.join(names)}")
    if node.value not in names:
        hint = advice(node.value, names, f"use one of {', '.join(names)}")
        raise ListError(f"{node.where}: unknown need {node}; {hint}")
    return names[node.value]


def _op(node: _ListNode, known: Known | None) -> tuple[str, str]:
    if not isinstance(node.value, str):
        raise ListError(f"{node.where}: {node} is not an op; write Op or domain::Op")
    op = parse_name(node.value, node.where)
    if known is not None:
        check_known(*op, node.where, known)
    return op


def _condition(node: _ListNode, op: tuple[str, str], known: Known | None) -> Condition:
    if not isinstance(node.value, dict) or not node.value:
        raise ListError(f"{node.where}: 'when' holds {node}; write when: {{mode: nearest}}")
    attributes: list[tuple[str, tuple[Scalar, ...]]] = []
    operands: tuple[tuple[str, int], ...] = ()
    for name, part in sorted(node.value.items()):
        alternatives = part.value if isinstance(part.value, list) else [part]
        if not alternatives:
            raise ListError(f"{part.where}: {name!r} has no value to test for; give one or a list of them")
        if name == "operands":
            operands = tuple(map(_operand_test, alternatives))
            continue
        if known is not None:
            check_attribute(*op, name, part.where)
        attributes.append((name, tuple(map(_plain, alternatives))))
    return Condition(tuple(attributes), operands)


def _operand_test(node: _ListNode) -> tuple[str, int]:
    match = re.fullmatch(r"(<=|>=|==|<|>|)\s*(\d{1,4})", str(node.value).strip())
    if match is None:
        raise ListError(f"{node.where}: {node} is not a count of operands; write 2 or '<=2'")
    return match[1] or "==", int(match[2])


def _plain(node: _ListNode) -> Scalar:
    if node.value is None or isinstance(node.value, list | dict):
        raise ListError(f"{node.where}: an attribute value cannot be {node}; give text or a number")
    return node.value


def _refuse_contradictions(entries: list[tuple[Entry, str]]) -> None:
    seen: dict[tuple[str, str], list[tuple[Entry, str]]] = {}
    for entry, where in entries:
        others = seen.setdefault((entry.domain, entry.op_type), [])
        for other, place in others:
            if fact := _overlap(entry, other):
                both = f"on '{other.color.value}' ({place}) and on '{entry.color.value}'"
                raise ListError(f"{where}: op {entry.name!r} is {both}{fact}")
        others.append((entry, where))


def _overlap(one: Entry, other: Entry) -> str:
    """Return the collision of two entries of an op; "" without one (an entry without condition is the fall-back)."""
    if one.condition == other.condition:
        return f" when {one.condition}; keep one" if one.condition else "; keep one"
    if one.condition is None or other.condition is None or one.color is other.color:
        return ""
    if one.condition.excludes(other.condition):
        return ""
    return f", and '{other.condition}' and '{one.condition}' may hold together; make one exclude the other"
