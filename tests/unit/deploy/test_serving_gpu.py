"""Sessions on a real GPU: what is bound lies there, comes back unchanged, and a recorded graph computes anew."""

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from amp_rewrite import Session
from amp_rewrite.runtime.gpu import hardware
from amp_rewrite.runtime.runner import CPU, CUDA, cuda_opens
from support.paths import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_opens(), reason="no CUDA provider opens here")]

CNN = ROOT / "examples" / "models" / "digits_cnn.onnx"
IMAGES = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
LOW = """<ir_version: 10, opset_import: ["": 20]> g (bfloat16[2] b, float16[2] h) => (bfloat16[2] c, float16[2] i)
    { c = Add (b, b)  i = Add (h, h) }"""
MLP = """<ir_version: 10, opset_import: ["": 20]> mlp (float[2, 8] x) => (float[2, 2] y)
    <float[8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> { m = MatMul (x, w)  y = Relu (m) }"""


def test_a_converted_model_runs_on_the_gpu_and_agrees_with_float32() -> None:
    if hardware().gpus[0].capability < (7, 0):
        pytest.skip("this GPU gains nothing by float16")
    session = Session(CNN, policy="mixed_float16", cache=None)
    assert (session.notes, session.converted, session.get_providers()) == ((), True, [CUDA, CPU])
    expected = Session(CNN, providers=[CPU]).run({"image": IMAGES})["probability"]
    found = session.run({"image": IMAGES})["probability"]
    # Probabilities of a five-layer network in float16, whose eps is 2**-10: an error of ten of them at most.
    np.testing.assert_allclose(found, expected, atol=10 * 2.0**-10, rtol=0)


def test_low_types_travel_to_the_gpu_and_back() -> None:
    b, h = np.array([1, 2.5], ml_dtypes.bfloat16), np.float16([3, 4])
    binding = Session(onnx.parser.parse_model(LOW)).bind({"b": b, "h": h})
    assert {value.device_name() for value in binding.inputs.values()} == {"cuda"}
    found = binding.arrays()
    np.testing.assert_array_equal(found["c"], b + b)
    np.testing.assert_array_equal(found["i"], h + h)
    binding.feed({"b": h.astype(ml_dtypes.bfloat16)})
    np.testing.assert_array_equal(binding.arrays()["c"], np.array([6, 8], ml_dtypes.bfloat16))


def test_a_recorded_graph_computes_with_what_is_fed() -> None:
    session = Session(onnx.parser.parse_model(MLP), policy="mixed_float16", cache=None, cuda_graph=True)
    eye = np.eye(2, 8, dtype=np.float32)
    binding = session.bind({"x": eye})
    for factor in (1, 2, 3):
        expected = np.float32([[1, 2], [3, 4]]) * factor
        binding.feed({"x": factor * eye})
        np.testing.assert_array_equal(binding.arrays()["y"], expected)
        np.testing.assert_array_equal(session.run({"x": factor * eye})["y"], expected)


@pytest.mark.torch
def test_a_tensor_of_torch_on_the_gpu_is_not_copied() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x, y = torch.eye(2, 8, device="cuda"), torch.zeros(2, 2, device="cuda")
    binding = Session(onnx.parser.parse_model(MLP)).bind({"x": x}, {"y": y})
    assert binding.inputs["x"].data_ptr() == x.data_ptr()
    binding.run()
    assert y.tolist() == [[1, 2], [3, 4]]
