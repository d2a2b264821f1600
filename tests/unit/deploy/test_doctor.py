"""The doctor's findings about fake machines and real models."""

import json
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from click.testing import CliRunner

from amp_rewrite import Model, convert, doctor
from amp_rewrite.cli import program
from amp_rewrite.deploy import doctor as checkup
from amp_rewrite.deploy.doctor import Check, Checkup
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.installation import Package, install
from amp_rewrite.runtime.kernels import load_kernels
from support.corpus import exported
from support.fake_driver import H200, P100

FACTS = {"version": "1.31.1", "cuda": "13.0", "opens": True, "unloaded": None}
CLOSED = {**FACTS, "opens": False, "unloaded": "libcublasLt.so.13: cannot open shared object file"}


def machine(*gpus: Gpu) -> Hardware:
    return Hardware(gpus, (13, 0))


NONE = Hardware(unavailable_reason="no NVIDIA driver is installed here: libcuda.so.1 cannot be loaded")


def checked(
    hardware: Hardware | None = None,
    model: object = None,
    *,
    facts: Mapping[str, Any] = FACTS,
    packages: Mapping[str, str] | None = None,
    **options: Any,
) -> Checkup:
    named = {"onnxruntime-gpu": "1.31.1"} if packages is None else packages
    here = tuple(Package(name, release) for name, release in named.items())
    queries = {
        "query_hardware": lambda: hardware or machine(H200),
        "query_onnxruntime": lambda: facts,
        "packages": lambda: here,
    }
    with patch.multiple(checkup, **queries):
        return doctor(model, **options)  # type: ignore[arg-type]


def about(found: Checkup, topic: str) -> list[Check]:
    return [check for check in found.checks if check.topic == topic]


# -- the machine ---------------------------------------------------------------------------------------


def test_a_machine_without_faults() -> None:
    found = checked()
    assert found.well
    assert found.text() == (
        "ok  GPU          NVIDIA H200, compute capability 9.0, 161.1 GB: fast in float16 and bfloat16\n"
        "ok  driver       supports CUDA up to 13.0\n"
        "ok  onnxruntime  onnxruntime-gpu 1.31.1, built for CUDA 13.0\n"
        "ok  provider     CUDAExecutionProvider loads\n"
        "ok  kernels      the kernel table is for onnxruntime-gpu 1.31.1\n"
        "\nall well"
    )


def test_a_machine_with_every_fault() -> None:
    tool = install("onnxruntime-gpu[cuda,cudnn]==1.31.1")
    assert checked(NONE, facts=CLOSED).text() == (
        "FINDING  GPU          no NVIDIA driver is installed here: libcuda.so.1 cannot be loaded\n"
        "         on a CPU, float16 is slower, not faster\n"
        "unknown  driver       CUDA version unknown\n"
        "ok       onnxruntime  onnxruntime-gpu 1.31.1, built for CUDA 13.0\n"
        "FINDING  libraries    libcublasLt.so.13: cannot open shared object file\n"
        f"         {tool}\n"
        "FINDING  provider     CUDAExecutionProvider does not load, so models run on the CPU\n"
        "ok       kernels      the kernel table is for onnxruntime-gpu 1.31.1\n"
        "\n3 findings"
    )


def test_a_missing_driver_is_not_a_finding_but_another_releases_table_is() -> None:
    assert not about(checked(NONE, facts={**CLOSED, "unloaded": "libcuda.so.1: cannot open"}), "libraries")
    (check,) = about(checked(packages={"onnxruntime-gpu": "1.40.0"}), "kernels")
    assert check == Check(
        "kernels",
        "finding",
        f"the kernel table is for {load_kernels().runtime}, but onnxruntime-gpu 1.40.0 is installed, and its"
        " kernels may differ",
        install("onnxruntime-gpu==1.31.1"),
    )


@pytest.mark.parametrize(
    ("gpu", "to", "well", "fact"),
    [
        (Gpu("T4", (7, 5)), "float16", True, "fast in float16 (bfloat16 needs 8.0)"),
        (Gpu("T4", (7, 5)), "bfloat16", False, "fast in float16 (bfloat16 needs 8.0)"),
        (
            P100,
            "float16",
            False,
            "not fast in any low type (float16 needs 7.0, bfloat16 needs 8.0)",
        ),
    ],
)
def test_each_gpu_lists_its_fast_types(gpu: Gpu, to: str, well: bool, fact: str) -> None:
    found = checked(machine(gpu, H200), to=to)
    first, second = about(found, "GPU")
    assert first.state == ("ok" if well else "finding") and first.fact.endswith(f": {fact}")
    assert second.state == "ok" and found.well is well


