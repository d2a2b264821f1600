"""Files of other frameworks, recognized by content or suffix, and the conversion of each to ONNX."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from amp_rewrite.files.disk import open_regular

_HEAD = 256  # bytes that tell the formats apart
_ZIP = b"PK\x03\x04"
_TORCH_PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True)
class Foreign:
    """A format other than ONNX: the start of its files, words for them, and the way to an ONNX model.

    `{file}` in `remedy` stands for the path in a shell, `{folder}` for its folder, `{text}` for the path in Python.
    """

    suffixes: tuple[str, ...]
    begins: Callable[[bytes], bool]
    words: str
    remedy: str


_TORCH = 'torch.onnx.export(model, args, "model.onnx", dynamo=True)'
_WEIGHTS = f"export the model that reads them: {_TORCH}, or `optimum-cli export onnx --model {{folder}} onnx`"
_KERAS = 'in Python, keras.models.load_model({text}).export("model.onnx", format="onnx")'
_BINARY = 'in Python, onnx.save(onnx.load({text}), "model.onnx")'
_TF2ONNX = "run `python -m tf2onnx.convert --output model.onnx"
_ORIGINAL = "convert the ONNX model that it was made from"

TEXT = (".onnxtxt", ".onnxtext", ".textproto", ".prototxt", ".pbtxt", ".txtpb", ".json", ".onnxjson")
"""Suffixes of files that onnx writes models as text to."""
FORMATS = (
    Foreign(
        (".safetensors",),
        lambda head: head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 32,
        "holds weights (safetensors) without a graph",
        _WEIGHTS,
    ),
    Foreign((".gguf",), lambda head: head.startswith(b"GGUF"), "holds weights (GGUF) without a graph", _WEIGHTS),
    Foreign(
        (".keras", ".h5", ".hdf5"),
        lambda head: head.startswith(b"\x89HDF\r\n\x1a\n") or (head.startswith(_ZIP) and b"metadata.json" in head),
        "is a Keras model",
        _KERAS,
    ),
    Foreign(
        (".npz",),
        lambda head: head.startswith(_ZIP) and b".npy" in head,
        "is an archive of arrays",
        "name the model first, and these with --data {file}",
    ),
    Foreign(
        TEXT,
        lambda head: False,
        "is text",
        'if it holds a model, in Python, onnx.save(onnx.load({text}), "model.onnx")',
    ),
    Foreign(
        (".html", ".htm"),
        lambda head: head.lstrip()[:14].lower() == b"<!doctype html",
        "is a web page",
        "name the model that it shows, or its JSON report",
    ),
    Foreign(
        (".pt", ".pth", ".pt2"),
        lambda head: head.startswith(_TORCH_PICKLE) or (head.startswith(_ZIP) and b"/data" in head),
        "is a PyTorch file",
        f"load the module in Python, and call {_TORCH}",
    ),
    Foreign(
        (".gz", ".tgz"),
        lambda head: head.startswith(b"\x1f\x8b"),
        "is compressed (gzip)",
        "unpack it, as by `gunzip --keep {file}`",
    ),
    Foreign(
        (".tflite",),
        lambda head: head[4:8] == b"TFL3",
        "is a TensorFlow Lite model",
        f"{_TF2ONNX} --tflite {{file}}`",
    ),
    Foreign((".ort",), lambda head: head[4:8] == b"ORTM", "is a model in onnxruntime's own format", _ORIGINAL),
    Foreign(
        (".engine", ".plan", ".trt"),
        lambda head: head.startswith((b"ftrt", b"ptrt")),
        "is a TensorRT engine, compiled for one GPU",
        _ORIGINAL,
    ),
    Foreign(
        (),
        lambda head: head.startswith(b"\x08\x01\x12"),
        "is a TensorFlow SavedModel",
        f"{_TF2ONNX} --saved-model {{folder}}`",
    ),
    Foreign(
        (".pb",),
        lambda head: head.startswith(b"\n") and (b"\x12\x0bPlaceholder" in head or b"\x12\x05Const" in head),
        "is a frozen TensorFlow graph",
        f"{_TF2ONNX} --graphdef {{file}} --inputs NAME:0 --outputs NAME:0`",
    ),
)


def foreign(path: Path) -> str | None:
    """Return the format of a file other than ONNX, and how to convert it, in words; None for unknown formats.

    Of folders, those that hold a SavedModel are known.
    """
    if path.is_dir():
        saved = path / "saved_model.pb"
        return foreign(saved) if saved.is_file() else None
    with open_regular(path) as file:
        head = file.read(_HEAD)
    for form in FORMATS:
        if form.begins(head):
            return f"{path} {form.words}, not an ONNX model; {_remedy(form, path)}"
    for form in FORMATS:
        if path.suffix.lower() in form.suffixes:
            return f"{path} is not an ONNX model; by its suffix it {form.words}: {_remedy(form, path)}"
    return None


def _remedy(form: Foreign, path: Path) -> str:
    words = {"file": shlex.quote(str(path)), "folder": shlex.quote(str(path.parent))}
    return form.remedy.format(**words, text=json.dumps(str(path), ensure_ascii=False))
