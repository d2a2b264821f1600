"""The summary of a batch: a file with one line of JSON for each model, from which a later run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from amp_rewrite.errors import ReportError, spelled
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.files.scratch import check_place, write_whole
from amp_rewrite.fleet.outcome import Outcome
from amp_rewrite.fleet.remote import read, size_of, write
from amp_rewrite.fleet.urls import name_of, url_of

_LARGEST = 1 << 30  # bytes
_INTERVAL = 30  # seconds between two writes to a store
_JSONL = (".jsonl", ".ndjson", ".json")


class Summary:
    """A file of outcomes. Each is added when it is known; `complete` puts them into the order of the sources.

    A line that is cut off, by a crash or a full disk, counts as absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, path: Path) -> Summary:
        """Return the summary at a path, or in a store."""
        return _InStore(path) if url_of(path) else cls(path)

    def close(self) -> None:
        """Write what is not written yet."""

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Raise ReportError if the summary cannot be written there, and say why."""
        self._check_name()
        check_place(self.path, ReportError)
        self._check_new(os.path.lexists(self.path), replaced=overwrite or resume)

    def _check_name(self) -> None:
        if self.path.suffix.lower() not in _JSONL:
            fact = f"cannot write a summary to {name_of(self.path)}: it has a line of JSON for each model"
            raise ReportError(f"{fact}; name a .jsonl file")

    def _check_new(self, there: bool, *, replaced: bool) -> None:
        if there and not replaced:
            way = f"go on from it with {spelled('resume', True)}, or replace it with {spelled('overwrite', True)}"
            raise ReportError(f"{name_of(self.path)} exists; {way}")

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
        return _parsed(content, name_of(self.path))

    def begin(self, outcomes: Iterable[Outcome]) -> None:
        """Write a file with the outcomes that are known already."""
        self.complete(outcomes)

    def add(self, outcome: Outcome) -> None:
        """Add a line, in one write."""
        with self._writing(), self.path.open("ab") as file:
            file.write(f"{outcome.to_json()}\n".encode())

    def complete(self, outcomes: Iterable[Outcome]) -> None:
        """Replace the file by one with these outcomes, whole or not at all."""
        with self._writing():
            write_whole(Path(os.path.realpath(self.path)), _encoded(outcomes))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            reason = cause.strerror or cause
            raise ReportError(f"cannot write {self.path}: {reason}; models written so far stay") from cause


class _InStore(Summary):
    """A summary in an object store, which cannot append: it is written whole, now and then and at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._known: dict[str, Outcome] = {}
        self._written = time.monotonic()
        self._behind = False

    def check(self, *, overwrite: bool, resume: bool) -> None:
        self._check_name()
        self._check_new(size_of(self.path) is not None, replaced=overwrite or resume)

    def read(self) -> Mapping[str, Outcome]:
        if size_of(self.path) is None:
            return {}
        return _parsed(read(self.path, _LARGEST), name_of(self.path))

    def begin(self, outcomes: Iterable[Outcome]) -> None:
        self._known = {outcome.source: outcome for outcome in outcomes}

    def add(self, outcome: Outcome) -> None:
        self._known[outcome.source] = outcome
        self._behind = True
        if time.monotonic() - self._written > _INTERVAL:
            self.close()

    def close(self) -> None:
        if self._behind:
            self.complete(self._known.values())

    def complete(self, outcomes: Iterable[Outcome]) -> None:
        write(self.path, _encoded(outcomes))
        self._written, self._behind = time.monotonic(), False


def _encoded(outcomes: Iterable[Outcome]) -> bytes:
    return "".join(f"{outcome.to_json()}\n" for outcome in outcomes).encode()


def _parsed(content: bytes, name: str) -> Mapping[str, Outcome]:
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
            raise ReportError(f"{name}:{number} {fact} ({error}); name a summary, or another file") from error
        known[outcome.source] = outcome
    return known
