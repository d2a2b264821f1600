"""The summary of a batch: a file with one line of JSON for each model, from which a later run goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from amp_rewrite.errors import ReportError, spelled
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.files.scratch import check_place, write_whole
from amp_rewrite.fleet.outcome import Outcome
from amp_rewrite.fleet.urls import url_of

_LARGEST = 1 << 30  # bytes
_JSONL = (".jsonl", ".ndjson", ".json")


class Summary:
    """A file of outcomes. Each is added when it is known; `complete` puts them into the order of the sources.

    A line that is cut off, by a crash or a full disk, counts as absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Raise ReportError if the summary cannot be written there, and say why."""
        if url := url_of(self.path):
            raise ReportError(f"cannot write a summary to {url}: lines are added to it; name a file of this machine")
        if self.path.suffix.lower() not in _JSONL:
            fact = f"cannot write a summary to {self.path}: it has a line of JSON for each model"
            raise ReportError(f"{fact}; name a .jsonl file")
        check_place(self.path, ReportError)
        if os.path.lexists(self.path) and not (overwrite or resume):
            way = f"go on from it with {spelled('resume', True)}, or replace it with {spelled('overwrite', True)}"
            raise ReportError(f"{self.path} exists; {way}")

    def read(self) -> Mapping[str, Outcome]:
        """Return the outcomes of earlier runs by source, the last of each; none without a file.

        ReportError for a file that is not a summary.
        """
        try:
            with open_regular(self.path) as file:
                content = file.read(_LARGEST + 1)
        except FileNotFoundError:
            return {}
        except OSError as cause:
            raise ReportError(f"cannot read {self.path}: {cause.strerror or cause}; name another summary") from cause
        return self._parsed(content)

    def add(self, outcome: Outcome) -> None:
        """Add a line, in one write."""
        with self._writing(), self.path.open("ab") as file:
            file.write(f"{outcome.to_json()}\n".encode())

    def complete(self, outcomes: Iterable[Outcome]) -> None:
        """Replace the file by one with these outcomes, whole or not at all."""
        with self._writing():
            lines = "".join(f"{outcome.to_json()}\n" for outcome in outcomes)
            write_whole(Path(os.path.realpath(self.path)), lines.encode())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            reason = cause.strerror or cause
            raise ReportError(f"cannot write {self.path}: {reason}; models written so far stay") from cause

    def _parsed(self, content: bytes) -> Mapping[str, Outcome]:
        """Return the outcomes in a summary by source, the last of each. ReportError for another file."""
        lines = content.split(b"\n")
        known: dict[str, Outcome] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                outcome = Outcome.from_json(line.decode())
            except ValueError as error:
                if number == len(lines):  # without its end
                    break
                fact = "is not a line that convert writes"
                raise ReportError(f"{self.path}:{number} {fact} ({error}); name a summary, or another file") from error
            known[outcome.source] = outcome
        return known
