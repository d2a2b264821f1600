"""`calibrate`, with and without ranges of earlier runs: exact output, where it goes, and exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from amp_rewrite import Ranges
from unit.cli.test_cli import files, run

TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[2,4] x) => (float[2,3] y) <float[4,8] w1 = {HALVES}, float[8,3] w2 = {QUARTERS}> {
  [first] h = MatMul (x, w1)
  [act] a = Relu (h)
  [second] z = MatMul (a, w2)
  [last] y = Exp (z)
}
""".replace("HALVES", ",".join(["0.5"] * 32)).replace("QUARTERS", ",".join(["0.25"] * 24))

SHOWN = """\
net.onnx: ranges for float16
  data       d.npz, 1 batch
  values     7 seen, 0 not seen, 0 not measured
  overflow   0 values beyond 65504
  nonfinite  0 values with infinity or NaN

  value     absmax  headroom   smallest  overflow  subnormal  flushed  nonfinite  elements
  y      2.203e+04      2.97  2.203e+04         -          -        -          -         6
  z             10  6.55e+03         10         -          -        -          -         6
  x              8  8.19e+03          1         -          -        -          -         8
  h              5  1.31e+04          5         -          -        -          -        16
  a              5  1.31e+04          5         -          -        -          -        16
  w1           0.5  1.31e+05        0.5         -          -        -          -        32
  w2          0.25  2.62e+05       0.25         -          -        -          -        24
"""
LOUD = """\
net.onnx: ranges for float16
  data       loud.npz, 1 batch
  values     7 seen, 0 not seen, 0 not measured
  overflow   4 values beyond 65504
  nonfinite  1 value with infinity or NaN

  value  absmax  headroom  smallest  overflow  subnormal  flushed  nonfinite  elements
  y           -         -         -         -          -        -      100 %         6
  z       4e+05     0.164     4e+05     100 %          -        -          -         6
  h       2e+05     0.328     2e+05     100 %          -        -          -        16
"""
HELP = "see 'amp-rewrite {} --help'"
EXISTS = "d.npz exists; name another output, or replace it with --overwrite"
NOT_JSON = "net.json: not JSON (Expecting value: line 1 column 1 (char 0)); name a file that calibrate wrote"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and data for it, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AMP_REWRITE_")]:
        monkeypatch.delenv(name)
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "net.onnx")
    np.savez(tmp_path / "d.npz", x=np.float32([[1, 2, 3, 4], [-5, 0, 7, 8]]))
    return tmp_path


def test_ranges_go_to_a_file_and_a_table_to_stdout(folder: Path) -> None:
    done = run("calibrate", "net.onnx", "--data", "d.npz", "-o", "r.json")

    assert (done.exit_code, done.stdout, done.stderr) == (0, SHOWN, "wrote r.json\n")
    assert run("calibrate", "net.onnx", "--ranges", "r.json").stdout == SHOWN


def test_without_an_output_they_go_to_a_file_beside_the_model(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "net.onnx").rename("sub/net.onnx")
    done = run("calibrate", "sub/net.onnx", "--data", "d.npz")

    assert (done.exit_code, done.stdout, done.stderr) == (0, SHOWN, "wrote sub/net.ranges.json\n")
    again = run("calibrate", "sub/net.onnx", "--data", "d.npz")
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr == "error: sub/net.ranges.json exists; name another output, or replace it with --overwrite\n"
    assert run("calibrate", "sub/net.onnx", "--data", "d.npz", "--overwrite").exit_code == 0


def test_with_a_dash_as_output_they_go_to_stdout_as_json(folder: Path) -> None:
    done = run("calibrate", "net.onnx", "--data", "d.npz", "-o", "-")

    assert (done.exit_code, done.stderr, files()) == (0, "", ["d.npz", "net.onnx"])
    assert run("calibrate", "net.onnx", "--data", "d.npz", "-o", "r.json", "-q").output == ""
    assert done.stdout == Path("r.json").read_text()
    assert Ranges.from_json(done.stdout, "stdout").values["z"].absmax == 10.0


