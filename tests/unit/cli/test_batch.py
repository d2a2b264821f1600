"""`amp-rewrite convert` for folders, globs and files: output, refusals and files."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.repositories import net, repository, tree
from unit.cli.test_cli import run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    repository(Path("src"))
    return tmp_path


def test_a_folder_is_converted_with_a_line_for_each_model() -> None:
    done = run("src", "-o", "out", "--io", "caches")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "ok  out/decoder/model.onnx",
        "ok  out/decoder/plain.onnx",
        "ok  out/model.onnx",
    ]
    assert "2 of 2 compute ops lowered, 0 Casts" in lines[0] and "131.1 kB → 65.5 kB of weights" in lines[0]
    assert done.stderr == "3 models done, 2 other files copied\n"


@pytest.mark.parametrize(
    "words", [("src/*.onnx", "-o", "out"), ("src/model.onnx", "-o", "out/"), ("convert", "src/m*.onnx", "-o", "out")]
)
def test_a_glob_and_a_file_go_into_a_folder(words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 0
    assert sorted(tree(Path("out"))) == ["model.onnx"]


def test_json_and_the_report_have_the_same_lines() -> None:
    done = run("src", "-o", "out", "--json", "--report", "s.jsonl", "--keep", "relu")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [json.loads(line) for line in Path("s.jsonl").read_text().splitlines()]
    assert [line["source"] for line in lines] == ["src/decoder/model.onnx", "src/decoder/plain.onnx", "src/model.onnx"]
    assert lines[0].keys() >= {"source", "target", "rc", "key", "made", "evidence", "totals", "seconds", "findings"}
    assert (lines[0]["rc"], lines[0]["evidence"]["level"]) == (0, "smoke")


def test_a_failure_spares_other_models_and_the_worst_exit_code_wins() -> None:
    (Path("src") / "decoder" / "model.onnx").write_bytes(b"\x08\x08garbage")
    done = run("src", "-o", "out", "--report", "s.jsonl")
    assert done.exit_code == 2 and "2 models done, 1 failed, 2 other files copied" in done.stderr
    assert "error: src/decoder/model.onnx" in done.stderr and done.stderr.count("src/decoder/model.onnx") == 1
    went_on = run("src", "-o", "out", "--report", "s.jsonl", "--resume")
    assert went_on.exit_code == 2 and "2 models done, 1 failed" in went_on.stderr
    assert "ok  out/model.onnx: already finished" in went_on.stdout


def test_an_exceeded_tolerance_exits_with_1() -> None:
    np.savez("d.npz", x=np.ones((2, 128), np.float32))
    done = run("src/model.onnx", "-o", "out/", "--data", "d.npz", "--tolerance", "1e-12", "--set", "budget=1")
    assert (done.exit_code, tree(Path("out")) if Path("out").exists() else {}) == (1, {})
    assert "not written: the tolerance is not met" in done.stderr


def test_a_pattern_without_a_match_is_an_error_after_all_are_written() -> None:
    done = run("src", "-o", "out", "--keep", "op=Softmax")
    assert done.exit_code == 2 and done.stdout.count("ok  ") == 3
    assert (
        "error: 'op=Softmax' matches nothing in 3 models; in src/decoder/model.onnx: pattern 'op=Softmax'"
        in done.stderr
    )


def test_errors_in_other_processes_name_command_line_options(tmp_path: Path) -> None:
    np.savez("d.npz", x=np.full((2, 128), np.nan, np.float32))
    command = [sys.executable, "-m", "amp_rewrite", "src/m*.onnx", "src/decoder/p*.onnx", "-o", "out", "-j", "2"]
    done = subprocess.run([*command, "--data", "d.npz"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.count("--set allow-nonfinite=true") == 2, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_an_interrupted_batch_can_be_resumed() -> None:
    for i in range(40):
        net(Path("src") / f"more{i}.onnx", seed=i)
    command = [sys.executable, "-m", "amp_rewrite", "src", "-o", "out", "--report", "s.jsonl", "-j", "2"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),  # a shell may ignore it in the tests
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, output = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output
    assert "run the same command with --resume to continue" in output
    assert not [name for name in tree(Path("out")) if name.endswith(".tmp")]
    known = len(Path("s.jsonl").read_text().splitlines())
    assert 1 <= known < 43
    again = run("src", "-o", "out", "--report", "s.jsonl", "--resume")
    assert again.exit_code == 0 and again.stdout.count("already finished") >= known
    assert len(Path("s.jsonl").read_text().splitlines()) == 43
