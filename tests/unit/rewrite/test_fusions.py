"""Fusions by default and by release, models that a wrong fusion would break, and the records."""

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
from amp_rewrite import convert, emulate
from amp_rewrite.deploy.doctor import FINDING, doctor
from amp_rewrite.errors import Finding, ModelError
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.rewrite import fusions
from amp_rewrite.rewrite.fusions import FUSIONS, FusionRule
from amp_rewrite.runtime.installation import Package
from amp_rewrite.runtime.providers import release_refusal
from amp_rewrite.runtime.runner import CPU, CUDA
from support import cases
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
from support.fusing import kinds, outputs_of, standard

RNG = np.random.default_rng(1)


def model(text: str, opset: int = 17, **constants: Any) -> ModelProto:
    head = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    proto = onnx.parser.parse_model(f"{head} g {text}")
    arrays = {name: array if array.dtype == bool else np.float32(array) for name, array in constants.items()}
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    proto.graph.initializer.extend(stored)
    return proto


def error(proto: ModelProto, feeds: dict[str, Any] | None = None, **options: Any) -> tuple[float, ModelProto]:
    """Return the largest relative difference of the emulated outputs, and the mixed model."""
    converted = amp_rewrite.convert(proto, **options).model
    twin = amp_rewrite.emulate(converted).to_proto()
    sizes = {"B": 2, "T": 5}
    feed = dict(feeds or {})
    for formal in proto.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in formal.type.tensor_type.shape.dim]
        feed.setdefault(formal.name, RNG.standard_normal(shape).astype(np.float32))
    pairs = zip(outputs_of(proto, feed), outputs_of(twin, feed), strict=True)
    return max(float(np.abs(x - y).max() / np.abs(x).max()) for x, y in pairs), converted


NORMS = """(float[2,3,64] x, float[2,3,64] r) => (float[2,3,64] y)
    { p=MatMul(x,w) h=Add(p,c) s=Add(h,r) n=LayerNormalization<axis=-1>(s,g,z) y=MatMul(n,w) }"""
OUTLIER = np.where(np.arange(64) == 3, 3000, 0)


@pytest.mark.parametrize(
    ("bias", "adds"),
    [
        pytest.param(np.full(64, 300), 1, id="a common bias"),
        pytest.param(np.full(64, 3000), 1, id="a large bias"),
        pytest.param(np.full(64, 1), 0, id="a small bias"),
        pytest.param(OUTLIER, 0, id="one feature"),
    ],
)
def test_a_sum_and_norm_take_no_bias_subtracted_by_the_norm(bias: Any, adds: int) -> None:
    difference, converted = error(model(NORMS, w=RNG.standard_normal((64, 64)), c=bias, g=np.ones(64), z=np.zeros(64)))
    assert "SkipLayerNormalization" in kinds(converted)
    assert kinds(converted).count("Add") == adds
    assert difference < 5e-3


GEMM = """(float[B,T,16] x) => (float[N,1,16] y) <int64[2] rows={-1,16}, int64[3] apart={APART}>
    { r=Reshape(x,rows) g=Gemm(r,w,c) y=Reshape(g,apart) }"""


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        pytest.param(GEMM.replace("APART", "0,1,16"), False, id="a 0"),
        pytest.param(GEMM.replace("APART", "-1,1,16"), False, id="no 0"),
        pytest.param(GEMM.replace("APART", "-1,1,16").replace("[B,T,16]", "[2,5,16]"), True, id="sizes"),
        pytest.param(GEMM.replace("APART", "0,1,16").replace("[B,T,16]", "[B,T,2,8]"), False, id="a 0, four axes"),
    ],
)
def test_a_gemm_keeps_the_rows_of_a_shape_that_copies_them(text: str, rewritten: bool) -> None:
    difference, converted = error(model(text, w=RNG.standard_normal((16, 16)), c=np.ones(16)))
    assert ("Gemm" not in kinds(converted)) == rewritten
    assert difference < 5e-3


