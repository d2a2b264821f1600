"""`amp-rewrite gate`: compare models with those of a commit, and with expectations."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import write_file
from amp_rewrite.cli.group import ERROR, FINDING
from amp_rewrite.errors import AmpRewriteError, MachineError, ReportError, one_line
from amp_rewrite.files.store import data_files
from amp_rewrite.reports.delta import Delta
from amp_rewrite.reports.diff import diff
from amp_rewrite.reports.expect import CheckedExpectation, Expectation
from amp_rewrite.reports.json_records import load, record
from amp_rewrite.reports.report import MAX_CHARACTERS, Report
from amp_rewrite.reports.sources import report_in

_HEAD = "HEAD"


@dataclass(frozen=True)
class _GatedFile:
    """A file with its report, its difference from the commit (None for a new file), and its failed expectations.

    `differs`: True if the difference is a failure. `accepted`: accepted failures, as text.
    """

    file: Path
    report: Report
    delta: Delta | None
    differs: bool
    failed: tuple[CheckedExpectation, ...]
    accepted: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        return self.differs or bool(self.failed)

    def accept(self, base: str) -> _GatedFile:
        """Record the failures as accepted in a file next to this one, and return the new state."""
        words = self.delta.summary() if self.delta is not None and self.differs else ""
        expect = tuple(outcome.expected for outcome in self.failed)
        Acceptance(base, words, expect, self.report).write(self.file)
        return replace(self, differs=False, failed=(), accepted=(*filter(None, (words,)), *map(str, self.failed)))

    def text(self, fail_on: Collection[str], *, github: bool, verbose: bool) -> str:
        """Return the text for a terminal or a GitHub workflow. `verbose`: print each op on a terminal."""
        failed, accepted = ("  failed  ", "  accepted  ")
        if github:
            failed, accepted = f"::error::{self.file}: expected ", f"::notice::{self.file}: accepted: "
        lines = "".join(f"{failed}{outcome}\n" for outcome in self.failed)
        lines += "".join(f"{accepted}{words} ({place_of(self.file).name})\n" for words in self.accepted)
        new = "new, nothing to compare it with\n"
        if not github:
            return f"{self.file}: {new if self.delta is None else self.delta.to('text', verbose=verbose)}{lines}"
        body = f"::notice::{self.file}: {new}"
        if self.delta is not None:
            body = self.delta.to("github", fail_on if self.differs else None)
        return f"::group::{self.file}\n{body}{lines}::endgroup::\n"


@parameters.command(
    click.argument("files", metavar="FILE...", nargs=-1, required=True, type=parameters.FILE),
    parameters.option("--base", "REF", "The commit to compare with.", default=_HEAD, show_default=True),
    *parameters.reads("fail_on"),
    parameters.option("--expect", "TEXT", "Exit with 1 unless this holds for each FILE; repeatable.", multiple=True),
    parameters.flag("--accept", "Record the failures in FILE.accepted.json as accepted."),
    parameters.form("text", "github", text="Output format; github: workflow annotations."),
    parameters.option(
        "--pages", "FOLDER", "Write an .html page to FOLDER for each FILE that differs.", type=parameters.FILE_OUT
    ),
    parameters.verbose,
)
def gate(
    files: tuple[Path, ...],
    base: str,
    expect: tuple[str, ...],
    accept: bool,
    form: str,
    pages: Path | None,
    verbose: bool,
    **options: Any,
) -> int:
    """Compare each FILE with a commit; exit with 1 if one differs.

    A FILE is a model or a JSON report in git. If the commit does not contain it, only --expect checks it. If a FILE
    cannot be read, the others are still compared, and the exit code is 2. For an intended change, --accept writes
    FILE.accepted.json; commit it with FILE. The differences are accepted until the base contains that file.
    """
    fail_on, github = parameters.take_settings(options).fail_on, form == "github"
    expectations = [Expectation.parse(text) for text in expect]
    if folder := next((file for file in files if file.is_dir()), None):
        raise click.UsageError(f"{folder} is a folder; name the files in it, as in {folder / '*.onnx'}")
    _git(files[0], "rev-parse", "--git-dir")  # an error outside of a repository
    found = _git(files[0], "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}", check=False)
    commit = found.stdout.decode().strip() if found.returncode == 0 else None
    if commit is None and base != _HEAD:  # a new repository has no HEAD, and all files are new
        raise click.UsageError(
            f"--base {base} does not name a commit here; fetch it (git fetch origin {base}), or name another commit"
        )
    worst, unaccepted = 0, list[Path]()
    for file in files:
        try:
            checked = _check(file, commit, expectations, fail_on)
            if accept and checked.fails:
                checked = checked.accept(commit or "")
        except AmpRewriteError as error:
            named = str(error) if str(file) in str(error) else f"{file}: {error}"
            terminal.talk(f"::error::{named}" if github else f"error: {named}", quiet=False)
            worst = ERROR
            continue
        terminal.show(checked.text(fail_on, github=github, verbose=verbose), commands=github)
        if checked.delta is not None and checked.delta.differs and pages is not None:
            page = pages / f"{file.as_posix().strip('./').replace('/', '_')}.html"
            pages.mkdir(exist_ok=True)
            write_file(page, checked.delta.to_html(), "the files were compared")
        if checked.fails:
            worst = max(worst, FINDING)
            unaccepted.append(file)
    if unaccepted:
        words = ["amp-rewrite", "gate", "--accept", *(("--base", base) if base != _HEAD else ())]
        words += [word for text in expect for word in ("--expect", text)]
        command = shlex.join([*words, "--", *map(str, unaccepted)])
        hint = f"if this change is intended, run {command} and commit {place_of(unaccepted[0])}"
        hint += " and the others" if len(unaccepted) > 1 else ""
        terminal.show(f"::notice::{hint}\n" if github else f"{hint}\n", commands=github)
    return worst


def _check(file: Path, ref: str | None, expected: Collection[Expectation], fail_on: Collection[str]) -> _GatedFile:
    place = place_of(file)
    with TemporaryDirectory(prefix="amp-rewrite-") as folder:
        before = committed(file, ref, Path(folder)) if ref is not None else None
        report = report_in(file)
        delta = diff(before, file) if before is not None else None
        old = committed(place, ref, Path(folder)) if ref is not None and place.is_file() else None
        merged = old is not None and old.read_bytes() == place.read_bytes()  # then it does not cover later changes
    outcomes = [expectation.outcome(report) for expectation in expected]
    failed = tuple(outcome for outcome in outcomes if not outcome.met)
    differs = delta is not None and delta.fails(fail_on)
    accepted = Acceptance.read(file) if differs or failed else None
    words: list[str] = []
    if differs and accepted and not merged and accepted.covers(report, fail_on):
        differs = False
        words.append(delta.summary() if delta is not None else "")
    if failed and accepted and accepted.covers(report):
        words.extend(str(outcome) for outcome in failed if outcome.expected in accepted.expect)
        failed = tuple(outcome for outcome in failed if outcome.expected not in accepted.expect)
    return _GatedFile(file, report, delta, differs, failed, tuple(words))


# -- acceptances ---------------------------------------------------------------------------------------------


_SUFFIX = ".accepted.json"


def place_of(file: Path) -> Path:
    return file.with_name(file.name + _SUFFIX)


@dataclass(frozen=True)
class Acceptance:
    """The accepted state of a file: its differences from a commit as text, waived expectations, and its report."""

    base: str
    differences: str
    expect: tuple[str, ...]
    report: Report

    @classmethod
    def read(cls, file: Path) -> Acceptance | None:
        """Return the acceptance next to a file; None if there is none, ReportError if it cannot be read."""
        place = place_of(file)
        if not place.exists():
            return None
        remedy = "delete it, and run `amp-rewrite gate --accept` again"
        try:
            with place.open("rb") as stream:
                content = stream.read(MAX_CHARACTERS + 1)
        except OSError as error:
            raise ReportError(f"cannot read {place}: {error.strerror or error}; {remedy}") from error
        reader = record(cls, {"report": lambda value: Report.from_json(json.dumps(value), str(place))})
        acceptance: Acceptance = load(content, str(place), "a record of `gate --accept`", remedy, ReportError, reader)
        return acceptance

    def write(self, file: Path) -> None:
        """Write the acceptance next to a file, atomically."""
        first = json.dumps({"base": self.base, "differences": self.differences, "expect": self.expect})[:-1]
        text = f'{first},\n"report": {self.report.to_json().rstrip()}\n}}\n'
        write_file(place_of(file), text, "nothing was accepted")

    def covers(self, report: Report, fail_on: Collection[str] = ()) -> bool:
        return not diff(self.report, report).fails(fail_on)


# -- files of a commit ---------------------------------------------------------------------------------------


def committed(file: Path, ref: str, folder: Path) -> Path | None:
    """Write a file's committed version and external data to a folder; None if the commit does not contain the file.

    Git filters run, so a file in Git LFS is the model and not its pointer. External data that is not in the commit is
    omitted.
    """
    copy = folder / file.name
    if not _copy(file, ref, copy):
        return None
    for data in data_files(copy) if copy.suffix != ".json" else ():
        inside = Path(os.path.normpath(data))  # a model may name any path
        if inside.is_relative_to(folder) and inside != copy:
            _copy(file.parent / inside.relative_to(folder), ref, inside)
    return copy


def _copy(file: Path, ref: str, to: Path) -> bool:
    """Write the committed version of a file; return False if the commit does not contain it."""
    top, name = file.parent if file.parent.is_dir() else Path(), f"{ref}:./{file.name}"
    if _git(top, "cat-file", "-e", name, check=False).returncode != 0:
        return False
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as stream:
        _git(top, "cat-file", "--filters", name, into=stream)
    return True


def _git(
    where: Path, *words: str, into: IO[bytes] | None = None, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("git")
    if program is None:
        raise MachineError("git is not installed, but `gate` compares with a commit; install git")
    folder = where if where.is_dir() else where.parent
    command = [program, "-C", str(folder), *words]
    done = subprocess.run(command, stdout=into or subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if check and done.returncode != 0:
        message = one_line(done.stderr.decode(errors="replace"))
        raise ReportError(f"{where}: git {words[0]} failed: {message}; run this in the file's repository")
    return done
