"""`amp-rewrite convert`: a conversion, measured or repaired if there is data, or a batch of conversions."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import (
    SUFFIXES,
    check_report,
    convert_guided,
    file_path,
    guided_request,
    is_folder,
    is_page,
    parent_folders,
    path_beside,
    write_file,
)
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.parameters import option
from amp_rewrite.errors import ModelError, as_option, count
from amp_rewrite.files.disk import is_collection, name_of, url_of
from amp_rewrite.files.foreign import foreign
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.settings.request import KEYWORDS, USUAL_TOLERANCES

if TYPE_CHECKING:
    from amp_rewrite.pipeline.batch.job import Outcome
    from amp_rewrite.pipeline.conversion import Converted
    from amp_rewrite.pipeline.repair import Repaired
    from amp_rewrite.settings.request import Request


@parameters.command(
    parameters.model,
    click.argument("out", metavar="[OUT]", nargs=-1),
    option("-o --output", "OUT", "Output file or folder.  [default: MODEL.float16.onnx]"),
    parameters.ROWS["overwrite"],
    parameters.flag("--dry-run", "Print the report without writing a model."),
    option(
        "--report report_file",
        "FILE",
        "Also write the report: .json, .html, or .jsonl.",
        type=parameters.FILE_OUT,
    ),
    parameters.as_json,
    parameters.quiet(),
    parameters.verbose,
    option("-j --jobs", "N|HOST:PORT", "Parallel models, or a Dask scheduler.  [default: 1]"),
    parameters.flag("--resume", "Skip models that an earlier run has finished."),
    *parameters.reads(*KEYWORDS, *parameters.MEASURED, "external_data", keys=parameters.FEEDBACK),
    parameters.SHAPE,
)
@gc_paused(last=True)
def convert(
    model: Path, out: tuple[str, ...], output: str | None, dry_run: bool, report_file: Path | None, **options: Any
) -> int:
    """Convert MODEL, a file or folder. For GPUs: half precision is slow on a CPU."""
    run = _RunOptions(
        dry_run, report_file, *(options.pop(word) for word in ("jobs", "resume", "as_json", "quiet", "verbose"))
    )
    shapes, overwrite, explicit = options.pop("shape"), bool(options["overwrite"]), parameters.explicit(options)
    if is_batch(model, out, output):
        request = guided_request(parameters.take_settings(options), shapes, explicit)
        return convert_batch((model, *map(Path, out)), output, run, request)
    for word in ("jobs", "resume"):
        if getattr(run, word):
            raise click.UsageError(f"{as_option(word)} is for several models; name a folder, and add -o FOLDER")
    target = _destination(out, output)
    settings = parameters.take_settings(options)
    request = guided_request(settings, shapes, explicit)
    target = target or path_beside(model, f"{settings.to.spelling}.onnx")
    command = _next_command(request, [*out], fed=bool(settings.data))
    run = replace(run, makes_folder=not (dry_run or target.parent.is_dir()))
    with parent_folders(target) if run.makes_folder else nullcontext():
        return _convert_one(model, target, run, request, overwrite=overwrite, command=command)


@dataclass(frozen=True, slots=True)
class _RunOptions:
    """The output options of the command. With JSON, stdout contains nothing else."""

    dry_run: bool
    report_file: Path | None
    jobs: str | None
    resume: bool
    as_json: bool
    quiet: bool
    verbose: bool
    makes_folder: bool = False

    def show(self, converted: Converted, repaired: Repaired | None, *, command: str) -> None:
        """Print a conversion and its repair. `command`: the next command to suggest."""
        report = converted.report
        searched = repaired.text(verbose=self.verbose) if repaired is not None else ""
        if self.as_json:
            terminal.show(report.to_json())
            terminal.warn(report.findings, quiet=self.quiet)
            for line in searched.splitlines():
                terminal.talk(line, quiet=self.quiet)
        elif not self.quiet:
            terminal.show(report.text(verbose=self.verbose, more=searched, command=command))


def _convert_one(
    model: Path, output: Path, run: _RunOptions, request: Request, *, overwrite: bool, command: str
) -> int:
    from amp_rewrite.files.store import data_files
    from amp_rewrite.reports.evidence import FAILED
    from amp_rewrite.reports.summary import unchecked

    file, quiet = run.report_file, run.quiet
    kept = (model, output, *data_files(model)) if file else ()  # a report must not replace these
    check_report(file, overwrite=request.overwrite, inputs=kept)
    if not run.dry_run:
        lost = "the float32 precision of its weights"
        parameters.check_target(output, model, request, explicit=overwrite, lost=lost)  # fail early
    with terminal.stages(model.name, model, quiet=quiet) as tell:
        converted, repaired = convert_guided(model, request, tell, quiet=quiet)
        solved = converted.report.evidence.level != FAILED
        written = solved and not run.dry_run
        if written:
            progress = None if tell is None else lambda done, total: tell("write", done, total)
            saving = {name: getattr(request, name) for name in ("overwrite", "external_data")}
            converted.result.save(output, **saving, progress=progress)
    if request.config:
        converted = replace(converted, config=request.config)
    lost_source = written and output.exists() and output.resolve() == model.resolve()
    replaces = " --overwrite" if (written or (file and solved)) and command and not overwrite else ""
    suggested = "" if lost_source or not unchecked(converted.report) else command + replaces
    if file and (solved or is_page(file)):  # a page shows why a repair failed
        text = _page(converted, repaired, suggested) if is_page(file) else converted.report.to_json()
        write_file(file, text, f"{output} was written, but the report was not" if written else "nothing was changed")
        terminal.talk(f"wrote {file}", quiet=quiet)
    if converted.plan.empty and solved:
        pinned = repaired is not None and repaired.regions
        cause = "the tolerance leaves nothing to lower" if pinned else "nothing to lower"
        terminal.talk(f"{cause}: {model.name} is {'copied ' if written else ''}unchanged", quiet=quiet)
    run.show(converted, repaired, command=suggested)
    if not run.dry_run:
        where = f"{output}, in a new folder" if run.makes_folder else str(output)
        terminal.talk(f"wrote {where}" if solved else f"not written: {output}", quiet=quiet)
    return 0 if solved else FINDING


def _next_command(request: Request, named: list[str], *, fed: bool) -> str:
    """Return the user's command plus the options for a check on data; "" if it has them. `fed`: it has data."""
    words, typed = [], iter(click.get_current_context().find_root().obj)
    for word in typed:
        if word == "--shape":  # only for a random batch
            next(typed, None)
        elif word not in named and not word.startswith("--shape="):
            words.append(word)
    for path in named:
        words += ["-o", path]
    added = [] if fed else ["--data", "batches.npz"]
    added += [] if request.criterion else ["--tolerance", USUAL_TOLERANCES[request.to.spelling]]
    return shlex.join(["amp-rewrite", *words, *added]) if added else ""


