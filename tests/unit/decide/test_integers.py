"""Which ops the shape, index, accumulator and angle rules hold in float32, and which they leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx.parser
import pytest

from amp_rewrite.decide.hazards.counts import element_counts, whole_numbers
from amp_rewrite.decide.hazards.find import find_hazards
from amp_rewrite.decide.hazards.positions import positions
from amp_rewrite.decide.hazards.rule import HeldOp
from amp_rewrite.decide.hazards.sums import running_sums
from amp_rewrite.decide.pin import Pin
from amp_rewrite.decide.reasons import WHOLE_NUMBER
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.held import pins_of


def view_of(text: str, opset: int = 18) -> View:
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>\n'
    return View.of(Model.load(onnx.parser.parse_model(head + text)))


def pinned(rule: Callable[[View, DType], Iterable[HeldOp]], text: str, opset: int = 18) -> list[str]:
    """The first results of the pinned ops, in graph order, each once."""
    view = view_of(text, opset)
    pins = {pin.op for pin in pins_of(rule(view, DType.FLOAT16), view)}
    return [view.ops[op].node.output[0] for op in sorted(pins)]


# -- shapes -----------------------------------------------------------------------------------------


def test_a_size_computed_in_floats_stays_float32_up_to_the_integer_it_came_from() -> None:
    text = """g (float[1,3,H,W] x, float scale) => (float[1,3,a,b] y) {
        s = Shape <start = 2> (x)
        f = Cast <to = 1> (s)
        m = Mul (f, scale)
        r = Floor (m)
        n = Cast <to = 7> (r)
        c = Constant <value = int64[2] {1, 3}> ()
        sizes = Concat <axis = 0> (c, n)
        none = Constant <value = float[0] {}> ()
        y = Resize <mode = "linear"> (x, none, none, sizes)
    }"""
    assert pinned(whole_numbers, text) == ["f", "m", "r", "n"]


def test_a_size_that_a_layer_predicts_stays_float32_up_to_the_layer() -> None:
    text = """g (float[B,T,8] x, float[8,1] w) => (int64[L] y) {
        logits = MatMul (x, w)
        e = Exp (logits)
        up = Ceil (e)
        total = ReduceSum <keepdims = 0> (up)
        n = Cast <to = 7> (total)
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        y = Range (zero, n, one)
    }"""
    assert pinned(whole_numbers, text) == ["e", "up", "total", "n"]


def test_computed_scales_stay_float32_and_the_image_does_not() -> None:
    text = """g (float[1,3,H,W] x, float[4] given) => (float[1,3,a,b] y) {
        r = Relu (x)
        scales = Reciprocal (given)
        y = Resize <mode = "nearest"> (r, , scales)
    }"""
    assert pinned(whole_numbers, text) == ["scales"]


def test_a_float_range_is_held_with_what_says_its_length() -> None:
    text = """g (float a, float b, float c) => (float[N] y) {
        limit = Mul (a, b)
        y = Range (c, limit, a)
    }"""
    assert pinned(whole_numbers, text) == ["limit", "y"]


@pytest.mark.parametrize(
    "index",
    ["ArgMax <axis = 1, keepdims = 0> (s)", "NonZero (s)", "Shape (s)"],
)
def test_a_shape_made_of_an_index_leaves_the_scores_alone(index: str) -> None:
    text = f"""g (float[B,8] x, float[8,8] w, float[4] t) => (float[K] y) {{
        l = MatMul (x, w)
        s = Sigmoid (l)
        i = {index}
        flat = Flatten <axis = 0> (i)
        zero = Constant <value = int64[1] {{0}}> ()
        n = Gather <axis = 1> (flat, zero)
        n1 = Squeeze (n)
        one = Constant <value = int64[1] {{1}}> ()
        n2 = Reshape (n1, one)
        y = Expand (t, n2)
    }}"""
    assert pinned(whole_numbers, text) == []


def test_a_shape_from_a_comparison_leaves_the_compared_values_alone() -> None:
    text = """g (float[N] x, float t) => (float[K] y) {
        d = Mul (x, x)
        b = Greater (d, t)
        i = Cast <to = 7> (b)
        one = Constant <value = int64[1] {0}> ()
        n = ReduceSum <keepdims = 1> (i, one)
        y = ConstantOfShape (n)
    }"""
    assert pinned(whole_numbers, text) == []


def test_shape_marks_go_into_branches_and_out_of_loops() -> None:
    text = """g (float[N] x, float scale, bool c, int64 trips, bool yes, float start) => (float[K] y, float[L] z) {
        h = Mul (scale, scale)
        s = If (c) <
            then_branch = a () => (float p) { p = Neg (h) },
            else_branch = b () => (float q) { q = Identity (h) }
        >
        n = Cast <to = 7> (s)
        one = Constant <value = int64[1] {1}> ()
        shape = Reshape (n, one)
        y = Expand (x, shape)
        last = Loop (trips, yes, start) <
            body = l (int64 i, bool go, float state) => (bool more, float next) {
                more = Identity (go)
                next = Exp (state)
            }
        >
        k = Cast <to = 7> (last)
        shape2 = Reshape (k, one)
        z = Expand (x, shape2)
    }"""
    assert pinned(whole_numbers, text) == ["h", "p", "q", "n", "next", "k"]


# -- numbers of elements ----------------------------------------------------------------------------

GRAM = """g (float[B,C,N] f, float[N,C] t) => (float[B,C,C] y) <int64 one = {1}> {
    gram = MatMul (f, t)
    s = Shape <start = 1> (f)
    COUNT
    y = Mul (a, a)
}"""


@pytest.mark.parametrize(
    ("count", "ops"),
    [
        ("n = ReduceProd <keepdims = 0> (s)  k = Cast <to = 1> (n)  a = Div (gram, k)", ["k", "a"]),
        ("n = Size (f)  k = Cast <to = 1> (n)  r = Reciprocal (k)  a = Mul (gram, r)", ["k", "r", "a"]),
        (
            "h = Gather (s, one)  m = Mul (h, h)  n = Sub (m, one)  k = CastLike (n, gram)  e = Sqrt (k)"
            "  a = Div (gram, e)",
            ["k", "e"],
        ),
        ("z = Cast <to = 1> (s)  k = ReduceProd <keepdims = 0> (z)  a = Mul (gram, k)", ["k", "a"]),
    ],
    ids=["product", "size", "less_one", "in_floats"],
)
def test_what_reads_a_product_of_sizes_stays_float32(count: str, ops: list[str]) -> None:
    text = GRAM.replace("COUNT", count)
    assert pinned(element_counts, text) == ops
    assert list(element_counts(view_of(text), DType.BFLOAT16)) == []


@pytest.mark.parametrize(
    "count",
    [
        "h = Gather (s, one)  k = Cast <to = 1> (h)  a = Div (gram, k)",
        "n = ReduceProd <keepdims = 0> (s)  q = Div (n, n)  a = Identity (gram)",
        "p = ReduceProd <keepdims = 0> (gram)  a = Div (gram, p)",
    ],
    ids=["one_size", "no_floats", "a_product_of_data"],
)
def test_one_size_alone_and_products_of_other_things_are_no_number_of_elements(count: str) -> None:
    assert pinned(element_counts, GRAM.replace("COUNT", count)) == []


# -- indices ----------------------------------------------------------------------------------------


def test_integer_division_done_in_floats_stays_float32() -> None:
    text = """g (int64[N] i, float[100] table, float seven) => (float[N] y) {
        f = Cast <to = 1> (i)
        d = Div (f, seven)
        r = Floor (d)
        j = Cast <to = 7> (r)
        y = Gather (table, j)
    }"""
    assert pinned(whole_numbers, text) == ["f", "d", "r", "j"]


def test_token_ids_compared_as_floats_stay_float32() -> None:
    text = """g (int64[N] ids, float stop) => (bool[N] y) {
        f = Cast <to = 1> (ids)
        y = Equal (f, stop)
    }"""
    assert pinned(whole_numbers, text) == ["f", "y"]


def test_an_index_pin_names_the_cast_that_it_comes_from_and_the_op_that_it_goes_to() -> None:
    view = view_of("""g (int64[N] ids, float stop) => (bool[N] y) {
        f = Cast <to = 1> (ids)
        [same] y = Equal (f, stop)
    }""")
    source, sink = (op.id for op in view.ops)
    assert pins_of(whole_numbers(view, DType.FLOAT16), view, WHOLE_NUMBER) == [
        Pin(sink, WHOLE_NUMBER, source, "reads an integer that 'Cast_0' (Cast) put into floats"),
        Pin(source, WHOLE_NUMBER, sink, "holds an integer that 'same' (Equal) reads as one"),
    ]


def test_an_attention_mask_made_of_integers_is_no_taint() -> None:
    text = """g (int64[B,1,1,S] mask, float[B,H,Q,S] q, float one, float far) => (float[B,H,Q,S] y) {
        f = Cast <to = 1> (mask)
        n = Sub (one, f)
        m = Mul (n, far)
        s = Add (q, m)
        y = Softmax (s)
    }"""
    assert pinned(whole_numbers, text) == []


def test_a_mask_of_bools_is_no_taint_even_before_a_floor() -> None:
    text = """g (bool[N] mask, float[N] x) => (float[N] y) {
        f = Cast <to = 1> (mask)
        m = Mul (f, x)
        y = Floor (m)
    }"""
    assert pinned(whole_numbers, text) == []


def test_rounding_what_a_layer_gives_is_no_taint() -> None:
    text = """g (uint8[B,8] image, float[8,8] w) => (uint8[B,8] y) {
        f = Cast <to = 1> (image)
        z = MatMul (f, w)
        r = Round (z)
        y = Cast <to = 2> (r)
    }"""
    assert pinned(whole_numbers, text) == []


def test_a_mixture_of_experts_router_is_not_tainted() -> None:
    text = """g (float[N,8] x, float[8,4] router, int64[1] k, float[4,8,8] experts, float[2] off_on, int64 depth)
              => (float[N,8] y) {
        logits = MatMul (x, router)
        gates = Softmax <axis = 1> (logits)
        best, which = TopK (gates, k)
        one = Constant <value = int64[1] {1}> ()
        total = ReduceSum (best, one)
        share = Div (best, total)
        flat = Squeeze (which, one)
        hot = OneHot (flat, depth, off_on)
        picked = Cast <to = 1> (which)
        zero = Constant <value = float {0}> ()
        live = Equal (picked, zero)
        weight = Gather (experts, flat)
        rows = Unsqueeze (x, one)
        z = MatMul (rows, weight)
        z2 = Squeeze (z, one)
        y = Mul (z2, share)
    }"""
    view = view_of(text)
    pins = {view.ops[pin.op].node.output[0] for pin in find_hazards(view, DType.FLOAT16).pins}
    assert pins == {"picked", "live"}


def test_a_detection_head_is_not_tainted() -> None:
    text = """g (float[1,Q,8] x, float[8,5] w, float[8,4] v, float[4] size, int64[1] k) => (float[1,K,4] boxes) {
        logits = MatMul (x, w)
        p = Sigmoid (logits)
        one = Constant <value = int64[1] {-1}> ()
        flat = Reshape (p, one)
        top, at = TopK (flat, k)
        five = Constant <value_int = 5> ()
        row = Div (at, five)
        b = MatMul (x, v)
        s = Sigmoid (b)
        picked = Gather <axis = 1> (s, row)
        boxes = Mul (picked, size)
    }"""
    assert pinned(whole_numbers, text) == []


# -- counters ---------------------------------------------------------------------------------------


def loop(body: str) -> str:
    return f"""g (int64 trips, bool yes, float[N,8] start, float[8,8] w) => (float[N,8] last) {{
        last = Loop (trips, yes, start) <
            body = l (int64 i, bool go, float[N,8] state) => (bool more, float[N,8] next) {{
                more = Identity (go)
                {body}
            }}
        >
    }}"""


def test_a_counter_held_in_a_float_state_is_added_up_in_float32() -> None:
    body = "one = Constant <value_float = 1.0> ()  sum = Add (state, one)  next = Identity (sum)"
    assert pinned(running_sums, loop(body)) == ["sum"]


def test_a_sum_over_the_results_of_a_layer_is_added_up_in_float32() -> None:
    body = "z = MatMul (state, w)  a = Add (state, z)  next = Relu (z)"
    assert pinned(running_sums, loop(body)) == []
    body = "z = MatMul (state, w)  next = Add (state, z)"
    assert pinned(running_sums, loop(body)) == ["next"]


def test_a_recurrent_or_a_fading_state_is_no_counter() -> None:
    assert pinned(running_sums, loop("z = MatMul (state, w)  next = Tanh (z)")) == []
    body = "half = Constant <value_float = 0.5> ()  old = Mul (state, half)  next = Add (old, half)"
    assert pinned(running_sums, loop(body)) == []


# -- angles -----------------------------------------------------------------------------------------


def test_rotary_angles_stay_float32_and_what_they_turn_does_not() -> None:
    text = """g (int64[1,S] positions, float[1,4,1] frequencies, float[1,S,8] q, float[8,8] w) => (float[1,S,8] y) {
        p = Cast <to = 1> (positions)
        one = Constant <value = int64[1] {1}> ()
        row = Unsqueeze (p, one)
        f = MatMul (frequencies, row)
        t = Transpose <perm = [0, 2, 1]> (f)
        both = Concat <axis = -1> (t, t)
        c = Cos (both)
        s = Sin (both)
        z = MatMul (q, w)
        a = Mul (z, c)
        b = Mul (z, s)
        y = Add (a, b)
    }"""
    assert pinned(positions, text) == ["p", "row", "f", "t", "both"]


@pytest.mark.parametrize(
    "product",
    ['Einsum <equation = "i,j->ij"> (time, f)', "MatMul (column, k1)", "Gemm <transB = 1> (column, k1t)"],
)
def test_an_outer_product_is_an_angle_whatever_it_is_spelled_with(product: str) -> None:
    text = f"""g (float[N] time, float[64] f) => (float[N,K] y)
        <float[1,4] k1 = {{1, 2, 3, 4}}, float[4,1] k1t = {{1, 2, 3, 4}}> {{
        one = Constant <value = int64[1] {{1}}> ()
        column = Unsqueeze (time, one)
        turns = {product}
        y = Sin (turns)
    }}"""
    assert "turns" in pinned(positions, text)


def test_a_sine_as_activation_leaves_the_layer_before_it_alone() -> None:
    text = """g (float[B,8] x) => (float[B,8] y) <float[8,8] w, float[8] b, float thirty = {30}> {
        z = MatMul (x, w)
        a = Add (z, b)
        m = Mul (a, thirty)
        y = Sin (m)
    }"""
    view = view_of(
        text.replace("float[8,8] w,", f"float[8,8] w = {{{', '.join(['1'] * 64)}}},").replace(
            "float[8] b,", f"float[8] b = {{{', '.join(['1'] * 8)}}},"
        )
    )
    pins = {pin.op for pin in pins_of(positions(view, DType.FLOAT16), view)}
    assert [view.ops[op].node.output[0] for op in sorted(pins)] == ["a", "m"]


def test_a_sine_beside_a_residual_stream_leaves_the_stream_alone() -> None:
    text = """g (float[1,8,T] x, float[8,8,3] w, float[1,8,1] alpha) => (float[1,8,T] y) {
        z = Conv <pads = [1, 1]> (x, w)
        r = Add (x, z)
        m = Mul (r, alpha)
        s = Sin (m)
        y = Add (r, s)
    }"""
    assert pinned(positions, text) == ["m"]


def test_nothing_is_pinned_where_no_sine_is() -> None:
    text = "g (int64[N] i, float[1,4] w) => (float[N,4] y) { f = Cast <to = 1> (i)  y = Mul (f, w) }"
    assert pinned(positions, text.replace("float[1,4] w", "float[N,4] w")) == []


# -- numbers that count or point ----------------------------------------------------------------------


@pytest.mark.parametrize("birth", ["b = Sign (x)", "b = Floor (x)", "c = Greater (x, half)  b = Cast <to = 1> (c)"])
def test_a_sum_or_product_of_whole_numbers_is_pinned_up_to_its_index(birth: str) -> None:
    text = f"""g (float[N,8] x) => (int64[N,1] y)
    <float half = {{0.5}}, float[8,1] powers = {{1, 2, 4, 8, 16, 32, 64, 128}}> {{
        {birth}
        h = MatMul (b, powers)
        y = Cast <to = 7> (h)
    }}"""
    assert "h" in pinned(whole_numbers, text)


def test_a_count_times_a_real_number_is_no_longer_a_count() -> None:
    text = """g (float[N,8] x, float[8,1] w) => (int64[N,1] y) {
        b = Sign (x)
        h = MatMul (b, w)
        y = Cast <to = 7> (h)
    }"""
    assert "h" not in pinned(whole_numbers, text)


def test_a_whole_number_that_nothing_uses_as_one_is_left_alone() -> None:
    text = """g (float[N,8] x, float[8,8] w) => (float[N,8] y) <float two = {2}> {
        b = Sign (x)
        s = Mul (b, two)
        y = MatMul (s, w)
    }"""
    assert pinned(whole_numbers, text) == []


def test_a_running_count_that_is_compared_is_pinned() -> None:
    text = """g (bool[N] m, float[N] limit, int64 axis) => (bool[N] y) {
        f = Cast <to = 1> (m)
        c = CumSum (f, axis)
        y = Less (c, limit)
    }"""
    assert "c" in pinned(whole_numbers, text)


def test_one_hot_rows_times_whole_numbers_are_ids_up_to_the_gather() -> None:
    text = """g (int64[N] n, float[8,4] table) => (float[N,1,4] y)
    <int64 depth = {8}, float[2] values = {0, 1}, float[8,1] ids = {0, 1, 2, 3, 4, 5, 6, 7}> {
        o = OneHot (n, depth, values)
        i = MatMul (o, ids)
        at = Cast <to = 7> (i)
        y = Gather (table, at)
    }"""
    assert "i" in pinned(whole_numbers, text)
