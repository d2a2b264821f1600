"""The line `next:`: it names the missing step, with the type's tolerance, and runs as printed."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_rewrite
from amp_rewrite import View, calibrate, convert, repair
from amp_rewrite.deploy.doctor import on_cpu
from amp_rewrite.errors import FeedError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.files.model import Model
from amp_rewrite.reports.evidence import Evidence
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.sources import report_in
from amp_rewrite.reports.summary import next_command
from amp_rewrite.runtime.kernels import load_kernels
from support.corpus import exported, text_model
from support.paths import TESTS
from unit.cli.test_cli import files, folder, run
from unit.pipeline.test_repair import BATCH, needy

__all__ = ["folder"]

MODELS = TESTS / "models"
EXPORTED = {
    "sklearn/mlp": "--shape X=2,4",
    "sklearn/logistic": "--shape X=2,4",
    "tf2onnx/cnn_17": "--shape x=2,12,12,3",
    "tf2onnx/lstm_17": "--shape=x=1,7",
    "needy": "",
}
"""Write models with batches and with random data."""
HANDWRITTEN = ("half_island", "if_in_loop", "local_function", "qdq19", "tied_weights")
MEANT = [
    "model.onnx -o low.onnx",
    "model.onnx bf.onnx --to bfloat16",
    "model.onnx -o low.onnx RANDOM --overwrite",
    "model.onnx --data batches.npz --dry-run",
    "model.onnx --data batches.npz --tolerance 1e-9 --set budget=2 -o low.onnx --overwrite",
    "model.onnx --data batches.npz --metric cosine=0.9 -o low.onnx --overwrite",
    "model.onnx --ranges model.ranges.json --dry-run",
    "model.onnx --dry-run --report report.json",
    "model.onnx --config other.toml --dry-run",
]
"""Commands without checks, with random data, ranges or real data, and with outputs of all kinds."""


def line(text: str) -> str:
    """Return the text after `next:`, or "" if there is none."""
    return next((line.removeprefix("next: ") for line in text.splitlines() if line.startswith("next: ")), "")


def typed(command: str) -> tuple[int, str]:
    """Run a printed command; return its exit code and `next:`."""
    program, *words = shlex.split(command)
    assert program == "amp-rewrite"
    done = run(*words)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.exit_code in (0, 1), (command, done.stderr)
    return done.exit_code, line(done.stdout + done.stderr)


def walked(command: str) -> Iterator[str]:
    """Yield a command and those suggested after it, running each."""
    while command:
        yield command
        command = typed(command)[1]


def walk(command: str) -> list[str]:
    """Return a command and those suggested after it; no suggestion may repeat an earlier one."""
    steps = list(walked(f"amp-rewrite {command}"))
    assert len(steps) == len(set(steps)) <= 2, steps
    for step in steps[1:]:
        assert step.count("--tolerance") + step.count("--metric") == 1
        assert ("--data" in step) != ("other.toml" in step)
        assert "--shape" not in step and "seed=" not in step
        if "--tolerance" not in command:
            assert ("--tolerance 8e-2" if "bfloat16" in step else "--tolerance 1e-2") in step
    return steps


@pytest.mark.parametrize("name", EXPORTED)
def test_each_next_line_runs_and_names_another_step(folder: Path, name: str) -> None:
    if name == "needy":
        onnx.save(needy(layers=2, needs=(1,)), "model.onnx")
        np.savez("batches.npz", x=BATCH["x"])
    else:
        shutil.copy(MODELS / f"{name}.onnx", "model.onnx")
        data = "sklearn/data" if "sklearn" in name else name.partition("_")[0]
        shutil.copy(MODELS / f"{data}.npz", "batches.npz")
    run("calibrate", "model.onnx", "--data", "batches.npz", "-o", "model.ranges.json")
    Path("other.toml").write_text('data = "batches.npz"\nranges = "model.ranges.json"\n', "utf-8")
    for command in MEANT if name == "needy" else MEANT[::4]:
        steps = walk(command.replace("RANDOM", EXPORTED[name]))
        judged = "batches.npz --tolerance" in command or "--metric" in command
        assert len(steps) == (1 if judged or name == "sklearn/logistic" else 2), steps


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_the_next_line_of_an_unusual_model_runs(folder: Path, name: str) -> None:
    onnx.save(text_model(name), "model.onnx")
    np.savez("batches.npz", **next(iter(Feed.randomly(Model.load("model.onnx")))))
    assert len(walk("model.onnx -o low.onnx")) == 2


@pytest.mark.parametrize(("to", "near"), [("float16", "1e-2"), ("bfloat16", "8e-2"), ("mixed_bfloat16", "8e-2")])
def test_the_type_sets_the_tolerance_on_the_command_line_and_in_python(folder: Path, to: str, near: str) -> None:
    onnx.save(needy(layers=2, needs=(1,)), "model.onnx")
    assert line(run("model.onnx", "-o", "low.onnx", "--to", to).stdout).endswith(f"--tolerance {near} --overwrite")
    report = convert("model.onnx", to=to).report
    words = "" if report.model.to == "float16" else "--to bfloat16 "
    assert line(report.text()) == f"amp-rewrite model.onnx {words}--data batches.npz --tolerance {near}"
    np.savez("batches.npz", x=BATCH["x"])
    assert typed(line(report.text()))[1] == ""


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["bert_ts13", "cnn_ts13", "vit_ts17"])
def test_no_report_suggests_an_opset_that_moves_ops_to_the_cpu(name: str, to: str) -> None:
    def fallen(opset: str | int) -> int:
        converted = convert(exported(f"tests/models/{name}.onnx"), to=to, opset=opset)
        return sum(map(len, on_cpu(View.of(converted.result), load_kernels()).values()))

    report = convert(exported(f"tests/models/{name}.onnx"), to=to, opset="keep").report
    words = " ".join([*(f.message for f in report.findings), *(row.note for row in report.rows)])
    advised = {"auto"} if "--opset auto" in words else set()
    advised |= set(re.findall(r"opset (\d+)(?= does| there is one)", words))
    assert name != "bert_ts13" or advised == {"auto"}
    assert all(fallen(opset) <= fallen("keep") for opset in advised)


def test_in_python_the_next_step_is_a_call_if_there_is_no_file() -> None:
    source = needy(layers=2, needs=(1,))
    real = {"x": BATCH["x"]}
    drawn = Feed.randomly(Model.load(source), shapes={"x": BATCH["x"].shape})
    ranges = calibrate(source, real)
    unjudged = [convert(source, **options) for options in ({"data": real}, {"ranges": ranges}, {"data": drawn})]
    for result in (*unjudged, repair(source, drawn, tolerance=0.5)):
        call = line(result.report.text())
        assert call == "amp_rewrite.repair(model, data, tolerance=1e-2)"
        found = eval(call, {"amp_rewrite": amp_rewrite, "model": source, "data": real})
        assert line(found.report.text()) == ""
    assert line(unjudged[0].report.text(command="")) == ""
    assert next_command(report_in(Model.load(source))) == ""


# -- evidence -----------------------------------------------------------------------------------------

ONNX = ("--target", "onnx")


@pytest.fixture
def model(folder: Path) -> str:
    onnx.save(needy(layers=3, needs=(1,)), folder / "net.onnx")
    np.savez(folder / "d.npz", x=BATCH["x"])
    return "net.onnx"


def closing(*words: str) -> list[str]:
    """Return the end of a successful conversion's output."""
    done = run(*words, *ONNX)
    assert done.exit_code == 0, done.stderr
    return done.stdout.rstrip("\n").rpartition("\n\n")[2].split("\n")


