"""`amp-rewrite convert` for folders, globs and several files."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import MeasuringOptions
from amp_rewrite.cli.files import SUFFIXES, as_folder, is_stdout
from amp_rewrite.errors import ModelError, count
from amp_rewrite.files.foreign import foreign
from amp_rewrite.fleet.urls import name_of, url_of

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from amp_rewrite.fleet.batch import Batch, BatchSettings
    from amp_rewrite.fleet.outcome import Outcome
    from amp_rewrite.settings.request import Request


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
    from amp_rewrite.fleet.schedulers import executor_of

    with executor_of(jobs) as scheduled:
        yield scheduled


def _asked(output: Path, asked: Mapping[str, Any], settings: Request, measuring: MeasuringOptions) -> BatchSettings:
    from amp_rewrite.files.store import SaveOptions
    from amp_rewrite.fleet.batch import BatchSettings
    from amp_rewrite.fleet.naming import SAME
    from amp_rewrite.fleet.tree import FileGlobs

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
