"""External data: tensors in files of a model's folder."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.tensors import Source, dtype, elements, stamp

_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


class Folder:
    """Folder for a model's external data. `also`: the folder of the file behind a linked model path."""

    def __init__(self, folder: Path, also: Path | None = None) -> None:
        self.path = folder
        self._roots = tuple(Path(os.path.realpath(p)) for p in (folder, also) if p is not None)
        self._files: dict[str, tuple[str, int, str]] = {}

    def source(self, tensor: onnx.TensorProto) -> Source:
        """Return the source of a tensor with external data.

        ModelError, naming the tensor, if the location leaves the folder (absolute, "..", through a link), is missing
        or is not a regular file, and if the number of bytes does not fit the tensor's dims and type or exceeds the
        file.
        """
        entries = {entry.key: entry.value for entry in tensor.external_data}
        where = f"external data of tensor {tensor.name!r}"
        if any(isinstance(text, bytes) for entry in entries.items() for text in entry):
            raise ModelError(f"{where} is described by text that is not UTF-8; the file is damaged, export it again")
        location = entries.get("location", "")
        if location not in self._files:
            self._files[location] = self._file(location, where)
        path, size, file_stamp = self._files[location]
        kind = dtype(tensor)
        if kind is DType.STRING:
            raise ModelError(f"{where}: strings cannot be external; export the model again")
        needed = kind.nbytes(elements(tensor))
        offset = _number(entries.get("offset", "0"), "offset", where)
        length = _number(entries["length"], "length", where) if "length" in entries else needed
        if length != needed:
            raise ModelError(
                f"{where} is {length} bytes long, but its dims {list(tensor.dims)} of {kind.spelling} need"
                f" {needed}; export the model again"
            )
        if offset + length > size:
            raise ModelError(
                f"{where} needs bytes {offset} to {offset + length} of {location!r}, which has only {size};"
                " copy that file again"
            )
        return Source(path, offset, length, kind, file_stamp)

    def _file(self, location: str, where: str) -> tuple[str, int, str]:
        if not location or "\0" in location:
            raise ModelError(f"{where} has the location {location!r}, which does not name a file; export it again")
        kinds = PurePosixPath(location), PureWindowsPath(location)
        if any(path.anchor or ".." in path.parts for path in kinds):
            raise ModelError(
                f"{where} has the location {location!r}, which leaves the model's folder; put the file there and use"
                " its plain name"
            )
        real = Path(os.path.realpath(self.path / location))
        if not any(real.is_relative_to(root) for root in self._roots):
            raise ModelError(
                f"{where}: {location!r} is a link that leaves the model's folder; put the file itself there"
            )
        try:
            status = real.stat()
        except OSError as cause:
            raise ModelError(
                f"{where}: cannot read {self.path / location}: {cause.strerror}; the file belongs beside the model"
            ) from cause
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{where}: {self.path / location} is not a regular file")
        return str(real), status.st_size, stamp(status)


def _number(text: str, key: str, where: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ModelError(f"{where} has the {key} {text!r}, which is not a byte count; export the model again")
    return int(text)
