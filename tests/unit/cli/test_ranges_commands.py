"""`calibrate`: exact output, where it goes, and exit codes."""

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


def test_without_an_output_they_go_to_a_file_beside_the_model(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "net.onnx").rename("sub/net.onnx")
    done = run("calibrate", "sub/net.onnx", "--data", "d.npz")

    assert (done.exit_code, done.stdout, done.stderr) == (0, SHOWN, "wrote sub/net.ranges.json\n")
    again = run("calibrate", "sub/net.onnx", "--data", "d.npz")
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr == "error: sub/net.ranges.json exists; name another output, or replace it with --overwrite\n"
    assert run("calibrate", "sub/net.onnx", "--data", "d.npz", "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("calibrate net.onnx", f"no input data; add --data FILE, or --random; {HELP.format('calibrate')}"),
        ("calibrate", "Missing argument 'MODEL', as in `amp-rewrite calibrate model.onnx --data batches.npz`"),
        ("calibrate net.onnx --data d.npz --to float32",
         "--to: cannot lower to float32; use float16 or bfloat16"),
        (
            "calibrate net.onnx --data d.npz --threads 0",
            "0 is not a valid number of threads; use 1 or more, or omit it for one per core",
        ),
        ("calibrate net.onnx --data d.npz -o d.npz", EXISTS),
        ("calibrate net.onnx --data d.npz -o net.onnx/r.json",
         "cannot make the folder net.onnx: File exists; name another output"),
        ("calibrate none.onnx --data d.npz", "cannot read none.onnx: No such file or directory"),
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
