"""`amp-rewrite diff`: the differences between two models or reports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from amp_rewrite.cli import parameters
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.page import check_report, present


@parameters.command(
    *parameters.PAIR,
    parameters.ROWS["fail_on"],
    parameters.form("text", "json", "markdown", "github", says="github: annotations of a workflow."),
    parameters.verbose,
    parameters.config,
    *parameters.REPORT,
)
def diff(a: Path, b: Path, form: str, verbose: bool, report_file: Path | None, **given: Any) -> int:
    """Print how B differs from A; exit with 1 if it does. Both are models or JSON reports.

    On a terminal this is a summary by type; -v names each op.
    """
    from amp_rewrite.reports.diff import diff

    check_report(report_file, overwrite=given.pop("overwrite"), read=(a, b))
    settings = parameters.in_force(given)
    delta = diff(a, b)
    failed = delta.fails(settings.fail_on)
    brief = sys.stdout.isatty() and not verbose
    text = delta.to(form, settings.fail_on, verbose=False if brief else verbose or None)
    present(delta, text, report_file, as_json=form == "json", commands=form == "github")
    return FINDING if failed else 0
