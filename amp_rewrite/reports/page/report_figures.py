"""The figures of a report, with facts from its model if it is available."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.page.graph import graph
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.page.summary_cards import summary_cards
from amp_rewrite.reports.rows import ReportData

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View


@gc_paused()
def report_figures(
    report: ReportData, view: View | None = None, errors: Mapping[int, float] | None = None
) -> tuple[Figure, ...]:
    """Return summary and graph of a report; with a view of its model, also modules and work.

    `errors`: share of the error by row, as `graph` takes it.
    """
    if view is None:
        return summary_cards(report), graph(report, errors=errors)
    from amp_rewrite.reports.page.facts import RowFacts  # late: a report alone is drawn without onnx

    facts = RowFacts(view, report)
    return summary_cards(report, facts.work), graph(report, facts, errors)
