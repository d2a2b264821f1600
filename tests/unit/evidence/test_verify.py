"""Comparing outputs of models and arrays: agreement, and everything that must not pass for it."""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.errors import FeedError, ModelError, PolicyError
from amp_rewrite.evidence import opening
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.metric import MEASURES, compare, criterion
from amp_rewrite.evidence.verify import FedData, ModelRun, verify
from amp_rewrite.files.model import Model
from amp_rewrite.reports.evidence import ALLCLOSE, Criterion, Difference
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, cuda_works

X = {"x": np.float32([[1, 2, 3], [4, 5, -6]])}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def model(body: str, *, x: str = "float[2,3] x", y: str = "float[2,3] y", constants: str = "") -> Model:
    initializers = f"<{constants}>" if constants else ""
    text = f'<ir_version: 10, opset_import: ["": 20]> g ({x}) => ({y}) {initializers} {{ {body} }}'
    return Model.load(onnx.parser.parse_model(text))


RELU = model("y = Relu (x)")
# 300 and 1/256 as float16's bits; 300 * 300 overflows float16, but not divided by 256.
SCALED = model("p = Mul (x, a) y = Mul (p, b)", constants="float a = {300}, float b = {0.00390625}")
SCALED_HALF = model(
    "h = Cast <to = 10> (x) p = Mul (h, a) q = Mul (p, b) y = Cast <to = 1> (q)",
    constants="float16 a = {23728}, float16 b = {7168}",
)
OVERFLOWING = {"x": np.float32([[1, 300, 1000], [1, 1, 1]])}


@pytest.mark.parametrize(
    ("body", "drawn"),
    [
        ("r = RandomNormalLike (x) y = Add (x, r)", "'RandomNormalLike_0' (RandomNormalLike)"),
        ("r = RandomNormalLike <seed = 1.0> (x) y = Add (x, r)", ""),
        ("y = Bernoulli (x)", "'Bernoulli_0' (Bernoulli)"),
        ("ratio = Constant <value_float = 0.5> () y = Dropout (x, ratio, t)", "'Dropout_1' (Dropout)"),
        ("ratio = Constant <value_float = 0.5> () f = Constant <value = bool {0}> () y = Dropout (x, ratio, f)", ""),
        ("y = Dropout (x)", ""),
    ],
)
def test_unseeded_random_ops_are_reported(body: str, drawn: str) -> None:
    random = model(body, constants="bool t = {1}" if "t)" in body else "")
    found = list(verify(random, random, {"x": np.ones((2, 3), np.float32)}, rtol=1e9).notes)
    half = f"the {{}} draws different random numbers in each run; to compare runs, set the `seed` attribute of {drawn}"
    assert found == ([half.format("reference"), half.format("candidate")] if drawn else [])


def test_a_model_agrees_with_itself_and_mismatches_show_the_worst_of_each_output() -> None:
    verdict = verify(RELU, RELU, X, rtol=0.0)
    runs = [ModelRun(f"the {role}", f"float32 on {CPU}") for role in ("reference", "candidate")]
    assert [verdict.reference, verdict.candidate, verdict.fed] == [*runs, FedData("the arrays given", False, 1)]
    (row,) = verdict.rows
    assert (row.output, row.batch, row.difference.score, row.difference.where) == ("y", 0, 0.0, (0, 0))
    assert (verdict.ok, verdict.because) == (True, "6 values compared in 1 output and 1 batch")
    candidate = model("z = Relu (x) y = Mul (z, c)", constants="float c = {1.25}")
    batches = [{"x": X["x"] * factor} for factor in (0, 2, 1)]
    verdict = verify(RELU, candidate, batches, atol=2.0)
    assert [row.difference.max_abs for row in verdict.rows] == [0.0, 2.5, 1.25]
    assert [(row.output, row.batch) for row in verdict.worst] == [("y", 1)]
    assert verdict.because == "output 'y', batch 1: error in units of the allowed error 1.25; at most 1 is required"


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_low_inputs_and_outputs_are_compared_with_float32_ones(low: str) -> None:
    source = model("y = Mul (x, x)")
    converted = amp_rewrite.convert(source.proto, to=low, lower=["*"], io="low").result
    fed = {"x": np.float32([[1.3, 2, 3], [4, 5, -6]])}  # 1.3 has an error of 0.15 eps in float16, 0.3 eps in bfloat16
    eps = amp_rewrite.DType.parse(low).eps
    verdict = verify(source, converted, fed, rtol=2 * eps)  # two roundings: of x, and of its square
    assert verdict.ok
    assert verify(source, converted, fed, rtol=eps / 8).ok is False


