"""The models of the GPU suite, each in float32 and in every way of making it half.

A model is a file and one batch beside it (`NAME.onnx`, `NAME.npz`); a way of making it half writes another file.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.shared import measure, zoo

if TYPE_CHECKING:
    from benchmarks.shared.zoo import Built

EXAMPLES = measure.ROOT / "examples" / "models"
EXPORTED = measure.ROOT / "tests" / "models"
SEED = 7


@dataclass(frozen=True, slots=True)
class Made:
    """A float32 model of the suite: how many items a batch has, where it comes from, and what stands for it if tiny."""

    rows: int
    source: Callable[[str, int, Path], Path]
    stand_in: str | None = None


def of_example(name: str, rows: int, cache: Path) -> Path:
    """A digit classifier that ships here, with held-out digits."""
    with np.load(EXAMPLES / "digits_test.npz") as held_out:
        images = np.resize(held_out["x"], (rows, *held_out["x"].shape[1:]))
    np.savez(cache / f"{name}.npz", image=images)
    return _copied(EXAMPLES / f"{name}.onnx", cache / f"{name}.onnx")


def of_zoo(name: str, rows: int, cache: Path) -> Path:
    """A model of the zoo, exported with a batch of that many rows."""
    return zoo.export(name, cache, lambda: tiled(zoo.ZOO[name](), rows))


def of_layers(name: str, rows: int, cache: Path) -> Path:
    """The dense network of TensorFlow's guide to mixed precision: 784-4096-4096-10, a batch of 8192."""
    return dense(cache / f"{name}.onnx", rows, 4096)


def stand_in(name: str, cache: Path) -> Path:
    """A small exported model of the same kind, with its batch."""
    small = MODELS[name].stand_in
    if small is None:
        return dense(cache / f"{name}.onnx", 16, 32)
    if small.startswith("digits"):
        return of_example(name, 8, cache)
    np.savez(cache / f"{name}.npz", **batch_of(EXPORTED / f"{small}.npz"))
    return _copied(EXPORTED / f"{small}.onnx", cache / f"{name}.onnx")


def batch_of(file: Path) -> dict[str, Any]:
    """The inputs in a file of arrays, which may hold outputs beside them, as `input/NAME` and `output/NAME`."""
    with np.load(file) as stored:
        return {n.removeprefix("input/"): stored[n] for n in stored.files if not n.startswith("output/")}


MODELS: Mapping[str, Made] = {
    "digits_cnn": Made(256, of_example, "digits_cnn"),
    "digits_vit": Made(256, of_example, "digits_vit"),
    "dense": Made(8192, of_layers),
    "bert_base": Made(32, of_zoo, "bert_dynamo20"),
    "resnet50": Made(32, of_zoo, "cnn_dynamo18"),
    "vit_base": Made(32, of_zoo, "vit_dynamo22"),
    "gpt2": Made(16, of_zoo, "gpt2_dynamo18"),
    "llama": Made(16, of_zoo, "llama_dynamo21"),
    "whisper_small_encoder": Made(8, of_zoo, "whisper_encoder_dynamo19"),
    "unet": Made(8, of_zoo, "unet_dynamo21"),
}


def made(name: str, cache: Path, *, tiny: bool) -> Path:
    """The float32 file of a model, with its batch beside it; made once."""
    path = cache / f"{name}.onnx"
    if path.exists() and path.with_suffix(".npz").exists():
        return path
    chosen = MODELS[name]
    return stand_in(name, cache) if tiny else chosen.source(name, chosen.rows, cache)


def _copied(source: Path, target: Path) -> Path:
    shutil.copy(source, target)
    return target


