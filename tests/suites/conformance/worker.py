"""A process of its own for trials, so that a crash or a hang costs one of them."""

from __future__ import annotations

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

from suites.conformance.case import cases
from suites.conformance.subset import subset
from suites.conformance.trial import MODES, Ground, Outcome, attempt, ground_of

START_LIMIT = 120.0
"""Seconds in which a process must have made its cases."""
TRIAL_LIMIT = 300.0
"""Seconds for one trial; the slowest, which is measured too, takes about thirty."""


def serve(connection: Connection, talk: str) -> None:
    """Answer requests until there are no more; what is written to stderr goes to the file `talk`."""
    descriptor = os.open(talk, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stderr.fileno())
    warnings.simplefilter("ignore")
    connection.send((tuple(cases()), subset(cases())))
    while (request := connection.recv()) is not None:
        key, mode = request
        connection.send(attempt(key, MODES[mode]) if mode else ground_of(key))


class Lost(Exception):
    """The process died ("crash") or did not answer ("hang")."""

    def __init__(self, verdict: str, note: str) -> None:
        super().__init__(note)
        self.verdict = verdict
        self.note = note


@dataclass
class Worker:
    """Trials one after another in another process, which is started anew when one kills it."""

    target: Callable[[Connection, str], None] = serve
    limit: float = TRIAL_LIMIT
    keys: tuple[str, ...] = ()
    """Every case, once the process runs."""
    small: tuple[str, ...] = ()
    """Those of the subset."""
    _folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _process: multiprocessing.process.BaseProcess | None = None
    _connection: Connection | None = None

    def ground(self, key: str) -> Ground:
        """What the float32 model does; one that kills the process is refused."""
        try:
            found = self._ask((key, ""))
        except Lost as lost:
            return Ground(key, "refused", f"{lost.verdict}: {lost.note}")
        assert isinstance(found, Ground)
        return found

    def attempt(self, key: str, mode: str) -> Outcome:
        """What comes of a trial, whatever that does to the process."""
        try:
            found = self._ask((key, mode))
        except Lost as lost:
            return Outcome(key, mode, lost.verdict, note=lost.note)
        assert isinstance(found, Outcome)
        return found

    def start(self) -> None:
        """Have a process that runs and knows its cases."""
        if self._process is None:
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            talk = str(Path(self._folder.name) / "stderr")
            self._process = multiprocessing.get_context("spawn").Process(
                target=self.target, args=(theirs, talk), daemon=True
            )
            self._process.start()
            theirs.close()
            self._connection = ours
            self.keys, self.small = self._answer(START_LIMIT)

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

    def _ask(self, request: tuple[str, str]) -> Any:
        self.start()
        assert self._connection is not None
        self._connection.send(request)
        return self._answer(self.limit)

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
        """The exit code of a process that ended by itself, and the last line that it wrote."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode
        talk = Path(self._folder.name) / "stderr"
        lines = talk.read_text("utf-8", "replace").splitlines() if talk.exists() else []
        talk.unlink(missing_ok=True)
        self._stop()
        return f"exit code {code}: {lines[-1] if lines else 'without a word'}"
