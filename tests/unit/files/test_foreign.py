"""Files of other frameworks are recognized, with a way to convert them to ONNX."""

import json
import zipfile
from pathlib import Path

import pytest

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
NODE = b"\n\x01x\x12\x0bPlaceholder"
TORCH = "load the module in Python, and call torch.onnx.export(model, args"


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        Model.load(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "words", "remedy"),
    [
        (len(HEADER).to_bytes(8, "little") + HEADER + bytes(4), "contains weights (safetensors)", "torch.onnx.export("),
        (b"GGUF" + bytes(20), "contains weights (GGUF)", "optimum-cli export onnx --model"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "is a PyTorch file", TORCH),
        (b"\x1c\0\0\0TFL3" + bytes(20), "is a TensorFlow Lite model", "tf2onnx.convert --output model.onnx --tflite"),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), "is a Keras model", '.export("model.onnx", format="onnx")'),
        (b"\x1f\x8b\x08" + bytes(20), "is compressed (gzip)", "gunzip --keep"),
        (b"\x08\x01\x12\x03\n\x01\x0a", "is a TensorFlow SavedModel", "--saved-model"),
        (b"\n" + bytes([len(NODE)]) + NODE, "is a frozen TensorFlow graph", "--graphdef"),
    ],
)
def test_another_format_is_recognized_by_its_content(tmp_path: Path, content: bytes, words: str, remedy: str) -> None:
    (tmp_path / "any.bin").write_bytes(content)
    message = refusal(tmp_path / "any.bin")
    assert message.startswith(f"{tmp_path / 'any.bin'} {words}") and ", not an ONNX model; " in message
    assert remedy in message


def test_the_way_to_onnx_quotes_names(tmp_path: Path) -> None:
    (tmp_path / "my $net.tflite").write_bytes(b"\x1c\0\0\0TFL3" + bytes(20))
    assert f"--tflite '{tmp_path}/my $net.tflite'`" in refusal(tmp_path / "my $net.tflite")
    (tmp_path / 'ä"b.keras').write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(20))
    assert f'load_model("{tmp_path}/ä\\"b.keras")' in refusal(tmp_path / 'ä"b.keras')


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("model/data.pkl", "is a PyTorch file"),
        ("model/data/0", "is a PyTorch file"),
        ("metadata.json", "is a Keras model"),
    ],
)
def test_archives_are_recognized_by_their_first_member(tmp_path: Path, first: str, words: str) -> None:
    with zipfile.ZipFile(tmp_path / "any.bin", "w") as archive:
        archive.writestr(first, b"{}")
    assert words in refusal(tmp_path / "any.bin")


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        *((suffix, "is a PyTorch file") for suffix in (".pt", ".pth", ".pt2")),
        *((suffix, "is a Keras") for suffix in (".keras", ".h5", ".hdf5")),
        (".safetensors", "contains weights (safetensors)"),
        (".pb", "is a frozen"),
    ],
)
def test_unknown_content_is_named_by_its_suffix(tmp_path: Path, suffix: str, words: str) -> None:
    path = (tmp_path / "any").with_suffix(suffix)
    path.write_bytes(b"\xff\xff\xff")
    assert refusal(path).startswith(f"{path} is not an ONNX model; by its suffix, it {words}")


def test_a_folder_with_a_saved_model_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01\x12\x03\n\x01\x0a")
    assert f"--saved-model {tmp_path}" in refusal(tmp_path)
