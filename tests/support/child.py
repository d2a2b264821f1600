"""A separate process for work that may crash or hang; either costs only one request."""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

START_LIMIT = 120.0
"""Seconds until a process must be ready."""


def hush(file: str) -> None:
    """Redirect this process's stdout and stderr to a file, and ignore warnings."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    warnings.simplefilter("ignore")


class Lost(Exception):
    """The process died ("crash") or did not answer ("hang")."""

    def __init__(self, verdict: str, note: str) -> None:
        super().__init__(note)
        self.verdict = verdict
        self.note = note


@dataclass
class Child:
    """A process that answers requests one at a time and is restarted after a crash.

    `target(connection, file)` sends any value once it is ready, then answers requests until it receives None; `file`
    is for its output (`hush`). `limit`: seconds for one answer.
    """

    target: Callable[[Connection, str], None]
    limit: float
    _folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _process: multiprocessing.process.BaseProcess | None = None
    _connection: Connection | None = None

    def ask(self, request: object) -> Any:
        """Return the answer to a request. Raises Lost if there is none."""
        self.start()
        assert self._connection is not None
        self._connection.send(request)
        return self._answer(self.limit)

    def start(self) -> None:
        """Start the process unless it is running."""
        if self._process is None:
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            log = str(Path(self._folder.name) / "stderr")
            self._process = multiprocessing.get_context("spawn").Process(
                target=self.target, args=(theirs, log), daemon=True
            )
            self._process.start()
            theirs.close()
            self._connection = ours
            self.ready(self._answer(START_LIMIT))

    def ready(self, greeting: Any) -> None:
        """Handle the first message of the process."""

    def close(self) -> None:
        """End the process for good."""
        self._stop()
        self._folder.cleanup()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _answer(self, seconds: float) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(seconds):
                self._stop()
                raise Lost("hang", f"no answer in {seconds:g} s")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise Lost("crash", self._last_words()) from None

    def _last_words(self) -> str:
        """Return the exit code and the last line of a process that ended by itself."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode
        log = Path(self._folder.name) / "stderr"
        lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        self._stop()
        return f"exit code {code}: {lines[-1] if lines else 'no output'}"
