"""Targets: spellings, releases, kernel tables, and conversions for them."""

from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import amp_rewrite
from amp_rewrite import PolicyError, Target, convert
from amp_rewrite.runtime.kernels import load_kernels, releases
from amp_rewrite.settings.request import Request

NEWEST = releases()[-1]


def graph(body: str, opset: int = 17, ir: int = 8, inputs: str = "float[2,8,16] x", outputs: str = "y") -> ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["": {opset}]> g ({inputs}) => (float[A,B,C] {outputs}) {{ {body} }}'
    )
    names = {name for node in proto.graph.node for name in node.input}
    values = {name for node in proto.graph.node for name in node.output} | {i.name for i in proto.graph.input}
    for name in sorted(names - values - {""}):
        array = np.full((16, 16) if name.startswith("w") else 16, 0.1, np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


PRODUCT = "y = MatMul (x, w)"
NORM = "a = MatMul (x, w)  s = Add (a, x)  n = LayerNormalization (s, one, one)  y = MatMul (n, w)"


def types(result: amp_rewrite.Converted) -> dict[str, str]:
    return {row.name: row.dtype for row in result.report.rows}


def kinds(result: amp_rewrite.Converted) -> set[str]:
    return {finding.kind for finding in result.report.findings}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("ort-cuda:1.22", "ort-cuda:1.22.0"),
        ("CUDA:1.22.0", "ort-cuda:1.22.0"),
        ("ort_cuda:1.20", "ort-cuda:1.20.2"),
        ("ort-cuda:1.24.3", "ort-cuda:1.24.3"),
        ("gpu:1.99", "ort-cuda:1.99"),
        ("tensorrt:11.2", "tensorrt:11.2"),
        ("trt:10", "tensorrt:10"),
        ("dml", "directml"),
    ],
)
def test_a_target_of_a_release_has_one_spelling(word: str, value: str) -> None:
    target = Target.parse(word)
    assert target.value == value
    assert Target.parse(value) == target == Target.parse(target)
    assert target.family == Target.parse(value.partition(":")[0])


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("ort-cuda:1.19", "use release 1.20.0 or later"),
        ("ort-cuda:", "not a release"),
        ("ort-cuda:new", "not a release"),
        ("onnx:1.20", "unknown release '1.20' of target onnx"),
        ("tensorrt:9", "unknown release '9' of target tensorrt"),
        ("cdua:1.22", "unknown value 'cdua'"),
    ],
)
def test_an_invalid_target_is_refused_with_the_reason(word: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        convert(graph(PRODUCT), target=word)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("installed", "value"),
    [("", "ort-cuda"), (NEWEST, "ort-cuda"), ("1.22.0", "ort-cuda:1.22.0"), ("1.99.0", "ort-cuda:1.99.0")],
)
def test_the_installed_release_is_the_default(installed: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.runtime.kernels.installed_release", lambda: installed)
    assert Request.of().target.value == value
    assert Request.of(target="ort-cuda:1.20").target.value == "ort-cuda:1.20.2"
    assert Request.of(target="onnx").target == Target.ONNX


def test_an_unknown_newer_release_gains_no_kernel_and_is_named() -> None:
    model = graph("a = MatMul (x, w)  b = Softplus (a)  y = MatMul (b, w)")
    newer, newest = (convert(model, target=word) for word in ("ort-cuda:1.99", f"ort-cuda:{NEWEST}"))
    assert types(newer) == types(newest)
    (finding,) = (f for f in newer.report.findings if f.kind == "kernel_table")
    assert finding.message == f"there is no kernel table for 1.99: the table for {NEWEST} is used"
    assert "kernel_table" not in kinds(newest)


def test_ops_of_an_opset_beyond_the_table_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that ends at opset 13 replaces the newest one."""
    old = load_kernels("1.20.0")
    object.__setattr__(old, "opset", 13)
    monkeypatch.setattr("amp_rewrite.runtime.kernels.load_kernels", lambda _release="": old)
    try:
        result = convert(graph("a = MatMul (x, w)  b = Relu (a)  y = MatMul (b, w)", 14), target="ort-cuda:1.99")
    finally:
        object.__setattr__(old, "opset", 21)
    (finding,) = (f for f in result.report.findings if f.kind == "kernel_table")
    assert finding.message.endswith("these ops stay float32, because their opset is newer: Relu")


@pytest.mark.parametrize(("target", "opset"), [("ort-cuda:1.20", 21), ("ort-cuda:1.23", 23), ("directml", 20)])
def test_auto_never_exceeds_the_opset_of_the_target(target: str, opset: int) -> None:
    model = graph(NORM, 24, 10)
    result = convert(model, target=target, opset="auto")  # type: ignore[arg-type]
    assert result.view.opsets[""] <= opset
    assert "target_limits" not in kinds(result)
    assert "float16" in types(result).values()


def test_a_model_that_the_target_cannot_open_is_reported() -> None:
    result = convert(graph(PRODUCT, 23, 11), target="ort-cuda:1.22")
    assert [f.message for f in result.report.findings if f.kind == "target_limits"] == [
        "onnxruntime-gpu 1.22.0 loads models up to IR version 10, not 11",
        "ort-cuda:1.22.0 loads models up to opset 22, but this one has 23",
    ]


@pytest.mark.parametrize("target", ["directml", "coreml", "qnn"])
def test_a_type_that_the_target_lacks_is_an_error(target: str) -> None:
    with pytest.raises(PolicyError, match="does not compute in bfloat16, only in float16"):
        convert(graph(PRODUCT), target=target, to="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize(("to", "dtype"), [("float16", "float16"), ("bfloat16", "float32")])
def test_tensorrt_keeps_ops_excluded_by_its_documentation(to: str, dtype: str) -> None:
    body = "a = MatMul (x, w)  b = Mish (a)  y = MatMul (b, w)"
    result = convert(graph(body, 18), target="tensorrt", to=to)  # type: ignore[arg-type]
    (mish,) = (row for row in result.report.rows if row.op == "Mish")
    assert mish.dtype == dtype
    if dtype == "float32":
        assert mish.rule == "kernel_gate" and "TensorRT does not support Mish in bfloat16" in mish.note


def grouped(group: int) -> ModelProto:
    proto = graph(f"y = Conv <group = {group}> (x, k)", inputs="float[1,16,8] x")
    del proto.graph.initializer[:]
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((16, 16 // group, 1), np.float32), "k"))
    return proto


@pytest.mark.parametrize(
    ("target", "group", "dtype", "warns"),
    [
        ("tensorrt:11.2", 4, "float32", False),
        ("tensorrt:11.2", 1, "float16", False),
        ("tensorrt:10", 4, "float16", False),
        ("tensorrt:11", 4, "float16", True),
        ("tensorrt", 4, "float16", True),
        ("ort-cuda", 4, "float16", False),
    ],
)
def test_grouped_convolutions_without_a_kernel_stay_float32(target: str, group: int, dtype: str, warns: bool) -> None:
    result = convert(grouped(group), target=target)  # type: ignore[arg-type]
    (conv,) = (row for row in result.report.rows if row.op == "Conv")
    assert conv.dtype == dtype
    assert ("runtime_hazard" in kinds(result)) is warns


def attention(size: int) -> ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 23]> g (float[1,2,4,{size}] q, float[1,2,4,{size}] k,'
        f" float[1,2,4,{size}] v) => (float[1,2,4,{size}] y) {{ y = Attention (q, k, v) }}"
    )


@pytest.mark.parametrize(
    ("release", "size", "dtype"), [("1.25", 512, "float32"), ("1.25", 256, "float16"), ("1.31", 512, "float16")]
)
def test_attention_with_wide_heads_stays_float32_if_it_would_give_nan(release: str, size: int, dtype: str) -> None:
    result = convert(attention(size), target=f"ort-cuda:{release}", fuse="basic")  # type: ignore[arg-type]
    (row,) = (row for row in result.report.rows if row.op == "Attention")
    assert row.dtype == dtype
    if dtype == "float32":
        assert row.rule == "runtime_fault" and "issues/28195" in row.note


def test_a_request_overrides_a_fault_and_the_report_names_it() -> None:
    result = convert(attention(512), target="ort-cuda:1.25", lower="op=Attention")
    (row,) = (row for row in result.report.rows if row.op == "Attention")
    assert row.dtype == "float16"
    assert any("returns NaN for float16 Attention" in f.message for f in result.report.findings)


@pytest.mark.parametrize("target", ["ort-cuda", "onnx"])
def test_a_listed_op_of_a_custom_domain_is_lowered_once_its_schema_is_registered(target: str) -> None:
    """The kernel tables do not cover its domain, because its kernel is in a library of custom operators."""
    domain, kinds = f"test.{target[:3]}", [("T", ["tensor(float)", "tensor(float16)"], "")]
    ports = (onnx.defs.OpSchema.FormalParameter(name, "T") for name in "abc")
    inputs, result = [next(ports), next(ports)], [next(ports)]
    schema = onnx.defs.OpSchema("Fancy", domain, 1, inputs=inputs, outputs=result, type_constraints=kinds)
    onnx.defs.register_schema(schema)
    try:
        model = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 17, "{domain}": 1]> g (float[8,8] x, float[8,8] w) => (float[8,8] y)
            {{ a = MatMul (x, w)  b = {domain}.Fancy (a, w)  y = MatMul (b, w) }}"""
        )
        listed = convert(model, target=target, lists=[{"allow": [f"{domain}::Fancy"]}])
        unlisted = convert(model, target=target)
    finally:
        onnx.defs.deregister_schema("Fancy", 1, domain)
    assert [row.dtype for row in listed.report.rows] == ["float16"] * 3
    assert [row.dtype for row in unlisted.report.rows] == ["float16", "float32", "float16"]
