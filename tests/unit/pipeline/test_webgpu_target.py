"""Conversion for onnxruntime's WebGPU provider: its kernels, its opsets, its types."""

import numpy as np
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite import convert
from amp_rewrite.evidence.opening import Device
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_nodes
from amp_rewrite.runtime.runner import WEBGPU
from amp_rewrite.settings.choices import Target, recorded_target
from support.paths import TESTS


def kinds(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in all_nodes(model.graph.node)}


def test_max_pool_of_opset_22_moves_to_an_opset_with_a_kernel() -> None:
    converted = convert(TESTS / "models" / "cnn_external_dynamo22.onnx", target="webgpu")
    opset = next(i.version for i in converted.model.opset_import if not i.domain)
    assert opset < 22 and "MaxPool" in kinds(converted.model)
    assert "opset" in {finding.kind for finding in converted.report.findings}


@pytest.mark.parametrize("name", ["bert_dynamo23", "llama_dynamo23"])
def test_attention_is_expanded_into_its_function(name: str) -> None:
    converted = convert(TESTS / "models" / f"{name}.onnx", target="webgpu")
    assert "Attention" not in kinds(converted.model)
    assert ("inlined", "Attention") in {(finding.kind, finding.subject) for finding in converted.report.findings}


def test_a_converted_model_records_its_target_and_runs_accordingly(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = convert(TESTS / "models" / "cnn_ts13.onnx", target="webgpu", lower=["op=Conv"])
    assert recorded_target(converted.result) == Target.WEBGPU
    assert recorded_target(Model.load(TESTS / "models" / "cnn_ts13.onnx")) is None
    monkeypatch.setattr("amp_rewrite.evidence.opening.webgpu_works", lambda: True)
    way = Device().choose(converted.result)
    assert way == (WEBGPU, False)
    assert Device(emulate=True).choose(converted.result)[1]
    monkeypatch.setattr("amp_rewrite.evidence.opening.webgpu_works", lambda: False)
    assert Device().choose(converted.result)[1]


def test_without_a_device_verify_emulates_like_cuda_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.evidence.opening.webgpu_works", lambda: False)
    head = '<ir_version: 8, opset_import: ["": 18]>'
    text = f"{head} g (float[2,2000] x, float[2000,2] w) => (float[2,2] y) {{ y = MatMul (x, w) }}"
    model = onnx.parser.parse_model(text)
    low = convert(model, target="webgpu", lower=["op=MatMul"])
    rng = np.random.default_rng(0)
    data = {name: (rng.standard_normal(s) + 1).astype(np.float32) for name, s in (("x", (2, 2000)), ("w", (2000, 2)))}
    for_device = amp_rewrite.verify(model, low, data, tolerance=1.0)
    for_cuda = amp_rewrite.verify(model, convert(model), data, tolerance=1.0)
    references = [verdict.candidate.as_ for verdict in (for_device, for_cuda)]
    assert references == [f"float16 emulated{how} on CPUExecutionProvider" for how in (" as on CUDA", "")]
    scores = [verdict.rows[0].difference.score for verdict in (for_device, for_cuda)]
    assert scores[0] == scores[1]
