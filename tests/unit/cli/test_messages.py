"""What messages say of common slips, on the command line and in Python."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite import EvidenceError, Ranges
from unit.cli.test_cli import TEXT, run

NET = "net.onnx"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(TEXT), NET)


def test_a_missing_shell_is_answered_with_the_shells() -> None:
    said = "error: Missing argument 'bash|zsh|fish'. Choose from: bash, zsh, fish, as in `"
    assert run("completion").stderr.startswith(said)


def test_a_report_in_place_of_ranges_is_recognized() -> None:
    assert run(NET, "--dry-run", "--report", "r.json").exit_code == 0
    with pytest.raises(EvidenceError) as refused:
        Ranges.load("r.json")
    assert "is a conversion report, not a ranges file" in str(refused.value)
    assert str(refused.value).startswith("r.json") and "calibrate" in str(refused.value)


def test_a_rule_page_says_what_to_do() -> None:
    said = run("explain", "overflow").stdout
    assert "  meaning     the ops that compute with it stay float32\n" in said
    assert "  what to do  --to bfloat16 holds larger values\n" in said
    assert "what to do" not in run("explain", "allow_root").stdout


def test_an_unknown_keyword_is_answered_with_the_nearest_or_all() -> None:
    with pytest.raises(
        TypeError, match=r"^convert\(\) got an unexpected keyword argument 'kep'; did you mean 'keep'\?$"
    ):
        amp_rewrite.convert(NET, kep="op=Softmax")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^doctor\(\) got an unexpected keyword argument 'tp'; it takes model, to$"):
        amp_rewrite.doctor(NET, tp="float16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'tolerance'; it takes model, to, lists, "):
        amp_rewrite.convert(NET, tolerance=0.1)  # type: ignore[call-arg]


def test_casts_of_the_model_itself_are_not_among_the_ops_that_stayed_float32() -> None:
    half = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float16[8, 8] x) => (float[8, 8] y)'
        " { a = MatMul (x, x)  y = Cast <to = 1> (a) }"
    )
    text = amp_rewrite.convert(half).report.text()
    assert "stays float32" not in text and "stay float32" not in text


def test_a_float16_op_is_said_to_be_float16_already() -> None:
    half = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float16[8, 8] x) => (float16[8, 8] y) { y = MatMul (x, x) }'
    )
    converted = amp_rewrite.convert(half)
    assert "(MatMul) is float16 in the model already\n" in str(amp_rewrite.explain(converted, "op=MatMul"))
