"""CUDA provider options that depend on the model, and options of sessions; nothing here needs a GPU."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite import Model, ModelError
from amp_rewrite.deploy.benchmark import Candidate
from amp_rewrite.evidence.opening import in_tf32, session_on
from amp_rewrite.runtime import runner as runner_module
from amp_rewrite.runtime.providers import CHANNELS_LAST, CudaOptions, cuda_options
from amp_rewrite.runtime.runner import CPU, CUDA, MAX_GRAPHS, CudaGraphs, Runner, SessionOptions
from support import stub

PRODUCT = "p = Cast <to = 1> (v) q = MatMul (p, p) y = Cast <to = 10> (q)"


def network(convolutions: int, dtype: str = "float16", tail: str = "y = Relu (v)", opset: int = 22) -> onnx.ModelProto:
    """Build a network of 3x3 convolutions followed by other ops."""
    last = ["x", *(f"c{i}" for i in range(1, convolutions)), "v"]
    body = " ".join(f"{b} = Conv <pads = [1, 1, 1, 1]> ({a}, w)" for a, b in pairwise(last))
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({dtype}[n, 4, h, h] x, {dtype}[4, 4, 3, 3] w)'
        f" => ({dtype}[n, 4, h, h] y) {{ {body} {tail} }}"
    )


SOUNDS = """<ir_version: 10, opset_import: ["": 20]> g (float16[1, 4, n] x) => (float16[1, 4, n] y)
    <float16[4, 4, 1] w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}> {"""
SOUNDS += " ".join(f"{a} = Conv ({b}, w)" for a, b in zip("abcdefghy", "xabcdefgh", strict=True)) + " }"
CALLED = """<ir_version: 10, opset_import: ["": 20, "own": 1]>
    g (float16[2, 2] x) => (float16[2, 2] y) { y = own.f (x) }
    <domain: "own", opset_import: ["": 20]> f (a) => (b) { b = MatMul (a, a) }"""


@pytest.mark.parametrize(
    ("model", "tf32", "channels_last", "costs"),
    [
        (network(8), True, True, False),
        (network(7), True, False, False),  # a few convolutions do not make a convolutional network
        (network(8, "bfloat16"), True, False, False),  # no kernels with channels last
        (network(8, "float"), False, False, False),
        (network(8, tail=PRODUCT), False, False, True),  # the digits of a remaining float32 product take precedence
        (onnx.parser.parse_model(SOUNDS), True, False, False),  # one dimension
        (onnx.parser.parse_model(CALLED), False, False, False),  # a function may contain anything
        (network(8, "bfloat16", opset=20), False, False, False),  # not valid
    ],
)
def test_a_model_decides_on_tf32_and_layout(
    model: onnx.ModelProto, tf32: bool, channels_last: bool, costs: bool
) -> None:
    found = cuda_options(Model(model))
    assert (found.tf32, found.channels_last, bool(found.cost)) == (tf32, channels_last, costs)
    assert found.without_layout == {"use_tf32": str(int(tf32))}


def test_a_report_and_the_doctor_print_the_options_of_a_plain_session() -> None:
    line = 'InferenceSession(path, providers=[("CUDAExecutionProvider", {"prefer_nhwc": 1, "fuse_conv_bias": 1}), '
    line += '"CPUExecutionProvider"])'
    report = amp_rewrite.convert(network(8, "float")).report
    assert [finding.message for finding in report.findings if finding.kind == "channels_last"] == [line]
    assert report.text().splitlines()[-2] == f"on CUDA: {line}"
    assert [c.remedy for c in amp_rewrite.doctor(network(8)).checks if c.topic == "session"] == [line]
    for other in ({"model": network(7, "float")}, {"model": network(8, "float"), "target": "tensorrt"}):
        assert "InferenceSession" not in amp_rewrite.convert(**other).report.text()
    costly = network(8, tail=PRODUCT)
    (check,) = (c for c in amp_rewrite.doctor(costly).checks if c.topic == "session")
    assert f"{check.fact}; {check.remedy}" == cuda_options(Model(costly)).cost
    reason = "because the float32 products of the model need TF32 off"
    assert check.fact == f"8 convolutions in a low type run without tensor cores, {reason}"
    assert check.remedy.startswith("set the provider option use_tf32=1 if 10 bits of significand are enough")


# -- TF32 for remaining float32 products ---------------------------------------------------------------


def beside(condition: float, tail: str = "o = MatMul (q, back)") -> onnx.ModelProto:
    """Build convolutions and two products that cancel: TF32's error is the condition number times 2⁻¹²."""
    model = network(8, "float")
    graph = model.graph
    text = (
        f"t (float[n, 8] u, float[8, 8] there, float[8, 8] back) => (float[n, 8] o) {{ q = MatMul (u, there) {tail} }}"
    )
    more = onnx.parser.parse_graph(text)
    more.node[0].name, more.node[-1].name = "first", "last"
    there, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))
    there = there @ np.diag(np.geomspace(1, condition, 8)) @ there[::-1]
    for name, array in (("there", there), ("back", np.linalg.inv(there))):
        graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    weight = np.random.default_rng(1).standard_normal((4, 4, 3, 3)).astype(np.float32) / 6
    graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del graph.input[1]
    graph.node.extend(more.node)
    graph.input.append(more.input[0])
    graph.output.append(more.output[0])
    return model


