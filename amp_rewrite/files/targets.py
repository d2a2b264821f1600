"""Targets: the path of a model to write, and its data files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto

from amp_rewrite.errors import ModelError, spelled
from amp_rewrite.files import wire
from amp_rewrite.files.disk import check_place, open_regular

TEXT = (".onnxtxt", ".onnxtext", ".textproto", ".prototxt", ".pbtxt", ".txtpb", ".json", ".onnxjson")
"""Suffixes of files that onnx writes models as text to."""
LARGEST_SHAPE = 1 << 14
"""Bytes of a list of integers that may be a shape, which runtimes read before they open data files."""

_LARGE = 50_000_000  # bytes


def check_target(path: Path, overwrite: bool, *, read: Path | None = None) -> None:
    """Raise ModelError if a model cannot be written to `path`, and say why. `read`: a model with data files to keep."""
    if "\0" in str(path):
        raise ModelError(f"cannot write {str(path)!r}: a name cannot hold a zero byte; name another")
    if path.suffix.lower() in TEXT:
        raise ModelError(f"cannot write {path}: only the binary format is written; use the suffix .onnx")
    check_place(path, ModelError)
    open_file = path.is_symlink() and str(path.readlink()).startswith("/proc/")  # of a process, such as /dev/stdout
    if (path.exists() and not path.is_file()) or open_file:
        raise ModelError(f"cannot write {path}: it is not a regular file; name another")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise ModelError(f"{path} exists; name another output, or replace it with {spelled('overwrite', True)}")
    try:
        path.name.encode()
    except UnicodeEncodeError as cause:
        raise ModelError(f"cannot write {str(path)!r}: its name is not Unicode; name another") from cause
    if read is not None and any(replaces(path, data) for data in data_files(read)):
        raise ModelError(f"cannot write {path}: it holds the weights of {read}, which is being read; name another")


def replaces(path: Path, file: Path) -> bool:
    """True if writing to `path` replaces `file`. Writing to a link replaces only the link."""
    return not path.is_symlink() and path.exists() and os.path.realpath(path) == os.path.realpath(file)


def outdated(path: Path, kept: Collection[str]) -> list[Path]:
    """Data files left unused by a replacement of the model at `path`.

    They were written by `save`, and no link to the model, no other model in the folder and no entry of `kept` refers to
    them.
    """
    if path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1:
        return []
    own = [file for file in data_files(path) if _own(path).fullmatch(file.name) and os.path.realpath(file) not in kept]
    if not own:
        return []
    shared = {file for other in models_beside(path) for file in data_files(other)}
    return [file for file in own if file not in shared]


def models_beside(path: Path) -> list[Path]:
    """Return the other models in the folder of a model."""
    near = (other for other in path.parent.iterdir() if other.suffix.lower() == ".onnx" and other.name != path.name)
    return [other for other in near if other.is_file()]


def _own(path: Path) -> re.Pattern[str]:
    return re.compile(re.escape(path.stem) + r"\.[0-9a-f]{16}\.data")


def data_files(path: Path) -> list[Path]:
    """Return the data files named by the model at `path`; none for other files."""
    try:
        with open_regular(path) as file:
            return data_files_in(file, os.fstat(file.fileno()).st_size, path)
    except OSError:
        return []


def is_large(path: Path) -> bool:
    """True if a model takes more than a moment to convert and check."""
    with suppress(OSError):
        return path.stat().st_size >= _LARGE or any(file.stat().st_size >= _LARGE for file in data_files(path))
    return False


def data_files_in(file: BinaryIO, size: int, path: Path) -> list[Path]:
    """Return the data files named by a model at `path`; none for other files."""
    names: set[str] = set()
    try:
        light = wire.lightened(file, size, LARGEST_SHAPE, lambda *_: True, str(path))
        if b"location" not in light:
            return []
        proto = ModelProto.FromString(light)
    except (ModelError, DecodeError):
        return []
    for tensor in wire.tensors(proto):
        locations = [entry.value for entry in tensor.external_data if entry.key == "location"]
        # protobuf returns bytes for text that is not UTF-8
        names |= {name for name in locations if isinstance(name, str) and "\0" not in name}
    return [path.parent / name for name in sorted(names)]
