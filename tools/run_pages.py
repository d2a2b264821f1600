"""Run what the pages of docs/ show, and compare the output: `python tools/run_pages.py [PAGE …]`.

Each page runs from its first line to its last in a folder of its own, with the names of Python kept. Marks:

    <!-- not run: REASON -->     the next block cannot run here; the site shows the reason
    <!-- needs: torch -->        it runs where these modules are; elsewhere the setup must do
    <!-- setup … -->             commands ("$ …") and Python (">>> …") for what the page takes as given

Below a command stands its output: a line of "…" stands for any lines, "…" at the end of a line for its rest.
Nothing reaches the network, and a block ends within LIMIT seconds. Commands stand in blocks of `console` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.train import policy as policies

ROOT = Path(__file__).resolve().parent.parent
GENERATED = (
    "rules/*.md",
    "failures/*.md",
    "reference/api*.md",
    "reference/commands.md",
    "reference/decisions.md",
    "reference/findings.md",
)
"""Pages that tools write: what they show has tests of its own."""
BLOCK = re.compile(
    r"^<!-- (?P<mark>not run|needs): (?P<why>.*?) -->$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^```(?P<language>console|python)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FENCE = re.compile(r"^(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)")
RUN = ("console", "python")
SHOWN = ("", "text", "toml", "yaml", "json", "js")
"""Languages of blocks that run, and of those that are only shown. Others, such as "bash", would look as if they ran."""
LIMIT = 300
"""Seconds that a block may take."""
COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
SHELL = re.compile(r"[|<>&;]|\$\(")
REMARK = re.compile(r"\s{2,}# .*$")


class PageError(Exception):
    """A block that does not run, or prints something else than the page shows."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page: what it is ("console", "python" or "setup"), its text, and its line."""

    kind: str
    text: str
    line: int
    unrun: str = ""
    needs: str = ""


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page that run, or say why they do not."""
    marks: dict[str, str] = {}
    end = 0
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["mark"]:
            marks, end = {match["mark"]: match["why"]}, match.end()
        elif match["setup"] is not None:
            yield Block("setup", match["setup"], line)
        else:
            near = marks if not text[end : match.start()].strip() else {}
            yield Block(match["language"], match["body"], line, near.get("not run", ""), near.get("needs", ""))
            marks = {}


def check_blocks(text: str) -> None:
    """Raise PageError, with the line, for a block that is shown and neither runs nor says why not."""
    fence, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if fence:
            if found and found["fence"].startswith(fence) and not line.strip(" >`~"):
                fence = ""
            continue
        if found is None:
            continue
        fence, first, language = found["fence"], number, found["language"]
        if language not in (*RUN, *SHOWN):
            raise PageError(f"{number}: a block of {language!r} does not run; use console, python or text")
        if language in RUN and line != f"```{language}":
            raise PageError(f"{number}: only a block that begins with '```{language}' at the margin runs")
    if fence:
        raise PageError(f"{first}: the block has no end")
    for block in blocks(text):
        if block.kind == "console" and not block.unrun and not block.text.startswith("$ "):
            raise PageError(f"{block.line}: a block of commands begins with '$ '; what stands before one does not run")
    for match in BLOCK.finditer(text):
        if match["mark"] and not match["why"].strip():
            line = text.count("\n", 0, match.start()) + 1
            raise PageError(f"{line}: the mark '{match['mark']}' gives no reason")


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise PageError if the body takes longer. In the main thread alone, where signals arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise PageError(f"the block did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


HERE = (None, "", "localhost", "127.0.0.1", "::1")
NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
"""A proxy that is not there, for commands of a shell."""


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Raise PageError where Python asks for another machine."""
    ask, connect = socket.getaddrinfo, socket.socket.connect

    def asked(host: Any, *more: Any, **words: Any) -> Any:
        if host not in HERE:
            raise PageError(f"asks {host} on the network, but pages are built offline")
        return ask(host, *more, **words)

    def connected(own: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in HERE:
            raise PageError(f"asks {address[0]} on the network, but pages are built offline")
        connect(own, address)

    socket.getaddrinfo, socket.socket.connect = asked, connected  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        socket.getaddrinfo, socket.socket.connect = ask, connect  # type: ignore[method-assign]


def pages() -> list[Path]:
    """Return the pages of docs/ that people write, and those beside it that the site has."""
    docs = ROOT / "docs"
    generated = {path for pattern in GENERATED for path in docs.glob(pattern)}
    own = [path for path in sorted(docs.rglob("*.md")) if path not in generated]
    return own + [ROOT / name for name in ("SKILL.md", "CONTRIBUTING.md", "benchmarks/README.md")]


def matches(expected: str, printed: str) -> bool:
    """True if an output is as shown."""
    spelled = [
        "(?:.*\n)*?" if line == "…" else f"{re.escape(line.removesuffix('…'))}{'.*' if line.endswith('…') else ''}\n"
        for line in expected.splitlines()
    ]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    return not expected.strip() or re.fullmatch("".join(spelled), plain.rstrip("\n") + "\n") is not None


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Work in an empty folder, without settings and without a cache of anybody."""
    before, environment, state = Path.cwd(), dict(os.environ), policies.state
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-page-") as made:
        os.chdir(made)
        for name in [name for name in os.environ if name.startswith("AMP_REWRITE")]:
            del os.environ[name]
        os.environ["XDG_CACHE_HOME"] = str(Path(made) / ".cache")
        policies.state = policies.ProcessSettings()
        try:
            yield Path(made)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
            policies.state = state


def run(page: Path, *, light: bool = False) -> tuple[int, int]:
    """Run a page; return how many blocks ran, and how many say why they do not. PageError for the first that fails.

    `light`: leave out what needs other packages, for these take long to import.
    """
    names: dict[str, Any] = {"__name__": page.stem, "amp_rewrite": amp_rewrite}
    ran = unrun = 0
    try:
        text = page.read_text("utf-8")
        check_blocks(text)
    except UnicodeDecodeError as error:
        raise PageError(f"{_shown(page)}: is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise PageError(f"{_shown(page)}: cannot be read: {error.strerror}") from error
    except PageError as error:
        raise PageError(f"{_shown(page)}:{error}") from None
    with folder(), offline():
        for block in blocks(text):
            if block.unrun:
                unrun += 1
                continue
            try:
                with limited(LIMIT):
                    _run(block, names, light)
            except PageError as error:
                raise PageError(f"{_shown(page)}:{block.line}: {error}") from None
            except (Exception, SystemExit) as error:
                raise PageError(f"{_shown(page)}:{block.line}: {type(error).__name__}: {error}") from error
            ran += block.kind != "setup"
    return ran, unrun


def _shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def _run(block: Block, names: dict[str, Any], light: bool) -> None:
    if block.needs and (light or any(find_spec(name) is None for name in block.needs.split(", "))):
        return  # the setup of the page stands for it
    if block.kind == "console":
        for command, expected in COMMAND.findall(block.text):
            _command(command.replace("\\\n", " "), expected, names)
    elif block.kind == "setup":
        for line in block.text.splitlines():
            if line.startswith("$ "):
                _command(line.removeprefix("$ "), "", names)
            elif line.startswith(">>> "):
                exec(compile(line.removeprefix(">>> "), "setup", "exec", dont_inherit=True), names)
            elif line.strip():
                raise PageError(f"a line of setup starts with '$ ' or '>>> ', not as {line!r}")
    else:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block.text, "block", "exec", dont_inherit=True), names)


def _command(command: str, expected: str, names: dict[str, Any]) -> None:
    """Run a command of a console: this program, copies and Python in this process, others in a shell."""
    command = REMARK.sub("", command)
    inner, _, file = (
        command.partition(" > ") if re.search(r"^amp-rewrite [^|<;&]* > \S+$", command) else (command, "", "")
    )
    words = shlex.split(inner)
    if SHELL.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", inner)):
        _shell(command, expected)
    elif words[0] == "amp-rewrite":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = CliRunner().invoke(program, words[1:])
        if file:
            Path(file).write_text(done.stdout, "utf-8")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        _judge(command, expected, "" if file else done.stdout, done.exit_code, done.output)
    elif words[0] == "cp":
        for name in words[1:-1]:
            shutil.copy(Path(name) if Path(name).exists() else ROOT / name, words[-1])
    elif words[:2] == ["python", "-c"]:
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            exec(compile(words[2], "command", "exec", dont_inherit=True), names)
        _judge(command, expected, printed.getvalue(), 0, "")
    else:
        _shell(command, expected)


def _shell(command: str, expected: str) -> None:
    """Run a command in bash, where `amp-rewrite` and `python` are those of this process."""
    python = shlex.quote(sys.executable)
    own = f'amp-rewrite() {{ {python} -m amp_rewrite "$@"; }}; python() {{ {python} "$@"; }}'
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    words = ["bash", "-c", f"{own}; set -o pipefail; {command}"]
    environment = os.environ | NOWHERE | {"PYTHONPATH": str(ROOT), "PATH": path}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env=environment, start_new_session=True, **pipes) as running:
        try:
            printed, told = running.communicate()
        finally:  # also what it left running, and all of it after a block that does not end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    _judge(command, expected, printed, running.returncode, printed + told)


def _judge(command: str, expected: str, printed: str, code: int, everything: str) -> None:
    if code not in ((0, 1) if "amp-rewrite" in command else (0,)):  # of ours, 1 is a finding
        raise PageError(f"`{command}` ends with exit code {code}: {everything.strip()}")
    if not matches(expected, printed):
        raise PageError(f"`{command}` prints something else than the page shows:\n{printed}")


def main() -> None:
    """Run pages, and print the time of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="all pages of the site by default")
    failed = total = left = 0
    start = time.monotonic()
    for page in [path.resolve() for path in parser.parse_args().pages] or pages():
        before = time.monotonic()
        try:
            ran, unrun = run(page)
        except PageError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        total, left = total + ran, left + unrun
        if ran + unrun:
            print(f"{time.monotonic() - before:5.1f} s  {_shown(page)}: {ran} run, {unrun} not")
    print(f"{time.monotonic() - start:5.1f} s  {total} blocks ran, {left} say why they do not")
    if failed:
        sys.exit(f"error: {failed} pages do not do what they show")


if __name__ == "__main__":
    main()
