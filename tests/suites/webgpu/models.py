"""The models that run on the device: the exported fixtures and the shipped ones, with their inputs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from amp_rewrite.files.model import Model
from support.paths import ROOT, TESTS
from support.rounded_products import relative_error

BOUND = 4e-3
"""The largest error of a fixture that was converted for the device, of the largest float32 value."""
LEAST, FACTOR = 0.7, 8.0
"""The smallest and the largest error on the device in errors of the emulation: of an op, and of a converted fixture."""
_DIGITS = ROOT / "examples" / "models"

Feeds = dict[str, np.ndarray]


def fixtures() -> Iterator[tuple[str, Path, Feeds]]:
    """Name, file and inputs of each model."""
    with np.load(_DIGITS / "digits_test.npz") as stored:
        images = stored["x"][:8]
    for path in sorted(_DIGITS.glob("*.onnx")):
        yield path.stem, path, {"image": images}
    for path in sorted((TESTS / "models").glob("*.onnx")):
        with np.load(path.with_suffix(".npz")) as stored:
            feeds = {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}
        yield path.stem, path, feeds


def whole(model: Model) -> ModelProto:
    """A model in memory, its weights too."""
    proto: ModelProto = model.to_proto()
    return onnx.load_from_string(proto.SerializeToString())


def error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference of a float output, of its largest float32 value; infinite where one side alone is so."""
    floats = [at for at, array in enumerate(expected) if array.dtype.kind == "f"]
    return relative_error([expected[at] for at in floats], [found[at] for at in floats])


def rms(found: np.ndarray, expected: np.ndarray) -> float:
    """The root of the mean squared difference, over what is finite on both sides."""
    wide, right = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    held = np.isfinite(wide) & np.isfinite(right)
    return float(np.sqrt(np.mean((wide - right)[held] ** 2))) if held.any() else 0.0
