"""Output on a terminal: it fits the width, and colors mean something; pipes get neither."""

import contextlib
import io
import os
import re
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import onnx
import pytest

from amp_rewrite.cli import terminal
from amp_rewrite.decide.reasons import remarked
from amp_rewrite.errors import Finding
from amp_rewrite.reports.render import WIDTH, table
from support.paths import ROOT
from unit.cli.test_cli import folder, shell
from unit.pipeline.test_repair import needy

__all__ = ["folder"]

BERT = str(ROOT / "tests" / "models" / "bert_ts13.onnx")
STYLED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m")


def drawn_on_a_terminal(width: int, *words: str, **environ: str) -> str:
    """Return a command's output on a terminal with this many columns."""
    import fcntl
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "amp_rewrite", *words]
    running = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**plain, "TERM": "xterm", **environ})
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # a closed pseudo-terminal on Linux
        while chunk := os.read(ours, 65536):
            text += chunk
    os.close(ours)
    running.wait(timeout=60)
    return text.decode().replace("\r", "")


def on_a_terminal(width: int, *words: str, **environ: str) -> str:
    """Return a command's output on a terminal without progress bars."""
    screen = drawn_on_a_terminal(width, *words, **environ).rpartition("\x1b[?25h")[2]
    return re.sub(r"\A(\x1b\[\d[AK])+", "", screen)


@cache
def piped() -> str:
    """Return a conversion's output into a pipe."""
    done = shell(BERT, "--dry-run")
    return done.stdout + done.stderr


def unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*[mK]", "", text)


needs_a_terminal = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


@needs_a_terminal
@pytest.mark.parametrize("width", [40, 200])
def test_a_report_fits_the_terminal_without_breaking_a_word(width: int) -> None:
    lines = unstyled(on_a_terminal(width, BERT, "--dry-run")).splitlines()
    assert max(len(line) for line in lines if not line.startswith("next: ")) <= width
    known = set(piped().split())
    broken = {word for line in lines if not line.startswith("next: ") for word in line.split()} - known
    assert {word for word in broken if "…" not in word} == set()
    assert any(line.startswith(f"next: amp-rewrite {BERT} --dry-run --data") for line in lines)  # unbroken, for copying


def test_a_narrow_table_wraps_between_words_and_cuts_longer_ones() -> None:
    token = WIDTH.set(36)
    try:
        lines = table([("1", "a_name_that_is_far_too_long_for_it", "words that say why it is so")], right=">")
    finally:
        WIDTH.reset(token)
    assert lines == ["  1  a_name_th…  words that say why", "                 it is so"]


# -- colors -------------------------------------------------------------------------------------------------


@needs_a_terminal
def test_only_a_terminal_gets_a_progress_bar_and_color() -> None:
    assert "\u2501" in drawn_on_a_terminal(80, BERT, "--dry-run")
    assert drawn_on_a_terminal(80, BERT, "--dry-run", "-q") == ""
    assert "\x1b" not in piped() and "\u2501" not in piped()


@needs_a_terminal
def test_errors_are_red_ok_is_green_and_findings_are_yellow(folder: Path) -> None:
    onnx.save(needy(layers=2), "n.onnx")
    verify = ("verify", "n.onnx", "n.onnx", "--random", "--tolerance", "1")
    assert STYLED.findall(on_a_terminal(80, "none.onnx"))[0][1].endswith("error")
    assert ("32", "ok") in STYLED.findall(on_a_terminal(80, *verify))
    styled = STYLED.findall(on_a_terminal(80, BERT, "--dry-run", "--no-check", "--keep", "op=MatMul"))
    assert {color for color, _ in styled} == {"33"}
    assert [word for _, word in styled] == ["to do", "not checked on data"]


@needs_a_terminal
def test_no_color_is_inside_the_name_of_a_file_or_op(folder: Path) -> None:
    proto = needy(layers=2)
    for node, name in zip(proto.graph.node, ("float16", "added", "error", "ok", "float32", "failed"), strict=False):
        node.name = name
    onnx.save(proto, "lowered.float16.onnx")
    screen = on_a_terminal(200, "lowered.float16.onnx", "--dry-run", "--no-check", "-v")
    assert {word for _, word in STYLED.findall(screen)} == {"not checked on data"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "colored"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_environment_variables_turn_colors_on_and_off(
    environ: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environ).items():
        monkeypatch.setenv(name, value)
    assert terminal.colored(Terminal()) == colored


# -- words --------------------------------------------------------------------------------------------------


def test_a_finding_states_the_event_its_meaning_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        remarked("fused", "2 ops")
        == "2 ops · fewer kernels, same results up to rounding · pass --fuse none to keep the ops"
    )
    assert remarked("fused", "what · all the rest", " (and 1 more)") == "what (and 1 more) · all the rest"
    assert remarked("kind_of_tomorrow", "what") == "what"
    terminal.warn([Finding("flushed", "w", "1 of 9 nonzero values become 0")] * 2, quiet=False)
    assert capsys.readouterr().err == (
        "warning: flushed: w: 1 of 9 nonzero values become 0 (and 1 more of this kind) · these weights are lost"
        " · pass --data to see the effect on the outputs\n"
    )


@pytest.mark.parametrize(
    ("start", "whole"), [("{", True), ("[", True), ("|", True), ("::", True), ("next: ", True), ("words ", False)]
)
def test_lines_to_copy_stay_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: str, whole: bool
) -> None:
    monkeypatch.setattr(terminal, "columns", lambda stream: 24)
    line = start + "a line that is longer than the terminal is wide"
    terminal.show(f"a head\n{line}", commands=True)
    head, *lines = capsys.readouterr().out.splitlines()
    assert (head, len(lines) == 1) == ("a head", whole)
    assert " ".join(" ".join(lines).split()) == line


def test_without_a_terminal_a_large_model_prints_a_line_per_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = tmp_path / "small.onnx", tmp_path / "m.onnx"
    small.touch()
    with large.open("wb") as file:
        file.truncate(60_000_000)
    with terminal.progress("verify", small, large, quiet=False) as tick:
        assert tick is not None
    assert capsys.readouterr().err == "verify …\n"
    with terminal.stages("m.onnx", large, quiet=False) as tell:
        assert tell is not None
        for stage, done, total in (("read", 0, 1), ("measure", 0, 2), ("measure", 1, 2), ("write", 0, 10**8)):
            tell(stage, done, total)
        tell("write", 10**7, 10**8)
    assert capsys.readouterr().err.splitlines() == [
        "m.onnx: read …",
        "m.onnx: measure …",
        "m.onnx: measure 1/2 …",
        "m.onnx: write …",
    ]
    with terminal.stages("m.onnx", large, quiet=True) as tell:
        assert tell is None


def test_a_long_stage_repeats_its_line_with_the_elapsed_time(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.5])
    lines = terminal.Lines(lambda: next(clock))
    lines.tell("m.onnx: check", 0, 1)  # at 0
    for _ in range(4):
        lines.beat()  # at 1, 2, 3 and 4
    lines.tell("m.onnx: check", 1, 1)  # unchanged
    lines.tell("m.onnx: write", 0, 1)  # at 5
    lines.tell("m.onnx: write", 1, 1)
    lines.beat()
    assert capsys.readouterr().err.splitlines() == [
        "m.onnx: check …",
        "m.onnx: check … 2 s",
        "m.onnx: check … 4 s",
        "m.onnx: write …",
    ]