HEAD = '<ir_version: 10, opset_import: ["": 20]> g'
FAR = {"x": 1e30, "w": 1e-30}
KEPT = ("name=first", "name=last")


@pytest.mark.parametrize(("condition", "permitted"), [(1.0, True), (100.0, False), (1e5, False)])
def test_a_file_permits_tf32_if_its_outputs_tolerate_it(condition: float, permitted: bool, tmp_path: Path) -> None:
    model = beside(condition)
    unchecked = amp_rewrite.convert(model, keep=KEPT)
    assert "8 convolutions" in cuda_options(unchecked.result).cost
    (unanswered,) = (finding for finding in unchecked.report.findings if finding.kind == "tf32")
    assert " · set the provider option use_tf32=1" in unanswered.message
    checked = amp_rewrite.convert(model, keep=KEPT, check=True)
    checked.save(tmp_path / "low.onnx")
    found = cuda_options(Model.load(tmp_path / "low.onnx"))
    assert (found.tf32, found.channels_last, not found.cost) == (permitted,) * 3
    notes = {finding.kind: finding.message for finding in checked.report.findings}
    assert ("TF32 in 2 float32 products has an error of" in notes["tf32"]) == permitted == ("channels_last" in notes)
    assert not cuda_options(amp_rewrite.emulate(checked.result)).tf32  # it has no low convolution
    (entry,) = (p for p in checked.result.proto.metadata_props if p.key == "amp_rewrite")
    entry.value = entry.value.replace("tf32=1", "tf32=0")
    assert not cuda_options(checked.result).tf32
    again = amp_rewrite.convert(tmp_path / "low.onnx", to="bfloat16", lower=["op=Conv"], keep=KEPT)
    assert cuda_options(again.result).cost  # another file, which was not tested
    assert "tf32" in {finding.kind for finding in again.report.findings}


@pytest.mark.parametrize(("tolerance", "permitted"), [(0.2, True), (2e-3, False)])
def test_your_criterion_and_data_decide_on_tf32(tolerance: float, permitted: bool) -> None:
    rng = np.random.default_rng(2)
    data = {"x": rng.standard_normal((2, 4, 8, 8), np.float32), "u": rng.standard_normal((2, 8), np.float32)}
    repaired = amp_rewrite.repair(beside(100.0), data, tolerance=tolerance, keep=KEPT)
    assert repaired.solved
    assert cuda_options(repaired.converted.result).tf32 == permitted


def test_a_half_model_without_changes_stays_unchanged() -> None:
    data = {"x": np.zeros((1, 4, 8, 8), np.float16), "w": np.zeros((4, 4, 3, 3), np.float16)}
    repaired = amp_rewrite.repair(network(8, tail=PRODUCT), data, tolerance=1e-2, keep=["op=MatMul"])
    assert repaired.converted.plan.empty
    assert not cuda_options(repaired.converted.result).tf32


@pytest.mark.parametrize(("keep", "rule"), [((), "cancellation"), (("name=first",), "keep")])
def test_a_product_protected_by_a_rule_gets_no_tf32(keep: tuple[str, ...], rule: str) -> None:
    model = beside(1.0, "square = Mul (u, u) sum = ReduceSum (square) o = Sub (sum, q)")
    converted = amp_rewrite.convert(model, keep=keep, check=True)
    assert {row.rule for row in converted.report.rows if row.name == "first"} == {rule}
    assert "tf32" in {finding.kind for finding in converted.report.findings}
    assert not cuda_options(converted.result).tf32


