"""Models from onnxruntime's quantizers keep their integer kernels; `--set quantized=rescale` runs them in float16."""

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.decide import reasons
from amp_rewrite.pipeline.convert import convert
from support.paths import ROOT, TESTS
from support.quantized_models import batches, integer_kernels, quantize_static, run_and_count

DIGITS = ROOT / "examples" / "models"
CNN, VIT = DIGITS / "digits_cnn.onnx", DIGITS / "digits_vit.onnx"
MODELS = [
    (CNN, {}, {"QGemm": 2, "QLinearConv": 3, "QLinearSoftmax": 1}),
    (CNN, {"per_channel": True}, {"QGemm": 2, "QLinearConv": 3, "QLinearSoftmax": 1}),
    (VIT, {}, {"QGemm": 1, "QLinearConcat": 1, "QLinearMatMul": 18, "QLinearSoftmax": 4}),
    (TESTS / "models" / "cnn_ts13.onnx", {}, {"QGemm": 1, "QLinearConv": 3}),
    (TESTS / "models" / "vit_ts17.onnx", {}, {"QGemm": 1, "QLinearAdd": 10, "QLinearMatMul": 10}),
]
written_by_onnxruntime = pytest.mark.parametrize(
    ("path", "options", "kernels"), MODELS, ids=[f"{p.stem}{''.join(o)}" for p, o, _ in MODELS]
)


@written_by_onnxruntime
@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_every_integer_kernel_is_kept(
    path: Path, options: dict[str, object], kernels: dict[str, int], to: str, tmp_path: Path
) -> None:
    model, feeds = quantize_static(path, tmp_path, **options), batches(path)[0]
    before, ops = run_and_count(model, feeds, tmp_path)
    assert kernels.items() <= integer_kernels(ops).items()
    result = convert(model, to=to)
    after, ops_after = run_and_count(result.model, feeds, tmp_path)
    assert integer_kernels(ops_after) == integer_kernels(ops)
    assert [np.abs(a - b).max() for a, b in zip(before, after, strict=True)] == [0.0] * len(before)
    assert result.report.totals.integer_ops >= sum(kernels.values())


@pytest.mark.parametrize("path", [CNN, VIT], ids=lambda path: path.stem)
def test_rescaled_quantizers_need_no_casts_but_for_biases(path: Path, tmp_path: Path) -> None:
    model, feeds = quantize_static(path, tmp_path), batches(path)[0]
    result = convert(model, quantized="rescale")
    totals = result.report.totals
    biases = sum(init.data_type == TensorProto.INT32 for init in model.graph.initializer if init.dims)
    assert totals.casts_to_float32 == 0 and totals.casts_to_low <= biases
    assert {row.dtype for row in result.report.rows if row.op in ("MatMul", "Conv", "Gemm")} == {"float16"}
    (before, *_), (after, *_) = (run_and_count(m, feeds, tmp_path)[0] for m in (model, result.model))
    assert (before.argmax(-1) == after.argmax(-1)).all()


@pytest.mark.parametrize(
    ("path", "options", "why"),
    [
        (TESTS / "models" / "cnn_ts13.onnx", {}, "from opset 19 on"),
        (CNN, {"to": "bfloat16"}, "no cuda kernel for (De)?[Qq]uantizeLinear"),
    ],
    ids=["opset 13", "bfloat16 on CUDA"],
)
def test_rescaling_changes_nothing_if_scales_must_stay_float32(
    path: Path, options: dict[str, str], why: str, tmp_path: Path
) -> None:
    model = quantize_static(path, tmp_path)
    result = convert(model, quantized="rescale", **options)
    assert result.plan.empty
    (finding,) = (finding for finding in result.report.findings if finding.kind == reasons.QUANTIZED)
    assert re.search(why, finding.message)


def weight_only(opset: int, code: int, **attributes: int) -> ModelProto:
    """Build a product with a dequantized weight."""
    codes = np.random.default_rng(1).integers(0, 7, 64 * 32).tolist()
    blocks = (64 // attributes["block_size"], 32) if attributes else (32,)
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["codes", "scale"], ["w"], "decode", axis=1 - bool(attributes), **attributes
        ),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, n]) for name, n in (("x", 64), ("y", 32))]
    scale = numpy_helper.from_array(np.linspace(0.01, 0.02, np.prod(blocks), dtype=np.float32).reshape(blocks), "scale")
    weights = [helper.make_tensor("codes", code, [64, 32], codes), scale]
    graph = helper.make_graph(nodes, "weight_only", edges[:1], edges[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


INT8, INT4, E4M3 = TensorProto.INT8, TensorProto.INT4, TensorProto.FLOAT8E4M3FN


@pytest.mark.parametrize(
    ("opset", "code", "attributes", "kernels"),
    [
        (19, INT8, {}, {"MatMulNBits": 1}),
        (19, E4M3, {}, {}),
        (21, INT4, {"block_size": 16}, {"MatMulNBits": 1}),
        (21, INT8, {"block_size": 16}, {"MatMulNBits": 1}),
        (23, INT4, {"block_size": 16}, {"MatMulNBits": 1}),
        (23, E4M3, {}, {}),
        (25, INT8, {}, {"MatMulNBits": 1}),
    ],
)
@pytest.mark.parametrize("target", ["ort-cuda", "onnx"])
def test_a_dequantized_weight_has_the_type_of_its_readers(
    opset: int, code: int, attributes: dict[str, int], kernels: dict[str, int], target: str, tmp_path: Path
) -> None:
    model = weight_only(opset, code, **attributes)
    feeds = {"x": np.random.default_rng(2).uniform(-1, 1, (4, 64)).astype(np.float32)}
    result = convert(model, target=target)
    assert {row.name: row.rule for row in result.report.rows}["decode"] == reasons.MIN_CUT
    assert (result.report.totals.casts_to_low, result.report.totals.casts_to_float32) == (1, 1)
    (before,), ops = run_and_count(model, feeds, tmp_path)
    (after,), ops_after = run_and_count(result.model, feeds, tmp_path)
    assert integer_kernels(ops) == integer_kernels(ops_after) == kernels
    np.testing.assert_allclose(before, after, atol=2**-8 * np.abs(before).max())
