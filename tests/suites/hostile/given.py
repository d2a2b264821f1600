"""Valid models, and command lines on hostile ones."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, numpy_helper

from suites.fuzz.cage import Cage, Outcome

TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[2,4] x) => (float[2,3] y)
<float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
  [first] h = MatMul (x, w)
  [last] y = Relu (h)
}
"""


def sound() -> ModelProto:
    return onnx.parser.parse_model(TEXT)


def net(seed: int = 0, size: int = 600) -> ModelProto:
    """Build a model with two weights of size × size, 1.4 MB each."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> net (float[2,{size}] x) => (float[2,{size}] y) {{
            h = MatMul (x, w)  y = MatMul (h, v) }}"""
    )
    rng = np.random.default_rng(seed)
    for name in ("w", "v"):
        weight = rng.standard_normal((size, size)).astype(np.float32) / 30
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    return model


def weights(model: ModelProto) -> list[bytes]:
    return [numpy_helper.to_array(tensor).tobytes() for tensor in model.graph.initializer]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def attempt(cage: Cage, folder: Path, *words: str | Path) -> Outcome:
    """Run a command line that must succeed or print one line, in little memory, without leaving scratch files."""
    before = set(folder.glob(".amp-rewrite.*"))
    outcome = cage.run(*words, folder=folder)
    assert outcome.code in (0, 1) or outcome.refused, outcome
    assert "Traceback" not in outcome.err and "out of memory" not in outcome.err, outcome
    assert outcome.peak < 600e6
    assert set(folder.glob(".amp-rewrite.*")) <= before
    return outcome


def converting(cage: Cage, folder: Path, model: ModelProto | bytes, *words: str) -> Outcome:
    """Convert a model and check that nothing but its result is written."""
    (folder / "m.onnx").write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    (folder / "out.onnx").unlink(missing_ok=True)
    before = set(files(folder))
    outcome = attempt(cage, folder, "m.onnx", "-o", "out.onnx", "-q", *words)
    assert set(files(folder)) == (before if outcome.code else before | {"out.onnx"})
    return outcome
