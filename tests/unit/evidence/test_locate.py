"""Locating errors: own and accumulated errors compared with numpy, the first jump, and matching of ops."""

import math
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence import errors
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.errors import ErrorStats, Pairing
from amp_rewrite.evidence.locate import Located, locate
from amp_rewrite.files.model import Model
from amp_rewrite.reports.evidence import OpErrors
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner
from support.paths import TESTS

MODELS = TESTS / "models"
RNG = np.random.default_rng(7)
W1, W2 = (RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 4)))
X = {"x": RNG.standard_normal((5, 8)).astype(np.float32)}
HALF = np.float16
# Statistics are sums of float32 squares over at most 80 elements; a sum of n terms has at most n roundings.
SUMMED = 80 * 2.0**-24


def parsed(body: str, signature: str, constants: str = "", opset: int = 20) -> onnx.ModelProto:
    initializers = f"<{constants}>" if constants else ""
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g {signature} {initializers} {{ {body} }}'
    )


def mlp() -> onnx.ModelProto:
    """h = x @ w1, r = Relu(h), y = r @ w2, all in float32."""
    model = parsed(
        "[first] h = MatMul (x, w1) [act] r = Relu (h) [second] y = MatMul (r, w2)", "(float[N,8] x) => (float[N,4] y)"
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, n) for n, w in (("w1", W1), ("w2", W2)))
    return model


def low(value: np.ndarray) -> np.ndarray:
    return value.astype(HALF).astype(np.float32)


def error(value: np.ndarray, reference: np.ndarray) -> float:
    noise, signal = ((v.astype(np.float64) ** 2).sum() for v in (value - reference, reference))
    return math.sqrt(noise / signal)


def fixture(name: str) -> dict[str, np.ndarray]:
    with np.load(MODELS / f"{name}.npz") as stored:
        return {k.removeprefix("input/"): stored[k] for k in stored.files if k.startswith("input/")}


# -- numbers ---------------------------------------------------------------------------------------------


def test_own_and_accumulated_errors_match_numpy() -> None:
    model = mlp()
    converted = amp_rewrite.convert(model).result
    located = locate(model, converted, X)
    x = X["x"]
    h = x @ W1
    r = np.maximum(h, 0)
    y = r @ W2
    own = [error(low(low(x) @ low(W1)), h), 0.0, error(low(low(r) @ low(W2)), y)]  # Relu selects and adds no error
    h_low = low(low(x) @ low(W1))
    y_low = low(np.maximum(h_low, 0) @ low(W2))
    accumulated = [error(h_low, h), error(np.maximum(h_low, 0), r), error(y_low, y)]
    assert [row.op for row in located.rows] == ["first", "act", "second"]
    # float32 products of other libraries round differently, which half precision rarely (1 in 2^11) shows.
    assert [row.own for row in located.rows] == pytest.approx(own, rel=0.02)
    assert [row.accumulated for row in located.rows] == pytest.approx(accumulated, rel=0.02)
    assert [row.absmax for row in located.rows] == pytest.approx([np.abs(v).max() for v in (h, r, y)], rel=1e-5)
    assert (located.matched, located.matchable, located.first_jump) == (3, 3, None)


def test_errors_accumulate_over_batches() -> None:
    model = mlp()
    converted = amp_rewrite.convert(model).result
    whole = locate(model, converted, X)
    parts = locate(model, converted, [{"x": X["x"][i : i + 1]} for i in range(5)])
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert (other.own, other.accumulated) == pytest.approx((one.own, one.accumulated), rel=2 * SUMMED + 1e-4)
        assert (other.max_abs, other.absmax) == pytest.approx((one.max_abs, one.absmax), rel=1e-3)
    assert parts.fed.batches == 5