# -- the last lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["input.1", "class", "onnx::Equal_1"])
def test_the_suggested_line_that_saves_inputs_is_valid_python(name: str, model: str) -> None:
    source = onnx.load(model)
    for node in source.graph.node:
        node.input[:] = [name if read == "x" else read for read in node.input]
    source.graph.input[0].name = name
    onnx.save(source, model)
    _, line, _ = closing(model, "--no-check")
    eval(line.removeprefix("your inputs: ").replace("…", "BATCH['x']"), {"np": np, "BATCH": BATCH})
    assert run("verify", model, "net.float16.onnx", "--data", "batches.npz", "--tolerance", "1").exit_code == 0


def test_the_next_command_keeps_all_options_and_ends_after_a_repair_on_real_data(model: str) -> None:
    *_, command = closing(model, "out.onnx", "--keep", "op=*", "--io=low")
    words = "--keep 'op=*' --io=low --target onnx -o out.onnx --data batches.npz --tolerance 1e-2 --overwrite"
    assert command == f"next: amp-rewrite net.onnx {words}"
    words, command = closing(model, "--dry-run", "--data", "d.npz")
    assert words == "checked on 1 batch (d.npz): only ranges; add a tolerance to compare outputs"
    assert command == "next: amp-rewrite net.onnx --dry-run --data d.npz --target onnx --tolerance 1e-2"
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
    assert "evidence" not in json.loads(plain.to_json())  # defaults may be missing, so that old reports load


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


def test_a_dimension_with_a_meaningless_name_needs_a_shape() -> None:
    with pytest.raises(
        FeedError, match=r"unknown sizes \(the shape \[batch, past\]\); give .* shapes=\{'x': \(64, 64\)\}"
    ):
        Feed.randomly(free("[batch, past]"))
    feed = Feed.randomly(free("[batch, past]"), shapes={"x": (2, 3)})
    assert (next(iter(feed))["x"].shape, feed.origin) == ((2, 3), "random, seed 0")


# -- settings from a file -----------------------------------------------------------------------------------


def test_the_report_has_a_files_settings_but_not_its_folder(model: str, folder: Path) -> None:
    Path("amp.toml").write_text('to = "bfloat16"\nlevel = "default"\n')
    head = run(model, "--dry-run", "--report", "r.json").stdout
    assert "  config   to = bfloat16, from ./amp.toml\n" in head
    assert json.loads(Path("r.json").read_text())["model"]["config"] == "to = bfloat16, from ./amp.toml"
    assert "  config   to = bfloat16, from ./amp.toml\n" in run("report", "r.json").stdout
    (folder / "far").mkdir()
    (folder / "far" / "own.toml").write_text('keep = ["op=Add"]\n')
    output = run(model, "--dry-run", "--config", str(folder / "far" / "own.toml")).stdout
    assert "keep = op=Add, from own.toml\n" in output
    assert files() == ["amp.toml", "d.npz", "far", "net.onnx", "r.json"]


def test_a_model_with_caches_names_the_option_that_keeps_them_low(folder: Path) -> None:
    model = str(MODELS / "gpt2_dynamo18.onnx")
    line = "between steps: 4 caches are float32 inputs and outputs · --io low makes them low\n"
    plain, low = (run(model, "--dry-run", "--no-check", *words).stdout for words in ((), ("--io", "low")))
    assert line in plain
    assert "between steps" not in low
    other = run(str(MODELS / "bert_ts13.onnx"), "--dry-run", "--no-check").stdout
    assert "between steps" not in other