HEADS = " ".join(
    f"{x}1=Reshape({x},h) {x}2=Transpose<perm=[PERM]>({x}1)".replace("PERM", perm)
    for x, perm in (("q", "0,2,1,3"), ("k", "0,2,3,1"), ("v", "0,2,1,3"))
)
ATTENTION = f"""(float[1,6,8] x, float[1,6,1] n, float[6,8] e) => (float[1,6,8] y)
    <int64[4] h={{1,6,2,4}}, int64[3] flat={{1,6,8}}>
    {{ q=MatMul(x,w) k0=MatMul(x,w) k=Add(k0,c) v0=MatMul(x,w) v=Add(v0,c) {HEADS} s=MatMul(q2,k2) p=Softmax(s)
    o=MatMul(p,v2) t=Transpose<perm=[0,2,1,3]>(o) f=Reshape(t,flat) y=MatMul(f,u) }}"""


@pytest.mark.parametrize(
    ("replaced", "by", "added"),
    [
        pytest.param("", "", 1, id="the same shape"),
        pytest.param("k=Add(k0,c)", "k=Add(n,c)", 2, id="broadcast to keys"),
        pytest.param("v=Add(v0,c)", "v=Add(n,c)", 1, id="broadcast to values"),
        pytest.param("k=Add(k0,c)", "k=Add(e,d)", 2, id="one axis more than keys"),
        pytest.param("v=Add(v0,c)", "v=Add(e,d)", 1, id="one axis more than values"),
    ],
)
def test_a_bias_that_broadcasts_keys_or_values_stays(replaced: str, by: str, added: int) -> None:
    weights = {"w": RNG.standard_normal((8, 8)), "u": RNG.standard_normal((8, 8)), "c": np.arange(8)}
    proto = model(ATTENTION.replace(replaced, by), **weights, d=np.arange(8).reshape(1, 1, 8))
    difference, converted = error(proto)
    assert "MultiHeadAttention" in kinds(converted)
    assert kinds(converted).count("Add") == added
    assert difference < 5e-3


ROTATED = """(float[2,3,32] x, float[2,3,16] z, float[2,3,16] u) => (float[2,3,32] y)
    <int64[4] heads={0,0,2,16}, int64[4] fewer={0,0,1,16}, int64[5] twice={1,1,2,1,1}, int64[1] two={2},
    int64[1] first={0}, int64[4] repeated={0,2,-1,16}, int64[3] flat={0,0,32}, float[2,3,32] q, float[2,3,16] k,
    float half={0.5}>
    { xm=MatMul(x,w) q=com.microsoft.RotaryEmbedding(xm,first,cos,sin) k=com.microsoft.RotaryEmbedding(z,first,cos,sin)
    q1=Reshape(q,heads) q2=Transpose<perm=[0,2,1,3]>(q1) k1=Reshape(k,fewer) k2=Transpose<perm=[0,2,1,3]>(k1)
    v1=Reshape(u,fewer) v2=Transpose<perm=[0,2,1,3]>(v1)
    k3=Unsqueeze(k2,two) k4=Expand(k3,twice) k5=Reshape(k4,repeated) v3=Unsqueeze(v2,two) v4=Expand(v3,twice)
    v5=Reshape(v4,repeated) kt=Transpose<perm=[0,1,3,2]>(k5) s0=MatMul(q2,kt) s1=Mul(s0,half) s2=Add(s1,causal)
    p=Softmax<axis=-1>(s2) o=MatMul(p,v5) t=Transpose<perm=[0,2,1,3]>(o) y=Reshape(t,flat) }"""


