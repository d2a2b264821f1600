"""Completion in real shells: a line is typed, and Tab completes it."""

import os
import pty
import re
import select
import shlex
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amp_rewrite.cli.group import COMMANDS
from support.paths import ROOT

SETUP = {
    "bash": "bind 'set bell-style none'; eval \"$(amp-rewrite completion bash)\"",
    "zsh": 'autoload -U compinit; compinit -u -D; unsetopt beep; eval "$(amp-rewrite completion zsh)"',
}
START = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
TYPED = {
    "calib": "calibrate",
    "model": "model.onnx",
    "--ove": "--overwrite",
    "convert --to b": "convert --to bfloat16",
    "explain Einsu": "explain Einsum",
    "--data bat": "--data batches.npz",
    "verify model.onnx su": "verify model.onnx sub",
}
"""The text typed after the program's name, and the line after Tab."""


FISH = """
amp-rewrite completion fish | source
for line in %s
    complete -C "amp-rewrite $line" | head -n 1
end
"""
"""Prints the best candidate for each line; fish lists other files after those with the suffix."""


def environment(folder: Path) -> dict[str, str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(folder), "TERM": "dumb", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}


class Shell:
    """An interactive shell on a pseudo-terminal."""

    def __init__(self, name: str, folder: Path) -> None:
        self.ours, theirs = pty.openpty()
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        environ = environment(folder) | {"PS1": "$ "}
        self.process = subprocess.Popen(START[name], cwd=folder, env=environ, start_new_session=True, **streams)
        os.close(theirs)

    def send(self, keys: str, until: str) -> str:
        """Type keys, wait until the screen matches an expression, and return its first group."""
        os.write(self.ours, keys.encode())
        seen, end = "", time.monotonic() + 30
        while (match := re.search(until, seen)) is None:
            assert time.monotonic() < end, seen
            if select.select([self.ours], [], [], 0.2)[0]:
                seen += os.read(self.ours, 1 << 16).decode(errors="replace")
        return match[1]

    def completed(self, typed: str) -> str:
        """Return the completed line after typing text after the program's name; it is printed, not run."""
        return self.send(f"amp-rewrite {typed}\t\x01echo '<'\x20\x05 '>'\n", r"\n< amp-rewrite (.*) >\r").rstrip(" /")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shells")
    (folder / "bin").mkdir()
    program = folder / "bin" / "amp-rewrite"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m amp_rewrite "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "sub").mkdir()
    for name in ("model.onnx", "sub/inner.onnx", "sub/notes.txt", "batches.npz", "my model.onnx"):
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("name", START)
def test_tab_completes_the_line_in_a_real_shell(name: str, folder: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    shell = Shell(name, folder)
    try:
        shell.send(f"{SETUP[name]}; echo re''ady\n", r"\n(ready)\r")
        assert {typed: shell.completed(typed) for typed in TYPED} == TYPED
    finally:
        shell.process.kill()
        shell.process.wait()
        os.close(shell.ours)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_the_last_word(folder: Path) -> None:
    program = FISH % " ".join(f"'{line}'" for line in TYPED)
    done = subprocess.run(
        ["fish", "--no-config", "-c", program], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    candidates = [line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines()]
    assert candidates == [line.split(" ")[-1] for line in TYPED.values()], done.stderr


def completions(*words: str) -> list[str]:
    """Return a shell's candidates for the last word."""
    environ = {
        **os.environ,
        "COMP_WORDS": shlex.join(["amp-rewrite", *words]),
        "COMP_CWORD": str(len(words)),
        "_AMP_REWRITE_COMPLETE": "bash_complete",
    }
    done = subprocess.run([sys.executable, "-m", "amp_rewrite"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split(",", 1)[1] for line in done.stdout.splitlines()]


def test_the_first_word_may_be_a_command_a_model_or_an_option() -> None:
    assert completions("") == [*COMMANDS]
    assert {"--to", "--keep", "--version", "--set"} <= set(completions("-"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("convert", "my model.onnx", "--set", "s"), ["safety=", "shift=", "steps="]),
        (("verify", "a.onnx", "b"), ["b"]),
        (("train-step", "m.onnx", "--loss-scale", "d"), ["dynamic"]),
        (("explain", "mask_f"), ["mask_fill"]),
        (("no-such-command", "--to", "fl"), ["float16"]),
    ],
)
def test_values_of_options_and_arguments_are_candidates(line: tuple[str, ...], words: list[str]) -> None:
    assert completions(*line) == words