PLAIN = {**FACTS, "cuda": None, "opens": False}
BOTH = {"onnxruntime-gpu": "1.31.1", "onnxruntime": "1.30.0"}


@pytest.mark.parametrize(
    ("packages", "facts", "fact"),
    [
        ({}, {"failure": "x"}, "not installed"),
        ({}, PLAIN, "onnxruntime 1.31.1 is built without CUDA"),
        ({"onnxruntime": "1.31.1"}, PLAIN, "onnxruntime 1.31.1 is built without CUDA"),
        (BOTH, FACTS, "onnxruntime-gpu 1.31.1 and onnxruntime 1.30.0 overwrite each other's files, and one of them is"),
        ({"onnxruntime-gpu": "1.31.1"}, {"failure": "it died"}, "onnxruntime-gpu 1.31.1: it died"),
    ],
)
def test_faults_of_onnxruntime_are_reported(packages: dict[str, str], facts: dict[str, Any], fact: str) -> None:
    (check,) = about(checked(facts=facts, packages=packages), "onnxruntime")
    assert check.state == "finding" and check.fact.startswith(fact) and check.remedy


# -- a model -------------------------------------------------------------------------------------------


def parsed(graph: str, opset: int = 20) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {graph}')


ALIGNED = "all fixed dimensions of low-precision products are multiples of 8"


@pytest.mark.parametrize(
    ("graph", "facts"),
    [
        ("(float[8, 64] x, float[64, 64] w) => (float[8, 64] y) { y = MatMul (x, w) }", [ALIGNED]),
        (
            "(float[8, 20] x, float[20, 9] w) => (float[8, 9] y) { [a] y = MatMul (x, w) }",
            ["1 MatMul with k = 20, not a multiple of 8 (a)", "1 MatMul with n = 9, not a multiple of 8 (a)"],
        ),
        (
            "(float[2, 30] x, float[20, 30] w) => (float[2, 20] y) { [a] y = Gemm <transB = 1> (x, w) }",
            ["1 Gemm with n = 20, not a multiple of 8 (a)", "1 Gemm with k = 30, not a multiple of 8 (a)"],
        ),
        (
            "(float[1, 3, 8, 8] x, float[16, 3, 3, 3] w) => (float[1, 16, 6, 6] y) { [a] y = Conv (x, w) }",
            ["1 Conv with in = 3, not a multiple of 8 (a)"],
        ),
        (
            "(float[1, 16, 8, 8] x, float[16, 5, 1, 1] w) => (float[1, 5, 8, 8] y) { [a] y = ConvTranspose (x, w) }",
            ["1 ConvTranspose with out = 5, not a multiple of 8 (a)"],
        ),
        (
            "(float[1, 3, 8, 8] x, float[3, 1, 3, 3] w) => (float[1, 3, 6, 6] y) { [a] y = Conv <group = 3> (x, w) }",
            [ALIGNED],
        ),
    ],
)
def test_dimensions_unsuited_to_tensor_cores_are_named(graph: str, facts: list[str]) -> None:
    found = checked(model=parsed(f"g {graph}"))
    assert [c.fact for c in about(found, "alignment")] == facts and found.well
    padded = {c.remedy.rpartition(" ")[2] for c in about(found, "alignment") if "k = 20" in c.fact or "n = 9" in c.fact}
    assert padded == ({"32", "16"} if "20, 9" in graph else set())


