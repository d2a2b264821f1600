"""Taps: their counts, in all kinds of graphs, without changing outputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from numpy.typing import NDArray

from amp_rewrite import DType, Feed, Model, ModelError, View, emulate
from amp_rewrite.evidence.calibrate import WIDTH, Taps, merged, neutral, ranges, tapped
from amp_rewrite.evidence.ranges import Range, key
from amp_rewrite.files.casting import Fit
from amp_rewrite.runtime.runner import Runner, SessionOptions
from support.cases import feeds
from support.corpus import TEXT_MODELS, text_model

INF, NAN = np.inf, np.nan
HALF = 2.0**-25  # rounds to zero in float16; larger values round to the smallest number, 2**-24
NORMAL = 2.0**-14 - 2.0**-25  # rounds to the smallest normal float16; smaller values round to a subnormal number
LIMIT = 65520.0  # rounds to infinity in float16; smaller values round to 65504


def above(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(INF)))


def below(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(0)))


def view_of(text: str, opset: int = 20) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')))


def measured(view: View, *batches: dict[str, Any], to: DType = DType.FLOAT16) -> dict[str, Range]:
    """Return the ranges of all taps over batches by key."""
    proto = tapped(view, Taps.of(view).taps, to)
    runner = Runner.open(proto.model, SessionOptions(outputs=(proto.rows,), optimized=False))
    rows = neutral(len(proto.values))
    for batch in batches:
        rows = merged(rows, np.asarray(runner.run(batch)[proto.rows]))
    return {key(view, v): found for v, found in zip(proto.values, ranges(rows), strict=True)}


def seen(*arrays: NDArray[Any], to: DType = DType.FLOAT16) -> Range:
    return Range().merge(Fit.of([array.reshape(-1) for array in arrays], to))


# -- counting ------------------------------------------------------------------------------------------------

EDGES: dict[str, Sequence[float]] = {
    "ordinary": [1.0, -2.0, 3.5],
    "zeros alone": [0.0, -0.0],
    "half the smallest": [HALF, -HALF, 1.0],
    "largest subnormal": [below(NORMAL), 1.0],
    "smallest normal": [NORMAL, 1.0],
    "zeros and small ones": [0.0, 1e-30, 1e-6, 1.0],
    "float32 subnormal": [1e-45, 1.0],
    "zeros and what barely survives": [0.0, above(HALF), -HALF, 1.0],
    "zeros and what bfloat16 holds as subnormal": [0.0, 2.0**-130, 1.0],
    "zeros and what bfloat16 barely holds": [0.0, 2.0**-120, above(2.0**-120), 2.0**-134],
    "largest that fits": [below(LIMIT), 1.0],
    "smallest that overflows": [-LIMIT, 1.0],
    "overflow and zeros": [0.0, 1e5, 1e-30, 1e-6],
    "infinite": [INF, 1.0, -INF],
    "not a number": [NAN, 1.0, -2.0, 0.0],
    "not a number last": [3.0, 70000.0, 1e-7, NAN],
    "everything": [NAN, INF, 0.0, 1e-45, 1e-7, 1.0, 1e5, -3e38],
    "a sum beyond float32": [3e38, 3e38, 1.0],
}


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16], ids=lambda to: to.spelling)
@pytest.mark.parametrize("name", ["float", "double"])
@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
def test_a_tap_counts_the_same_as_a_loop_over_the_values(values: Sequence[float], name: str, to: DType) -> None:
    view = view_of(f"g ({name}[n] x) => ({name}[n] y) {{ y = Identity (x) }}")
    x = np.array(values, np.float32 if name == "float" else np.float64)
    assert measured(view, {"x": x}, to=to)["x"] == seen(x, to=to)


def test_counts_beyond_float32_are_exact_and_low_types_are_measured_directly() -> None:
    """float32 cannot represent 2^24 + 3."""
    view = view_of("g (float[n] x) => (float[n] y) { y = Identity (x) }")
    x = np.ones((1 << 24) + 4, np.float32)
    x[0] = 1e-6
    assert measured(view, {"x": x})["x"] == Range(x.size, absmax=1.0, absmin=float(x[0]), subnormal=1)
    body = "y = Cast <to = 1> (x) c = Cast <to = 1> (b)"
    view = view_of(f"g (float16[n] x, bfloat16[n] b) => (float[n] y, float[n] c) {{ {body} }}")
    x, b = np.float16([0, 1e-7, 3]), np.array([1e30, 0, 2], DType.BFLOAT16.numpy)
    found = measured(view, {"x": x, "b": b})
    assert (found["x"], found["b"]) == (seen(x), seen(b))


def test_older_opsets_are_refused_with_a_remedy() -> None:
    view = view_of("g (float[n] x) => (float[n] y) { y = Exp (x) }", 8)
    with pytest.raises(ModelError) as error:
        tapped(view, Taps.of(view).taps, DType.FLOAT16)
    assert str(error.value) == (
        "the model imports ai.onnx opset 8, but measuring ranges requires opset 9 or later; convert the model with"
        " onnx.version_converter"
    )


def test_floats_are_tapped_under_new_names_and_constants_are_read() -> None:
    view = view_of("""g (float[2,3] x, int64[2] s) => (float[6] f, int64[2] t) <float[3] w = {1, 2, 3}> {
        r = Reshape (x, s)
        f = Relu (r)
        t = Identity (s)
    }""")
    taps = Taps.of(view)
    assert [[key(view, v) for v in values] for values in (taps.taps, taps.constants)] == [["x", "r", "f"], ["w"]]
    view = view_of("g (float[n] tap_1, float[n] tap__rows) => (float[n] y) { y = Add (tap_1, tap__rows) }")
    x, z = np.float32([1]), np.float32([2])
    assert measured(view, {"tap_1": x, "tap__rows": z}) == {"tap_1": seen(x), "tap__rows": seen(z), "y": seen(x + z)}


SEQUENCES = """g (float[2] a, float[2] b) => (float[n] y, float[2] z) {
    s = SequenceConstruct (a, b)
    y = ConcatFromSequence <axis = 0> (s)
    zero = Constant <value_int = 0> ()
    z = SequenceAt (s, zero)
}"""


def test_sequences_and_bodies_without_results_are_listed_as_untapped() -> None:
    view = view_of(SEQUENCES)
    a, b = np.float32([1, 2]), np.float32([3, 4e5])
    assert Taps.of(view).untapped == {"s": "it is not a tensor but seq(float32); tensors taken from it are measured"}
    assert measured(view, {"a": a, "b": b}) == {"a": seen(a), "b": seen(b), "y": seen(a, b), "z": seen(a)}
    view = view_of("""g (float[1,3,2] x) => (float[1,3,2] y) {
        [old] y = Scan <num_scan_inputs = 1, body = b (float[2] e) => (float[2] f) { f = Exp (e) }> ("", x)
    }""", 8)  # fmt: skip
    reason = "it is in a body of 'old', and a body of Scan-8 cannot return more values"
    assert Taps.of(view).untapped == {"old/body:e": reason, "old/body:f": reason}


# -- bodies --------------------------------------------------------------------------------------------------

LOOP = """g (int64 trips, float[2] x) => (float[2] y, float[k,2] all) {
    yes = Constant <value_int = 1> ()
    go = Cast <to = 9> (yes)
    [loop] y, all = Loop (trips, go, x) <body = b (int64 i, bool on, float[2] s) => (bool on2, float[2] t, float[2] u) {
        on2 = Identity (on)
        t = Mul (s, s)
        u = Exp (s)
    }>
}"""


def test_loop_iterations_are_merged_and_a_loop_without_any_has_no_counts() -> None:
    x = np.float32([2, 0.5])
    s = [x, x**2, x**4]
    found = measured(view_of(LOOP), {"trips": np.array(3), "x": x})
    assert found["loop/body:s"] == seen(*s)
    assert found["loop/body:t"] == seen(*(v**2 for v in s)) == replace(found["loop/body:t"], absmax=256.0)
    assert found["loop/body:u"] == found["all"]
    assert found["y"] == seen(x**8)
    x = np.float32([2, 0.5])
    found = measured(view_of(LOOP), {"trips": np.array(0), "x": x})
    assert {name: found[name] for name in ("loop/body:s", "loop/body:t", "loop/body:u", "all", "y")} == {
        **dict.fromkeys(("loop/body:s", "loop/body:t", "loop/body:u", "all"), Range()),
        "y": seen(x),
    }


def test_a_branch_inside_a_loop_is_measured_when_it_is_taken() -> None:
    view = view_of("""g (int64 trips, float[1] x) => (float[1] y) {
        yes = Constant <value_int = 1> ()
        go = Cast <to = 9> (yes)
        ten = Constant <value_floats = [10.0]> ()
        [loop] y = Loop (trips, go, x) <body = b (int64 i, bool on, float[1] s) => (bool on2, float[1] t) {
            on2 = Identity (on)
            big = Greater (s, ten)
            [pick] t = If (big) <then_branch = p () => (float[1] same) { same = Identity (s) },
                                 else_branch = q () => (float[1] more) { more = Mul (s, s) }>
        }>
    }""")  # fmt: skip
    found = measured(view, {"trips": np.array(5), "x": np.float32([2])})
    assert found["loop/body/pick/else_branch:more"] == seen(np.float32([4, 16]))
    assert found["loop/body/pick/then_branch:same"] == seen(np.float32([16, 16, 16]))


def test_a_scans_slices_and_states_are_merged() -> None:
    view = view_of("""g (float[2] start, float[3,2] x) => (float[2] end, float[3,2] y) {
        [scan] end, y = Scan (start, x) <num_scan_inputs = 1, scan_output_directions = [1],
            body = b (float[2] s, float[2] e) => (float[2] t, float[2] f) { t = Add (s, e) f = Exp (t) }>
    }""")  # fmt: skip
    start, x = np.float32([0, 0]), np.float32([[1, 2], [3, 4], [5, 1e-6]])
    t = start + np.cumsum(x, 0, dtype=np.float32)
    found = measured(view, {"start": start, "x": x})
    assert found["scan/body:e"] == seen(x)
    assert found["scan/body:s"] == seen(start, t[0], t[1])
    assert found["scan/body:t"] == seen(t)
    assert found["scan/body:f"] == found["y"]


WITHOUT_TAPS = {"custom_domain", "strings_and_integers", "function_of_integers", "random_normal_like"}
"""They do not run, have no floats, or differ in each run."""


@pytest.mark.parametrize("name", [name for name in TEXT_MODELS if name not in WITHOUT_TAPS])
def test_taps_change_no_output(name: str) -> None:
    view = View.of(emulate(text_model(name), rounding=False, io="float32"))
    batch = Feed.of(feeds(text_model(name)), view.model)
    plain = Runner.open(view.model, SessionOptions(optimized=False)).run(next(iter(batch)))
    proto = tapped(view, Taps.of(view).taps, DType.FLOAT16)
    found = Runner.open(proto.model, SessionOptions(optimized=False)).run(next(iter(batch)))
    rows = np.asarray(found.pop(proto.rows))
    assert rows.shape == (WIDTH * len(proto.values),)
    assert list(found) == list(plain)
    for output, given in plain.items():
        np.testing.assert_equal(found[output], given)
