"""Commands with data: ranges, guarding, repair, feedback; exact output, exit codes and written files."""

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest

from unit.cli.test_cli import files, folder, run
from unit.cli.test_next_step import model
from unit.evidence.test_feed import DRIP, LEAKY, SUM
from unit.pipeline.test_repair import BATCH

__all__ = ["folder", "model"]


NEAR = ("--metric", "scaled=0.01", "--target", "onnx")


def test_a_repair_writes_the_model_and_lists_its_pins_and_error(model: str) -> None:
    done = run(model, "-o", "out.onnx", "--data", "d.npz", *NEAR)

    assert (done.exit_code, files()) == (0, ["d.npz", "net.onnx", "out.onnx"])
    assert done.stdout.startswith("net.onnx → float16\n")
    lines = done.stdout[done.stdout.index("repair: ") :].splitlines()
    assert lines[0] == "repair: 1 of 6 regions pinned to float32, each is needed; 5 trials"
    assert " alone adds a relative error of " in lines[1]
    assert len(lines) == 4 and lines[2] == ""
    assert lines[-1].startswith("checked on 1 batch (d.npz): repaired by keeping 1 region in float32, largest error 0.")
    assert done.stderr == "wrote out.onnx\n"


def test_with_json_the_pins_are_on_stderr(model: str) -> None:
    done = run(model, "-o", "out.onnx", "--json", "--data", "d.npz", *NEAR)

    assert json.loads(done.stdout)["model"]["to"] == "float16"
    lines = done.stderr.splitlines()
    assert "repair: 1 of 6 regions pinned to float32, each is needed; 5 trials" in lines
    assert lines[-1] == "wrote out.onnx"
    done = run(model, "-o", "out.onnx", "--overwrite", "-v", "--data", "d.npz", *NEAR)
    assert "\nok: 64 values compared in 1 output and 1 batch\n" in done.stdout


def test_a_repair_that_finds_nothing_writes_nothing_and_exits_with_1(model: str) -> None:
    done = run(model, "-o", "out.onnx", "--data", "d.npz", *NEAR, "--set", "budget=1", "--report", "r.json")

    assert (done.exit_code, files()) == (1, ["d.npz", "net.onnx"])
    lines = done.stdout[done.stdout.index("repair: ") :].splitlines()
    assert lines[1] == "  the trials ran out before the outputs came within tolerance; allow more trials"
    assert done.stderr == "not written: out.onnx\n"


def kinds_of(*words: str) -> set[str]:
    done = run(*words, "--target", "onnx", "--set", "shift=none", "--dry-run", "--json")
    assert (done.exit_code, done.stderr.count("error")) == (0, 0)
    return {finding["kind"] for finding in json.loads(done.stdout)["findings"]}


def test_a_settings_file_names_the_ranges_and_the_command_line_overrides_it(model: str) -> None:
    from amp_rewrite.evidence.calibrate import calibrate

    calibrate(model, {"x": BATCH["x"] * 1000}).save("r.json")
    np.savez("large.npz", x=BATCH["x"] * 1e5)

    Path("amp.toml").write_text('ranges = "r.json"\nheadroom = 100\n')
    assert kinds_of(model) == {"calibrated", "mostly_float32", "overflow"}
    assert kinds_of(model, "--set", "headroom=2") == {"calibrated"}
    assert kinds_of(model, "--data", "d.npz", "--set", "headroom=2") == {"calibrated"}  # not the file's ranges
    Path("amp.toml").write_text('data = "large.npz"\n')
    assert kinds_of(model) == {"calibrated", "mostly_float32", "overflow"}
    assert kinds_of(model, "--ranges", "r.json") == {"calibrated"}
    Path("amp.toml").write_text('data = "large.npz"\nranges = "r.json"\n')
    assert kinds_of(model) == {"calibrated"}


def test_commands_that_feed_take_the_data_of_a_settings_file(model: str) -> None:
    Path("amp.toml").write_text('data = "d.npz"\n')
    assert run(model, "-q").exit_code == 0

    assert run("calibrate", model, "-o", "r.json", "-q").exit_code == 0
    assert '"origin": "d.npz"' in Path("r.json").read_text()
    assert '"origin": "d.npz"' in run("locate", model, "net.float16.onnx", "--json").stdout
    judged = run("verify", model, "net.float16.onnx", "--set", "rtol=1", "--json")
    assert json.loads(judged.stdout)["data"] == {"origin": "d.npz", "random": False, "batches": 1}