@pytest.mark.parametrize(
    ("width", "attribute", "fuses"),
    [
        pytest.param(16, "", True, id="whole heads"),
        pytest.param(16, "num_heads", True, id="whole heads with num_heads"),
        pytest.param(8, "", False, id="other heads"),
    ],
)
def test_an_attention_takes_only_a_rotation_of_its_own_heads(width: int, attribute: str, fuses: bool) -> None:
    angles = RNG.standard_normal((3, width // 2))
    causal = np.where(np.tri(3), 0, -1e38)
    weights = {"w": RNG.standard_normal((32, 32)), "cos": np.cos(angles), "sin": np.sin(angles), "causal": causal}
    text = ROTATED
    if attribute:
        text = text.replace("Embedding(xm", "Embedding<num_heads=2>(xm").replace(
            "Embedding(z", "Embedding<num_heads=1>(z"
        )
    difference, converted = error(model(text, **weights))
    assert ("GroupQueryAttention" in kinds(converted)) == fuses
    assert difference < 5e-3


QKV = "float[2,2,6,8] q, float[2,2,6,8] k, float[2,2,6,8] v"
PAIR = "=> (float[2,2,6,8] a, float[2,2,6,8] b) <float low={-3.4e38}>"
TWICE = """{ t=Transpose<perm=[0,1,3,2]>(k) s=MatMul(q,t) s1=SHOWN p1=Softmax(s1) a=MatMul(p1,v)
    u=MatMul(q,t) s2=SECOND p2=Softmax(s2) b=MatMul(p2,v) }"""


def two_attentions(second: str, *, constant: bool, opset: int) -> tuple[ModelProto, dict[str, Any]]:
    mask = np.broadcast_to(RNG.random((2, 1, 6, 6)) < 0.5, (2, 1, 6, 6)).copy()
    mask[..., 0], mask[..., 1] = True, False
    text = f"({QKV}{'' if constant else ', bool[2,1,6,6] m'}) {PAIR} {TWICE}"
    text = text.replace("SHOWN", "Where(m,s,low)").replace("SECOND", second)
    return (model(text, opset, m=mask), {}) if constant else (model(text, opset), {"m": mask})


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("options", "opset", "op_type"), [({}, 17, "MultiHeadAttention"), ({"target": "onnx"}, 23, "Attention")]
)
def test_one_mask_used_in_both_senses(options: dict[str, Any], opset: int, op_type: str, constant: bool) -> None:
    proto, feed = two_attentions("Where(m,low,u)", constant=constant, opset=opset)
    difference, converted = error(proto, feed, **options)
    assert kinds(converted).count(op_type) == 2
    assert difference < 5e-3


@pytest.mark.parametrize(("second", "times"), [("Where(m,u,low)", 1), ("Where(m,low,u)", 2)])
def test_the_rows_of_a_mask_in_one_sense_are_counted_once(second: str, times: int) -> None:
    proto, feed = two_attentions(second, constant=False, opset=17)
    difference, converted = error(proto, feed)
    assert kinds(converted).count("ReduceSum") == times
    assert difference < 5e-3


GEMMS = "(float[3,768] x) => (float[3,4] y, float[3,4] z) { y=Gemm(x,w,c) z=Gemm<beta=BETA>(x,w,c) }"


@pytest.mark.parametrize(("beta", "biases"), [("0.5", 2), ("1.0", 1)])
def test_one_large_bias_of_two_products(beta: str, biases: int) -> None:
    weights = {"w": RNG.standard_normal((768, 4)) * 0.02, "c": np.full(4, 1200)}
    difference, converted = error(model(GEMMS.replace("BETA", beta), **weights))
    assert sum("_split" in tensor.name for tensor in converted.graph.initializer) == biases
    assert difference < 1e-4


WEIGHTS = np.random.default_rng(0).standard_normal((8, 8)) / 30
NUMBERS = {"w": WEIGHTS, "g": np.ones(8), "z": np.zeros(8)}
NORMED = "h=Gemm(x,w,b);y=LayerNormalization(h,g,z)"
INSTANCE = "h=Conv(x,k,b);y=InstanceNormalization(h,g,z)"


def large(text: str, bias: float = 4000.0, outputs: str = "y") -> ModelProto:
    shapes = {"x": (1, 8, 8, 8)} if "Conv" in text else {}
    constants: dict[str, Any] = {**NUMBERS, "k": WEIGHTS.reshape(8, 8, 1, 1), "b": np.full(8, bias)}
    return cases.build(text, outputs.split(), shapes=shapes, constants=constants)


def findings(converted: Any) -> list[str]:
    return [finding.message for finding in converted.report.findings if finding.kind == "bias"]


@pytest.mark.parametrize("text", [NORMED, INSTANCE, "y=Gemm(x,w,b)", "h=Gemm(x,w,b);y=Identity(h)", "y=Conv(x,k,b)"])
def test_a_bias_is_split_off_and_added_afterwards(text: str) -> None:
    proto = large(text)
    converted = amp_rewrite.convert(proto)
    assert findings(converted) == ["its bias is far larger than its weights · now added in float32 after the product"]
    assert kinds(converted.model).count("Add") == 1
    row = next(row for row in converted.report.rows if row.op == "Add")
    assert row.dtype == "float32"


@pytest.mark.parametrize(("text", "bias"), [(NORMED, 4000.0), (INSTANCE, 4000.0), (INSTANCE, 40.0)])
def test_results_match_float32(text: str, bias: float) -> None:
    proto = large(text, bias)
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    twin = amp_rewrite.emulate(amp_rewrite.convert(proto).model).to_proto()
    (actual,), (exact,) = outputs_of(twin, feeds), outputs_of(proto, feeds)
    # Next to a bias of 4000, float32 itself keeps only 11 bits of numbers around 0.1.
    assert np.abs(actual - exact).max() <= 2e-2 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("text", "bias", "outputs"),
    [
        (NORMED, 1.0, "y"),
        ("h=Gemm(x,w,b);r=Relu(h);y=MatMul(r,w)", 4000.0, "y"),  # not a copy
        ("h=Gemm(x,w,b);y=LayerNormalization(h,g,z);v=Exp(h)", 4000.0, "y v"),  # several readers
    ],
)
def test_other_biases_do_not_move(text: str, bias: float, outputs: str) -> None:
    converted = amp_rewrite.convert(large(text, bias, outputs))
    assert findings(converted) == []
    first = converted.model.graph.node
    assert any(node.op_type in ("Gemm", "Conv") and len(node.input) == 3 for node in first)