@pytest.mark.parametrize(("op", "sizes"), [("MatMul", (3, 3)), ("Gemm", (3, 3)), ("Conv", (2, 3, 1))])
def test_operands_are_rounded_to_tf32_and_added_in_float32(op: str, sizes: tuple[int, ...]) -> None:
    typed = f"float[{', '.join(map(str, sizes))}]"
    model = Model(onnx.parser.parse_model(f"{HEAD} ({typed} x, {typed} w) => (float y) {{ y = {op} (x, w) }}"))
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(sizes).astype(np.float32) * np.float32(far) for name, far in FAR.items()}

    def shortened(array: np.ndarray) -> np.ndarray:
        bits = array.view(np.uint32)
        return ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)

    twin = in_tf32(model)
    assert twin is not None
    (found,) = Runner.open(twin).run(feeds).values()
    (expected,) = Runner.open(model).run({name: shortened(array) for name, array in feeds.items()}).values()
    np.testing.assert_array_equal(found, expected)


def test_cells_that_round_inside_are_not_tried_in_tf32() -> None:
    typed = "float[2, 1, 3] x, float[1, 9, 3] w, float[1, 9, 3] r"
    cell = f"{HEAD} ({typed}) => (float y) {{ y, h = GRU <hidden_size = 3> (x, w, r) }}"
    assert in_tf32(Model(onnx.parser.parse_model(cell))) is None


# -- options of sessions -------------------------------------------------------------------------------


class Opened:
    """A stub of onnxruntime's session; with `planless`, channels last has no plan."""

    seen: ClassVar[list[dict[str, str]]] = []
    planless = False

    def __init__(self, _given: object, _settings: object, providers: Any, **_: object) -> None:
        self.options = dict(dict(providers)[CUDA])
        self.seen.append(self.options)

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def run(self, _names: object, feeds: dict[str, np.ndarray], _options: object = None) -> list[object]:
        assert {name: array.shape for name, array in feeds.items()} == {"x": (1, 4, 64, 64), "w": (4, 4, 3, 3)}
        if self.planless and "prefer_nhwc" in self.options:
            raise RuntimeError("no execution plan")
        return [None]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Collect the CUDA options of each opened session."""
    monkeypatch.setattr("onnxruntime.InferenceSession", Opened)
    monkeypatch.setattr(runner_module, "check_providers", lambda _providers: None)
    monkeypatch.setattr(runner_module, "preload_once", lambda: None)
    monkeypatch.setattr(Opened, "seen", [])
    return Opened.seen


def opened(model: onnx.ModelProto, channels_last: bool = True, **options: str) -> Runner:
    chosen = {CUDA: options} if options else {}
    settings = SessionOptions(providers=(CUDA, CPU), provider_options=chosen, channels_last=channels_last)
    return Runner.open(Model(model), settings)


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, {"use_tf32": "1", **CHANNELS_LAST}),
        ({"channels_last": False}, {"use_tf32": "1"}),
        ({"use_tf32": "0"}, {"use_tf32": "0"}),  # then no plan has tensor cores
        ({"prefer_nhwc": "0"}, {"use_tf32": "1", "prefer_nhwc": "0"}),
        ({"device_id": "1"}, {"use_tf32": "1", **CHANNELS_LAST, "device_id": "1"}),
    ],
)
def test_options_reach_the_provider_and_the_callers_win(
    options: dict[str, Any], passed: dict[str, str], seen: list[dict[str, str]]
) -> None:
    assert opened(network(8), **options).provider_options == passed
    assert seen == [passed]


def test_channels_last_is_dropped_if_a_run_finds_no_plan(
    seen: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Opened, "planless", True)
    assert opened(network(8)).provider_options == {"use_tf32": "1"}
    assert seen == [{"use_tf32": "1", **CHANNELS_LAST}, {"use_tf32": "1"}]


def test_verify_and_bench_open_models_like_sessions(seen: list[dict[str, str]]) -> None:
    Runner.open(Model(network(8)), session_on(CUDA))
    candidate = Candidate(0, "m", Model(network(8, "float")), None, {}, CUDA, (), 1)  # type: ignore[arg-type]
    candidate.opened()
    assert Candidate(0, "m", candidate.model, None, {}, CUDA, (), 1, tf32=True).options == {"use_tf32": "1"}  # type: ignore[arg-type]
    assert seen == [{"use_tf32": "1", **CHANNELS_LAST}, {"use_tf32": "0"}]
    assert cuda_options(Model(network(1, "float"))) == CudaOptions()


ON_STUB = """
import onnx.parser, sys, warnings
from amp_rewrite import Session
warnings.simplefilter("ignore")
for text in sys.argv[1:]:
    session = Session(onnx.parser.parse_model(text), cuda_graph=True)
    print(session._runner.provider_options, *session.notes)
