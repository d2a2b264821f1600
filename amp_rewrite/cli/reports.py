"""Reports as commands read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.errors import ReportError
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.reports.report import Report


def is_report(file: Path) -> bool:
    """True if a file is a report by its name, or a pipe, as in `diff <(git show main:report.json) report.json`."""
    return file.suffix == ".json" or file.is_fifo()


def report_in(file: Path) -> Report:
    """Return the report in a file, or the inventory of a model."""
    if is_report(file):
        from amp_rewrite.reports.report import Report

        try:
            return Report.from_json(_content(file), str(file))
        except OSError as error:
            raise ReportError(f"cannot read {file}: {error.strerror}; name a model or a JSON report") from error
    from amp_rewrite.files.model import Model
    from amp_rewrite.reports.report_builder import inventory

    return inventory(Model.load(file), name=file.name, tool=VERSION)


def _content(file: Path) -> bytes:
    """Return the bytes of a report, one more than a report may have at most."""
    from amp_rewrite.reports.report import MAX_CHARACTERS

    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise ReportError(f"cannot read {file}: it is not a regular file; name a model or a JSON report")
        if status.st_size > MAX_CHARACTERS:
            raise ReportError(f"{file}: larger than {MAX_CHARACTERS >> 20} MiB, so not a report of this tool")
        return stream.read(MAX_CHARACTERS + 1)
