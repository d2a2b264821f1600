"""Fusions of image models: operators of diffusion models, and BatchNormalization folded into the op before it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import is_stub
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.equivalence import UNIT
from amp_rewrite.rewrite.passes.canonicalize import fuse_operators
from amp_rewrite.rewrite.reference import FORMULAS, contrib_results
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.settings.choices import Target
from support import cases, stub
from support.fuse_models import agree
from support.fusing import kinds, outputs_of, standard

NORM = """apart = Reshape (h, groups) normal = InstanceNormalization <epsilon = 0.001> (apart, ones, zeros)
    together = Reshape (normal, whole) scaled = Mul (together, scale) """
SHIFTED, PLAIN = "a = Add (bias, scaled) ", "y = Add (scaled, bias)"
SILU = "s = Sigmoid (a) y = Mul (s, a)"
GATED = "t = Add (x, flat) "
HALVES = "l, r = Split <axis = 2> (t, sizes) "
ERF = "q = Div (r, root2) e = Erf (q) o = Add (e, one) g = Mul (r, o) v = Mul (g, half) "
TANH = 'v = Gelu <approximate = "tanh"> (r) '
IMAGE = "float[2,8,4,6] x"
OUT = "float[2,8,4,6] y"


def norm_of(body: str, inputs: str = IMAGE, outputs: str = OUT, groups: int = 2, opset: int = 18) -> ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )
    constants = {
        "groups": np.array([0, groups, -1]),
        "ones": np.ones(groups, np.float32),
        "zeros": np.zeros(groups, np.float32),
        "whole": np.array([2, 8, 4, 6]),
        "scale": rng.standard_normal((8, 1, 1)).astype(np.float32),
        "bias": rng.standard_normal((1, 8, 1, 1)).astype(np.float32),
        "row": np.ones((8, 1, 6), np.float32),
        "twos": np.full(groups, 2, np.float32),
        "turned": np.array([2, 8, 6, 4]),
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def gate_of(body: str, width: int = 2560, rank: int = 3, opset: int = 20) -> ModelProto:
    axes = "2,3," if rank == 3 else "2,"
    ports = f"float[{axes}{width}] x) => (float[{axes}{width // 2}] y"
    text = f'<ir_version: 10, opset_import: ["": {opset}]> g ({ports}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    constants = {
        "flat": np.random.default_rng(0).standard_normal(width).astype(np.float32),
        "sizes": np.array([width // 2] * 2),
        "first": np.array([0]),
        "middle": np.array([width // 2]),
        "end": np.array([2**31 - 1]),
        "axis": np.array([2]),
        **{name: np.array(value, np.float32) for name, value in (("root2", 2**0.5), ("one", 1), ("half", 0.5))},
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def fused(model: ModelProto, **options: object) -> tuple[ModelProto, list[tuple[str, str, str]]]:
    return standard(model, **{"fuse": "diffusion", **options})


def contrib_ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type in FORMULAS and node.domain]


def random_feeds(model: ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    shapes = {v.name: [d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


SKIP = "float[2,8,4,6] x, float[2,8,4,6] z"
RELU, SUM = "h = Relu (x) ", "h = Add (x, z) "


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (norm_of(RELU + NORM + PLAIN), ["GroupNorm"]),
        (norm_of(RELU + NORM + SHIFTED + SILU), ["GroupNorm"]),
        (norm_of(RELU + NORM + SHIFTED + SILU, groups=1), ["GroupNorm"]),
        (norm_of(RELU + "all = Shape (h) " + NORM.replace("whole", "all") + PLAIN), ["GroupNorm"]),
        (norm_of(RELU + NORM + SHIFTED + "s = Sigmoid (a) y = Mul (s, x)"), ["GroupNorm"]),  # no SiLU
        (norm_of(RELU + NORM + SHIFTED + SILU, outputs=f"{OUT}, float[2,8,4,6] a"), ["GroupNorm", "QuickGelu"]),
        (norm_of(SUM + NORM + PLAIN, SKIP), ["SkipGroupNorm"]),
        (norm_of(SUM + NORM + SHIFTED + SILU + " y2 = Neg (h)", SKIP, f"{OUT}, float[2,8,4,6] y2"), ["SkipGroupNorm"]),
        (norm_of("h = Add (z, x) " + NORM + PLAIN, "float[2,8,4,6] x, float[2,8,1,1] z"), ["SkipGroupNorm"]),
        (norm_of(SUM + NORM + PLAIN, "float[2,8,4,6] x, float[1,8,1,1] z"), ["GroupNorm"]),
        (norm_of("h = Add (x, row) " + NORM + PLAIN), ["GroupNorm"]),
        (gate_of(GATED + HALVES + "v = Gelu (r) y = Mul (l, v)"), ["BiasSplitGelu"]),
        (gate_of(GATED + HALVES + ERF + "y = Mul (v, l)", 5120, opset=18), ["BiasSplitGelu"]),
        (
            gate_of(
                GATED + "l = Slice (t, first, middle, axis) r = Slice (t, middle, end, axis) " + ERF + "y = Mul (l, v)"
            ),
            ["BiasSplitGelu"],
        ),
    ],
)
def test_ops_become_one_equivalent_operator(model: ModelProto, expected: list[str]) -> None:
    result, _ = fused(model)
    assert contrib_ops(result) == expected
    feeds = random_feeds(model)
    written_out = amp_rewrite.emulate(result, rounding=False, io="float32").to_proto()
    for a, b in zip(outputs_of(model, feeds), outputs_of(written_out, feeds), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=64 * UNIT * float(np.abs(a).max()))


GELU = "v = Gelu (r) "
GATE = "y = Mul (l, v)"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (norm_of(RELU + NORM + PLAIN, groups=8), "an even number of channels per group, up to 512, not 1"),
        (norm_of(RELU + NORM.replace("ones", "twos") + PLAIN), "on random inputs the results differ"),
        (
            norm_of(RELU + NORM.replace("whole", "turned") + PLAIN, outputs="float[2,8,6,4] y"),
            "its input is not known to be",
        ),
        (norm_of(RELU + NORM.replace("scale)", "row)") + PLAIN), ""),
        (gate_of(GATED + HALVES + GELU + GATE, 2048), "the kernel accepts 2560, 5120, 10240 features, not 2048"),
        (gate_of(GATED + "r, l = Split <axis = 2> (t, sizes) " + GELU + GATE), "on random inputs the results differ"),
        (gate_of(GATED + HALVES + TANH + GATE), ""),
        (gate_of(GATED + HALVES + GELU + "w = Mul (l, v) y = Add (w, r)"), ""),
        (gate_of("t = Relu (x) " + HALVES + GELU + GATE), ""),
        (gate_of(GATED + HALVES.replace("2>", "1>") + GELU + GATE, rank=2), ""),
    ],
)
def test_other_forms_stay_with_the_reason_in_the_report(model: ModelProto, why: str) -> None:
    result, notes = fused(model)
    assert not {"GroupNorm", "SkipGroupNorm", "BiasSplitGelu"}.intersection(contrib_ops(result))
    assert not why or any(why in message for _, _, message in notes)


def test_these_fusions_apply_only_to_float16_on_onnxruntime() -> None:
    model = norm_of(RELU + NORM + PLAIN)
    assert contrib_ops(amp_rewrite.convert(model).model) == []
    with pytest.raises(
        PolicyError, match=re.escape("fuse 'diffusion' creates operators without bfloat16 kernels; use")
    ):
        amp_rewrite.convert(model, fuse="diffusion", to="bfloat16")
    with pytest.raises(PolicyError, match="fuse 'diffusion' creates operators that only onnxruntime supports"):
        amp_rewrite.convert(model, fuse="diffusion", target="onnx")


def between_convolutions(tail: str = "y = Conv (v, w)") -> ModelProto:
    """Return a residual block: two group norms between convolutions, one of them with a skip."""
    first = NORM + "a = Add (bias, scaled) s = Sigmoid (a) b = Mul (s, a) c = Conv (b, w) k = Add (h, c) "
    second = re.sub(
        r"\b(apart|normal|together|scaled|a|s)\b", r"\g<1>2", NORM + SHIFTED + "s = Sigmoid (a) v = Mul (s, a) "
    )
    second = second.replace("(h,", "(k,")
    model = norm_of(f"h = Conv (x, w) {first}{second}{tail} z = Relu (k)", IMAGE, f"{OUT}, float[2,8,4,6] z")
    weight = np.random.default_rng(1).standard_normal((8, 8, 1, 1)).astype(np.float32) / 3
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def test_a_cpu_checks_by_emulation_and_a_session_names_the_remedy(tmp_path: Path) -> None:
    model = between_convolutions()
    converted = amp_rewrite.convert(model, fuse="diffusion", check=True)
    assert contrib_ops(converted.model) == ["GroupNorm", "SkipGroupNorm"]
    assert converted.report.evidence.level == "smoke"
    assert "on CUDA" in next(f.message for f in converted.report.findings if f.kind == "needs_release")
    assert {t.data_type for t in converted.model.graph.initializer if t.name.endswith(("_gamma", "_bias"))} == {1}
    verdict = amp_rewrite.verify(model, converted.result, random_feeds(model), tolerance=1e-2)
    assert verdict.ok
    assert "emulated" in str(verdict)
    converted.save(tmp_path / "low.onnx")
    refusal = "has no known kernel for GroupNorm, SkipGroupNorm of com.microsoft; use CUDAExecutionProvider, or convert"
    with pytest.raises(ModelError, match=f"{re.escape(refusal)} the source with --fuse contrib"):
        amp_rewrite.Session(tmp_path / "low.onnx", policy="float32", providers=["CPUExecutionProvider"])
    (row,) = (row for row in converted.report.rows if row.op == "com.microsoft::GroupNorm")
    mixed = amp_rewrite.convert(model, fuse="diffusion", keep=[f"name={row.name}"])
    assert contrib_ops(mixed.model) == ["GroupNorm", "SkipGroupNorm"]
    assert amp_rewrite.verify(model, mixed.result, random_feeds(model), tolerance=1e-2)


def test_a_cpu_runs_fused_ops_in_float32_and_locates_their_errors() -> None:
    model = between_convolutions()
    whole, data = fused(model)[0], random_feeds(model)
    assert amp_rewrite.verify(model, whole, data, tolerance=1e-5)
    repaired = amp_rewrite.repair(model, data, tolerance=2e-4, fuse="diffusion")
    assert repaired.solved
    assert amp_rewrite.repair(whole, data, tolerance=2e-4).solved
    ranges = amp_rewrite.calibrate(whole, data)
    assert {name for node in whole.graph.node for name in node.output} <= set(ranges.values)
    assert not any("/" in name for name in ranges.values)  # without values inside the operators
    low = amp_rewrite.convert(model, fuse="diffusion").result
    assert [row.kind for row in amp_rewrite.locate(model, low, data).rows].count("Transpose") == 3  # two norms, a sum


def half(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("operator", ["GroupNorm", "SkipGroupNorm", "BiasSplitGelu"])
def test_the_emulation_rounds_sums_and_results_like_the_kernels(operator: str) -> None:
    rng = np.random.default_rng(0)
    sizes = {"x": (2, 3, 5, 8), "gamma": (8,), "beta": (8,), "skip": (2, 8), "b": (8,)}
    names = {"GroupNorm": "x, gamma, beta", "SkipGroupNorm": "x, gamma, beta, skip, b", "BiasSplitGelu": "x, b"}[
        operator
    ]
    if operator == "BiasSplitGelu":
        sizes["x"] = (2, 3, 8)
    read = names.split(", ")
    wide = {"gamma", "beta"}
    formals = ", ".join(f"{'float' if n in wide else 'float16'}[{', '.join(map(str, sizes[n]))}] {n}" for n in read)
    attributes = "" if operator == "BiasSplitGelu" else "<groups = 2, activation = 1, epsilon = 0.001>"
    outputs = "y, total" if operator == "SkipGroupNorm" else "y"
    formal = ", ".join(f"float16 {name}" for name in outputs.split(", "))
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> g ({formals}) => ({formal})'
        f" {{ {outputs} = com.microsoft.{operator} {attributes} ({names}) }}"
    )
    feeds = {name: rng.standard_normal(sizes[name]).astype(np.float32) for name in read}
    feeds = {name: array if name in wide else half(array) for name, array in feeds.items()}
    results = outputs_of(amp_rewrite.emulate(model, io="float32").to_proto(), feeds)
    summed = dict(feeds)
    if "b" in feeds:
        summed["x"] = half(feeds["x"] + feeds["b"])
        summed["b"] = np.zeros_like(feeds["b"])
    if "skip" in feeds:
        summed["x"] = half(summed["x"] + feeds["skip"][:, None, None, :])
        summed["skip"] = np.zeros_like(feeds["skip"])
    expected = contrib_results(model.graph.node[0], {name: array.astype(np.float64) for name, array in summed.items()})
    for name, array in zip(outputs.split(", "), results, strict=True):
        np.testing.assert_allclose(array, expected[name], rtol=2**-11 + 2**-18, atol=2**-24)
        np.testing.assert_array_equal(array, half(array))


@pytest.mark.stub
def test_convolutions_with_channels_last_leave_no_transpose_around_group_norms(cuda_stub: Path, tmp_path: Path) -> None:
    path = tmp_path / "low.onnx"
    amp_rewrite.convert(between_convolutions(), fuse="diffusion").save(path)
    program = """