def test_batches_are_read_one_at_a_time() -> None:
    alive: list[int] = []

    def batches() -> Iterator[Mapping[str, Any]]:
        for i in range(4):
            alive.append(i)
            yield {"x": X["x"] + np.float32(i)}

    seen: list[tuple[int, int]] = []
    verify(RELU, RELU, Feed.of(batches, RELU), rtol=0.0, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert verify(RELU, RELU, batches, rtol=0.0).fed == FedData("batches()", False, 4)


@pytest.mark.parametrize(
    ("candidate", "because"),
    [
        (model("y = Neg (x)"), "output 'y', batch 0: error in units of the allowed error 6e+05; at most"),
        (
            model("y = Transpose (x)", y="float[3,2] y"),
            "output 'y', batch 0: the shape is [2, 3] in the reference and [3, 2] in the candidate",
        ),
        (
            model("y = Cast <to = 7> (x)", y="int64[2,3] y"),
            "output 'y', batch 0: the element type is float32 in the reference and int64 in the candidate",
        ),
        (model("z = Relu (x)", y="float[2,3] z"), "the candidate has no output 'y' (1 more failure)"),
        (model("y = Relu (x) z = Neg (x)", y="float[2,3] y, float[2,3] z"), "the reference has no output 'z'"),
        (model("n = Neg (x) y = Sqrt (n)"), "output 'y', batch 0: 5 of 6 values are NaN or infinite where"),
    ],
)
def test_a_candidate_that_computes_something_else_fails(candidate: Model, because: str) -> None:
    verdict = verify(RELU, candidate, X, **CLOSE)
    assert not verdict.ok
    assert verdict.because.startswith(because)


def test_swapped_outputs_and_outputs_without_elements_fail() -> None:
    two = "y = Relu (x) z = Neg (x)"
    a = model(two, y="float[2,3] y, float[2,3] z")
    crossed = model("z = Relu (x) y = Neg (x)", y="float[2,3] y, float[2,3] z")
    assert not verify(a, crossed, X, **CLOSE).ok
    turned = model(two, y="float[2,3] z, float[2,3] y")
    assert verify(a, turned, X, **CLOSE).because == "the candidate returns its outputs in a different order: 'z', 'y'"
    none = model("y = Compress (x, c)", y="float[N] y", constants="bool[1] c = {0}")
    assert verify(none, none, X, rtol=1.0).because == (
        "output 'y': no batch had a value to compare; use data that produces one"
    )


def test_nan_on_both_sides_fails_unless_allowed_and_is_reported() -> None:
    nan = model("y = Sqrt (x)")
    assert verify(nan, nan, X, rtol=1.0).because == (
        "output 'y', batch 0: 1 of 6 values are NaN on both sides, which proves nothing"
    )
    verdict = verify(nan, nan, X, rtol=0.0, equal_nan=True)
    assert (verdict.ok, verdict.notes) == (True, ("NaN on both sides counts as equal",))


@pytest.mark.skipif(cuda_works(), reason="CUDA rounds")
def test_overflow_of_rounded_half_fails_by_default_and_passes_in_a_plain_cpu_session() -> None:
    verdict = verify(SCALED, SCALED_HALF, OVERFLOWING, rtol=2**-10)
    lost = "2 of 6 values are NaN or infinite where the reference is finite"
    assert verdict.because == f"output 'y', batch 0: {lost}"
    plain = verify(SCALED, SCALED_HALF, OVERFLOWING, rtol=2**-10, emulate=False)
    assert (plain.ok, plain.candidate.as_) == (True, f"float16 on {CPU}")
    assert plain.notes == (
        "the candidate: onnxruntime's CPU provider computes most float16 ops in float32, without rounding",
    )


@pytest.mark.skipif(cuda_works(), reason="CUDA opens")
def test_a_provider_that_does_not_open_is_an_error_and_not_a_verdict() -> None:
    with pytest.raises((ModelError, PolicyError)):
        verify(RELU, RELU, X, rtol=1.0, provider=CUDA)


def test_a_session_that_fell_back_to_the_cpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Runner.open
    monkeypatch.setattr(opening, "cuda_works", lambda: True)  # and yet it does not
    monkeypatch.setattr(opening.Runner, "open", lambda model, _options: opens(model))
    with pytest.raises(ModelError) as error:
        verify(RELU, RELU, X, rtol=1.0)
    assert str(error.value) == (
        f"the reference: {CUDA} cannot be used on this machine; use provider={CPU!r}, or install its libraries"
    )


def test_an_input_of_only_the_candidate_is_an_error_that_names_it() -> None:
    two = model("y = Add (x, b)", x="float[2,3] x, float[1] b")
    with pytest.raises(FeedError, match="'b'"):
        verify(RELU, two, X, rtol=0.0)


def test_a_failed_verdict_names_the_tolerance_that_would_pass() -> None:
    candidate = model("z = Relu (x) y = Mul (z, c)", constants="float c = {1.037}")
    failed = verify(RELU, candidate, X, rtol=1e-3)
    note = "the largest error is 0.037, so the candidate passes with a tolerance of 0.04"
    assert (failed.reached, f"note: {note}\n" in failed.text()) == (note, True)
    assert verify(RELU, candidate, X, tolerance=0.04).ok
    wrong, lost = (model("z = Relu (x) y = Mul (z, c)", constants=f"float c = {{{c}}}") for c in ("2", "1e38"))
    assert [verify(RELU, other, X, rtol=1e-3).reached for other in (wrong, lost)] == ["", ""]
    assert verify(RELU, candidate, X, metric="snr=90").reached == ""


def test_json_spells_out_infinities_and_round_trips() -> None:
    texts = [verify(SCALED, SCALED_HALF, OVERFLOWING, rtol=0.5, emulate=True).to_json() for _ in range(2)]
    (row,) = json.loads(texts[0])["rows"]
    assert (row["score"], row["where"], row["candidate"], row["nonfinite"]) == (None, [0, 1], "inf", [0, 2])
    zero = model("y = Sub (x, x)")
    assert '"score": "inf"' in verify(zero, RELU, X, rtol=1.0).to_json()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("fits", [True, False])
def test_an_emulated_model_is_written_to_a_file_only_if_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    weight = np.random.default_rng(0).standard_normal((200, 200)).astype(np.float16)  # 80 kB: stays in its file
    half = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float16[2, 200] x) => (float16[2, 200] y) { y = MatMul (x, w) }'
    )
    half.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(half, tmp_path / "half.onnx")
    made = []
    monkeypatch.setattr("amp_rewrite.evidence.opening.main_memory", lambda: 1 << 40 if fits else 0)
    folder = tempfile.TemporaryDirectory
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **more: made.append(more) or folder(**more))
    x = {"x": np.ones((2, 200), np.float16)}
    verdict = verify(tmp_path / "half.onnx", tmp_path / "half.onnx", x, atol=0, emulate=True)
    assert (verdict.ok, len(made)) == (True, 0 if fits else 2)