def test_a_required_bias_or_weights_as_inputs_keep_it_in_place() -> None:
    for opset, ir in ((9, 3), (10, 5), (17, 3)):
        proto = cases.build("y=Gemm(x,w,b)", ("y",), constants={"w": WEIGHTS, "b": np.full(8, 4000.0)}, opset=opset)
        proto.ir_version = ir
        if ir == 3:
            formals = [onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer]
            proto.graph.input.extend(formals)
        converted = amp_rewrite.convert(proto)
        assert findings(converted) == []
        onnx.checker.check_model(converted.model, full_check=True)


SKIP, MHA = "SkipLayerNormalization", "MultiHeadAttention"
TWO, OUT = "float[2,3,8] x, float[2,3,8] z", "float[2,3,8] y"
BLOCK = "x0 = MatMul (x, w)  " + SUM.replace("(x,", "(x0,") + NORM.replace("y =", "n =") + "  y = MatMul (n, w)"
GATE = "x0 = MatMul (x, w)  s = Sigmoid (x0)  m = Mul (x0, s)  y = MatMul (m, w)"


def wide(body: str, inputs: str = TWO, outputs: str = OUT, opset: int = 18) -> ModelProto:
    """Return a model with eight features, large enough for its products to gain from a low type."""
    model = model_of(body, inputs, outputs, opset)
    rng = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.name in ("gain", "shift", "bias", "w"):
            shape = (8, 8) if tensor.name == "w" else (8,)
            tensor.CopyFrom(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), tensor.name))
    return model


def contrib_ops(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == "com.microsoft")


def needs(converted: amp_rewrite.Converted) -> str:
    entry = next(p.value for p in converted.model.metadata_props if p.key == "amp_rewrite")
    return next((word for word in entry.split() if word.startswith("needs=")), "")


@pytest.mark.parametrize(
    ("target", "fuse", "ops"),
    [
        ("ort-cuda", None, {SKIP: 1}),
        ("ort-cuda", "auto", {SKIP: 1}),
        ("ort-cuda", "contrib", {SKIP: 1}),
        ("ort-cuda", "basic", {}),
        ("ort-cuda", "none", {}),
        *((target, None, {}) for target in ("onnx", "tensorrt", "directml", "openvino", "webgpu")),
    ],
)
def test_operators_of_onnxruntime_are_made_for_its_cuda_provider(target: Any, fuse: Any, ops: dict[str, int]) -> None:
    assert contrib_ops(amp_rewrite.convert(wide(BLOCK), target=target, fuse=fuse).model) == ops