def test_explain_agrees_with_convert_given_the_same_ranges(model: str) -> None:
    from amp_rewrite.evidence.calibrate import calibrate

    calibrate(model, {"x": BATCH["x"] * 1000}).save("r.json")
    words = ("--ranges", "r.json", "--set", "headroom=100", "--target", "onnx", "--set", "shift=none")
    rows = json.loads(run(model, *words, "--dry-run", "--json").stdout)["rows"]
    pinned = next(row for row in rows if row["rule"] == "overflow")

    done = run("explain", model, pinned["name"], *words)

    assert done.stdout.splitlines()[0] == f"{pinned['name']} ({pinned['op']}) is float32: overflow"
    assert pinned["note"] in done.stdout
    assert "overflow" not in run("explain", model, pinned["name"], "--target", "onnx").stdout
    data = run("explain", model, pinned["name"], "--data", "d.npz", "--set", "headroom=1e5", *words[4:])
    assert data.stdout.splitlines()[0].endswith("is float32: overflow")


# -- outputs fed back ----------------------------------------------------------------------------------------

KEYS = ("--set", "feedback=hn=h", "--set", "steps=300")


@pytest.fixture
def fed(folder: Path) -> None:
    onnx.save(LEAKY.proto, "leaky.onnx")
    onnx.save(SUM.proto, "sum.onnx")
    np.savez("one.npz", **DRIP)
    np.savez("many.npz", **{f"{n}/x": np.full(2, n, np.float32) for n in range(4)})
    done = run("leaky.onnx", "-o", "low.onnx", "--target", "onnx")
    assert done.exit_code == 0, done.stderr


@pytest.mark.usefixtures("fed")
def test_the_advice_of_a_verdict_runs_as_printed() -> None:
    plain = run("verify", "leaky.onnx", "low.onnx", "--data", "one.npz", "--tolerance", "1e-2", "--report", "v.json")
    assert plain.exit_code == 0, plain.stderr
    *_, note, command = plain.stdout.splitlines()
    assert note.startswith("note: without --feedback hn=h, this comparison misses errors that build up over ")
    words = "verify leaky.onnx low.onnx --data one.npz --tolerance 1e-2 --report v.json"
    assert command == f"next: amp-rewrite {words} --feedback hn=h --steps 100 --overwrite"
    done = run(*shlex.split(command.removeprefix("next: amp-rewrite ")))
    assert done.exit_code == 1 and "100 steps each, hn fed back to h" in done.stdout
    assert "hundredth" not in done.stdout
    assert {row["step"] for row in json.loads(Path("v.json").read_text())["rows"]} == set(range(100))


@pytest.mark.usefixtures("fed")
def test_calibrate_convert_and_settings_take_feedback() -> None:
    done = run("calibrate", "sum.onnx", "--data", "many.npz", "--feedback", "hn=h", "-o", "r.json")
    assert done.exit_code == 0, done.stderr
    ranges = json.loads(Path("r.json").read_text())
    assert (ranges["values"]["hn"]["absmax"], ranges["batches"]) == (6, 4)
    words = ("leaky.onnx", "--target", "onnx", "--tolerance", "1e-2", "--data", "one.npz", "--dry-run")
    plain, fed = run(*words), run(*words, "-v", *KEYS)
    assert "without --set feedback=hn=h, this comparison misses errors that build up over many steps" in plain.stdout
    assert "repair: 1 of" in fed.stdout and "300 steps each, hn fed back to h" in fed.stdout, fed.stdout
    Path("amp.toml").write_text('data = "one.npz"\nfeedback = "hn=h"\nsteps = 300\ntolerance = 0.01\n')
    assert run("verify", "leaky.onnx", "low.onnx").exit_code == 1
    assert run("bench", "leaky.onnx", "--rounds", "1", "--no-memory").exit_code == 0