ANY = Criterion(ALLCLOSE, rtol=1e9, atol=1e9)
INF, NAN = np.float32(np.inf), np.float32(np.nan)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_tolerance_is_numpys_allclose_and_shows_the_element_that_decides() -> None:
    a, b = f32(100, -1, 0), f32(101, -1.5, 0.25)
    found = compare(a, b, Criterion(ALLCLOSE, rtol=0.25, atol=0.5))
    # Errors 1, 0.5, 0.25 against 25.5, 0.75, 0.5: the second uses two thirds of its tolerance.
    assert found == Difference(
        elements=3,
        ok=True,
        because="error in units of the allowed error 0.6667; at most 1 is required",
        compared=3,
        max_abs=1.0,
        scaled=0.01,
        score=0.5 / 0.75,
        where=(1,),
        reference="-1",
        candidate="-1.5",
    )


@pytest.mark.parametrize(
    ("a", "b", "because"),
    [
        (f32(1, 2), f32(1, NAN), "1 of 2 values are NaN or infinite where the reference is finite"),
        (f32(1, 2), f32(1, INF), "1 of 2 values are NaN or infinite where the reference is finite"),
        (f32(1, INF), f32(1, 3e38), "1 of 2 values are not finite and differ"),
        (f32(INF), f32(-INF), "1 of 1 values are not finite and differ"),
        (f32(NAN, 1), f32(NAN, 1), "1 of 2 values are NaN on both sides, which proves nothing"),
        (f32(NAN), f32(INF), "1 of 1 values are not finite and differ"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "the shape is [2, 3] in the reference and [3, 2] in the candidate"),
        (np.zeros(1), np.zeros(()), "the shape is [1] in the reference and [] in the candidate"),
        (f32(1), np.array([1]), "the element type is float32 in the reference and int64 in the candidate"),
        (np.array([True]), np.array([1]), "the element type is bool in the reference and int64 in the candidate"),
        (np.array(["1"], object), f32(1), "the element type is string in the reference and float32 in the candidate"),
        (np.array([1, 2, 3]), np.array([1, 2, 4]), "1 of 3 values differ, and integer values must be equal"),
        (np.array([True]), np.array([False]), "1 of 1 values differ, and bool values must be equal"),
        (
            np.array(["a", "b"], object),
            np.array(["a", "c"], object),
            "1 of 2 values differ, and string values must be equal",
        ),
    ],
)
def test_even_the_widest_tolerance_rejects(a: np.ndarray, b: np.ndarray, because: str) -> None:
    found = compare(a, b, ANY)
    assert (found.ok, found.because) == (False, because)


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_every_metric_rejects_nan_on_both_sides(name: str) -> None:
    worst = -math.inf if (name != "scaled") else math.inf
    by = Criterion(name, worst)
    assert compare(f32(1, 2), f32(1, 2), by).ok
    assert not compare(f32(NAN, 2), f32(NAN, 2), by).ok


