"""Op lists: the color of each op, with its source and reason.

There are four lists, as in TensorFlow's automatic mixed precision (which calls the gray one "infer"), and a fifth
class for unlisted ops. The lists are YAML files, in the format described at the top of `lists/float16.yaml`. Overlays
and edits move ops between the lists. The last one wins, and every entry keeps its source.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConfigError, ListError, PolicyError
from amp_rewrite.ir.names import normal_domain
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import (
    SHIPPED,
    Color,
    Entry,
    ListFile,
    check_attribute,
    check_op,
    parse_name,
    read,
    spell,
)

Key = tuple[str, str]
Table = Mapping[Key, tuple[Entry, ...]]


Edit = tuple[Color, Entry]
"""An edit in an environment variable: the list to add an op to or remove it from, and the op's new entry."""


@dataclass(frozen=True, slots=True)
class OpLists:
    """The lists of a conversion. The entries of an op are in order of precedence, the unconditional one last.

    Attributes:
        name: names of the lists.
        entries: entries by op.
        fingerprint: the SHA-256 digest of ops, colors, conditions and needs, in hexadecimal, independent of reasons
            and sources.
    """

    name: str
    entries: Table = field(repr=False, hash=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for key, entries in sorted(self.entries.items()):
            if any(entry.color is not Color.UNLISTED for entry in entries):
                decisions = "; ".join(map(_decision, entries))
                digest.update(f"{spell(*key)} {decisions}\n".encode())
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    def classify(self, domain: str, op_type: str, attributes: Mapping[str, object], operands: int) -> Entry:
        """Return the entry for a node; the UNLISTED entry if no other applies."""
        domain = normal_domain(domain)
        for entry in self.entries_of(domain, op_type):
            if entry.condition is None or entry.condition.holds(domain, op_type, attributes, operands):
                return entry
        return self.otherwise(domain, op_type)

    def entries_of(self, domain: str, op_type: str) -> tuple[Entry, ...]:
        """Return the entries of an op in order of precedence."""
        return self.entries.get((normal_domain(domain), op_type), ())

    def otherwise(self, domain: str, op_type: str) -> Entry:
        """Return the UNLISTED entry, for ops on no list and nodes that do not meet any condition of their op."""
        because = "meets none of its conditions" if self.entries_of(domain, op_type) else "is not on any list"
        return Entry(domain, op_type, Color.UNLISTED, because, self.name)

    def at_level(self, level: Level) -> OpLists:
        """Return the lists at a level. Most levels do not change the lists, but only the painting."""
        if level not in _LEVEL_CHANGES:
            return self
        colors, new_color = _LEVEL_CHANGES[level]

        def changed(entry: Entry) -> Entry:
            if entry.color not in colors:
                return entry
            because = f"level {level}, otherwise {entry.color.value}: {entry.because}"
            return replace(entry, color=new_color, because=because, need=None)

        return OpLists(self.name, {key: tuple(map(changed, entries)) for key, entries in self.entries.items()})

    def __iter__(self) -> Iterator[Entry]:
        for key in sorted(self.entries):
            yield from self.entries[key]


def _decision(entry: Entry) -> str:
    need = f" {entry.need.name}" if entry.need is not None else ""
    return f"{entry.color.value} [{entry.condition or ''}]{need}"


_LEVEL_CHANGES = {
    "tensor-cores-only": ((Color.GRAY, Color.CLEAR, Color.DENY), Color.UNLISTED),
    "treat-gray-as-deny": ((Color.GRAY,), Color.DENY),
}


def lists_folder() -> Path:
    """Return the folder of the shipped lists: inside the installed package, or `lists/` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_lists", package.parent / "lists"):
        if (folder / "float16.yaml").is_file():
            return folder
    raise ListError("the shipped op lists are missing; reinstall amp-rewrite")


def load_lists(
    to: DType | str, overlays: Sequence[str | Path | Mapping[str, object]] = (), edits: Sequence[Edit] = ()
) -> OpLists:
    """Return the lists for a low type: the shipped ones, with the overlays in order, and then the edits.

    Args:
        to: float16 or bfloat16, or its name.
        overlays: names of shipped lists (each a new base), paths of YAML files, or mappings of the same form.
        edits: ops to add to a list or to remove from one.

    Returns:
        The resulting lists.

    Raises:
        ListError: an overlay is invalid; the message names file and line.
        PolicyError: `to` is another type.
    """
    to = DType.parse(to)
    if not to.low:
        raise PolicyError(f"there are no op lists for {to.spelling}; use float16 or bfloat16")
    table, names = _shipped(to.spelling, to), [to.spelling]
    for position, file in enumerate(map(_read_overlay, overlays)):
        if file.base is not None:
            if position:
                raise ListError(f"{file.name}: a list with a base discards the lists before it; put it first")
            table, names = {} if file.base == "empty" else _shipped(file.base, to), [file.base]
        names += [file.name] if file.name not in SHIPPED else []
        table = _overlay(table, file)
    edited = dict(table)
    for color, new in edits:
        key = new.domain, new.op_type
        if new.color is color:
            edited[key] = (new,)
        elif old := edited.get(key):
            edited[key] = tuple(replace(new, condition=e.condition) if e.color is color else e for e in old)
    return OpLists("+".join([*names, *(["environment"] if edits else [])]), edited)


def environment_edits(environ: Mapping[str, str]) -> tuple[Edit, ...]:
    """Return the edits in `AMP_REWRITE_{ALLOW,GRAY,DENY,CLEAR}LIST_{ADD,REMOVE}`: all additions, then all removals.

    ListError for an unknown op, or one that two variables add; ConfigError for an unknown variable with this prefix.
    """
    edits: dict[str, list[Edit]] = {"ADD": [], "REMOVE": []}
    added: dict[Key, str] = {}
    for name in sorted(filter(re.compile(r"AMP_REWRITE_\w*LIST_").match, environ)):
        variable = re.fullmatch("AMP_REWRITE_(ALLOW|GRAY|DENY|CLEAR)LIST_(ADD|REMOVE)", name)
        if variable is None:
            legal = "AMP_REWRITE_{ALLOW,GRAY,DENY,CLEAR}LIST_{ADD,REMOVE}"
            raise ConfigError(f"unknown environment variable {name}; use {legal}")
        color, add = Color[variable[1]], variable[2] == "ADD"
        for word in filter(None, (part.strip() for part in environ[name].split(","))):
            op = parse_name(word, name)
            check_op(*op, name, _shipped("float16", DType.FLOAT16))
            if add and added.setdefault(op, name) != name:
                raise ListError(f"{name}: op {word!r} is also in {added[op]}; keep one")
            to, verb = (color, "put on") if add else (Color.UNLISTED, "taken off")
            edits[variable[2]].append((color, Entry(*op, to, f"{verb} the {color.value} list", name)))
    return (*edits["ADD"], *edits["REMOVE"])


def _shipped(name: str, to: DType) -> Table:
    has_variant = name == "tensorflow" and to is DType.BFLOAT16
    return _shipped_file(lists_folder(), f"{name}_bfloat16" if has_variant else name)


@cache
def _shipped_file(folder: Path, name: str) -> Table:
    """Return the table of a shipped file, parsed once per process."""
    file = read(folder / f"{name}.yaml")
    # The base of a shipped file is a file name: it does not depend on the low type.
    return _overlay({} if file.base is None else _shipped_file(folder, file.base), file)


def _overlay(below: Table, file: ListFile) -> Table:
    """Return `below` with a file on top. An unconditional entry replaces all earlier entries of its op."""
    table = dict(below)
    groups: dict[Key, list[Entry]] = {}
    for entry in file.entries:
        groups.setdefault((entry.domain, entry.op_type), []).append(entry)
    for key, group in groups.items():
        conditions = {entry.condition for entry in group}
        kept = () if None in conditions else table.get(key, ())
        group.sort(key=lambda entry: entry.condition is None)
        table[key] = (*group, *(entry for entry in kept if entry.condition not in conditions))
    return table


def _read_overlay(overlay: str | Path | Mapping[str, object]) -> ListFile:
    if isinstance(overlay, str) and overlay in SHIPPED:
        return ListFile(overlay, base=overlay)
    file = read(overlay)
    for entry in file.entries:
        check_op(entry.domain, entry.op_type, entry.source, _shipped("float16", DType.FLOAT16))
        for attribute, _ in entry.condition.attributes if entry.condition else ():
            check_attribute(entry.domain, entry.op_type, attribute, entry.source)
    return file