@pytest.mark.parametrize(
    ("node", "opset", "fact", "remedy"),
    [
        ("Tan", 20, "no cuda kernel for Tan", "no opset has one; write it with other ops"),
        ("EyeLike", 22, "no cuda kernel for EyeLike of version 22", "opset 21 has one"),
        ("Identity", 22, None, None),
    ],
)
def test_an_op_without_a_kernel_is_a_finding(node: str, opset: int, fact: str | None, remedy: str | None) -> None:
    graph = f"g (float[8, 8] x) => (float[8, 8] y) {{ a = MatMul (x, x) [op] b = {node} (a)  y = MatMul (b, b) }}"
    found = checked(model=parsed(graph, opset))
    if fact is None:
        fell = Check("placement", "ok", "according to the kernel table, no float op runs on the CPU")
    else:
        fell = Check("placement", "finding", f"{fact}: 1 op would run on the CPU (op)", str(remedy))
    assert about(found, "placement") == [fell]
    assert found.well is (fact is None)


@pytest.mark.parametrize(("node", "well"), [("Identity", True), ("Tan", False)])
def test_without_a_gpu_the_findings_follow_from_the_model(node: str, well: bool) -> None:
    model = parsed(f"g (float[8, 8] x) => (float[8, 8] y) {{ a = MatMul (x, x) b = {node} (a)  y = MatMul (b, b) }}")
    found = checked(NONE, model, facts=CLOSED)
    assert found.well is well
    assert {check.state for topic in ("GPU", "libraries", "provider") for check in about(found, topic)} == {"advice"}
    ended = "\nno obstacle in the model; its values were not checked; this machine has no GPU"
    assert found.text().endswith(ended) is well
    assert not checked(NONE, facts=CLOSED).well
    assert not checked(machine(H200), model, facts=CLOSED).well


def test_operators_only_available_on_cuda_are_a_suggestion() -> None:
    model = parsed(
        "g (float16[1, 8, 8, 4] x, float[4] w) => (float16[1, 8, 8, 4] y)"
        " { y = com.microsoft.GroupNorm <groups = 2, activation = 0> (x, w, w) }"
    )
    assert about(checked(model=model), "operators") == [
        Check(
            "operators",
            "advice",
            "only CUDAExecutionProvider has kernels for GroupNorm of com.microsoft",
            "for a file that also runs elsewhere, convert the source with --fuse contrib",
        )
    ]


# -- half-precision models -------------------------------------------------------------------------------


FILLED = """g (float16[8, 8] x, bool[8, 8] m) => (float16[8, 8] y) {
    s = MatMul (x, x) f = Where (m, s, far) [scaled] d = Mul (f, x) p = Softmax (d) y = MatMul (p, x)
}"""
MASKED = """g (float16[8, 8] x, float16[8, 8] m) => (float16[8, 8] y) {
    s = MatMul (x, x) [fill] f = Mul (m, far) [sum] t = Add (s, f) [soft] p = Softmax (t) y = MatMul (p, x)
}"""


def half(graph: str, *, whole: bool = False, **constants: float) -> onnx.ModelProto:
    """Build a graph in float16 or, with `whole`, float32; `far` is the lowest float16, `e` a small number."""
    model = parsed(graph.replace("float16", "float") if whole else graph, 22)
    for name, number in {"far": -65504.0, "e": 1e-6, **constants}.items():
        if any(name in node.input for node in model.graph.node):
            array = np.array(number, np.float32 if whole else np.float16)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize(
    ("graph", "rule", "named"),
    [
        (FILLED, "constant_range", "scaled"),
        (MASKED, "mask_fill", "fill, sum, soft"),
        (
            "g (float16[8, 8] x) => (float16[8, 8] y) { s = MatMul (x, x) q = Mul (s, s)"
            " v = ReduceMean <keepdims = 1> (q) [eps] a = Add (v, e) r = Sqrt (a) d = Div (s, r) y = MatMul (d, x) }",
            "magnified",
            "eps",
        ),
    ],
    ids=["fill", "mask", "epsilon"],
)
def test_low_ops_that_a_conversion_keeps_in_float32_are_a_finding(graph: str, rule: str, named: str) -> None:
    found = checked(model=half(graph))
    (check,) = about(found, f"rule {rule}")
    assert check.state == "finding"
    assert named in check.fact
    assert "in float16" in check.fact
    assert not found.well
    assert not about(checked(model=half(graph, whole=True)), f"rule {rule}"), (
        "of a float32 model the conversion takes care"
    )


