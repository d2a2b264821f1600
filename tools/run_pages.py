"""Run the commands and Python code on the pages of docs/, and compare the output: `python tools/run_pages.py [PAGE …]`.

Each page runs from start to end in a separate folder, in one Python namespace. Comments mark special blocks:

    <!-- not run: REASON -->     the next block cannot run here; the site shows the reason
    <!-- needs: torch -->        the next block runs only with these modules; without them, the setup replaces it
    <!-- setup … -->             commands ("$ …") and Python (">>> …") that prepare the page, hidden on the site

A command's output follows it: a line "…" matches any lines, and "…" at the end of a line matches the rest of the line.
The network is blocked, and a block must end within LIMIT seconds. Commands only run in `console` blocks.
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
"""Pages written by tools; separate tests cover their contents."""
BLOCK = re.compile(
    r"^<!-- (?P<mark>not run|needs): (?P<why>.*?) -->$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^```(?P<language>console|python)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FENCE = re.compile(r"^(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)")
RUN = ("console", "python")
SHOWN = ("", "text", "toml", "yaml", "json", "js")
"""Languages of blocks that run or are only shown. Others, such as "bash", would look as if they ran."""
LIMIT = 300
"""Time limit of a block, in seconds."""
COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
SHELL = re.compile(r"[|<>&;]|\$\(")
COMMENT = re.compile(r"\s{2,}# .*$")


class PageError(Exception):
    """An error for a block that fails, or prints different output from the page."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page: its kind ("console", "python" or "setup"), its text, and its line."""

    kind: str
    text: str
    line: int
    unrun: str = ""
    needs: str = ""


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page to run, or to skip for a given reason."""
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
    """Raise PageError, with the line, for a block that does not run and has no reason."""
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
            raise PageError(f"{block.line}: a block of commands begins with '$ '; text before a command does not run")
    for match in BLOCK.finditer(text):
        if match["mark"] and not match["why"].strip():
            line = text.count("\n", 0, match.start()) + 1
            raise PageError(f"{line}: the mark '{match['mark']}' gives no reason")


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise PageError if the body takes longer. This only works in the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def timed_out(*_: object) -> None:
        raise PageError(f"the block did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, timed_out)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


LOCAL_HOSTS = (None, "", "localhost", "127.0.0.1", "::1")
DEAD_PROXY = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
"""A proxy without a server, which blocks the network for shell commands."""


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Raise PageError if Python connects to another machine."""
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def checked_resolve(host: Any, *more: Any, **words: Any) -> Any:
        if host not in LOCAL_HOSTS:
            raise PageError(f"asks {host} on the network, but pages are built offline")
        return resolve(host, *more, **words)

    def checked_connect(connection: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in LOCAL_HOSTS:
            raise PageError(f"asks {address[0]} on the network, but pages are built offline")
        connect(connection, address)

    socket.getaddrinfo, socket.socket.connect = checked_resolve, checked_connect  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        socket.getaddrinfo, socket.socket.connect = resolve, connect  # type: ignore[method-assign]


def pages() -> list[Path]:
    """Return the hand-written pages of docs/, and the site's other pages."""
    docs = ROOT / "docs"
    generated = {path for pattern in GENERATED for path in docs.glob(pattern)}
    written = [path for path in sorted(docs.rglob("*.md")) if path not in generated]
    return written + [ROOT / name for name in ("SKILL.md", "CONTRIBUTING.md", "benchmarks/README.md")]


def matches(expected: str, printed: str) -> bool:
    """Return True if the output matches the page."""
    spelled = [
        "(?:.*\n)*?" if line == "…" else f"{re.escape(line.removesuffix('…'))}{'.*' if line.endswith('…') else ''}\n"
        for line in expected.splitlines()
    ]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    return not expected.strip() or re.fullmatch("".join(spelled), plain.rstrip("\n") + "\n") is not None


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Work in an empty folder, without the user's settings and cache."""
    before, environment, state = Path.cwd(), dict(os.environ), policies.state
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-page-") as directory:
        os.chdir(directory)
        for name in [name for name in os.environ if name.startswith("AMP_REWRITE")]:
            del os.environ[name]
        os.environ["XDG_CACHE_HOME"] = str(Path(directory) / ".cache")
        policies.state = policies.ProcessSettings()
        try:
            yield Path(directory)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
            policies.state = state


def run(page: Path, *, light: bool = False) -> tuple[int, int]:
    """Run a page; return how many blocks ran and how many were skipped. Raise PageError for the first failure.

    `light`: skip the blocks that need other packages, since they take long to import.
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
        return  # the page's setup replaces it
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
                raise PageError(f"a line of setup must start with '$ ' or '>>> ', unlike {line!r}")
    else:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block.text, "block", "exec", dont_inherit=True), names)


def _command(command: str, expected: str, names: dict[str, Any]) -> None:
    """Run a console command: `amp-rewrite`, `cp` and `python -c` in this process, others in a shell."""
    command = COMMENT.sub("", command)
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
        _check_output(command, expected, "" if file else done.stdout, done.exit_code, done.output)
    elif words[0] == "cp":
        for name in words[1:-1]:
            shutil.copy(Path(name) if Path(name).exists() else ROOT / name, words[-1])
    elif words[:2] == ["python", "-c"]:
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            exec(compile(words[2], "command", "exec", dont_inherit=True), names)
        _check_output(command, expected, printed.getvalue(), 0, "")
    else:
        _shell(command, expected)


def _shell(command: str, expected: str) -> None:
    """Run a command in bash, with this process's `amp-rewrite` and `python`."""
    python = shlex.quote(sys.executable)
    own = f'amp-rewrite() {{ {python} -m amp_rewrite "$@"; }}; python() {{ {python} "$@"; }}'
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    words = ["bash", "-c", f"{own}; set -o pipefail; {command}"]
    environment = os.environ | DEAD_PROXY | {"PYTHONPATH": str(ROOT), "PATH": path}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env=environment, start_new_session=True, **pipes) as running:
        try:
            printed, errors = running.communicate()
        finally:  # including background processes, and everything after a timeout
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    _check_output(command, expected, printed, running.returncode, printed + errors)


def _check_output(command: str, expected: str, printed: str, code: int, everything: str) -> None:
    if code not in ((0, 1) if "amp-rewrite" in command else (0,)):  # for amp-rewrite, 1 is a finding
        raise PageError(f"`{command}` ends with exit code {code}: {everything.strip()}")
    if not matches(expected, printed):
        raise PageError(f"`{command}` prints different output from the page:\n{printed}")


def main() -> None:
    """Run pages, and print the time for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages to run (default: all pages of the site)")
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
            print(f"{time.monotonic() - before:5.1f} s  {_shown(page)}: {ran} run, {unrun} skipped")
    print(f"{time.monotonic() - start:5.1f} s  {total} blocks ran, {left} skipped")
    if failed:
        sys.exit(f"error: {failed} page{'s' * (failed > 1)} failed")


if __name__ == "__main__":
    main()