def test_values_that_overflow_come_first_and_are_counted(folder: Path) -> None:
    np.savez("loud.npz", x=np.full((2, 4), 1e5, np.float32))

    done = run("calibrate", "net.onnx", "--data", "loud.npz", "-o", "r.json")

    assert (done.exit_code, done.stdout[: len(LOUD)]) == (0, LOUD)


def test_random_data_is_said_to_be_random(folder: Path) -> None:
    done = run("calibrate", "net.onnx", "--random", "--set", "batches=2", "--set", "seed=3", "-o", "r.json")

    lines = done.stdout.splitlines()
    assert (done.exit_code, lines[1]) == (0, "  data       random, seed 3, 2 batches; random data is not real data")
    assert Ranges.load("r.json").random


def test_the_type_comes_from_the_command_line_or_the_settings(folder: Path) -> None:
    Path("amp.toml").write_text('to = "bfloat16"\n')

    words = ("calibrate", "net.onnx", "--data", "d.npz", "-o", "-")
    assert Ranges.from_json(run(*words).stdout, "stdout").to == "bfloat16"
    assert Ranges.from_json(run(*words, "--to", "f16").stdout, "stdout").to == "float16"


def shards(**data: np.ndarray) -> None:
    """Calibrate on d.npz and each of the other arrays, into files of those names."""
    for name, array in data.items():
        np.savez(f"{name}.npz", x=array)
    for name in ("d", *data):
        run("calibrate", "net.onnx", "--data", f"{name}.npz", "-o", f"{name}.json")


def test_earlier_ranges_are_merged_and_shown_without_data(folder: Path) -> None:
    shards(e=np.asarray([[0, 0, 0, 1]] * 2, np.float32))
    both = ("calibrate", "net.onnx", "--ranges", "d.json", "--ranges", "e.json")

    shown, saved, printed = run(*both), run(*both, "-o", "both.json"), run(*both, "-o", "-")

    assert (shown.exit_code, shown.stderr, saved.stderr) == (0, "", "wrote both.json\n")
    assert shown.stdout == saved.stdout
    assert shown.stdout.splitlines()[1] == "  data       d.npz; e.npz, 2 batches"
    assert files() == ["both.json", "d.json", "d.npz", "e.json", "e.npz", "net.onnx"]
    assert Ranges.load("both.json") == Ranges.load("d.json").merge(Ranges.load("e.json"))
    assert printed.stdout == Path("both.json").read_text()


def test_without_a_file_every_value_is_shown(folder: Path) -> None:
    ops = "".join(f"v{i + 1} = Relu (v{i}) " for i in range(30))
    head = '<ir_version: 10, opset_import: ["" : 21]> long (float[2,4] x) => (float[2,4] y)'
    onnx.save(onnx.parser.parse_model(f"{head} {{ v0 = Exp (x) {ops} y = Neg (v30) }}"), "long.onnx")

    written = run("calibrate", "long.onnx", "--data", "d.npz", "-o", "r.json").stdout
    shown = run("calibrate", "long.onnx", "--ranges", "r.json").stdout

    assert "  … 13 more\n" in written
    assert all(f"\n  v{i} " in shown for i in range(31))


def test_earlier_ranges_are_merged_into_what_is_measured(folder: Path) -> None:
    shards(e=np.asarray([[9, 0, 0, 1]] * 2, np.float32))

    done = run("calibrate", "net.onnx", "--data", "e.npz", "--ranges", "d.json", "-o", "both.json")

    assert (done.exit_code, done.stderr) == (0, "wrote both.json\n")
    assert Ranges.load("both.json") == Ranges.load("e.json").merge(Ranges.load("d.json"))
    assert Ranges.load("both.json").values["x"].absmax == 9.0


def test_data_of_a_settings_file_are_not_measured_where_only_ranges_are_named(folder: Path) -> None:
    shards()
    Path("amp.toml").write_text('data = "none.npz"\n')

    assert run("calibrate", "net.onnx", "--ranges", "d.json").stdout == SHOWN
    assert "none.npz" in run("calibrate", "net.onnx").stderr


