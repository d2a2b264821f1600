"""`amp-rewrite gate`: models compared with those of a commit, and with what is expected of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.committed import commit_exists, committed
from amp_rewrite.cli.group import FINDING, USAGE
from amp_rewrite.cli.page import write_file
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.settings.option import OUTPUT

if TYPE_CHECKING:
    from amp_rewrite.reports.delta import Delta
    from amp_rewrite.reports.expect import CheckedExpectation, Expectation

_HEAD = "HEAD"


@dataclass(frozen=True)
class _GatedFile:
    """A file, its difference from the commit (None: it is new there), and the expectations that it fails."""

    file: Path
    delta: Delta | None
    failed: tuple[CheckedExpectation, ...]

    def text(self, form: str, fail_on: Collection[str], *, verbose: bool = False) -> str:
        """Return it for a terminal, for a workflow of GitHub, or as Markdown. `verbose`: a terminal gets each op."""
        new = "new, nothing to compare it with\n" if self.delta is None else ""
        if form == "github":
            marks = "".join(f"::error::{self.file}: expected {outcome}\n" for outcome in self.failed)
            told = f"::notice::{self.file}: {new}" if self.delta is None else self.delta.to(form, fail_on)
            return f"::group::{self.file}\n{told}{marks}::endgroup::\n"
        body = new or (self.delta.to(form, verbose=verbose) if self.delta else "")
        if form == "markdown":
            lines = "".join(f"- **failed**: {outcome}\n" for outcome in self.failed)
            return f"### {self.file}\n\n{body}\n{lines}\n"
        return f"{self.file}: {body}" + "".join(f"  failed  {outcome}\n" for outcome in self.failed)


@parameters.command(
    click.argument("files", metavar="FILE...", nargs=-1, required=True, type=parameters.FILE),
    parameters.option("--base", "REF", "The commit to compare with.", default=_HEAD, show_default=True),
    parameters.ROWS["fail_on"],
    parameters.option("--expect", "TEXT", "Exit with 1 unless this holds for each FILE; repeatable.", multiple=True),
    parameters.form("text", "github", says="github: annotations of a workflow."),
    parameters.option(
        "--summary", "FILE", "Append the output as Markdown to a file.", OUTPUT, type=parameters.FILE_OUT
    ),
    parameters.option(
        "--pages", "FOLDER", "Draw each FILE that differs on an .html page in FOLDER.", OUTPUT, type=parameters.FILE_OUT
    ),
    parameters.verbose,
    parameters.config,
)
def gate(
    files: tuple[Path, ...],
    base: str,
    expect: tuple[str, ...],
    form: str,
    summary: Path | None,
    pages: Path | None,
    verbose: bool,
    **given: Any,
) -> int:
    """Compare each FILE with the same file in a commit of git; exit with 1 if one differs.

    A FILE is a model or a JSON report. If the commit lacks it, only --expect checks it. If it cannot be read, the
    others are still compared, and the exit code is 2.
    """
    from amp_rewrite.reports.expect import Expectation

    fail_on = parameters.in_force(given).fail_on
    expectations = [Expectation.parse(text) for text in expect]
    known = commit_exists(base, files[0])
    if not known and base != _HEAD:  # a repository without a commit has no HEAD: all files are new
        raise click.UsageError(
            f"--base {base} does not name a commit here; fetch it (git fetch origin {base}), or name another"
        )
    worst = 0
    for file in files:
        try:
            checked = _check(file, base if known else None, expectations)
        except AmpRewriteError as error:
            named = str(error) if str(file) in str(error) else f"{file}: {error}"
            terminal.talk(f"::error::{named}" if form == "github" else f"error: {named}", quiet=False)
            worst = USAGE
            continue
        terminal.show(checked.text(form, fail_on, verbose=verbose), commands=form == "github")
        if summary is not None:
            before = summary.read_text("utf-8") if summary.is_file() else ""
            write_file(summary, before + checked.text("markdown", fail_on), "the files were compared")
        if checked.delta is not None and checked.delta.differs and pages is not None:
            page = pages / f"{file.as_posix().strip('./').replace('/', '_')}.html"
            pages.mkdir(exist_ok=True)
            write_file(page, checked.delta.page().to_html(), "the files were compared")
        if checked.failed or (checked.delta is not None and checked.delta.fails(fail_on)):
            worst = max(worst, FINDING)
    return worst


def _check(file: Path, ref: str | None, expectations: Collection[Expectation]) -> _GatedFile:
    from amp_rewrite.reports.diff import diff
    from amp_rewrite.reports.sources import report_in

    with TemporaryDirectory(prefix="amp-rewrite-") as folder:
        before = committed(file, ref, Path(folder)) if ref is not None else None
        report = report_in(file)
        delta = diff(before, file) if before is not None else None
    outcomes = [expectation.outcome(report) for expectation in expectations]
    return _GatedFile(file, delta, tuple(outcome for outcome in outcomes if not outcome.met))
