"""Where commands read and write models: stdin, stdout, a second file, folders that do not exist yet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result

from amp_rewrite.cli import group, program
from unit.cli.test_cli import TEXT, files, run

AMP = [sys.executable, "-m", "amp_rewrite"]
NET = "net.onnx"
HELP = "; see 'amp-rewrite convert --help'\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    onnx.save(onnx.parser.parse_model(TEXT), NET)
    return tmp_path


def piped(*words: str, source: str | None = NET) -> Result:
    """A command with a file as stdin; whatever happens, no temporary file stays."""
    content = b"" if source is None else Path(source).read_bytes()
    done = CliRunner().invoke(program, words, input=content)
    assert [name for name in files("temporary") if name.startswith("amp-rewrite")] == []
    return done


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_closed_standard_streams_are_opened_on_the_null_device(
    closed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table of the numbers that are free: what is opened gets the least one."""
    free, opened = list(closed), {}

    def fstat(number: int) -> None:
        if number in free:
            raise OSError

    def open_(name: str, flags: int) -> None:
        opened[free.pop(0)] = (name, flags)

    names = {1: "stdout", 2: "stderr"}
    with monkeypatch.context() as patch:
        for number in closed:
            patch.setattr(sys, names.get(number, "stdin"), None)
        patch.setattr(os, "fstat", fstat)
        patch.setattr(os, "open", open_)
        group._hold_streams()
        for number in names.keys() & closed:
            with getattr(sys, names[number]) as stream:
                assert stream.fileno() == number
    os.fstat(1), os.fstat(2)  # the numbers stay open, as those of the process
    flags = {0: os.O_RDONLY, 1: os.O_RDONLY, 2: os.O_WRONLY}
    assert opened == {number: (os.devnull, flags[number]) for number in closed}


# -- a second file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(NET, "out.onnx"), ("convert", NET, "--to", "float16", "out.onnx")])
def test_a_second_file_that_does_not_exist_is_the_output(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.exit_code, done.stderr) == (0, "wrote out.onnx\n")
    assert files() == [NET, "out.onnx", "temporary"]


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_a_second_file_that_exists_is_never_replaced(more: tuple[str, ...]) -> None:
    Path("other.onnx").write_bytes(b"mine")
    done = run(NET, "other.onnx", *more)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "error: other.onnx exists, so it may be an input or the output; `amp-rewrite diff net.onnx other.onnx` compares"
        f" them, `-o other.onnx --overwrite` replaces it, and `-o FOLDER/` converts both into a folder{HELP}"
    )
    assert Path("other.onnx").read_bytes() == b"mine"


def test_suggested_commands_quote_names() -> None:
    Path("my net.onnx").write_bytes(b"mine")
    said = run(NET, "my net.onnx").stderr
    assert "`amp-rewrite diff net.onnx 'my net.onnx'` compares" in said and "`-o 'my net.onnx' --overwrite`" in said
    assert run(NET, "$x y").stderr.startswith(
        "error: '$x y' is not the name of an .onnx file; to write there, use -o '$x"
    )


def test_a_link_to_nowhere_is_no_free_name() -> None:
    Path("other.onnx").symlink_to("gone.onnx")
    assert run(NET, "other.onnx").stderr.startswith("error: other.onnx exists, so it may be")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((NET, "fp16"), "'fp16' is not the name of an .onnx file; to write there, use -o fp16"),
        ((NET, "a.onnx", "b.onnx"), "convert writes one model to a file; several go to a folder, as in -o FOLDER/"),
        ((NET, "a.onnx", "-o", "b.onnx"), "convert writes one model to a file; several go to a folder, as in"),
    ],
)
def test_other_words_behind_the_model_are_refused(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert files() == [NET, "temporary"]


# -- folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("convert", NET, "-o", "a/b/out.onnx", "--report", "a/c/report.json"), "a/c/report.json"),
        ((NET, "a/b/out.onnx"), "a/b/out.onnx"),
        (("emulate", NET, "-o", "a/b/out.onnx"), "a/b/out.onnx"),
        (("train-step", NET, "--loss", "mean_squared_error(y,t)", "-o", "a/b/out.onnx"), "a/b/out.onnx"),
        (("calibrate", NET, "--random", "-o", "a/b/out.json"), "a/b/out.json"),
    ],
)
def test_folders_of_an_output_are_made(words: tuple[str, ...], output: str) -> None:
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    assert Path(output).is_file()