def _destination(out: tuple[str, ...], output: str | None) -> Path | None:
    """Return the output: the second file, or the file after -o; UsageError if the second file may be an input."""
    if len(out) > 1 or (out and output is not None):
        raise click.UsageError("convert writes one model to a file; several go to a folder, as in -o FOLDER/")
    (word,) = out or (output,)
    if word is None:
        return None
    path = file_path(word, output=True)
    if out and (os.path.lexists(path) or path.suffix.lower() != ".onnx"):
        fact = "exists, and could be an input" if os.path.lexists(path) else "is not the name of an .onnx file"
        raise click.UsageError(f"{word!r} {fact}; to write there, use -o {shlex.quote(word)}")
    return path


def _page(converted: Converted, repaired: Repaired | None, command: str) -> str:
    from amp_rewrite.reports.page.page import page_of

    return page_of(converted.brief, (repaired or converted).figures(command))


# -- several models ---------------------------------------------------------------------------------------------


def is_batch(model: Path, more: tuple[str, ...], output: str | None) -> bool:
    """True if the arguments describe a batch: one is a folder, a URL or a glob, or the output is a folder."""
    for word in more if output is None else (*more, output):
        file_path(word)
    several = bool(more) and output is not None and Path(output).suffix.lower() != ".onnx"
    folder = output is not None and is_folder(output)
    return several or folder or any(map(is_collection, (str(model), *more)))


