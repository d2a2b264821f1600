"""Conversion settings: from a file, the environment and the command line, which wins in that order.

The file is `amp.toml`, or the table `[tool.amp-rewrite]` of `pyproject.toml`. Its keys are the names of the
command line's options, with "-" or "_"; options that may be repeated take a list of text.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, ConfigError
from amp_rewrite.settings.choices import Fuse, Placement, Safety, Target, check_headroom, parse_opset
from amp_rewrite.settings.policy import low_type


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides a conversion, and what a comparison fails on. None: the model or the type decides.

    `ranges`, `headroom` and `data` say by which measurements, and what commands feed that are told nothing else.
    """

    to: str = "float16"
    lists: tuple[str, ...] = ()
    level: str = "default"
    target: str = "ort-cuda"
    safety: str = "default"
    keep: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    io: tuple[str, ...] = ()
    gray_follows_allow: bool | None = None
    fuse: str = "basic"
    opset: str | None = None
    placement: str | None = None
    external_data: bool | None = None
    overwrite: bool = False
    fail_on: tuple[str, ...] = ()
    ranges: str | None = None
    headroom: float | None = None
    data: str | None = None


def settings(
    given: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    config: Path | None = None,
    folder: Path = Path(),
) -> Settings:
    """The settings in force: those given, else the environment's, else the file's, else the defaults.

    `given` holds what was said on the command line; None and () mean that nothing was said. The file is
    `config`, or the one that `find` finds in `folder`. ConfigError names the file and line, the variable
    or the option, of an unknown key, a wrong type or an unknown choice.
    """
    file = config or find(folder)
    merged: dict[str, object] = dict(from_file(file)) if file else {}
    merged.update((key, value) for key, value in from_environment(environ).items() if key in _KEYS)
    for key, value in given.items():
        if value not in (None, ()):
            merged[key] = _checked(key, value, f"--{key}")
    return Settings(**merged)  # type: ignore[arg-type]


def find(folder: Path) -> Path | None:
    """`amp.toml` of a folder, else its `pyproject.toml` if that has our table, else None."""
    own = folder / "amp.toml"
    if own.is_file():
        return own
    shared = folder / _SHARED
    return shared if shared.is_file() and _table(shared, _read(shared)) is not None else None


def from_file(file: Path) -> Mapping[str, object]:
    """The settings that a file states. Paths in `lists`, `ranges` and `data` count from the file's folder."""
    text = _read(file)
    table = _table(file, text)
    if table is None:
        raise ConfigError(f"{file}: has no table [tool.amp-rewrite]; add it, or name another file")
    found: dict[str, object] = {}
    for written, value in table.items():
        key, where = written.replace("-", "_"), f"{file}{_line(text, written, file.name == _SHARED)}"
        if key not in _KEYS:
            legal = [name.replace("_", "-") for name in _KEYS]
            near = difflib.get_close_matches(written, legal, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(legal)}"
            raise ConfigError(f"{where}: unknown key {written!r}; {hint}")
        if key in found:
            raise ConfigError(f"{where}: key {key!r} is here with '-' and with '_'; keep one")
        found[key] = _checked(key, _typed(key, value, where), where)
    if "lists" in found:
        found["lists"] = tuple(_beside(file, str(entry)) for entry in _texts(found["lists"]))
    return {key: str(file.parent / str(value)) if key in _PATHS else value for key, value in found.items()}


def from_environment(environ: Mapping[str, str]) -> Mapping[str, object]:
    """The settings of AMP_REWRITE_LEVEL, AMP_REWRITE_LISTS (separated as PATH is) and AMP_REWRITE_LOG_PATH.

    An empty variable counts as absent. Variables that edit the lists are read by `lists.environment_edits`.
    """
    found: dict[str, object] = {}
    if level := environ.get("AMP_REWRITE_LEVEL"):
        found["level"] = _checked("level", level, "AMP_REWRITE_LEVEL")
    if lists := environ.get("AMP_REWRITE_LISTS"):
        found["lists"] = tuple(entry for entry in lists.split(os.pathsep) if entry)
    if log_path := environ.get("AMP_REWRITE_LOG_PATH"):
        found["log_path"] = log_path
    return found


_SHARED = "pyproject.toml"
_KEYS = tuple(field.name for field in fields(Settings))
_LISTS = ("lists", "keep", "lower", "io", "fail_on")
_PATHS = ("ranges", "data")
_SWITCHES = ("gray_follows_allow", "external_data", "overwrite")


def _level(spelling: str) -> object:
    from amp_rewrite.settings.op_lists import Level  # late: settings without a level need no op lists

    return Level.parse(spelling)


def _headroom(spelling: str) -> object:
    check_headroom(float(spelling))
    return spelling


_CHOICES: Mapping[str, Callable[[str], object]] = {
    "to": low_type,
    "level": _level,
    "target": Target.parse,
    "safety": Safety.parse,
    "fuse": Fuse.parse,
    "opset": parse_opset,
    "placement": Placement.parse,
    "headroom": _headroom,
}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); name a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8; save it as UTF-8") from error


def _table(file: Path, text: str) -> Mapping[str, object] | None:
    import tomllib  # late: most runs have no file

    try:
        document = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and what int() says of thousands of digits
        raise ConfigError(f"{file}: not valid TOML: {error}; mend it") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deeply for settings; mend it") from error
    if file.name != _SHARED:
        return document
    tools = document.get("tool", {})
    found = tools.get("amp-rewrite") if isinstance(tools, dict) else None
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{file}: tool.amp-rewrite is no table; write [tool.amp-rewrite]")
    return found


def _line(text: str, key: str, shared: bool) -> str:
    """ ":LINE" of a key, below our table's header in a shared file; "" where it is not written plainly."""
    start = 0
    if shared:
        header = re.search(r"^\s*\[\s*tool\s*\.\s*[\"']?amp-rewrite[\"']?\s*\]", text, re.MULTILINE)
        start = header.end() if header else len(text)
    found = re.compile(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?\s*[=.]", re.MULTILINE).search(text, start)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""


def _typed(key: str, value: object, where: str) -> object:
    if key in _SWITCHES:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where}: {key} is {value!r}; write true or false")
    if key in _LISTS:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
        raise ConfigError(f'{where}: {key} is {value!r}; write a list of text, as in ["..."]')
    if key == "headroom":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) if abs(value) <= DType.DOUBLE.max else math.inf  # TOML's integers know no end
        raise ConfigError(f"{where}: {key} is {value!r}; write a number, as in 2")
    if isinstance(value, str):
        return value
    if key == "opset" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{where}: {key} is {value!r}; write text in quotes")


def _checked(key: str, value: object, where: str) -> object:
    if key in _CHOICES:
        try:
            _CHOICES[key](str(value))
        except AmpRewriteError as error:
            raise ConfigError(f"{where}: {error}") from error
    return value


def _texts(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def _beside(file: Path, entry: str) -> str:
    """A path of the lists, from the file's folder; the name of a shipped list stays as it is."""
    beside = file.parent / entry
    return str(beside) if beside.suffix or beside.exists() else entry