@pytest.mark.parametrize(
    "words",
    [
        ("convert", NET, "-o", "a/b/out.onnx", "--keep", "nothing"),
        ("convert", NET, "-o", "a/b/out.onnx", "--dry-run"),
        ("convert", NET, "-o", "a/b/out.onnx", "--to", "float8"),
        ("convert", "gone.onnx", "-o", "a/b/out.onnx"),
        ("convert", NET, "-o", "a/b/out.onnx", "--no-such-option"),
        ("calibrate", NET, "-o", "a/b/out.json"),
        ("convert", NET, "-o", "a/b/../out.onnx", "--dry-run"),
        ("convert", NET, "a/b/"),
        ("convert", NET, "-o", "a/b/", "--dry-run"),
    ],
)
def test_folders_go_again_where_nothing_was_written(words: tuple[str, ...]) -> None:
    run(*words)
    assert files() == [NET, "temporary"]


def test_folders_that_were_there_stay() -> None:
    Path("a").mkdir()
    assert run(NET, "-o", "a/b/out.onnx", "--keep", "nothing").exit_code == 2
    assert files() == ["a", NET, "temporary"] and files("a") == []


def test_a_name_that_ends_with_a_slash_is_a_folder() -> None:
    assert run("emulate", NET, "-o", "a/b/").stderr.startswith("error: a/b/ is a folder; name a file in it")
    assert run(NET, "a/b/").stderr == f"error: a/b/ is a folder; name a file in it{HELP}"


@pytest.mark.parametrize("words", [(NET, "-o", ""), (NET, ""), ("convert", "")])
def test_an_empty_name_is_refused(words: tuple[str, ...]) -> None:
    assert run(*words).stderr == f"error: the name of the file is empty; name a file{HELP}"


def test_ranges_are_not_written_under_the_name_of_a_model() -> None:
    said = run("calibrate", NET, "--random", "-o", "ranges.onnx").stderr
    assert said == "error: cannot write ranges.onnx: ranges are JSON, not a model; use the suffix .json\n"
    assert files() == [NET, "temporary"]


# -- stdin and stdout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("-", "-o", "-"), ("-", "-"), ("--to", "float16", "-", "-o", "-")])
def test_a_model_goes_through_a_pipe_and_the_report_to_stderr(words: tuple[str, ...]) -> None:
    assert run(NET).exit_code == 0
    done = piped(*words)
    assert done.exit_code == 0, done.stderr
    assert done.stdout_bytes == Path("net.float16.onnx").read_bytes()
    assert done.stderr.startswith("stdin.onnx → float16\n") and done.stderr.endswith("wrote stdout\n")
    assert piped(*words, "-q").stderr == ""


@pytest.mark.parametrize(
    "words", [("emulate", "-o", "-"), ("train-step", "--loss", "mean_squared_error(y,t)", "-o", "-")]
)
def test_commands_that_write_models_write_them_to_stdout(words: tuple[str, ...]) -> None:
    done = piped(words[0], "-", *words[1:])
    assert done.exit_code == 0, done.stderr
    onnx.checker.check_model(onnx.load_from_string(done.stdout_bytes))


@pytest.mark.parametrize(
    "words",
    [
        ("report", "-"),
        ("explain", "-", "first"),
        ("diff", "-", NET),
        ("verify", NET, "-", "--random", "--set", "rtol=0"),
        ("calibrate", "-", "--random", "-o", "-"),
        ("convert", "-", "-o", "out.onnx"),
    ],
)
def test_commands_read_a_model_from_stdin(words: tuple[str, ...]) -> None:
    done = piped(*words)
    assert done.exit_code == 0, done.stderr
    assert "temporary" not in done.stdout + done.stderr


def test_a_file_whose_name_is_a_dash_is_a_file(folder: Path) -> None:
    Path("-").write_bytes(Path(NET).read_bytes())
    done = run("report", "./-")
    assert done.exit_code == 0, done.stderr
    assert piped("convert", "./-", "-o", "./-", "--overwrite").stdout_bytes.startswith(b"-")
    assert Path("-").read_bytes() != Path(NET).read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("words", [("-", "-o", "out.onnx"), ("report", "-")])
