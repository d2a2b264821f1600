"""Conversion settings from a file, the environment and the command line; the last one wins.

The file is `amp.toml`, or the table `[tool.amp-rewrite]` of `pyproject.toml`. Its keys are those of the table of
options, with "-" or "_"; some are options of the command line, and `--set KEY=VALUE` states the others there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amp_rewrite.errors import ConfigError, advice, option_of
from amp_rewrite.files.disk import read_regular
from amp_rewrite.settings.option import Kind, Option
from amp_rewrite.settings.request import CRITERION, SETTINGS, Request, from_environment


def settings(
    given: Mapping[str, object], environ: Mapping[str, str], *, config: Path | None = None, folder: Path = Path()
) -> Request:
    """Return the options in force: those of the command line, else the environment's, else the file's, else defaults.

    `given` holds the values of the command line; None and () stand for options that are absent. The file is `config`,
    or the one that `find` returns for `folder`. ConfigError names the file and line, the variable or the option of an
    unknown key, a wrong type or an unknown choice.
    """
    file = config or find(folder)
    filed = from_file(file) if file else {}
    said = {key for key, value in given.items() if value not in (None, ())}
    merged: dict[str, Any] = {
        key: value for key, value in filed.items() if not any(key in group and said & group for group in _ALTERNATIVES)
    }
    merged.update((key, value) for key, value in from_environment(environ).items() if key in SETTINGS)
    merged.update((key, SETTINGS[key].check(given[key], option_of(key))) for key in said)
    changed = [name for name, value in filed.items() if merged.get(name) is value and value != SETTINGS[name].default]
    words = ", ".join(f"{SETTINGS[name].key} = {_spelled(merged[name], file)}" for name in changed) if file else ""
    return Request(**merged, config=f"{words}, from {_shown(file)}" if file and words else "")


_ALTERNATIVES = ({"data", "ranges"}, CRITERION.keys())
"""Options of which the command line replaces all of a file by stating one."""


def _spelled(value: object, file: Path) -> str:
    if isinstance(value, tuple):
        return " ".join(_spelled(part, file) for part in value)
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    beside = f"{file.parent}{os.sep}"
    return text.removeprefix(beside)


def _shown(file: Path) -> str:
    """Return the path of a file in the current folder or below; of others the name, to keep folders out of reports."""
    return f"./{file.as_posix()}" if not file.is_absolute() and ".." not in file.parts else file.name


def find(folder: Path) -> Path | None:
    """Return `amp.toml` of a folder, else its `pyproject.toml` with a table of ours, else None."""
    own = folder / "amp.toml"
    if own.is_file():
        return own
    shared = folder / _SHARED
    return shared if shared.is_file() and _table(shared, _read(shared)) is not None else None


def setting_of(key: str, where: str) -> Option:
    """Return the option of a key, with "-" or "_". ConfigError for an unknown one."""
    option = SETTINGS.get(key.replace("-", "_"))
    if option is None:
        legal = [option.key for option in SETTINGS.values()]
        hint = advice(key.replace("_", "-"), legal, f"use one of {', '.join(legal)}")
        raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    return option


def from_file(file: Path) -> Mapping[str, object]:
    """Return the settings of a file. Relative paths start at its folder."""
    text = _read(file)
    table = _table(file, text)
    if table is None:
        raise ConfigError(f"{file}: has no table [tool.amp-rewrite]; add it, or name another file")
    stated: dict[str, object] = {}
    for written, value in table.items():
        where = f"{file}{_line(text, written, file.name == _SHARED)}"
        option = setting_of(written, where)
        key = option.name
        if key in stated:
            raise ConfigError(f"{where}: key {key!r} appears with '-' and with '_'; keep one")
        stated[key] = _beside(file, option, option.check(option.typed(value, where), where))
    return stated


_SHARED = "pyproject.toml"


_LARGEST, _SEARCHED = 1 << 20, 1 << 26  # bytes of settings, and of a shared file in which they may stand
_KEY = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:{_KEY}){{32}}""")
"""A key of many parts, for which Python's parser takes a time quadratic in their number."""


def _read(file: Path) -> str:
    try:
        most = _SEARCHED if file.name == _SHARED else _LARGEST
        content = read_regular(file, most)
        return content.decode("utf-8-sig", "ignore" if len(content) > most else "strict")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); name a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8; save it as UTF-8") from error


def _table(file: Path, text: str) -> Mapping[str, object] | None:
    if file.name == _SHARED and "amp-rewrite" not in text:
        return None
    if len(text) > _LARGEST or _LONG_KEY.search(text):
        raise ConfigError(f"{file}: larger than 1 MiB, or has a key of more than 32 parts; name a settings file")
    import tomllib  # late: most runs have no file

    try:
        document = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and what int() says of thousands of digits
        raise ConfigError(f"{file}: not valid TOML: {error}; correct it (text needs quotes)") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deeply for settings; correct it") from error
    if file.name != _SHARED:
        return document
    tools = document.get("tool", {})
    table = tools.get("amp-rewrite") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{file}: tool.amp-rewrite is not a table; write [tool.amp-rewrite]")
    return table


def _line(text: str, key: str, shared: bool) -> str:
    """Return ":LINE" of a key, below our table's header in a shared file; "" for a key with escapes."""
    start = 0
    if shared:
        blank = r"[ \t]*"
        header = re.search(
            rf"^{blank}\[{blank}tool{blank}\.{blank}[\"']?amp-rewrite[\"']?{blank}\]", text, re.MULTILINE
        )
        start = header.end() if header else len(text)
    match = re.compile(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*[=.]", re.MULTILINE).search(text, start)
    return f":{text.count(chr(10), 0, match.start()) + 1}" if match else ""


def _beside(file: Path, option: Option, value: Any) -> object:
    if option.kind is Kind.PATH:
        return str(file.parent / value)
    if option.name != "lists":
        return value
    places = [(entry, file.parent / entry) for entry in value]
    return tuple(str(place) if place.suffix or place.exists() else entry for entry, place in places)
