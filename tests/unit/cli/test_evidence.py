"""How far to trust a conversion: the last lines of its report, the next command, tolerances, smoke tests, settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from amp_rewrite import convert, repair
from amp_rewrite.errors import FeedError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.files.model import Model
from amp_rewrite.reports.evidence import Evidence
from amp_rewrite.reports.report import Report
from unit.cli.test_cli import files, folder, run
from unit.pipeline.test_repair import BATCH, needy

__all__ = ["folder"]

ONNX = ("--target", "onnx")


@pytest.fixture
def model(folder: Path) -> str:
    onnx.save(needy(layers=3, needs=(1,)), folder / "net.onnx")
    np.savez(folder / "d.npz", x=BATCH["x"])
    return "net.onnx"


def closing(*words: str) -> list[str]:
    """The last part of the output of a conversion, which succeeds."""
    done = run(*words, *ONNX)
    assert done.exit_code == 0, done.stderr
    return done.stdout.rstrip("\n").rpartition("\n\n")[2].split("\n")


# -- the last lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["input.1", "class", "onnx::Equal_1"])
def test_the_line_that_saves_inputs_is_python(name: str, model: str) -> None:
    source = onnx.load(model)
    for node in source.graph.node:
        node.input[:] = [name if read == "x" else read for read in node.input]
    source.graph.input[0].name = name
    onnx.save(source, model)
    _, line, _ = closing(model, "--no-check")
    eval(line.removeprefix("your inputs: ").replace("…", "BATCH['x']"), {"np": np, "BATCH": BATCH})
    assert run("verify", model, "net.float16.onnx", "--data", "batches.npz", "--tolerance", "1").exit_code == 0


def test_the_next_command_keeps_all_options_and_names_a_second_file_as_output(model: str) -> None:
    *_, command = closing(model, "out.onnx", "--keep", "op=*", "--io=low")
    words = "--keep 'op=*' --io=low --target onnx -o out.onnx --data batches.npz --tolerance 1e-2 --overwrite"
    assert command == f"next: amp-rewrite net.onnx {words}"


def test_a_conversion_guarded_by_ranges_says_that_no_outputs_were_compared(model: str) -> None:
    words, command = closing(model, "--dry-run", "--data", "d.npz")
    assert words == "checked on 1 batch (d.npz): only ranges; add a tolerance to compare outputs"
    assert command == "next: amp-rewrite net.onnx --dry-run --data d.npz --target onnx --tolerance 1e-2"


def test_a_repair_by_real_data_needs_no_next_command(model: str) -> None:
    words, *more = closing(model, "--dry-run", "--data", "d.npz", "--tolerance", "0.01")
    assert words.startswith("checked on 1 batch (d.npz): repaired by keeping 1 region in float32, largest error 0.")
    assert "passes if error ≤ 0.01 of the output's largest value" in words
    assert more == []
    assert " verified, largest error " in closing(model, "--dry-run", "--data", "d.npz", "--tolerance", "10")[0]


def test_random_inputs_are_weak_evidence(model: str) -> None:
    words, _, command = closing(model, "--dry-run", "--shape=x=8,8")
    assert words.startswith("checked on 1 random batch (seed 0, deviation 2): no gross error, largest error 0.")
    assert words.endswith("; this says nothing about your data")
    assert command == "next: amp-rewrite net.onnx --dry-run --target onnx --data batches.npz --tolerance 1e-2"


def test_the_report_holds_the_evidence_and_reads_it_back(model: str) -> None:
    report = repair(model, {"x": BATCH["x"]}, tolerance=0.01, target="onnx").converted.report
    assert (report.evidence.level, report.evidence.batches, report.evidence.pinned) == ("repaired", 1, 1)
    assert str(report.evidence) in report.text()
    assert Report.from_json(report.to_json(), "r.json") == report
    plain = convert(model, target="onnx").report
    assert plain.evidence == Evidence()
    assert "evidence" not in json.loads(plain.to_json())  # left out, as every default: old reports load


# -- smoke tests --------------------------------------------------------------------------------------------


def free(shape: str) -> Model:
    text = (
        f'<ir_version: 8, opset_import: ["": 17]> g (float{shape} x) => (float y) {{ y = ReduceMax <keepdims=0> (x) }}'
    )
    return Model.load(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    ("shape", "expected", "assumed"),
    [
        ("[batch, 8]", (1, 8), "random, seed 0, batch = 1"),
        ("[N, seq_len, 8]", (1, 16, 8), "random, seed 0, N = 1, seq_len = 16"),
        ("[time, batch, 8]", (16, 1, 8), "random, seed 0, time = 16, batch = 1"),
        ("[items, 3, height, width]", (1, 3, 64, 64), "random, seed 0, items = 1, height = 64, width = 64"),
        ("[2, 8]", (2, 8), "random, seed 0"),
    ],
)
def test_free_dimensions_get_usual_sizes_and_the_origin_says_so(
    shape: str, expected: tuple[int, ...], assumed: str
) -> None:
    feed = Feed.randomly(free(shape))
    assert (next(iter(feed))["x"].shape, feed.origin) == (expected, assumed)


def test_a_dimension_that_tells_nothing_needs_a_shape() -> None:
    with pytest.raises(
        FeedError, match=r"input 'x' has the shape \[batch, past\]; give all sizes, as in shapes=\{'x': \(64, 64\)\}"
    ):
        Feed.randomly(free("[batch, past]"))
    feed = Feed.randomly(free("[batch, past]"), shapes={"x": (2, 3)})
    assert (next(iter(feed))["x"].shape, feed.origin) == ((2, 3), "random, seed 0")


# -- settings from a file -----------------------------------------------------------------------------------


def test_the_report_names_the_settings_that_a_file_changed(model: str) -> None:
    Path("amp.toml").write_text('to = "bfloat16"\nlevel = "default"\n')
    head = run(model, "--dry-run", "--report", "r.json").stdout
    assert "  config   to = bfloat16, from ./amp.toml\n" in head
    assert json.loads(Path("r.json").read_text())["model"]["config"] == "to = bfloat16, from ./amp.toml"
    assert "  config   to = bfloat16, from ./amp.toml\n" in run("report", "r.json").stdout


def test_no_folder_of_a_settings_file_is_in_a_report(model: str, folder: Path) -> None:
    (folder / "far").mkdir()
    (folder / "far" / "own.toml").write_text('keep = ["op=Add"]\n')
    shown = run(model, "--dry-run", "--config", str(folder / "far" / "own.toml")).stdout
    assert "keep = op=Add, from own.toml\n" in shown
    assert files() == ["d.npz", "far", "net.onnx"]