@pytest.mark.parametrize(
    ("body", "to", "release", "expected", "oldest"),
    [
        (BLOCK, "float16", "1.27", {}, ""),
        (BLOCK, "float16", "1.28", {SKIP: 1}, "1.28.0"),
        (BLOCK, "bfloat16", "1.23", {}, ""),  # without a kernel
        (BLOCK, "bfloat16", "1.26", {}, ""),  # with an incorrect kernel
        (BLOCK, "bfloat16", "1.31", {SKIP: 1}, "1.28.0"),
        (GATE, "float16", "1.31", {"QuickGelu": 1}, "1.20.0"),
        (GATE, "bfloat16", "1.22", {}, ""),
        (GATE, "bfloat16", "1.31", {"QuickGelu": 1}, "1.23.0"),
    ],
)
def test_a_release_gets_only_correct_operators(
    body: str, to: Any, release: str, expected: dict[str, int], oldest: str
) -> None:
    converted = amp_rewrite.convert(wide(body), to=to, target=f"ort-cuda:{release}")  # type: ignore[arg-type]
    assert contrib_ops(converted.model) == expected
    assert needs(converted) == (f"needs=onnxruntime>={oldest}" if oldest else "")
    releases = [f.subject for f in converted.report.findings if f.kind == "needs_release"]
    assert releases == ([f"onnxruntime {oldest}"] if oldest else [])


def test_the_report_says_why_a_wrong_kernel_is_left_out() -> None:
    report = amp_rewrite.convert(wide(BLOCK), target="ort-cuda:1.26").report
    (message,) = (f.message for f in report.findings if f.kind == "not_fused")
    assert "onnxruntime-gpu 1.26.0 sums squares in float16" in message


@pytest.mark.parametrize(("fuse", "expected"), [("contrib", MHA), ("basic", "Attention")])
def test_attention_of_onnxruntime_is_preferred_to_the_standards(fuse: str, expected: str) -> None:
    result, notes = standard(attention_of(SPLIT + SCORES + SOFTMAX + REST + MERGED, opset=23), fuse=fuse)
    assert expected in kinds(result)
    assert {kind for kind, _, _ in notes} == {"fused"}


NEWER = "the model needs onnxruntime 1.28.0 or later for SkipLayerNormalization"


@pytest.mark.parametrize(
    ("release", "provider", "reason"),
    [
        ("1.28.0", CUDA, None),
        ("1.31.1", CPU, None),
        ("1.27.0", CUDA, f"{NEWER}, but 1.27.0 is installed and rejects or miscomputes it"),
        ("1.31.1", "TensorrtExecutionProvider", "TensorrtExecutionProvider has no known kernel for SkipLayer"),
    ],
)
def test_older_releases_and_other_providers_are_excluded(release: str, provider: str, reason: str | None) -> None:
    refusal = release_refusal("1.28.0", [SKIP], release, provider)
    assert (refusal is None) if reason is None else (refusal or "").startswith(reason)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    result = amp_rewrite.convert(wide(BLOCK))
    result.save(tmp_path / "low.onnx")
    return tmp_path / "low.onnx"