import onnx, onnxruntime, sys
for nhwc in "01":
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, sys.argv[1] + nhwc
    providers = [("CUDAExecutionProvider", {"prefer_nhwc": nhwc}), "CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=providers, enable_fallback=0)
    print(*sorted(node.op_type for node in onnx.load(sys.argv[1] + nhwc).graph.node))
"""
    done = stub.on_cuda(cuda_stub, program, str(path))
    first, last = (line.split() for line in done.stdout.splitlines())
    for op_types in (first, last):
        assert {"GroupNorm", "SkipGroupNorm"} <= set(op_types)
        assert not {"InstanceNormalization", "Sigmoid", "Mul", "Add"}.intersection(op_types)
    assert last.count("Transpose") < first.count("Transpose")


FOLDED_IMAGE = (2, 4, 5, 5)
BATCH_NORM = ";y=BatchNormalization[epsilon=0.001](a,gamma,beta,mean,var)"
CONV = "a=Conv[pads=1 1 1 1](x,w,b)" + BATCH_NORM
FORMS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "conv": (CONV, (6, 4, 3, 3), FOLDED_IMAGE),
    "no bias": ("a=Conv(x,w)" + BATCH_NORM, (6, 4, 3, 3), FOLDED_IMAGE),
    "grouped": ("a=Conv[group=2,dilations=2](x,w,b)" + BATCH_NORM, (6, 2, 3), (2, 4, 9)),
    "transposed": ("a=ConvTranspose[strides=2 2](x,w,b)" + BATCH_NORM, (4, 6, 2, 2), FOLDED_IMAGE),
    "gemm": ("a=Gemm[alpha=0.5](x,w,b)" + BATCH_NORM, (4, 6), (2, 4)),
    "transposed gemm": ("a=Gemm[transB=1](x,w,b)" + BATCH_NORM, (6, 4), (2, 4)),
}


def model(
    text: str = CONV,
    weight: tuple[int, ...] = (6, 4, 3, 3),
    shape: tuple[int, ...] = FOLDED_IMAGE,
    outputs: str = "y",
    **more: Any,
) -> ModelProto:
    """Return a linear op with six channels and a BatchNormalization, with random weights; None makes one an input."""
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {"w": rng.standard_normal(weight)}
    arrays |= {name: rng.standard_normal(6) for name in ("b", "gamma", "beta", "mean")}
    arrays |= {"var": rng.uniform(0.1, 2, 6), **more}
    read = {name: array for name, array in arrays.items() if re.search(rf"\b{name}\b", text) and array is not None}
    shapes = {"x": shape, "mean": (6,)}
    return cases.build(text, outputs.split(), shapes=shapes, constants=read, opset=13)


@pytest.mark.parametrize("form", FORMS)
def test_batch_normalization_is_folded_into_the_op_before_it(form: str) -> None:
    proto = model(*FORMS[form])
    converted, notes = standard(proto)
    op = proto.graph.node[0].op_type
    assert kinds(converted) == [op]
    assert [t.name for t in converted.graph.initializer] == ["w_folded", "w_folded_bias"]
    assert notes == [("fused", "y", f"batch normalization: one {op} in place of a, y")]
    agree(proto, converted, FORMS[form][2])


@pytest.mark.parametrize(
    ("proto", "why"),
    [
        (model(CONV + ";z=Relu(a)", outputs="y z"), "other ops read the result of a, or it is in another graph"),
        (model(mean=None), "mean is not a constant"),
        (model(gamma=np.full(6, 9e9)), "the folded weights would reach N, beyond the range of float16"),
        (model(gamma=np.full(6, 1e-9)), "the folded weights of 6 channels would be subnormal in float16"),
        (model(var=np.full(6, -1.0)), "the folded weights would not be finite"),
        (model("a=ConvTranspose[group=2](x,w,b)" + BATCH_NORM, (4, 3, 2, 2)), "its ConvTranspose has groups"),
        (model("a=Gemm[beta=0.5](x,w,b)" + BATCH_NORM, (4, 6), (2, 4)), "its Gemm scales its bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unfoldable_batch_normalization_has_a_reason(proto: ModelProto, why: str) -> None:
    converted, ((kind, subject, message),) = standard(proto)
    assert (kind, subject) == ("not_fused", "batch_normalization")
    assert re.sub(r"reach [\d.e+]+", "reach N", message) == f"1 match is not fused (it ends at y): {why}"
    assert kinds(converted) == kinds(proto)


def test_a_shared_weight_is_folded_for_each_of_its_readers() -> None:
    text = "a=Conv(x,w)" + BATCH_NORM + ";a2=Conv(x,w);y2=BatchNormalization[epsilon=0.001](a2,beta,beta,mean,var)"
    result, _ = standard(model(text, outputs="y y2"))
    assert [list(n.input) for n in result.graph.node] == [
        ["x", "w_folded", "w_folded_bias"],
        ["x", "w_folded_2", "w_folded_bias_2"],
    ]
    assert [t.name for t in result.graph.initializer] == [n for node in result.graph.node for n in node.input[1:]]


def test_unfolded_weights_stay_in_their_file(tmp_path: Path) -> None:
    text = CONV + ";z=Conv[pads=16 16 16 16](y,large)"
    onnx.save(model(text, outputs="z", large=np.zeros((6, 6, 32, 32))), tmp_path / "m.onnx")
    view, notes = fuse_operators(View.of(Model.load(tmp_path / "m.onnx")), Context(DType.FLOAT16), Target.ORT_CUDA)
    stubs = {t.name: is_stub(t) for t in view.model.proto.graph.initializer}
    assert ([f.kind for f in notes], stubs) == (["fused"], {"large": True, "w_folded": False, "w_folded_bias": False})
