"""Model input of onnxruntime: heavy weights stay in their files, which onnxruntime maps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from onnx import ModelProto, TensorProto

from amp_rewrite.errors import ModelError
from amp_rewrite.files import wire
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.files.tensors import Sources, is_pending, is_stub, materialized, nbytes, source

_FROM_FOLDER = "session.model_external_initializers_file_folder_path"
_LARGEST_MESSAGE = 1 << 26  # bytes of tensors in memory above which a model is passed as a file


@contextmanager
def model_input(model: Model) -> Iterator[tuple[bytes | str, Mapping[str, str]]]:
    """Yield the model for onnxruntime, a message that refers to the files of weights or a path, and session entries."""
    heavy = [t for t in wire.tensors(model.proto) if is_stub(t)]
    in_memory = sum(nbytes(t) for t in wire.tensors(model.proto) if not is_stub(t) or source(t).in_memory)
    if in_memory <= _LARGEST_MESSAGE and not any(map(is_pending, heavy)):
        yield _message(model.proto, heavy)
        return
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "model.onnx"
        try:
            model.save(path, external_data=True)
        except ModelError as cause:
            raise ModelError(
                f"the model must be written to a temporary folder to be opened, and that failed: {cause}; set TMPDIR"
                " to a folder with more space, or save the model and load it again"
            ) from cause
        yield str(path), {}


def _message(proto: ModelProto, heavy: Sequence[TensorProto]) -> tuple[bytes, Mapping[str, str]]:
    """Serialize the model with stubs as onnxruntime reads them: files below one folder."""
    if not heavy:
        return proto.SerializeToString(), {}
    places = [place for tensor in heavy if not (place := source(tensor)).in_memory]
    copy = clone(proto)
    with Sources() as sources:
        for tensor in wire.tensors(copy):
            if is_stub(tensor) and source(tensor).in_memory:
                tensor.CopyFrom(materialized(tensor, sources))
        for first in {(p.path, p.stamp): p for p in places}.values():
            sources.fill(first, 0, memoryview(bytearray()))  # refuses a file that has changed
    if not places:
        return copy.SerializeToString(), {}
    folder = os.path.commonpath([os.path.dirname(p.path) for p in places])  # noqa: PTH120
    for tensor in wire.tensors(copy):
        if is_stub(tensor):
            place = source(tensor)
            del tensor.external_data[:]
            where = Path(place.path).relative_to(folder).as_posix()
            for key, value in (("location", where), ("offset", place.offset), ("length", place.length)):
                tensor.external_data.add(key=key, value=str(value))
    return copy.SerializeToString(), {_FROM_FOLDER: folder}
