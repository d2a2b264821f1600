"""The summary of a batch: a file with one line of JSON for each model, from which a later run goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from amp_rewrite.errors import ReportError, spelled
from amp_rewrite.files.regular import open_regular
from amp_rewrite.files.scratch import write_whole
from amp_rewrite.fleet.outcome import Outcome

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
        path = self.path
        if path.suffix.lower() not in _JSONL:
            raise ReportError(
                f"cannot write a summary to {path}: it has a line of JSON for each model; name a .jsonl file"
            )
        if path.is_dir():
            raise ReportError(f"cannot write {path}: it is a folder; name a file")
        if not path.parent.is_dir():
            raise ReportError(f"cannot write {path}: the folder {path.parent} does not exist; make it first")
        if os.path.lexists(path) and not (overwrite or resume):
            way = f"go on from it with {spelled('resume', True)}, or replace it with {spelled('overwrite', True)}"
            raise ReportError(f"{path} exists; {way}")

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

    def begin(self, outcomes: Iterable[Outcome]) -> None:
        """Write a file with the outcomes that are known already."""
        self.complete(outcomes)

    def add(self, outcome: Outcome) -> None:
        """Add a line, in one write."""
        try:
            with self.path.open("ab") as file:
                file.write(f"{outcome.to_json()}\n".encode())
        except OSError as cause:
            raise ReportError(
                f"cannot write {self.path}: {cause.strerror or cause}; models written so far stay"
            ) from cause

    def complete(self, outcomes: Iterable[Outcome]) -> None:
        """Replace the file by one with these outcomes, whole or not at all."""
        content = "".join(f"{outcome.to_json()}\n" for outcome in outcomes).encode()
        try:
            write_whole(Path(os.path.realpath(self.path)), content)
        except OSError as cause:
            raise ReportError(
                f"cannot write {self.path}: {cause.strerror or cause}; models written so far stay"
            ) from cause