def test_a_session_refuses_a_file_for_a_newer_release(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    amp_rewrite.Session(file, policy="float32", providers=[CPU], cache=None)
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.4")
    with pytest.raises(ModelError, match=rf"low\.onnx: {NEWER}"):
        amp_rewrite.Session(file, policy="float32", providers=[CPU], cache=None)


def test_doctor_finds_that_the_installed_release_is_too_old(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.deploy.doctor.packages", lambda: (Package("onnxruntime-gpu", "1.24.4"),))
    (check,) = (check for check in doctor(file).checks if check.topic == "release")
    assert (check.state, check.fact.partition(", but")[0]) == (FINDING, NEWER)


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
    result = amp_rewrite.convert(model).model
    assert contrib_ops(result)[MHA] == 1
    opened(result)
    assert untyped(result) == []
    SymbolicShapeInference.infer_shapes(result, auto_merge=True)


def test_types_are_declared_in_bodies() -> None:
    body = SUM.replace("t =", "t0 =") + NORM.replace("(t,", "(t0,").replace("y =", "n =") + "  m = MatMul (n, w)  "
    body += BIASED.replace("x)", "m)") + ERF.replace("y =", "g2 =") + "  y = MatMul (g2, w)"
    for formal in ("float[2,3,8] y", "y"):
        then = f"then_branch = a () => ({formal}) {{ {body} }}"
        other = "else_branch = b () => (float[2,3,8] e) { e = MatMul (x, w) }"
        model = wide(f"chosen = If (flag) <{then}, {other}>", TWO + ", bool flag", "float[2,3,8] chosen")
        result = amp_rewrite.convert(model).model
        (branch,) = (a.g for n in result.graph.node for a in n.attribute if a.name == "then_branch")
        assert {n.op_type for n in branch.node} >= {SKIP, "BiasGelu"}
        assert untyped(result) == []
        opened(result)


def untyped(model: ModelProto) -> list[str]:
    """Return the results without a type after onnx's inference, including those in bodies."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    missing: list[str] = []

    def walk(graph: GraphProto, around: set[str]) -> None:
        formals = [v.name for v in (*graph.input, *graph.value_info, *graph.output) if v.type.WhichOneof("value")]
        known = around | set(formals) | {t.name for t in graph.initializer}
        for node in graph.node:
            missing.extend(name for name in node.output if name and name not in known)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    walk(attribute.g, known)

    constants = {n.output[0] for n in inferred.graph.node if n.op_type == "Constant"}
    walk(inferred.graph, constants)
    return missing


@pytest.mark.parametrize(("size", "inputs"), [(1.0, 4), (1e5, 3)])
def test_a_bias_that_overflows_is_added_by_its_own_op(size: float, inputs: int) -> None:
    body = "x0 = MatMul (x, w)  r = Add (x0, bias)  t = Add (r, z)  n = RMSNormalization (t, gain)  y = MatMul (n, w)"
    model = wide(body, opset=23)
    for tensor in model.graph.initializer:
        if tensor.name == "bias":
            tensor.CopyFrom(numpy_helper.from_array(np.full(8, size, np.float32), "bias"))
    (norm,) = (n for n in amp_rewrite.convert(model).view.model.proto.graph.node if n.op_type.startswith("Skip"))
    assert len(norm.input) == inputs


named = pytest.mark.parametrize("fusion", FUSIONS, ids=[fusion.name for fusion in FUSIONS])


def findings_of_fusion(fusion: FusionRule, end: str) -> tuple[Finding, ...]:
    model = onnx.parser.parse_model(fusion.model(end))
    onnx.checker.check_model(model, full_check=True)
    converted = convert(model, fuse=fusion.fuse)
    on_cpu = emulate(converted.result, io="same").to_proto() if fusion.fuse == "diffusion" else converted.model
    onnxruntime.InferenceSession(on_cpu.SerializeToString(), providers=["CPUExecutionProvider"])
    return converted.report.findings


@named
def test_a_fusions_example_is_fused_unlike_its_near_miss_and_both_open(fusion: FusionRule) -> None:
    messages = [finding.message for finding in findings_of_fusion(fusion, "hit") if finding.kind == "fused"]
    start = "computed ahead of time" if fusion.name == "constant" else f"{fusion.name.replace('_', ' ')}: one "
    assert [message.startswith(start) for message in messages] == [True]
    near_miss = findings_of_fusion(fusion, "near")
    assert not any(finding.message.startswith(start) for finding in near_miss)
    assert {finding.subject for finding in near_miss if finding.kind == "not_fused"} <= {each.name for each in FUSIONS}


@named
def test_a_record_describes_what_the_fusion_replaces_and_its_obstacles(fusion: FusionRule) -> None:
    assert fusion.sections["What it replaces"].startswith(fusion.spelling)
    assert fusion.sections["What prevents it"].startswith(f"Any of these obstacles: {fusion.refusals}")
    assert all(text.endswith(".") for text in fusion.sections.values())


def test_every_example_model_belongs_to_a_fusion() -> None:
    files = {path.name for path in (Path(fusions.__file__).parent / "models").iterdir()}
    assert files == {f"{fusion.name}.{end}.onnxtxt" for fusion in FUSIONS for end in ("hit", "near")}


def test_every_operator_added_to_the_standard_later_has_a_fusion() -> None:
    assert FIRST_FUSED.keys() <= {fusion.operator for fusion in FUSIONS}
