"""Files of other frameworks, recognized by content or suffix, with instructions for converting each to ONNX."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from amp_rewrite.files.disk import open_regular
from amp_rewrite.files.store import TEXT

_HEAD_BYTES = 256  # enough to tell the formats apart


@dataclass(frozen=True, slots=True)
class Foreign:
    """A format other than ONNX: its suffixes, first bytes, description, and instructions for converting it.

    In `remedy`, `{file}` is the path quoted for a shell, `{folder}` is its folder, and `{text}` is the path as a Python
    string.
    """

    suffixes: tuple[str, ...]
    begins: bytes
    description: str
    remedy: str


_TORCH = 'torch.onnx.export(model, args, "model.onnx", dynamo=True)'
_WEIGHTS = f"export the model that uses them: {_TORCH}, or `optimum-cli export onnx --model {{folder}} onnx`"
_KERAS = 'in Python, keras.models.load_model({text}).export("model.onnx", format="onnx")'
_BINARY = 'in Python, onnx.save(onnx.load({text}), "model.onnx")'
_TF2ONNX = "run `python -m tf2onnx.convert --output model.onnx"
FORMATS = (
    Foreign((".safetensors",), rb'.{4}\0{4}\{"', "contains weights (safetensors) without a graph", _WEIGHTS),
    Foreign((".gguf",), rb"GGUF", "contains weights (GGUF) without a graph", _WEIGHTS),
    Foreign((".keras", ".h5", ".hdf5"), rb"\x89HDF\r\n|PK\x03\x04.*metadata\.json", "is a Keras model", _KERAS),
    Foreign(TEXT, rb"(?!)", "is a text file", f"if it contains a model, {_BINARY}"),
    Foreign(
        (".pt", ".pth", ".pt2"),
        rb"\x80\x02\x8a\nl\xfc\x9cF\xf9|PK\x03\x04.*/data",
        "is a PyTorch file",
        f"load the module in Python, and call {_TORCH}",
    ),
    Foreign((".gz", ".tgz"), rb"\x1f\x8b", "is compressed (gzip)", "unpack it first: `gunzip --keep {file}`"),
    Foreign((".tflite",), rb".{4}TFL3", "is a TensorFlow Lite model", f"{_TF2ONNX} --tflite {{file}}`"),
    Foreign((), rb"\x08\x01\x12", "is a TensorFlow SavedModel", f"{_TF2ONNX} --saved-model {{folder}}`"),
    Foreign(
        (".pb",),
        rb"\n.*\x12(\x0bPlaceholder|\x05Const)",
        "is a frozen TensorFlow graph",
        f"{_TF2ONNX} --graphdef {{file}} --inputs NAME:0 --outputs NAME:0`",
    ),
)


def foreign(path: Path) -> str | None:
    """Describe a file of another format and its conversion; None for an unknown format.

    A folder is recognized if it contains a SavedModel.
    """
    if path.is_dir():
        saved = path / "saved_model.pb"
        return foreign(saved) if saved.is_file() else None
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    names = {"file": shlex.quote(str(path)), "folder": shlex.quote(str(path.parent))}
    names["text"] = json.dumps(str(path), ensure_ascii=False)
    for form in FORMATS:
        if re.match(form.begins, head, re.DOTALL):
            return f"{path} {form.description}, not an ONNX model; {form.remedy.format(**names)}"
    for form in FORMATS:
        if path.suffix.lower() in form.suffixes:
            return f"{path} is not an ONNX model; by its suffix, it {form.description}: {form.remedy.format(**names)}"
    return None