def convert_batch(words: tuple[Path, ...], output: str | None, run: _RunOptions, request: Request) -> int:
    """Convert the models of a batch, print a line for each, and return the worst exit code."""
    gc.enable()  # collection is paused for a single conversion, but many conversions leave cycles
    file = run.report_file
    if file and file.suffix.lower() in (".json", *SUFFIXES):
        raise click.UsageError("for several models, --report writes a line for each to a .jsonl file; name one")
    jobs = _jobs(run.jobs or "1")
    if output is None:
        if hint := next(filter(None, (foreign(word) for word in words if word.is_dir())), None):
            raise ModelError(hint)
        what = "models from URLs go" if len(words) == 1 and url_of(str(words[0])) else "several models go"
        raise click.UsageError(f"{what} to a folder; add -o FOLDER")
    if output.lower().endswith(".onnx") and any(map(url_of, (*map(str, words), output))):
        raise click.UsageError(f"{output} is the name of a file; with URLs, -o must name a folder")
    from amp_rewrite.pipeline.batch.batch import Batch
    from amp_rewrite.pipeline.batch.job import BatchSettings
    from amp_rewrite.pipeline.batch.processes import executor_of

    settings = BatchSettings(request, Path(output), resume=run.resume, write=not run.dry_run, summary=file)
    batch = Batch.of(words, settings)
    codes: list[int] = []
    try:
        with (
            nullcontext((None, jobs)) if isinstance(jobs, int) else executor_of(jobs) as (executor, many),
            terminal.progress(count(len(batch.jobs), "model"), quiet=run.quiet) as draw,
        ):
            for outcome in batch.run(executor, many):
                codes.append(outcome.rc)
                if draw is not None:
                    draw(min(len(codes), len(batch.jobs)), len(batch.jobs))
                _show(outcome, run)
    except KeyboardInterrupt:
        again = "run the same command with --resume to continue" if file else "--overwrite starts over"
        how = "nothing was written" if run.dry_run else again
        terminal.talk(
            f"interrupted: {codes.count(0)} of {count(len(batch.jobs), 'model')} done; {how}", quiet=run.quiet
        )
        raise
    done = codes.count(0)
    parts = [f"{count(done, 'model')} {'would be written' if run.dry_run else 'done'}"]
    parts += [f"{len(codes) - done} failed"] if len(codes) > done else []
    parts += [f"{count(len(batch.copies), 'other file')} copied"] if batch.copies and not run.dry_run else []
    terminal.talk(", ".join(parts), quiet=run.quiet or run.as_json)
    if file and not run.dry_run:
        terminal.talk(f"wrote {name_of(file)}", quiet=run.quiet or run.as_json)
    return max(codes, default=0)


def _jobs(word: str) -> int | str:
    if word.isdecimal() and int(word):
        return int(word)
    if ":" in word or word.endswith(".json"):
        return word
    raise click.UsageError(f"{word} is not a number of jobs; use 1 or more, or the HOST:PORT of a Dask scheduler")


def _show(outcome: Outcome, run: _RunOptions) -> None:
    if run.as_json:
        terminal.show(outcome.to_json())
    elif not outcome.error and not run.quiet:
        terminal.show(f"ok  {outcome.source if run.dry_run else outcome.target}: {outcome.fate}")
        if run.verbose:
            terminal.warn(outcome.findings, quiet=False)
    if outcome.trace:
        sys.stderr.write(outcome.trace)
    if outcome.error:
        named = outcome.error.startswith((f"{outcome.source}:", f"{outcome.source} "))
        terminal.talk(f"error: {'' if named else f'{outcome.source}: '}{outcome.error}", quiet=False)