def test_a_signal_leaves_no_temporary_folder(words: tuple[str, ...]) -> None:
    heard = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)  # also where the tests run under nohup
    with subprocess.Popen([*AMP, *words], stdin=PIPE, stderr=PIPE, preexec_fn=heard) as child:
        assert child.stdin is not None
        child.stdin.write(Path(NET).read_bytes())
        child.stdin.flush()
        while child.poll() is None and not list(Path("temporary").glob("amp-rewrite-*/*")):
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 130
    assert [name for name in files("temporary") if name.startswith("amp-rewrite")] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-",), "a model from stdin leaves the output without a name; add -o FILE, or -o - for stdout"),
        (("calibrate", "-", "--random"), "a model from stdin leaves the output without a name; add -o FILE, or"),
        (("-", "-o", "-", "--json"), "the model goes to stdout, and --json prints there, too; name a file with -o"),
        (
            ("-", "-", "--set", "external-data=true"),
            "the model goes to stdout, and it has no file beside it; name a file with -o",
        ),
        (
            ("verify", "-", "-", "--random", "--set", "rtol=1"),
            "only one model can come from stdin; name a file for the",
        ),
    ],
)
def test_what_streams_cannot_hold_is_refused(words: tuple[str, ...], message: str) -> None:
    done = piped(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")


def test_weights_in_a_second_file_do_not_fit_stdout() -> None:
    Path("amp.toml").write_text("external-data = true\n")
    proto = onnx.load(NET)
    for weight, shape in zip(proto.graph.initializer, ((8, 4096), (4096, 6)), strict=True):
        weight.CopyFrom(onnx.numpy_helper.from_array(np.ones(shape, np.float32), weight.name))
    onnx.save(proto, "large.onnx")
    done = piped("emulate", "-", "-o", "-", "--set", "external-data=true", source="large.onnx")
    assert (done.exit_code, done.stdout) == (2, "") and "it has no file beside it" in done.stderr
    done = piped("-", "-o", "-", source="large.onnx")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "error: the weights need a file of their own, which stdout cannot hold" in done.stderr


def test_an_empty_or_foreign_stdin_is_one_line() -> None:
    assert piped("report", "-", source=None).stderr == "error: stdin is empty; export or download it again\n"
    Path("m.tflite").write_bytes(b"\x1c\0\0\0TFL3" + bytes(40))
    assert piped("report", "-", source="m.tflite").stderr.startswith("error: stdin is a TensorFlow Lite model")


def test_a_failed_conversion_writes_nothing_to_stdout() -> None:
    done = piped("-", "-o", "-", "--keep", "nothing")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_closed_stdin_is_one_line() -> None:
    command = f'"{sys.executable}" -m amp_rewrite report - <&-'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: - reads a model from stdin, which is closed; pipe a model in, or name a file")


def test_a_full_disk_for_stdin_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    done = piped("report", "-")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: cannot copy a model from stdin to ")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((NET, "-o", "-"), "writes a model to stdout, which is a terminal; redirect it, or name a file"),
        (("report", "-"), "reads a model from stdin, which is a terminal; pipe a model in, or name a file"),
    ],
)
def test_a_terminal_is_neither_read_nor_flooded(words: tuple[str, ...], message: str) -> None:
    ours, theirs = os.openpty()
    done = subprocess.run([*AMP, *words], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 2 and done.stderr.startswith(f"error: - {message}")


def test_real_streams_carry_a_model() -> None:
    assert run(NET).exit_code == 0
    with Path(NET).open("rb") as source, Path("out.onnx").open("wb") as target:
        done = subprocess.run([*AMP, "-", "-q", "-o", "-"], stdin=source, stdout=target, stderr=-1, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert Path("out.onnx").read_bytes() == Path("net.float16.onnx").read_bytes()


# -- closed pipes -------------------------------------------------------------------------------------------


def test_the_report_is_json_where_the_model_goes_to_a_file() -> None:
    assert json.loads(run(NET, "out.onnx", "--json").stdout)["model"]["name"] == NET
