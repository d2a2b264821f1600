"""`amp-rewrite pareto` and `amp-rewrite locate --predict`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import amp_rewrite
from amp_rewrite.cli import program
from support import cases

TEXT = "h=MatMul(x,w);n=LayerNormalization(h,g,b);k=MatMul(n,v);y=Softmax(k)"
RNG = np.random.default_rng(5)
CONSTANTS = {"w": RNG.normal(size=(16, 16)), "v": RNG.normal(size=(16, 16)) * 3, "g": np.ones(16), "b": np.zeros(16)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(cases.build(TEXT, ["y"], shapes={"x": (8, 16)}, constants=CONSTANTS), tmp_path / "model.onnx")
    np.savez(tmp_path / "batches.npz", x=RNG.normal(size=(8, 16)).astype(np.float32))
    return tmp_path / "model.onnx"


def run(*words: object) -> Result:
    return CliRunner().invoke(program, [str(word) for word in words])


def test_the_curve_is_a_table_json_and_a_page(model: Path, tmp_path: Path) -> None:
    given = (model, "--data", tmp_path / "batches.npz", "--points", "3")
    table = run("pareto", *given, "--html", tmp_path / "curve.html")
    assert table.exit_code == 0, table.stderr
    assert "predicted on A100" in table.stdout
    assert "<svg" in (tmp_path / "curve.html").read_text("utf-8")
    points = json.loads(run("pareto", *given, "--json").stdout)["points"]
    assert {point["kind"]: point["measured_error"] > 0 for point in points} == {"float32": False, "converted": True}
    assert [line.split()[-1] for line in table.stdout.splitlines() if line.startswith(("  0 ", "  1 "))] == [
        point["kind"] for point in points
    ]


def point_of(kind: str, *given: object) -> tuple[int, dict[str, float]]:
    points = json.loads(run("pareto", *given, "--json").stdout)["points"]
    return next((number, point) for number, point in enumerate(points) if point["kind"] == kind)


def test_the_model_of_a_point_is_written_and_as_near_as_the_table_says(model: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "point.onnx", (model, "--data", tmp_path / "batches.npz", "--points", "2")
    number, point = point_of("converted", *given)
    written = run("pareto", *given, "--point", number, "-o", out)
    assert written.exit_code == 0, written.stderr
    assert f"wrote {out}" in written.stderr
    verdict = amp_rewrite.verify(model, out, tmp_path / "batches.npz", metric="scaled", at_most=1.0, emulate=True)
    assert verdict.worst[0].difference.score == pytest.approx(point["measured_largest"], rel=1e-2)
    again = run("pareto", *given, "--point", number, "-o", out)
    assert again.exit_code != 0
    assert "--overwrite" in again.stderr


@pytest.mark.parametrize("words", [("--point", "1"), ("-o", "out.onnx")])
def test_a_point_and_its_file_go_together(model: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    refused = run("pareto", model, "--data", tmp_path / "batches.npz", *words)
    assert refused.exit_code == 2
    assert "--point N and -o OUT go together" in refused.stderr


def test_float32_is_a_point_without_a_model(model: Path, tmp_path: Path) -> None:
    given = (model, "--data", tmp_path / "batches.npz", "--points", "2")
    number, _ = point_of("float32", *given)
    refused = run("pareto", *given, "--point", number, "-o", tmp_path / "out.onnx")
    assert refused.exit_code != 0
    assert "is float32" in refused.stderr


@pytest.mark.parametrize(("words", "points"), [((), 8), (("--points", "3"), 3)])
def test_the_curve_has_as_many_points_as_asked_for(
    model: Path, tmp_path: Path, words: tuple[str, ...], points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, points: int, **more: object) -> None:
        raise amp_rewrite.EvidenceError(f"{points} points")

    monkeypatch.setattr("amp_rewrite.pipeline.pareto.pareto", refuse)
    assert f"{points} points" in run("pareto", model, "--data", tmp_path / "batches.npz", *words).stderr


def test_locate_prints_predicted_shares(model: Path, tmp_path: Path) -> None:
    low, batches = tmp_path / "low.onnx", tmp_path / "batches.npz"
    assert run(model, "-o", low).exit_code == 0
    located = run("locate", model, low, "--data", batches, "--predict", "--top", "2")
    assert located.exit_code == 0, located.stderr
    assert "predicted error of the outputs" in located.stdout
    shares = json.loads(run("locate", model, low, "--data", batches, "--predict", "--json").stdout)["shares"]
    assert shares["measured"] / 2 < shares["error"] < 2 * shares["measured"]
    lowered = [row.name for row in amp_rewrite.convert(model).report.rows if row.dtype == "float16"]
    assert [row["op"] for row in shares["rows"]] == lowered != []
    for words, most in ((("--top", "1"), 1), ((), 10)):
        text = run("locate", model, low, "--data", batches, *words).stdout.partition("ops that add most\n")[2]
        assert len(text.splitlines()) == 1 + min(most, len(lowered))  # below a heading