def test_nan_on_both_sides_passes_only_on_request() -> None:
    a = f32(1, NAN)
    assert compare(a, a, ANY, equal_nan=True).ok
    assert not compare(a, f32(NAN, 1), ANY, equal_nan=True).ok


def test_a_complex_number_counts_as_two() -> None:
    found = compare(np.array([1 + 2j]), np.array([1 + 2.5j]), Criterion(ALLCLOSE, atol=0.4))
    assert (found.ok, found.compared, found.where, found.max_abs) == (False, 2, (0, 1), 0.5)


@pytest.mark.parametrize(
    ("name", "a", "b", "expected"),
    [
        ("cosine", f32(3, 4), f32(4, 3), 24 / 25),
        ("cosine", f32(1, 0), f32(-1, 0), -1.0),
        ("cosine", f32(0, 0), f32(0, 0), 1.0),
        ("cosine", f32(0, 0), f32(1, 0), 0.0),
        # 10 log10((9 + 16) / 0.25)
        ("snr", f32(3, 4), f32(3, 4.5), 20.0),
        ("snr", f32(3, 4), f32(-3, 4), 10 * math.log10(25 / 36)),
        ("snr", f32(1, 0), f32(0, 0), 0.0),
        ("snr", f32(3, 4), f32(3, 4), math.inf),
        ("snr", f32(0, 0), f32(1, 0), -math.inf),
        ("scaled", f32(1, -4), f32(1.5, -4), 0.125),
        ("scaled", f32(0, 0), f32(0, 0), 0.0),
        ("top1", np.array([[1, 2, 0], [5, 1, 1]], np.float32), np.array([[0, 9, 0], [1, 5, 1]], np.float32), 0.5),
        ("top1", np.array([[-np.inf, 2.0]]), np.array([[-np.inf, 3.0]]), 1.0),
    ],
)
def test_a_metric_follows_its_formula(name: str, a: np.ndarray, b: np.ndarray, expected: float) -> None:
    found = compare(a, b, Criterion(name, -math.inf if (name != "scaled") else math.inf))
    assert found.score == pytest.approx(expected, rel=1e-12)  # a few roundings of float64


@pytest.mark.parametrize("size", [1e300, 1e-300])
@pytest.mark.parametrize("name", ["cosine", "snr"])
def test_squares_neither_overflow_nor_vanish(name: str, size: float) -> None:
    a, b = np.array([3.0, 4.0]), np.array([3.0, 4.5])
    function = MEASURES[name].function
    assert function(a * size, b * size) == pytest.approx(function(a, b), rel=1e-12)


@pytest.mark.parametrize("shape", [(), (3, 1), (1,)])
def test_top1_of_one_class_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PolicyError) as error:
        compare(np.zeros(shape), np.zeros(shape), criterion(metric="top1=1"))
    assert str(error.value) == (
        f"top1 needs two or more classes along the last axis, but the shape is {list(shape)}; choose another metric,"
        " or compare only the outputs that contain class scores"
    )


NONE = (
    "no criterion was given, and there is no default; pass tolerance=, rtol= and/or atol=, or metric= with its bound;"
    " a good start is a tolerance of 1e-2 for float16, 8e-2 for bfloat16"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, NONE),
        ({"rtol": -1.0}, "rtol=-1.0: use a finite number, 0 or more"),
        ({"atol": math.nan}, "atol=nan: use a finite number, 0 or more"),
        ({"tolerance": math.inf}, "tolerance=inf: use a finite number, 0 or more"),
        ({"metric": "snr=1", "rtol": 1.0}, "rtol= and metric= exclude each other; choose one"),
        ({"tolerance": 1.0, "rtol": 1.0, "atol": 1}, "tolerance= and rtol= and atol= exclude each other; choose one"),
        ({"metric": "cos=1"}, "unknown metric 'cos'; did you mean 'cosine'?"),
        ({"metric": "snr"}, "metric='snr' needs a finite bound, as in metric='snr=40'"),
        ({"metric": "snr=high"}, "metric='snr=high' needs a finite bound, as in metric='snr=40'"),
        ({"metric": "top1=2"}, "metric='top1=2' needs a finite bound from 0 to 1, as in"),
        ({"metric": "scaled=-1"}, "metric='scaled=-1' needs a finite bound from 0 to inf, as in"),
    ],
)
def test_a_criterion_without_a_bound_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError) as error:
        criterion(**options)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