def tiled(built: Built, rows: int) -> Built:
    """A model of the zoo with its inputs repeated to that many rows."""
    inputs = {}
    for name, tensor in built.inputs.items():
        times = -(-rows // tensor.shape[0])
        inputs[name] = tensor.repeat(times, *[1] * (tensor.dim() - 1))[:rows].contiguous()
    return zoo.Built(built.module, inputs)


def dense(path: Path, rows: int, hidden: int) -> Path:
    """784 (tiny: 16) to `hidden` twice to 10, Relu between, weights as of Glorot's uniform start; the batch is free."""
    import onnx
    import onnx.parser
    from onnx.numpy_helper import from_array

    features = 784 if hidden > 784 else 16
    signature = f"dense (float[batch,{features}] image) => (float[batch,10] logits)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> {signature} {{
          h1 = MatMul (image, w1)  a1 = Add (h1, b1)  dense_1 = Relu (a1)
          h2 = MatMul (dense_1, w2)  a2 = Add (h2, b2)  dense_2 = Relu (a2)
          h3 = MatMul (dense_2, w3)  logits = Add (h3, b3)
        }}"""
    )
    random = np.random.default_rng(SEED)
    for number, (fan_in, fan_out) in enumerate([(features, hidden), (hidden, hidden), (hidden, 10)], start=1):
        limit = np.sqrt(6 / (fan_in + fan_out))
        weight = random.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
        model.graph.initializer.append(from_array(weight, f"w{number}"))
        model.graph.initializer.append(from_array(np.zeros(fan_out, np.float32), f"b{number}"))
    onnx.save(model, path)
    np.savez(path.with_suffix(".npz"), image=random.random((rows, features), np.float32))
    return path


# -- ways of making a model half -----------------------------------------------------------------------


def by_amp(to: str) -> Callable[[str, Path, Path, Mapping[str, Any]], Path]:
    """amp-rewrite itself, with its defaults."""

    def way(name: str, source: Path, folder: Path, given: Mapping[str, Any]) -> Path:
        import amp_rewrite

        target = folder / f"{name}.{to}.onnx"
        amp_rewrite.convert(source, to=to).save(target, overwrite=True)
        return target

    return way


def has_module(name: str, *, tiny: bool) -> bool:
    """True if the zoo builds the model as a PyTorch module."""
    return MODELS[name].source is of_zoo and not tiny


def by_torch(name: str, source: Path, folder: Path, given: Mapping[str, Any]) -> Path:
    """`module.half()`, exported: every op and every input in float16. Only for what `has_module`."""

    def half() -> Built:
        built = tiled(zoo.ZOO[name](), MODELS[name].rows)
        inputs = {key: t.half() if t.is_floating_point() else t for key, t in built.inputs.items()}
        return zoo.Built(built.module.half(), inputs)

    return zoo.export(f"{name}.torch_half", folder, half)


def by_peer(tool: str, interpreter: str) -> Callable[[str, Path, Path, Mapping[str, Any]], Path]:
    """Run another converter (peers/peer_tools.py) by the Python that the setting `interpreter` names."""

    def way(name: str, source: Path, folder: Path, given: Mapping[str, Any]) -> Path:
        python = given[interpreter]
        if not python:
            raise LookupError(f"no interpreter for it was named; add --{interpreter} PYTHON")
        target = folder / f"{name}.{tool}.onnx"
        command = [*measure.script("peer_tools", python), tool, source, target]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as cause:
            raise LookupError(f"{python}, which --{interpreter} names, does not start: {cause.strerror}") from cause
        if ran.returncode:
            raise LookupError(f"it failed: {(ran.stderr.strip().splitlines() or ['without a word'])[-1][:200]}")
        return target

    return way


WAYS: Mapping[str, Callable[[str, Path, Path, Mapping[str, Any]], Path]] = {
    "amp-rewrite float16": by_amp("float16"),
    "amp-rewrite bfloat16": by_amp("bfloat16"),
    "torch half": by_torch,
    "onnxruntime.transformers float16": by_peer("onnxruntime_float16", "peers"),
    "modelopt AutoCast": by_peer("modelopt_autocast", "autocast"),
}
"""Each makes a half file of a float32 one; LookupError says why there is none."""
