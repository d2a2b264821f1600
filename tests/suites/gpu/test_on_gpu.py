"""On a real GPU: `make gpu` runs these. Elsewhere they are skipped."""

from pathlib import Path

import numpy as np
import pytest

import amp_rewrite
from amp_rewrite import Model
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from support.paths import ROOT

MODELS = ROOT / "examples" / "models"
# Two of the 360 digits, as the demo allows.
LOST_ANSWERS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_opens(), reason="no CUDA provider opens here"),
]


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    with np.load(MODELS / "digits_test.npz") as held_out:
        return held_out["x"]


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["digits_cnn", "digits_vit"])
def test_the_gpu_answers_as_its_emulation_does(name: str, to: str, digits: np.ndarray) -> None:
    converted = amp_rewrite.convert(MODELS / f"{name}.onnx", to=to)
    real = Runner.open(converted.result, SessionOptions(providers=(CUDA, CPU)))
    twin = Runner.open(amp_rewrite.emulate(converted.result))
    assert real.provider == CUDA
    answers = [np.asarray(next(iter(r.run({"image": digits}).values()))).argmax(axis=1) for r in (real, twin)]
    assert np.count_nonzero(answers[0] != answers[1]) <= LOST_ANSWERS


def test_a_benchmark_has_both_float32_baselines_and_memory(digits: np.ndarray) -> None:
    source = MODELS / "digits_vit.onnx"
    half = amp_rewrite.convert(source).result
    found = amp_rewrite.bench([source, half], {"image": digits}, rounds=2)
    assert found.provider == CUDA
    assert [e.name for e in found.entries] == ["digits_vit.onnx", "digits_vit.onnx with TF32", "model 1"]
    assert found.baselines == ("digits_vit.onnx", "digits_vit.onnx with TF32")
    assert all(entry.memory for entry in found.entries), found.notes


def test_half_weights_take_less_of_the_gpu(tmp_path: Path) -> None:
    import onnx
    import onnx.parser
    from onnx.numpy_helper import from_array

    text = '<ir_version: 10, opset_import: ["": 20]> g (float[n, 4096] x) => (float[n, 4096] y) { y = MatMul (x, w) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(from_array(np.full((4096, 4096), 0.01, np.float32), "w"))
    full, half = Model.load(model), amp_rewrite.convert(model).result
    found = amp_rewrite.bench([full, half], {"x": np.ones((1, 4096), np.float32)}, rounds=1)
    before, after = found.entries[0].memory, found.entries[-1].memory
    assert before is not None and after is not None
    # The weights alone are 64 MiB and 32 MiB; what a library loads for itself differs by a few.
    assert before - after > 20 << 20
