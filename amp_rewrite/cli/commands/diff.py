"""`amp-rewrite diff`: the differences between two models or reports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.page import check_page, encoded, write_page
from amp_rewrite.settings.options import OUTPUT


@parameters.command(
    *parameters.PAIR,
    parameters.ROWS["fail_on"],
    parameters.option(
        "--format form",
        "text|json|markdown|github",
        "Output format; github: annotations of a workflow.",
        OUTPUT,
        type=parameters.Choice(["text", "json", "markdown", "github"]),
        default="text",
        show_default=True,
    ),
    parameters.verbose,
    parameters.config,
    *parameters.PAGE,
)
def diff(a: Path, b: Path, form: str, verbose: bool, html: Path | None, **given: Any) -> int:
    """Print how B differs from A; exit with 1 if it does. Both are models or JSON reports.

    On a terminal this is a summary by type; -v names each op.
    """
    from amp_rewrite.reports.diff import diff

    check_page(html, overwrite=given.pop("overwrite"), read=(a, b))
    settings = parameters.in_force(given)
    delta = diff(a, b)
    failed = delta.fails(settings.fail_on)
    brief = sys.stdout.isatty() and not verbose
    page = delta.page() if html else None
    text = delta.to(form, settings.fail_on, verbose=False if brief else verbose or None)
    terminal.show(encoded(text, page) if form == "json" else text, commands=form == "github")
    write_page(page, html, quiet=False)
    return FINDING if failed else 0
