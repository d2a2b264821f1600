"""Products and pools over many terms, for a target that adds up in float16."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.decide.needs.find import MOST_TERMS, long_sums
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View

HEAD = '<ir_version: 8, opset_import: ["": 18]>'


def notes(body: str) -> list[str]:
    view = View.of(Model.load(onnx.parser.parse_model(f"{HEAD} g {body}")))
    return [note.partition(";")[0] for _, note in long_sums(view)]


@pytest.mark.parametrize(
    ("body", "terms"),
    [
        ("(float[4,40] x, float[40,3] w) => (float[4,3] y) { y = MatMul (x, w) }", 40),
        ("(float[4,N] x, float[N,3] w) => (float[4,3] y) { y = MatMul (x, w) }", 128),
        ("(float[50,4] x, float[50,3] w) => (float[4,3] y) { y = Gemm <transA = 1> (x, w) }", 50),
        ("(float[1,8,9,9] x, float[4,8,3,3] w) => (float[1,4,7,7] y) { y = Conv (x, w) }", 72),
        ("(float[1,64,9] x, float[64,4,2] w) => (float[1,4,10] y) { y = ConvTranspose (x, w) }", 64),
        ('(float[4,40] x, float[40,3] w) => (float[4,3] y) { y = Einsum <equation = "ij,jk->ik"> (x, w) }', 40),
        ('(float[4,6,7] x) => (float[4] y) { y = Einsum <equation = "ijk->i"> (x) }', 42),
        ("(float[1,8,9,9] x) => (float[1,8,1,1] y) { y = GlobalAveragePool (x) }", 81),
    ],
)
def test_a_sum_is_pinned_with_the_number_of_its_terms(body: str, terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.decide.needs.find.MOST_TERMS", terms - 1)
    assert notes(body) == [f"adds up {terms} terms"]
    monkeypatch.setattr("amp_rewrite.decide.needs.find.MOST_TERMS", terms)
    assert notes(body) == []


def test_the_longest_sums_are_pinned_until_the_others_have_few_terms_in_all() -> None:
    body = """(float[4,99] x, float[99,80] a, float[80,60] b, float[60,50] c, float[50,3] d) => (float[4,3] y)
    { p = MatMul (x, a) q = MatMul (p, b) r = MatMul (q, c) y = MatMul (r, d) }"""
    assert 50 + 60 <= MOST_TERMS < 50 + 60 + 80
    assert notes(body) == ["adds up 99 terms", "adds up 80 terms"]


@pytest.mark.parametrize(
    "body",
    [
        f"(float[4,{MOST_TERMS}] x, float[{MOST_TERMS},3] w) => (float[4,3] y) {{ y = MatMul (x, w) }}",
        "(float[1,64,9,9] x, float[64,1,3,3] w) => (float[1,64,7,7] y) { y = Conv <group = 64> (x, w) }",
        "(float[1,64,9] x, float[64,1,2] w) => (float[1,64,10] y) { y = ConvTranspose <group = 64> (x, w) }",
        '(float[4,9] x, float[4,9] w) => (float[4,9] y) { y = Einsum <equation = "ij,ij->ij"> (x, w) }',
        "(double[4,40] x, double[40,3] w) => (double[4,3] y) { y = MatMul (x, w) }",
    ],
)
def test_short_sums_and_other_types_are_left_alone(body: str) -> None:
    assert notes(body) == []
