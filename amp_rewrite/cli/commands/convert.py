"""`amp-rewrite convert`: one conversion, guarded or repaired by data where options ask for that; or many of them."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import MeasuringOptions, without_drawing
from amp_rewrite.cli.files import SUFFIXES, as_folder, beside, check_report, is_page, is_stdout, write_file
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.parameters import option
from amp_rewrite.errors import ModelError, count, option_of
from amp_rewrite.files.foreign import foreign
from amp_rewrite.fleet.stores import name_of, url_of
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.settings.option import OUTPUT

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from amp_rewrite.fleet.batch import Batch, BatchSettings
    from amp_rewrite.fleet.outcome import Outcome
    from amp_rewrite.pipeline.conversion import Converted
    from amp_rewrite.pipeline.repaired import Repaired
    from amp_rewrite.reports.page.page import Page
    from amp_rewrite.settings.request import Request

_OUTCOME = (
    parameters.ROWS["overwrite"],
    parameters.flag("--dry-run", "Print the outcome; write no model.", OUTPUT),
    option(
        "--report report_file",
        "FILE",
        "Also write the report: .json or .html, or .jsonl for several models.",
        OUTPUT,
        type=parameters.FILE_OUT,
    ),
    parameters.as_json,
    parameters.quiet("errors and what --json or --dry-run asks for"),
    parameters.verbose,
)
_KEYS = (*parameters.CONVERSION_KEYS, *parameters.MEASURING_KEYS, "external_data", "shard_size", *parameters.BATCH_KEYS)


@parameters.command(
    parameters.model,
    click.argument("out", metavar="[OUT]", nargs=-1, type=parameters.MODELS_OUT),
    option(
        "-o --output",
        "OUT",
        "The model to write, or a folder; - is stdout.  [default: MODEL-stem.float16.onnx]",
        OUTPUT,
        type=parameters.MODELS_OUT,
    ),
    *parameters.CONVERSION,
    *parameters.MEASURING,
    *_OUTCOME,
    *parameters.BATCH,
    parameters.config,
    parameters.keys(*_KEYS),
)
@gc_paused(last=True)
def convert(
    model: Path,
    out: tuple[Path, ...],
    output: Path | None,
    dry_run: bool,
    report_file: Path | None,
    **given: Any,
) -> int:
    """Convert MODEL and print a report with reasons.

    The result is for GPUs: on a CPU half precision is slower, mostly float32.

    A PATTERN chooses ops: a glob on the node name, or terms such as op=MatMul,feeds=Softmax or scope=encoder/* or
    name~=REGEX. Options with a PATTERN, a GLOB or a list may be repeated. MODEL may be - (stdin) or a folder.
    """
    words = {word: given.pop(word) for word in ("jobs", "resume")}
    if is_batch(model, out, output):
        words |= {"dry_run": dry_run, "report_file": report_file, "talk": _talk(given)}
        return convert_batch((model, *out), output, words, given)
    unused = next((word for word in (*words, *parameters.BATCH_KEYS) if (words | given)[word]), None)
    if unused is not None:
        raise click.UsageError(f"{option_of(unused)} is for several models; name a folder, and -o FOLDER")
    for path in (*out, output):
        if word := as_folder(path):
            raise click.UsageError(f"{word} is a folder; name a file in it")
    output = _destination(model, out, output)
    measuring = MeasuringOptions.taken(given)
    talk = _talk(given)
    asked = bool(given["overwrite"])
    settings = parameters.in_force(given)
    measuring = measuring.completed(settings)
    output = output or beside(model, f"{settings.to.spelling}.onnx", needed=not dry_run)
    from amp_rewrite.files.targets import data_files, foreign_data
    from amp_rewrite.reports.evidence import FAILED
    from amp_rewrite.reports.summary import unchecked, usual_tolerance

    kept = (model, output, *data_files(model)) if report_file else ()  # what a report must not replace
    check_report(report_file, overwrite=settings.overwrite, read=kept)
    if not dry_run:
        lost = "the float32 precision of its weights"
        parameters.check_target(output, model, settings, asked=asked, lost=lost)  # before the work, not after it
    left = [] if dry_run else foreign_data(output)  # data files of the replaced model that stay
    with terminal.stages(model.name, quiet=talk.quiet, verbose=talk.verbose) as tell:
        converted, repaired = measuring.converted(model, parameters.keywords(settings), tell, quiet=talk.quiet)
        solved = converted.report.evidence.level != FAILED
        if solved and not dry_run:
            progress = None if tell is None else lambda done, total: tell("write", done, total)
            saving = {name: getattr(settings, name) for name in ("overwrite", "external_data", "shard_size")}
            converted.result.save(output, **saving, progress=progress)
    written = solved and not dry_run
    if settings.config:
        header = replace(converted.report.model, config=settings.config)
        converted = replace(converted, report=replace(converted.report, model=header))
    if report_file and (solved or is_page(report_file)):  # a page shows why a repair failed
        text = _page(converted, repaired).to_html() if is_page(report_file) else converted.report.to_json()
        write_file(report_file, text, f"{output} is written, the report is not" if written else "nothing was changed")
        terminal.talk(f"wrote {report_file}", quiet=talk.quiet)
    try:
        lost_source = written and output.exists() and output.resolve() == model.resolve()
        command = ""
        if not lost_source and unchecked(converted.report):
            wrote = written or bool(report_file and solved)
            command = _typed(usual_tolerance(converted.report), measuring, out, settings, wrote=wrote)
        talk.outcome(converted, repaired, asked=talk.as_json or dry_run, command=command)
    except BrokenPipeError:
        raise
    except OSError as error:  # stdout is closed, or its disk is full
        ending = f"; {output} is written" if written else ""
        raise OSError(error.errno, f"{error.strerror}{ending}, the report is not printed") from error
    if converted.plan.empty and solved:
        pinned = repaired is not None and repaired.regions
        why = "the tolerance leaves nothing to lower" if pinned else "nothing to lower"
        terminal.talk(f"{why}: {model.name} {'is copied' if written else 'stays'} as it is", quiet=talk.quiet)
    if not dry_run:
        terminal.talk(f"wrote {output}" if solved else f"not written: {output}", quiet=talk.quiet)
    for file in left if solved else ():
        remark = f"{file} held the data of the old {output.name}: remove it if no other model reads it"
        terminal.talk(remark, quiet=talk.quiet)
    return 0 if solved else FINDING


@dataclass(frozen=True, slots=True)
class _Printer:
    """Output of the command: the report, and pins of a repair. With JSON, stdout holds nothing else."""

    as_json: bool
    quiet: bool
    verbose: bool

    def outcome(self, converted: Converted, repaired: Repaired | None, *, asked: bool, command: str) -> None:
        """Print a conversion and its repair. `asked`: print even with --quiet. `command`: the one to suggest."""
        report = converted.report
        searched = ""  # what ranges alone show stands in the evidence
        if repaired is not None and repaired.verdict is not None:
            searched = repaired.text(verbose=self.verbose)
        if self.as_json:
            terminal.show(report.to_json())
            terminal.warn(report.findings, quiet=self.quiet)
            for line in searched.splitlines():
                terminal.talk(line, quiet=self.quiet)
            return
        if asked or not self.quiet:
            terminal.show(report.text(verbose=self.verbose, more="" if self.quiet else searched, command=command))


def _talk(given: dict[str, Any]) -> _Printer:
    return _Printer(**{word: given.pop(word) for word in ("as_json", "quiet", "verbose")})


def _typed(
    tolerance: str, measuring: MeasuringOptions, out: tuple[Path, ...], settings: Request, *, wrote: bool
) -> str:
    """Return the command as it was typed, with what the next step adds.

    It is empty if a model comes or goes by a pipe, and if nothing is left to add. `wrote`: files, which it replaces.
    """
    typed = list(click.get_current_context().find_root().obj)
    named = [str(path) for path in out]
    lasting = list(without_drawing(typed))
    words = [word for word in lasting if word not in named]
    if "-" in (*words, *named):
        return ""
    for path in named:
        words += ["-o", path]
    added = [] if measuring.feeding.data or settings.data else ["--data", "batches.npz"]
    added += [] if measuring.criterion else ["--tolerance", tolerance]
    if not added and lasting == typed:
        return ""
    words += added + (["--overwrite"] if wrote and "--overwrite" not in words else [])
    return shlex.join(["amp-rewrite", *words])


def _destination(model: Path, out: tuple[Path, ...], output: Path | None) -> Path | None:
    """Return the output that is named as second file or by -o. UsageError if the second file may be an input."""
    if not out:
        return output
    if len(out) > 1 or output is not None:
        raise click.UsageError("convert writes one model to a file; several go to a folder, as in -o FOLDER/")
    (second,) = out
    read, typed = shlex.quote(str(model)), shlex.quote(str(second))
    if os.path.lexists(second):
        raise click.UsageError(
            f"{second} exists, so it may be an input or the output; `amp-rewrite diff {read} {typed}`"
            f" compares them, `-o {typed} --overwrite` replaces it, and `-o FOLDER/` converts both into a folder"
        )
    if second.suffix.lower() != ".onnx" and not is_stdout(second):
        raise click.UsageError(f"{str(second)!r} is not the name of an .onnx file; to write there, use -o {typed}")
    return second


def _page(converted: Converted, repaired: Repaired | None) -> Page:
    """Return the page of a conversion, and of the repair that it took."""
    from amp_rewrite.reports.page.page import Page

    searched = repaired.figures() if repaired is not None else ()
    return Page(converted.brief, searched or converted.figures())


# -- several models ---------------------------------------------------------------------------------------------


def is_batch(model: Path, more: tuple[Path, ...], output: Path | None) -> bool:
    """True if words of the command line stand for a batch: one is a folder or a glob, or the output is a folder."""
    from amp_rewrite.fleet.tree import is_batch

    words = (model, *more)
    several = len(words) > 1 and output is not None and output.suffix.lower() != ".onnx" and not is_stdout(output)
    folder = output is not None and bool(as_folder(output))
    return several or folder or any(is_batch(word) for word in words)


def convert_batch(words: tuple[Path, ...], output: Path | None, asked: dict[str, Any], given: dict[str, Any]) -> int:
    """Convert the models of a batch, print a line for each, and return the worst exit code."""
    gc.enable()  # one conversion pauses it for itself; many leave cycles behind
    talk = asked.pop("talk")
    if asked["report_file"] and asked["report_file"].suffix.lower() in (".json", *SUFFIXES):
        raise click.UsageError("--report writes the report of one model; name a .jsonl file, with a line for each")
    measuring = MeasuringOptions.taken(given)
    jobs = _jobs(asked["jobs"] or "1")
    if output is None or is_stdout(output):
        if hint := next(filter(None, (foreign(word) for word in words if word.is_dir())), None):
            raise ModelError(hint)
        raise click.UsageError("several models go to a folder; add -o FOLDER")
    if output.suffix.lower() == ".onnx" and any(url_of(word) for word in (*words, output)):
        raise click.UsageError(f"{name_of(output)} is the name of a file; what comes or goes by URL needs a folder")
    if any(terminal.ALIASES.get(str(word)) for word in words):
        raise click.UsageError("a model from stdin is converted by itself; name files for several")
    settings = parameters.in_force(given)
    measuring = measuring.completed(settings)
    from amp_rewrite.fleet.batch import Batch

    batch = Batch.of(words, _asked(output, asked, settings, measuring), parameters.keywords(settings))
    for remark in batch.remarks:
        terminal.talk(remark, quiet=talk.quiet)
    worst, done, failed = 0, 0, 0
    try:
        with (
            _executor_for(jobs) as (executor, many),
            terminal.progress(count(batch.models, "model"), quiet=talk.quiet) as draw,
        ):
            for outcome in batch.run(executor, many):
                worst = max(worst, outcome.rc)
                done, failed = done + (outcome.rc == 0), failed + (outcome.rc != 0)
                if draw is not None:
                    draw(min(done + failed, batch.models), batch.models)
                _show(outcome, talk, dry_run=asked["dry_run"])
    except KeyboardInterrupt:
        how = "the same command with --resume goes on" if not asked["dry_run"] else "nothing was written"
        terminal.talk(f"interrupted: {done} of {count(batch.models, 'model')} done; {how}", quiet=talk.quiet)
        raise
    _conclude(batch, done, failed, talk.quiet or talk.as_json)
    return worst


def _jobs(word: str) -> int | str:
    """Return the number of jobs at a time, or the address of a scheduler. UsageError for another word."""
    if word.isdecimal() and int(word):
        return int(word)
    if ":" in word or word.endswith(".json"):
        return word
    raise click.UsageError(f"{word} is not a number of jobs at a time; use 1 or more, or HOST:PORT of a Dask scheduler")


@contextmanager
def _executor_for(jobs: int | str) -> Iterator[tuple[Executor | None, int]]:
    if isinstance(jobs, int):
        yield None, jobs
        return
    from amp_rewrite.fleet.processes import executor_of

    with executor_of(jobs) as scheduled:
        yield scheduled


def _asked(output: Path, asked: Mapping[str, Any], settings: Request, measuring: MeasuringOptions) -> BatchSettings:
    from amp_rewrite.files.store import SaveOptions
    from amp_rewrite.fleet.batch import BatchSettings
    from amp_rewrite.fleet.tree import SAME, FileGlobs

    return BatchSettings(
        out=output,
        name=settings.name or SAME,
        choice=FileGlobs(settings.include, settings.exclude),
        saving=SaveOptions(settings.overwrite, settings.external_data, settings.shard_size),
        resume=asked["resume"],
        write=not asked["dry_run"],
        guidance=measuring.guidance,
        summary=asked["report_file"],
    )


def _show(outcome: Outcome, talk: Any, *, dry_run: bool) -> None:
    if talk.as_json:
        terminal.show(outcome.to_json())
    elif not outcome.error and not (talk.quiet and not dry_run):
        terminal.show(f"ok  {outcome.source if dry_run else outcome.target}: {outcome.fate}")
        if talk.verbose:
            terminal.warn(outcome.findings, quiet=False)
    if outcome.trace:
        sys.stderr.write(outcome.trace)
    if outcome.error:
        terminal.talk(f"error: {outcome.source}: {outcome.error.removeprefix(f'{outcome.source}: ')}", quiet=False)


def _conclude(batch: Batch, done: int, failed: int, quiet: bool) -> None:
    parts = [f"{count(done, 'model')} {'done' if batch.asked.write else 'would be written'}"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{count(len(batch.copies), 'other file')} copied"] if batch.copies and batch.asked.write else []
    terminal.talk(", ".join(parts), quiet=quiet)
    if batch.asked.summary and batch.asked.write:
        terminal.talk(f"wrote {name_of(batch.asked.summary)}", quiet=quiet)
