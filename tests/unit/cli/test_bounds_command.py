"""`amp-rewrite bounds`, and what conversions with data say of bounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.errors import EvidenceError, PatternError, PolicyError
from amp_rewrite.reports.report import Report
from support import cases
from support.paths import ROOT

TEXT = "n=LayerNormalization(x,g,b);h=MatMul(n,w);s=Softmax(h);r=Relu(x);y=Add(s,r)"
CONSTANTS = {"g": np.ones(8), "b": np.zeros(8), "w": np.random.default_rng(0).normal(size=(8, 8))}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(cases.build(TEXT, ["y"], constants=CONSTANTS), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def run(*words: object) -> Result:
    return CliRunner().invoke(program, [str(word) for word in words])


def test_the_summary_counts_the_classes(model: Path) -> None:
    text = run("bounds", model).stdout
    assert "model.onnx: bounds for float16, from weights alone" in text
    assert [line.split() for line in text.splitlines() if line.startswith("  proved to fit")] == [
        ["proved", "to", "fit", "3", "1"]
    ]
    assert "input of unknown range" in text


def test_a_range_of_an_input_proves_more(model: Path) -> None:
    given = run("bounds", model, "--input", "x=-2,2")
    assert "given: x in [-2, 2]" in given.stdout
    assert amp_rewrite.bounds(model, {"x": (-2, 2)}).counts()["proved to fit"] == 6


def test_the_chain_goes_back_to_the_norm(model: Path) -> None:
    lines = run("bounds", model, "s").stdout.splitlines()
    assert lines[0].startswith("s in [0, 1]")
    assert lines[1] == "    proved to fit"
    chain = run("bounds", model, "h").stdout
    assert "because n ≤ 2.8" in chain
    assert "√8·|g|" in chain


def test_json_follows_its_schema(model: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    printed = json.loads(run("bounds", model, "--json").stdout)
    schema = json.loads((ROOT / "docs" / "reference" / "bounds.schema.json").read_text("utf-8"))
    jsonschema.validate(printed, schema)
    assert [row["klass"] for row in printed["rows"]].count("unknown") == printed["counts"]["unknown"] == 3


def test_verbose_lists_every_value(model: Path) -> None:
    assert "Softmax: a softmax lies in [0, 1]" in run("bounds", model, "-v").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "x=1"], "is not a range"),
        (["--input", "=1,2"], "no input ''"),
        (["--input", "1,2"], "names no input"),
        (["--input", "z=1,2"], "no input 'z'"),
        (["--input", "x=2,1"], "two finite numbers in order"),
        (["--input", "x=nan,1"], "two finite numbers in order"),
        (["nothing"], "no float value or op 'nothing'"),
        (["--to", "int8"], "int8"),
    ],
)
def test_mistakes_are_named(model: Path, words: list[str], message: str) -> None:
    result = run("bounds", model, *words)
    assert result.exit_code == 2
    assert message in result.output


def test_python_says_the_same(model: Path) -> None:
    found = amp_rewrite.bounds(model)
    assert 1.0 <= found.find("op=Softmax")[0].absmax < 1.001
    assert found.find("Softmax") == found.find("s")
    assert [row.value for row in found.find("unknown")] == ["x", "r", "y"]
    assert repr(found) == "<Bounds model.onnx for float16: 3 proved to fit, 3 unknown>"
    assert len(list(found.records())) == len(found.rows) == 6
    with pytest.raises(PatternError, match="no float value or op"):
        found.find("t")
    with pytest.raises(PolicyError, match="is not a pair"):
        amp_rewrite.bounds(model, {"x": 3})  # type: ignore[dict-item]


def test_measured_values_have_their_class(model: Path) -> None:
    feed = {"x": np.ones((8, 8), np.float32)}
    ranges = amp_rewrite.calibrate(model, feed)
    assert amp_rewrite.bounds(model, ranges=ranges).counts()["measured to fit"] == 3
    large = amp_rewrite.calibrate(model, {"x": feed["x"] * 60_000})
    assert amp_rewrite.bounds(model, ranges=large, headroom=2.0).counts()["measured to fit"] == 0
    with pytest.raises(EvidenceError, match="are for float16"):
        amp_rewrite.bounds(model, ranges=ranges, to="bfloat16")


def test_explain_adds_the_proof(model: Path) -> None:
    text = run("explain", model, "op=MatMul", "--bounds").stdout
    assert "allow_root" in text
    assert "‖x‖·‖w‖ (Cauchy–Schwarz)" in text
    assert run("explain", model, "op=MatMul", "--bounds", "--json").exit_code == 2


def test_a_report_with_data_counts_the_classes_and_an_old_one_reads(model: Path) -> None:
    converted = amp_rewrite.convert(model, data={"x": np.ones((8, 8), np.float32)})
    assert sum(converted.report.bounds.values()) == 6
    assert "3 proved to fit, 3 measured to fit" in converted.report.text()
    assert Report.from_json(converted.report.to_json(), "r") == converted.report
    without = amp_rewrite.convert(model).report
    assert '"bounds"' not in without.to_json()
    assert Report.from_json(without.to_json(), "r").bounds == {}


UNSEEN = """<ir_version: 8, opset_import: ["": 18]> g (float[4,8] x, bool c) => (float[4,8] y) <float[8,8] w> {
    h = MatMul (x, w)
    z = If (c) <then_branch = a () => (float[4,8] p) { t = Tanh (h) p = MatMul (t, w) },
                else_branch = b () => (float[4,8] q) { s = Relu (h) q = MatMul (s, w) }>
    y = MatMul (z, w)
}"""


def test_a_guard_spares_what_is_proved_to_fit_and_holds_what_is_not() -> None:
    """Neither branch is seen at once: tanh bounds one of them, and nothing bounds the other."""
    proto = onnx.parser.parse_model(UNSEEN)
    del proto.graph.initializer[:]
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    x = np.ones((4, 8), np.float32)
    unseen = {}
    for taken in (True, False):
        report = amp_rewrite.convert(proto, data={"x": x, "c": np.array(taken)}).report
        unseen[taken] = {finding.subject for finding in report.findings if finding.kind == "unseen"}
    assert unseen[True] >= {"q"}
    assert not unseen[False] & {"p", "t"}


def test_a_page_shows_classes_and_bounds(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "bounds.html"
    result = run("bounds", model, "--input", "x=-2,2", "--html", page)
    assert result.exit_code == 0
    text = page.read_text("utf-8")
    assert "Given: x in [-2, 2]." in text and "proved to fit" in text and "√8" in text
    assert run("bounds", model, "--html", page).exit_code != 0
    figure = amp_rewrite.bounds(model, {"x": (-2, 2)}).figures()[0]
    assert figure.data["counts"]["proved to fit"] == 6
    assert [value["value"] for value in figure.data["values"]] == ["x", "n", "h", "s", "r", "y"]
