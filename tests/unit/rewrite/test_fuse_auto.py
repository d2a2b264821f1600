"""What a conversion fuses by default: onnxruntime's operators for its CUDA provider, as its release runs them right."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import GraphProto, ModelProto, numpy_helper
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

import amp_rewrite
from amp_rewrite.deploy.doctor import FINDING, doctor
from amp_rewrite.errors import ModelError
from amp_rewrite.runtime.installation import Package
from amp_rewrite.runtime.providers import misfit
from amp_rewrite.runtime.runner import CPU, CUDA
from support.contrib_models import (
    ATTENDED,
    BIASED,
    ERF,
    MASKED,
    MERGED,
    NORM,
    REST,
    SCORES,
    SOFTMAX,
    SPLIT,
    SUM,
    attention_of,
    model_of,
)
from support.fusing import kinds, standard

SKIP, MHA = "SkipLayerNormalization", "MultiHeadAttention"
TWO, OUT = "float[2,3,8] x, float[2,3,8] z", "float[2,3,8] y"
BLOCK = "x0 = MatMul (x, w)  " + SUM.replace("(x,", "(x0,") + NORM.replace("y =", "n =") + "  y = MatMul (n, w)"
GATE = "x0 = MatMul (x, w)  s = Sigmoid (x0)  m = Mul (x0, s)  y = MatMul (m, w)"


def wide(body: str, inputs: str = TWO, outputs: str = OUT, opset: int = 18) -> ModelProto:
    """A model of eight features, whose products gain from a low type."""
    model = model_of(body, inputs, outputs, opset)
    rng = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.name in ("gain", "shift", "bias", "w"):
            shape = (8, 8) if tensor.name == "w" else (8,)
            tensor.CopyFrom(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), tensor.name))
    return model


def own(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == "com.microsoft")


def needs(made: amp_rewrite.Converted) -> str:
    entry = next(p.value for p in made.model.metadata_props if p.key == "amp_rewrite")
    return next((word for word in entry.split() if word.startswith("needs=")), "")


@pytest.mark.parametrize(
    ("target", "fuse", "made"),
    [
        ("ort-cuda", None, {SKIP: 1}),
        ("ort-cuda", "auto", {SKIP: 1}),
        ("ort-cuda", "contrib", {SKIP: 1}),
        ("ort-cuda", "basic", {}),
        ("ort-cuda", "none", {}),
        *((target, None, {}) for target in ("onnx", "tensorrt", "directml", "openvino", "webgpu")),
    ],
)
def test_operators_of_onnxruntime_are_made_for_its_cuda_provider(target: Any, fuse: Any, made: dict[str, int]) -> None:
    assert own(amp_rewrite.convert(wide(BLOCK), target=target, fuse=fuse).model) == made


@pytest.mark.parametrize(
    ("body", "to", "release", "made", "oldest"),
    [
        (BLOCK, "float16", "1.27", {}, ""),
        (BLOCK, "float16", "1.28", {SKIP: 1}, "1.28.0"),
        (BLOCK, "bfloat16", "1.23", {}, ""),  # without a kernel
        (BLOCK, "bfloat16", "1.26", {}, ""),  # with a wrong one
        (BLOCK, "bfloat16", "1.31", {SKIP: 1}, "1.28.0"),
        (GATE, "float16", "1.31", {"QuickGelu": 1}, "1.20.0"),
        (GATE, "bfloat16", "1.22", {}, ""),
        (GATE, "bfloat16", "1.31", {"QuickGelu": 1}, "1.23.0"),
    ],
)
def test_a_release_gets_what_it_runs_right(body: str, to: Any, release: str, made: dict[str, int], oldest: str) -> None:
    converted = amp_rewrite.convert(wide(body), to=to, target=f"ort-cuda:{release}")  # type: ignore[arg-type]
    assert own(converted.model) == made
    assert needs(converted) == (f"needs=onnxruntime>={oldest}" if oldest else "")
    told = [f.subject for f in converted.report.findings if f.kind == "needs_release"]
    assert told == ([f"onnxruntime {oldest}"] if oldest else [])


def test_the_report_says_why_a_wrong_kernel_is_left_out() -> None:
    report = amp_rewrite.convert(wide(BLOCK), target="ort-cuda:1.26").report
    (told,) = (f.message for f in report.findings if f.kind == "not_fused")
    assert "onnxruntime-gpu 1.26.0 sums squares in float16" in told


@pytest.mark.parametrize(("fuse", "expected"), [("contrib", MHA), ("basic", "Attention")])
def test_own_attention_goes_before_that_of_the_standard(fuse: str, expected: str) -> None:
    made, told = standard(attention_of(SPLIT + SCORES + SOFTMAX + REST + MERGED, opset=23), fuse=fuse)
    assert expected in kinds(made)
    assert {kind for kind, _, _ in told} == {"fused"}


@pytest.mark.parametrize(
    ("release", "provider", "said"),
    [
        ("1.28.0", CUDA, None),
        ("1.31.1", CPU, None),
        ("1.27.0", CUDA, "it needs onnxruntime 1.28.0 or later for SkipLayerNormalization, and this is 1.27.0"),
        ("1.31.1", "TensorrtExecutionProvider", "TensorrtExecutionProvider has no known kernel for SkipLayer"),
    ],
)
def test_older_releases_and_providers_without_kernels_do_not_fit(release: str, provider: str, said: str | None) -> None:
    found = misfit("1.28.0", [SKIP], release, provider)
    assert (found is None) if said is None else (found or "").startswith(said)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = amp_rewrite.convert(wide(BLOCK))
    made.save(tmp_path / "low.onnx")
    return tmp_path / "low.onnx"


def test_a_session_refuses_a_file_for_a_newer_release(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    amp_rewrite.Session(file, policy="float32", providers=[CPU], cache=None)
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.4")
    with pytest.raises(
        ModelError, match=r"low\.onnx: it needs onnxruntime 1\.28\.0 or later for SkipLayerNormalization"
    ):
        amp_rewrite.Session(file, policy="float32", providers=[CPU], cache=None)


def test_doctor_finds_that_the_installed_release_is_too_old(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.deploy.doctor.packages", lambda: (Package("onnxruntime-gpu", "1.24.4"),))
    (check,) = (check for check in doctor(file).checks if check.topic == "release")
    fact = "it needs onnxruntime 1.28.0 or later for SkipLayerNormalization"
    assert (check.state, check.fact.partition(", and")[0]) == (FINDING, fact)


def opened(model: ModelProto) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CPU])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("opset", [13, 23])
def test_attention_opens_on_the_cpu_at_the_default_level(opset: int, masked: bool) -> None:
    body, inputs = SPLIT + SCORES, "float[2,3,8] x, float[2,5,8] z, float[2,5,8] u"
    if masked:
        body, inputs = body.replace("s = Mul", "s0 = Mul") + "s = Where (mask, s0, lowest)  ", MASKED
    body = "x00 = MatMul (x, w8)  " + body.replace("Reshape (x,", "Reshape (x00,") + SOFTMAX + REST + MERGED
    model = attention_of(body, inputs, ATTENDED, opset)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float32), "w8"))
    made = amp_rewrite.convert(model).model
    assert own(made)[MHA] == 1
    opened(made)
    assert untyped(made) == []
    SymbolicShapeInference.infer_shapes(made, auto_merge=True)


def test_types_are_declared_in_bodies() -> None:
    body = SUM.replace("t =", "t0 =") + NORM.replace("(t,", "(t0,").replace("y =", "n =") + "  m = MatMul (n, w)  "
    body += BIASED.replace("x)", "m)") + ERF.replace("y =", "g2 =") + "  y = MatMul (g2, w)"
    for formal in ("float[2,3,8] y", "y"):
        then = f"then_branch = a () => ({formal}) {{ {body} }}"
        other = "else_branch = b () => (float[2,3,8] e) { e = MatMul (x, w) }"
        model = wide(f"chosen = If (flag) <{then}, {other}>", TWO + ", bool flag", "float[2,3,8] chosen")
        made = amp_rewrite.convert(model).model
        (branch,) = (a.g for n in made.graph.node for a in n.attribute if a.name == "then_branch")
        assert {n.op_type for n in branch.node} >= {SKIP, "BiasGelu"}
        assert untyped(made) == []
        opened(made)


def untyped(model: ModelProto) -> list[str]:
    """The results without a type after onnx's inference, bodies included."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    missing: list[str] = []

    def walk(graph: GraphProto, around: set[str]) -> None:
        formals = [v.name for v in (*graph.input, *graph.value_info, *graph.output) if v.type.WhichOneof("value")]
        known = around | set(formals) | {t.name for t in graph.initializer}
        for node in graph.node:
            missing.extend(name for name in node.output if name and name not in known)
            for stated in node.attribute:
                if stated.HasField("g"):
                    walk(stated.g, known)

    constants = {n.output[0] for n in inferred.graph.node if n.op_type == "Constant"}
    walk(inferred.graph, constants)
    return missing


@pytest.mark.parametrize(("size", "inputs"), [(1.0, 4), (1e5, 3)])
def test_a_bias_beyond_the_low_type_is_added_by_an_op_of_its_own(size: float, inputs: int) -> None:
    body = "x0 = MatMul (x, w)  r = Add (x0, bias)  t = Add (r, z)  n = RMSNormalization (t, gain)  y = MatMul (n, w)"
    model = wide(body, opset=23)
    for tensor in model.graph.initializer:
        if tensor.name == "bias":
            tensor.CopyFrom(numpy_helper.from_array(np.full(8, size, np.float32), "bias"))
    (norm,) = (n for n in amp_rewrite.convert(model).view.model.proto.graph.node if n.op_type.startswith("Skip"))
    assert len(norm.input) == inputs