@pytest.mark.parametrize(
    "name", ["bert_dynamo20", "cnn_ts13", "gpt2_dynamo18", "if_ts13", "loop_dynamo21", "lstm_ts13"]
)
def test_the_accumulated_error_of_an_output_matches_the_emulated_model(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    converted = amp_rewrite.convert(path, fuse="basic").result
    fed = fixture(name)
    located = locate(path, converted, fed)
    # a Transpose of the result is between two Reshapes; two values of other shapes match by structure
    assert located.matchable - located.matched == {"lstm_ts13": 3, "bert_dynamo20": 1}.get(name, 0)
    a, b = (Runner.open(m).run(fed) for m in (Model.load(path), emulate(converted, io="float32")))
    pairing = Pairing.of(Model.load(path), converted, Feed.of(fed, Model.load(path)))
    drift = pairing.accumulated()
    theirs = {pairing.reference.value_name(w): drift[v] for v, w in pairing.measured.items()}
    compared = [out for out in a if out in theirs]
    assert compared
    for out in compared:
        # The tapped graph is not optimized, so float32 sums have another order and occasionally round differently.
        assert theirs[out].error(0) == pytest.approx(error(np.asarray(b[out]), np.asarray(a[out])), rel=0.1, abs=1e-6)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load(MODELS / "cnn_ts13.onnx")
    both = Pairing.of(model, amp_rewrite.convert(MODELS / "cnn_ts13.onnx").result, Feed.of(fixture("cnn_ts13"), model))
    runs: list[tuple[int, int]] = []
    whole = [measure(lambda *done: runs.append(done)) for measure in (both.local, both.accumulated)]
    assert runs == [(1, 1), (1, 1)]
    monkeypatch.setattr(errors, "PIECE", 2000)
    parts = [measure(lambda *done: runs.append(done)) for measure in (both.local, both.accumulated)]
    assert parts == whole and len(runs) > 6


# -- findings ----------------------------------------------------------------------------------------------

SCALED = parsed(
    "[up] p = Mul (x, a) [down] y = Mul (p, b)",
    "(float[3] x) => (float[3] y)",
    "float a = {300}, float b = {0.00390625}",
)
SCALED_HALF = parsed(
    "h = Cast <to = 10> (x) [up] p = Mul (h, a) [down] q = Mul (p, b) y = Cast <to = 1> (q)",
    "(float[3] x) => (float[3] y)",
    "float16 a = {23728}, float16 b = {7168}",  # the bits of 300 and 1/256
)
OVERFLOWING = {"x": np.float32([1, 300, 1000])}


def test_an_overflow_is_the_first_jump() -> None:
    located = locate(SCALED, SCALED_HALF, OVERFLOWING)
    up = OpErrors("up", "Mul", "float16", math.inf, math.inf, math.inf, 300000.0, overflows=True)
    # The input of `down` overflows when it is rounded; 1 * 300 / 256 does not.
    down = OpErrors("down", "Mul", "float16", math.inf, math.inf, math.inf, 1171.875, overflows=True)
    assert (located.rows, located.first_jump) == ((up, down), up)


def test_the_error_jumps_at_the_wrong_op_even_in_float32() -> None:
    wrong = parsed(
        "[a] p = Exp (x) [b] q = Mul (p, c) [d] y = Neg (q)", "(float[3] x) => (float[3] y)", "float c = {3}"
    )
    right = parsed(
        "[a] p = Exp (x) [b] q = Mul (p, c) [d] y = Neg (q)", "(float[3] x) => (float[3] y)", "float c = {2}"
    )
    located = locate(right, wrong, {"x": np.float32([1, 2, 3])})
    assert located.first_jump == located.rows[1]
    assert [(row.op, row.own, row.accumulated) for row in located.rows] == [
        ("a", None, 0.0),
        ("b", None, pytest.approx(0.5)),
        ("d", None, pytest.approx(0.5)),
    ]
    assert located.top(3) == ()


def test_an_op_with_a_body_is_measured_as_a_whole() -> None:
    model = parsed(
        "[pick] y = If (c) <then_branch = t () => (float[1] u) {[inside] u = MatMul (m, x)},"
        " else_branch = e () => (float[1] v) {v = ReduceSum (x)}>",
        "(float[8] x, bool c) => (float[1] y)",
        "float[1,8] m = {1.1, 2.2, 3.3, 4.4, 5.5, 6.6, 7.7, 8.8}",
    )
    converted = amp_rewrite.convert(model).result
    fed = {"x": np.float32([1.1, 2.2, 0.3, 0.7, 1.3, 2.9, 3.1, 1.7]), "c": np.array(True)}
    located = locate(model, converted, fed)
    m = np.float32([[1.1, 2.2, 3.3, 4.4, 5.5, 6.6, 7.7, 8.8]])
    expected = error(low(low(m) @ low(fed["x"])), m @ fed["x"])
    assert [(row.op, row.own) for row in located.rows] == [("pick", pytest.approx(expected, rel=0.02))]


def test_a_half_precision_reference_is_replaced_by_its_float32_twin() -> None:
    located = locate(SCALED_HALF, SCALED_HALF, OVERFLOWING)
    assert located.notes == ("the reference uses float16: the reference is its float32 twin, which rounds nothing",)
    assert located.first_jump is not None
    assert (located.first_jump.op, located.first_jump.overflows) == ("up", True)
    rounded = locate(SCALED_HALF, SCALED_HALF, {"x": np.float32([1, 1.0001, 1.3])})
    assert all(1e-5 < (row.accumulated or 0) < 1e-3 for row in rounded.rows)


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    out = onnx.ModelProto()
    out.CopyFrom(model)
    edges = {v.name for v in (*out.graph.input, *out.graph.output)}
    for node in out.graph.node:
        node.name = f"other_{node.name}"
        for names in (node.input, node.output):
            names[:] = [n if n in edges else f"other_{n}" for n in names]
    for tensor in out.graph.initializer:
        tensor.name = f"other_{tensor.name}"
    del out.graph.value_info[:]
    return out


def test_ops_with_other_names_are_matched_by_structure_and_shapes() -> None:
    model = mlp()
    converted = amp_rewrite.convert(model).result
    same = locate(model, converted, X)
    other = locate(model, renamed(converted.to_proto()), X)
    assert (other.rows, other.matched) == (same.rows, 3)
    signature, shape = "(float[2,3] x) => (float[2,3] y)", "int64[2] s = {2, 3}"
    body = "[e] e = Exp (x) [t] h = Transpose <perm = [{}]> (e) [r] r = Reshape (h, s) [n] y = Neg (r)"
    a, b = (parsed(body.format(perm), signature, shape) for perm in ("0, 1", "1, 0"))
    located = locate(a, b, {"x": np.float32([[1, 2, 3], [4, 5, 6]])})
    assert (located.matched, located.matchable, [row.op for row in located.rows]) == (3, 4, ["e", "r", "n"])


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (
            parsed("[other] z = Exp (v)", "(float[3] v) => (float[3] z)"),
            "no values of the two models match: their ops have neither names nor structure in common",
        ),
        (
            parsed("[up] p = Mul (x, a) [down] y = Mul (p, a)", "(float[3] x, float a) => (float[3] y)"),
            "the candidate has an input 'a', but the reference does not",
        ),
    ],
)
def test_models_that_cannot_be_compared_inside_are_refused(b: onnx.ModelProto, message: str) -> None:
    with pytest.raises(ModelError) as error:
        locate(SCALED, b, OVERFLOWING)
    assert str(error.value) == message


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("value", "reference", "is_low", "expected"),
    [
        ([3.0, 4.5], [3.0, 4.0], True, ErrorStats(0.5, 4.0, 0.25, 25.0)),
        ([], [], True, ErrorStats()),
        ([INF, NAN, 1.0], [1.0, 2.0, 1.0], True, ErrorStats(0.0, 2.0, 0.0, 6.0, lost=2)),
        ([INF, NAN, 1.0], [INF, INF, NAN], True, ErrorStats()),
        ([INF], [70000.0], True, ErrorStats(0.0, 70000.0, 0.0, 0.0, lost=1)),
        # A mask that saturates in half precision still masks and has no weight.
        ([-65504.0, 2.0], [-3e38, 1.0], True, ErrorStats(1.0, np.float32(3e38).item(), 1.0, 1.0)),
        ([-3e38, 2.0], [-3e38, 1.0], False, ErrorStats(1.0, np.float32(3e38).item(), 1.0, 1.0)),
        ([1.0], [-3e38], True, ErrorStats(65505.0, np.float32(3e38).item(), 65505.0**2, 0.0)),
        ([80000.0], [70000.0], False, ErrorStats(10000.0, 70000.0, 1e8, 4.9e9)),
        ([1e-30], [2e-30], True, ErrorStats(1e-30, 2e-30, 1e-60, 4e-60)),
    ],
)
def test_masks_and_lost_elements_do_not_count_as_size(
    value: list[float], reference: list[float], is_low: bool, expected: ErrorStats
) -> None:
    found = ErrorStats.of(np.float32(value), np.float32(reference), 65504.0 if is_low else 2.0**64)
    for part in ("max_abs", "absmax", "noise", "signal", "lost"):
        assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=1e-6)


def two() -> Iterator[Located]:
    yield locate(SCALED, SCALED_HALF, OVERFLOWING)
    yield locate(SCALED, SCALED_HALF, {"x": np.float32([1, 2, 3])})