def test_ranges_of_another_model_or_type_are_not_merged(folder: Path) -> None:
    onnx.save(onnx.parser.parse_model(TEXT.replace("Exp", "Tanh")), "other.onnx")
    run("calibrate", "net.onnx", "--data", "d.npz", "-o", "a.json")
    run("calibrate", "net.onnx", "--data", "d.npz", "--to", "bfloat16", "-o", "b.json")
    run("calibrate", "other.onnx", "--data", "d.npz", "-o", "c.json")
    mine, theirs = Ranges.load("a.json").graph[:12], Ranges.load("c.json").graph[:12]
    merging = "--ranges a.json --ranges b.json"

    refused = {
        merging: "cannot merge ranges of different models or types: type float16 and bfloat16; calibrate again in one"
        " way",
        "--ranges c.json": "c.json: the ranges are of another model, other.onnx: graph"
        f" {theirs} and {mine} differ; calibrate again on this one",
        "--ranges b.json --data none.npz": "b.json holds ranges for bfloat16; add --to bfloat16, or leave the file out",
    }
    for words, fact in refused.items():
        done = run("calibrate", "net.onnx", *words.split(), "-o", "d.json")
        assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: {fact}\n")
    assert "d.json" not in files()


def test_the_same_ranges_twice_are_refused_under_any_name(folder: Path) -> None:
    shards(e=np.zeros((2, 4), np.float32))
    Path("copy.json").write_text(Path("d.json").read_text())

    for names in (("d.json", "d.json"), ("d.json", "e.json", "copy.json")):
        words = [word for name in names for word in ("--ranges", name)]
        done = run("calibrate", "net.onnx", *words, "-o", "all.json")
        told = f"d.json and {names[-1]} hold the same ranges, which would count twice; name each file once"
        assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: {told}\n")
    done = run("calibrate", "net.onnx", "--data", "d.npz", "--ranges", "d.json", "-o", "all.json")
    told = "d.json holds what these data give, which would count twice; leave out --ranges d.json"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: {told}\n")
    assert "all.json" not in files()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("calibrate net.onnx", f"no input data; add --data FILE, or --random; {HELP.format('calibrate')}"),
        ("calibrate", f"Missing argument 'MODEL'; {HELP.format('calibrate')}"),
        ("calibrate net.onnx --data d.npz --to float32",
         "--to: cannot lower to float32; use float16 or bfloat16"),
        (
            "calibrate net.onnx --data d.npz --chunk 0",
            "0 is not a valid number of taps per session; use a chunk of 1 or more",
        ),
        ("calibrate net.onnx --data d.npz -o d.npz", EXISTS),
        ("calibrate net.onnx --data d.npz -o net.onnx/r.json",
         "cannot make the folder net.onnx: File exists; name another output"),
        ("calibrate none.onnx --data d.npz", "cannot read none.onnx: No such file or directory"),
        ("calibrate net.onnx --ranges r.json",
         "cannot read r.json: there is no such file; name a file that calibrate wrote"),
        ("calibrate net.onnx --ranges net.json", NOT_JSON),
        ("calibrate net.onnx --ranges net.json --to bfloat16",
         f"--to describes a measurement; add --data FILE, or --random; {HELP.format('calibrate')}"),
        ("calibrate net.onnx --ranges net.json --chunk 5",
         f"--chunk describes a measurement; add --data FILE, or --random; {HELP.format('calibrate')}"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, words: str, message: str) -> None:
    Path("net.json").write_text("no ranges")

    done = run(*words.split())

    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
    assert files() == ["d.npz", "net.json", "net.onnx"]


def test_an_output_that_exists_is_refused_before_the_work(folder: Path) -> None:
    Path("r.json").write_text("mine")

    done = run("calibrate", "net.onnx", "--data", "none.npz", "-o", "r.json")

    assert done.stderr == "error: r.json exists; name another output, or replace it with --overwrite\n"
    assert run("calibrate", "net.onnx", "--data", "d.npz", "-o", "r.json", "--overwrite").exit_code == 0
    assert Ranges.load("r.json").batches == 1
