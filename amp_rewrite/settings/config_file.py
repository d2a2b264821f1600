"""Conversion settings from `amp.toml`, the environment and the command line; the last one wins.

The keys of the file are those of the table of options, with "-" or "_"; some are options of the command line, and
`--set KEY=VALUE` states the others there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amp_rewrite.errors import ConfigError, advice, option_of
from amp_rewrite.files.disk import read_text
from amp_rewrite.settings.option import Kind, Option
from amp_rewrite.settings.request import CRITERION, OPTIONS, Request, from_environment

NAME = "amp.toml"
_ALTERNATIVES = ({"data", "ranges"}, CRITERION.keys())
"""Options of which the command line replaces all of a file by stating one."""
_MAX_BYTES = 1 << 16


def settings(
    given: Mapping[str, object], environ: Mapping[str, str], *, config: Path | None = None, folder: Path = Path()
) -> Request:
    """Return the options in force: those of the command line, else the environment's, else the file's, else defaults.

    `given` holds the values of the command line; None and () stand for options that are absent. The file is `config`,
    or `amp.toml` in `folder` if it exists. ConfigError names the file, the variable or the option of an unknown key, a
    wrong type or an unknown choice.
    """
    own = folder / NAME
    file = config or (own if own.is_file() else None)
    filed = from_file(file) if file else {}
    said = {key for key, value in given.items() if value not in (None, ())}
    merged: dict[str, Any] = {
        key: value for key, value in filed.items() if not any(key in group and said & group for group in _ALTERNATIVES)
    }
    merged.update((key, value) for key, value in from_environment(environ).items())
    merged.update((key, OPTIONS[key].check(given[key], option_of(key))) for key in said)
    changed = {name: value for name, value in filed.items() if merged.get(name) is value}
    return Request(**merged, config=_stated(changed, file) if file else "")


def _stated(changed: Mapping[str, object], file: Path) -> str:
    """Return the settings that a file changes, and the file; "" without any. Paths are those of the file."""
    parts = []
    for name, value in changed.items():
        if value != OPTIONS[name].default:
            words = value if isinstance(value, (list, tuple)) else (value,)
            text = " ".join(str(word).removeprefix(f"{file.parent}{os.sep}") for word in words)
            parts.append(f"{OPTIONS[name].key} = {text.lower() if isinstance(value, bool) else text}")
    shown = f"./{file.as_posix()}" if not file.is_absolute() and ".." not in file.parts else file.name
    return f"{', '.join(parts)}, from {shown}" if parts else ""


def setting_of(key: str, where: str) -> Option:
    """Return the option of a key, with "-" or "_". ConfigError for an unknown one."""
    option = OPTIONS.get(key.replace("-", "_"))
    if option is None:
        legal = [option.key for option in OPTIONS.values()]
        hint = advice(key.replace("_", "-"), legal, f"use one of {', '.join(legal)}")
        raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    return option


def from_file(file: Path) -> Mapping[str, object]:
    """Return the settings of a file. Relative paths start at its folder."""
    stated: dict[str, object] = {}
    for key, value in _table(file).items():
        option = setting_of(key, str(file))
        listed = isinstance(value, list) and all(isinstance(part, str) for part in value)
        if not (listed or isinstance(value, str if option.kind is Kind.LIST else (str, int, float))):
            form = "a list of text" if option.kind is Kind.LIST else "text, a number, true or false"
            raise ConfigError(f"{file}: {key} is {value!r}; write {form}")
        stated[option.name] = _beside(file, option, option.check(value, str(file)))
    return stated


def _table(file: Path) -> Mapping[str, Any]:
    import tomllib  # late: most runs have no file

    text = read_text(file, _MAX_BYTES, "a TOML file", ConfigError)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and what int() says of thousands of digits
        raise ConfigError(f"{file}: not valid TOML: {error}; correct it (text needs quotes)") from error


def _beside(file: Path, option: Option, value: Any) -> object:
    if option.kind is Kind.PATH:
        return str(file.parent / value)
    if option.name != "lists":
        return value
    places = [(entry, file.parent / entry) for entry in ([value] if isinstance(value, str) else value)]
    return tuple(str(place) if place.suffix or place.exists() else entry for entry, place in places)
