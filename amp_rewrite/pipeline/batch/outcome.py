"""The outcome of one model of many, plain data from a worker, and the summary: a file with a line of JSON for each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from amp_rewrite.errors import Finding, ReportError, spelled
from amp_rewrite.files.disk import check_place, open_regular, url_of, write_whole
from amp_rewrite.reports.json_records import Malformed, decode, record
from amp_rewrite.reports.render import count, size
from amp_rewrite.reports.result import Result

OK, MISSED, FAILED = 0, 1, 2
"""Values of `Outcome.rc`, as exit codes: written; not written, since the tolerance is not met; failed."""


@dataclass(frozen=True, slots=True, repr=False)
class Outcome(Result):
    """One model of many: its source, its target, and the result.

    Attributes:
        source: the file that was read, as it was named.
        target: the file that was written, or would be.
        rc: 0 done, 1 a tolerance that is not met, 2 an error; the exit code of the command is the worst of all.
        key: hash of version, options, and size and time of the files that were read.
        made: size and time of the written files; with `key` they tell whether a written model is still the right one.
        evidence: the fields of `Report.evidence` that say something.
        totals: those of the report.
        findings: those of the report.
        seconds: wall time.
        error: the reason of a failure, in one line.
        finished: True if the written model was there already, from an earlier run.
        unmatched: each pattern without a match in this model, with the error that a conversion of it alone would raise.
        trace: the lines of Python where an error is a bug in this package.

    Example:
        >>> import amp_rewrite
        >>> outcomes = list(amp_rewrite.convert_many(["model.onnx"], out="converted"))
        >>> [outcome.rc for outcome in outcomes]
        [0]
    """

    source: str
    target: str
    rc: int = OK
    key: str = ""
    made: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    error: str = ""
    finished: bool = False
    unmatched: Mapping[str, str] = field(default_factory=dict)
    trace: str = ""

    @property
    def brief(self) -> str:
        """Source and outcome."""
        return f"{self.source}: {self.fate}"

    @property
    def fate(self) -> str:
        """The outcome in a few words."""
        if self.error:
            return self.error
        totals = self.totals
        casts = totals.get("casts_to_low", 0) + totals.get("casts_to_float32", 0)
        lowered = f"{totals.get('compute_lowered', 0)} of {count(totals.get('compute_ops', 0), 'compute op')} lowered"
        sizes = f"{size(totals.get('weights_before', 0))} → {size(totals.get('weights_after', 0))} of weights"
        words = [lowered, count(casts, "Cast"), sizes, f"{self.seconds:.1f} s"]
        if self.findings:
            words.insert(2, count(len(self.findings), "finding"))
        if self.finished:
            words = ["finished before"]
        return ", ".join(words)

    def text(self) -> str:
        """Return source, target and fate of the model."""
        return f"{self.source} → {self.target}\n  {self.fate}\n"

    def to_json(self) -> str:
        """Return one line of JSON, without empty fields."""
        encoded = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("findings", "trace")}
        encoded["findings"] = [asdict(finding) for finding in self.findings]
        encoded["seconds"] = round(self.seconds, 3)
        silent = ("error", "finished", "unmatched", "trace")
        return json.dumps({name: value for name, value in encoded.items() if value or name not in silent})

    @classmethod
    def from_json(cls, line: str) -> Outcome:
        """Return the outcome in a line of `to_json`.

        Raises:
            ValueError: the line is not such JSON.
        """
        try:
            outcome: Outcome = _READER(decode(line))
        except Malformed as error:
            raise ValueError(f"{error.where} {error}") from error
        return outcome


_READER = record(Outcome, needed=("source", "target", "rc"))


# -- the summary -------------------------------------------------------------------------------------


_LARGEST = 1 << 30  # bytes
_JSONL = (".jsonl", ".ndjson", ".json")


class Summary:
    """A file of outcomes. Each is added when it is known; `complete` has one of each in the order of the sources.

    A line that is cut off, by a crash or a full disk, counts as absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Raise ReportError, with the reason, if the summary cannot be written there."""
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
