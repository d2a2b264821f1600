"""Accepted changes of precision: a file beside a model holds the report of the state that is meant.

Differences count as accepted until the base of the comparison holds the same file: from then on the state is the base,
and a later change has to be accepted again. An expectation stays accepted for as long as the model does not change.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from amp_rewrite.cli.committed import committed
from amp_rewrite.cli.page import write_file
from amp_rewrite.errors import ReportError
from amp_rewrite.reports import reading
from amp_rewrite.reports.report import MAX_CHARACTERS, Report

if TYPE_CHECKING:
    from amp_rewrite.reports.delta import Delta

_SUFFIX = ".accepted.json"


def place_of(file: Path) -> Path:
    """Return the file that holds what is accepted for a model or report."""
    return file.with_name(file.name + _SUFFIX)


@dataclass(frozen=True)
class Acceptance:
    """The accepted report of a file, and the expectations that it need not meet.

    `differences`: the accepted differences in words. `base`: the commit that they were seen against.
    """

    base: str
    differences: str
    expect: tuple[str, ...]
    report: Report

    @classmethod
    def read(cls, file: Path) -> Acceptance | None:
        """Return what is accepted for a file, None without one. ReportError if it cannot be read."""
        place = place_of(file)
        if not place.exists():
            return None
        remedy = "delete it, and run `amp-rewrite gate --accept` again"
        try:
            with place.open("rb") as stream:
                content = stream.read(MAX_CHARACTERS + 1)
        except OSError as error:
            raise ReportError(f"cannot read {place}: {error.strerror or error}; {remedy}") from error
        held = reading.load(content, str(place), "an acceptance of this tool", remedy, ReportError, json.loads)
        stated = held.get("accepted") if isinstance(held, dict) else None
        texts = [stated.get("base"), stated.get("differences")] if isinstance(stated, dict) else [None]
        expect = stated.get("expect") if isinstance(stated, dict) else None
        if not isinstance(expect, list) or not all(isinstance(text, str) for text in (*texts, *expect)):
            raise ReportError(f"{place}: not an acceptance of this tool; {remedy}")
        report = Report.from_json(json.dumps(held.get("report")), str(place))
        return cls(str(texts[0]), str(texts[1]), tuple(expect), report)

    def write(self, file: Path) -> Path:
        """Write what is accepted for a file, whole or not at all, and return the place."""
        place = place_of(file)
        stated = {"base": self.base, "differences": self.differences, "expect": list(self.expect)}
        text = f'{{\n"accepted": {json.dumps(stated)},\n"report": {self.report.to_json().rstrip()}\n}}\n'
        write_file(place, text, "nothing was accepted")
        return place

    def covers(self, report: Report, fail_on: Collection[str] = ()) -> bool:
        """True if a report differs from the accepted one in no kind that fails."""
        from amp_rewrite.reports.diff import diff  # late: few files have one

        delta: Delta = diff(self.report, report)
        return not delta.fails(fail_on)


def in_commit(file: Path, ref: str | None) -> bool:
    """True if a commit holds the same acceptance of a file."""
    place = place_of(file)
    if ref is None or not place.exists():
        return False
    with TemporaryDirectory(prefix="amp-rewrite-") as folder:
        before = committed(place, ref, Path(folder))
        return before is not None and before.read_bytes() == place.read_bytes()