"""


@pytest.mark.stub
def test_unrecordable_models_run_without_a_graph_with_onnxruntimes_reason(cuda_stub: Path) -> None:
    branches = "then_branch = a () => (float[2] z) { z = Relu (x) }, else_branch = b () => (float[2] w) { w = Neg (x) }"
    models = [
        f"{HEAD} (float[2, 2] x) => (float[2, 2] y) {{ y = MatMul (x, x) }}",
        f"{HEAD} (float[2] x, bool c) => (float[2] y) {{ y = If (c) <{branches}> }}",
        f"{HEAD} (float[2, 2, 2] x) => (float[2] y) {{ y = Det (x) }}",
    ]
    done = stub.on_cuda(cuda_stub, ON_STUB, *models)
    recorded, *refusals = done.stdout.splitlines()
    assert recorded == "{'use_tf32': '0', 'enable_cuda_graph': '1'}"
    assert len(refusals) == 2, done.stderr
    for line in refusals:
        assert "'enable_cuda_graph': '0'} the model runs without a CUDA graph: onnxruntime cannot open" in line
        assert line.endswith("; turn off CUDA graphs (cuda_graph, enable_cuda_graph)")


# -- CUDA graphs ---------------------------------------------------------------------------------------


class Recorded:
    """A stub of a model that doubles its input and counts its runs."""

    def __init__(self, records: bool = True) -> None:
        self.records = records
        self.usual = self.bound = 0

    def run(self, feeds: dict[str, Any], _outputs: object = None) -> dict[str, Any]:
        self.usual += 1
        return {"y": feeds["x"] * 2}

    def on_device(self, array: np.ndarray, _device: int) -> np.ndarray:
        return array.copy()

    def bind(self, feeds: dict[str, np.ndarray], room: dict[str, np.ndarray], **_: object) -> Any:
        if not self.records:
            raise ModelError("a kernel waits for the device")
        self.bound += 1
        before = {name: array.copy() for name, array in feeds.items()}

        def arrays() -> dict[str, np.ndarray]:
            room["y"][...] = before["x"] * 2
            return {"y": room["y"].copy()}

        return SimpleNamespace(run=lambda: None, feed=before.update, arrays=arrays)


def graphs(records: bool = True) -> tuple[Any, CudaGraphs]:
    model: Any = Recorded(records)
    return model, CudaGraphs(model, 0)


def test_a_graph_is_recorded_once_per_shape_and_results_outlive_the_next_run() -> None:
    model, recorded = graphs()
    rows = [np.full((size, 2), size + number, np.float32) for size in (1, 2) for number in range(3)]
    results = [recorded.run({"x": row}) for row in rows]
    for row, result in zip(rows, results, strict=True):
        np.testing.assert_array_equal(result["y"], row * 2)
    assert (model.usual, model.bound) == (2, 2)


def test_shapes_beyond_the_limit_and_unrecordable_ones_run_as_usual() -> None:
    model, recorded = graphs()
    for size in range(MAX_GRAPHS + 2):
        recorded.run({"x": np.zeros(size, np.float32)})
        recorded.run({"x": np.zeros(size, np.float32)})
    assert (model.bound, model.usual) == (MAX_GRAPHS, MAX_GRAPHS + 4)
    model, recorded = graphs(records=False)
    for _ in range(3):
        np.testing.assert_array_equal(recorded.run({"x": np.ones(2)})["y"], [2, 2])
    assert model.usual == 3
    model, recorded = graphs()
    recorded.run({"x": 3})  # not an array
    assert (model.usual, model.bound) == (1, 0)