def test_our_conversions_break_no_rule_and_are_checked_in_their_own_type() -> None:
    for to in ("float16", "bfloat16"):
        proto = convert(exported("tests/models/bert_ts13.onnx"), to=to, fuse="basic").result.to_proto()
        found = checked(model=proto)
        assert [check.state for check in about(found, "rules")] == ["ok"]
        assert about(found, "model")[0].fact == f"17 of 17 compute ops in {to}"
        assert to in about(found, "type")[0].fact
        assert not [check for check in found.checks if check.topic.startswith("rule ")]


def test_infinity_in_a_half_constant_may_be_a_number_that_overflowed() -> None:
    body = "s = MatMul (x, x) f = Where (m, s, far) y = Softmax (f)"
    model = half(f"g (float16[8, 8] x, bool[8, 8] m) => (float16[8, 8] y) {{ {body} }}", far=-np.inf)
    (check,) = about(checked(model=model), "constants")
    assert (check.state, check.fact) == ("advice", "1 float16 constant with infinity (far)")


NEG = "g (float[8, 8] x) => (float[8, 8] y) { y = Neg (x) }"


@pytest.mark.parametrize(
    ("graph", "fact"),
    [
        (NEG, "float32; ops: 1 float32"),
        (NEG.replace("float", "float16"), "float16; ops: 1 float16"),
        (NEG.replace("float", "int64"), "no floats"),
        (
            "g (float[8, 8] x) => (float[8, 8] y)"
            " { a = Neg (x) b = Cast <to = 10> (a) c = Abs (b) y = Cast <to = 1> (c) }",
            "mixed float32 and float16; ops: 1 float32, 1 float16",
        ),
        (
            "g (float[8, 8] x) => (float[8, 8] y) <float s = {0.1}, int8 z = {0}> {"
            " q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Neg (d) }",
            "quantized, the rest float32; ops: ",
        ),
        (
            "g (float[8, 8] x) => (float[8, 8] y) <float s = {0.1}> {"
            " z = Constant <value = float8e4m3fn {0}> () q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }",
            "quantized, the rest",
        ),
    ],
)
def test_the_actual_types_of_a_model_are_named(graph: str, fact: str) -> None:
    (check,) = about(checked(model=parsed(graph, 21)), "type")
    assert check.state == "ok"
    assert check.fact.startswith(fact)


@pytest.mark.parametrize("graph", [NEG, NEG.replace("float", "float16"), FILLED, NEG.replace("float", "int64")])
def test_no_model_is_said_to_have_correct_values(graph: str) -> None:
    found = checked(model=half(graph))
    (check,) = about(found, "values")
    assert check.state == "unknown"
    assert "`amp-rewrite verify" in check.remedy
    assert "not checked" in found.brief or not found.well
    assert "fine" not in found.text()


# -- speed ---------------------------------------------------------------------------------------------


def test_nothing_is_claimed_about_an_op_without_a_schema() -> None:
    head = '<ir_version: 10, opset_import: ["": 20, "my.ops": 1]> '
    text = "g (float[n, 16] x) => (float[n, 16] y) { t = MatMul (x, x)  u = my.ops.Odd (t)  y = my.ops.Odd (u) }"
    found = checked(model=Model.load(onnx.parser.parse_model(head + text)))
    fact = "2 ops without a known schema (my.ops::Odd), so their provider is unknown"
    assert Check("placement", "unknown", fact, "a runtime without these ops does not load the model") in found.checks


# -- the command ---------------------------------------------------------------------------------------


def ran(monkeypatch: pytest.MonkeyPatch, found: Checkup, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(checkup, "doctor", lambda *_, **__: found)
    done = CliRunner().invoke(program, ["doctor", *words])
    return done.exit_code, done.stdout, done.stderr


WELL = Checkup((Check("GPU", "ok", "fine"), Check("speed", "advice", "slow", "pad it")))
ILL = Checkup((Check("GPU", "finding", "none", "buy one"),))


def test_the_command_prints_findings_and_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(monkeypatch, WELL) == (
        0,
        "ok      GPU    fine\nadvice  speed  slow\n         pad it\n\nno obstacle; 1 piece of advice\n",
        "",
    )
    assert ran(monkeypatch, ILL) == (1, "FINDING  GPU  none\n         buy one\n\n1 finding\n", "")
    code, out, _ = ran(monkeypatch, ILL, "--json")
    assert (code, json.loads(out)) == (1, json.loads(ILL.to_json()))
