"""Reports from any source: a report, its file, the result of a conversion, or a model to inventory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from amp_rewrite.errors import ReportError
from amp_rewrite.files.disk import read_regular
from amp_rewrite.reports.report import MAX_CHARACTERS, Report
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.files.model import ModelSource
    from amp_rewrite.ir.view import View

ReportSource: TypeAlias = "Report | ModelSource"
"""Sources accepted by `report_in`."""


def is_report(source: object) -> bool:
    """True if the source is a path with the suffix of a report."""
    return isinstance(source, (str, os.PathLike)) and Path(source).suffix == ".json"


def report_in(source: ReportSource) -> Report:
    """Return the report in a source, or the inventory of a model."""
    return report_and_view(source)[0]


def report_and_view(source: ReportSource) -> tuple[Report, View | None]:
    """Return a report and the view of the reported model; the view is None for a report in a file."""
    if isinstance(report := getattr(source, "report", source), Report):
        return report, getattr(source, "view", None)
    if isinstance(source, (str, os.PathLike)) and is_report(source):
        try:
            return Report.from_json(read_regular(Path(source), MAX_CHARACTERS), str(source)), None
        except OSError as error:
            raise ReportError(f"cannot read {source}: {error.strerror}; name a model or a JSON report") from error
    from amp_rewrite.files.model import Model  # late: comparing two reports does not need onnx
    from amp_rewrite.reports.report_builder import inventory_view, report_of

    model = Model.load(source)
    view = inventory_view(model)
    return report_of(view, name=model.path.name if model.path else None, tool=VERSION), view
