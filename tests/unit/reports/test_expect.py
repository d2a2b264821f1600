"""Expectations: what they compare, what they say, and which texts are none."""

from dataclasses import replace

import pytest

from amp_rewrite.errors import PolicyError
from amp_rewrite.reports.expect import Expectation
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import CastRow, Header, PortRow, Row, Totals


def report() -> Report:
    rows = (
        Row("a", "MatMul", "float16", variables={"T": "float16"}, reads=(-2,)),
        Row("b", "MatMul", "float16", variables={"T": "float16"}, reads=(0,)),
        Row("head", "Softmax", "float32", variables={"T": "float32"}, reads=(1,)),
        Row("shape", "Shape", "int64", inputs=("float32",), outputs=("int64",), reads=(2,)),
        Row("unread", "Exp", "float32", variables={"T": "float32"}, reads=(1,)),
        Row("copy", "Identity", "float32", variables={"T": "float32"}, reads=(2,)),
        Row("w", "Constant", "float32"),
    )
    casts = (
        CastRow("x", "float32", "float16", readers=1, after=-2),
        CastRow("b", "float16", "float32", readers=1, after=1),
        CastRow("folded", "float16", "float32", origin="folded", readers=1),
        CastRow("unread", "float16", "float32"),
        CastRow("own", "float32", "float32", readers=1),
    )
    weights = {"float16": 3000, "float32": 900, "int64": 100}
    inputs = PortRow("x", "float32"), PortRow("ids", "int64")
    outputs = PortRow("y", "float32", 2), PortRow("n", "int64", 3)
    header = Header("m.onnx", 10, {"ai.onnx": 21})
    return Report(header, Totals(), rows, casts, inputs=inputs, outputs=outputs, weights=weights)


@pytest.mark.parametrize(
    ("text", "met", "fact"),
    [
        ("float16 >= 95%", False, "66.67 % (2 of 3 float ops)"),
        ("float16=2", True, "2 of 3 float ops"),
        ("int64 = 1", True, "1 of 4 ops"),
        ("float32 < 1", False, "1 of 3 float ops"),
        ("compute >= 100 %", True, "100 % (2 of 2 compute ops)"),
        ("casts <= 2", True, "2 casts"),
        ("ops <= 3", False, "4 ops"),
        ("ops > 3", True, "4 ops"),
        ("ops != 3", True, "4 ops"),
        ("ops[MatMul] >= 2", True, "2 of 4 ops"),
        ("ops[*] = float16", False, "2 of 4: head is float32, shape is int64"),
        ("ops[head] != float16", True, "1 of 1"),
        ("ops[Gelu] = float32", False, "no op matches 'Gelu'"),
        ("ops[Gelu] = 0", True, "0 of 4 ops"),
        ("io = float32", True, "2 of 2"),
        ("io = float16", False, "0 of 2: x is float32, y is float32"),
        ("inputs[ids] = int64", True, "1 of 1"),
        ("outputs = float32", True, "1 of 1"),
        ("weights < 3999", False, "4.0 kB"),
        ("weights = float16", False, "3.0 kB float16, 900 B float32"),
        ("weights != bfloat16", True, "3.0 kB float16, 900 B float32"),
        ("weights[float32] <= 22.5%", True, "22.5 % (3.0 kB float16, 900 B float32, 100 B int64)"),
        ("weights[float32] <= 1 kB", True, "900 B"),
    ],
)
def test_an_expectation_is_met_or_not_and_says_the_numbers(text: str, met: bool, fact: str) -> None:
    outcome = Expectation.parse(text).outcome(report())
    assert (outcome.met, outcome.fact) == (met, fact)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("float16", "is not a comparison; write it like 'compute >= 95%'"),
        ("flot16 >= 3", "unknown 'flot16'; did you mean 'float16'"),
        ("casts[x] <= 3", "casts takes no brackets"),
        ("weights[half] <= 3", "unknown type 'half'"),
        ("ops[x] < float16", "ops cannot be compared with < 'float16'; write it like"),
        ("io >= 3", "io cannot be compared with >= '3'"),
        ("float16 >= many", "float16 cannot be compared with >= 'many'"),
        ("float16 >= 3 MB", "float16 cannot be compared with >= '3 MB'"),
        ("casts <= 4%", "casts cannot be compared with <= '4%'"),
    ],
)
def test_a_text_that_is_no_expectation_is_refused_with_a_way_out(text: str, fact: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Expectation.parse(text)
    assert f"expectation {text!r}" in str(caught.value)
    assert fact in str(caught.value)


def test_a_share_of_nothing_fails() -> None:
    empty = replace(report(), rows=(), casts=(), weights={}, inputs=(), outputs=())
    for text in ("float16 >= 0%", "weights[float32] <= 1%", "weights = float16"):
        assert not Expectation.parse(text).outcome(empty).met
