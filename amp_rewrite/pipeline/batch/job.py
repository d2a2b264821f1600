"""Jobs, each the conversion of one model by a worker; their outcomes; and the summary of all outcomes.

Jobs and outcomes are plain data, so any executor can send them to another process or machine: a job only names files,
and a worker copies the weights from file to file. The summary is a file with a line of JSON for each outcome.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from amp_rewrite.errors import AmpRewriteError, Finding, ModelError, ReportError, one_line, option_spelling, spelled
from amp_rewrite.files.disk import check_output_path, make_parent_folder, name_of, open_regular, url_of, write_whole
from amp_rewrite.files.model import Model
from amp_rewrite.files.store import MAX_INLINE_BYTES
from amp_rewrite.pipeline.batch.places import data_of, staged, state_of
from amp_rewrite.pipeline.convert import convert_by, feed_of
from amp_rewrite.reports.evidence import FAILED as CHECK_FAILED
from amp_rewrite.reports.json_records import decode, record
from amp_rewrite.reports.render import count, size
from amp_rewrite.reports.result import Result
from amp_rewrite.settings.option import OUTPUT
from amp_rewrite.settings.request import OPTIONS, Request
from amp_rewrite.settings.selectors import allow_unmatched
from amp_rewrite.version import VERSION

OK, MISSED, FAILED = 0, 1, 2
"""The values of `Outcome.rc`, which are exit codes: written; not written, since the tolerance is not met; failed."""


@dataclass(frozen=True, slots=True, repr=False)
class Outcome(Result):
    """The outcome for one model of a batch.

    Attributes:
        source: the file that was read, as named by the caller.
        target: the file that was written, or would have been.
        rc: 0 for success, 1 for a missed tolerance, 2 for an error; the exit code of the command is the largest.
        key: a hash of the version, the options, and the sizes and times of the input files.
        made: the sizes and times of the written files; with `key`, it shows whether a written model is up to date.
        evidence: the nonempty fields of `Report.evidence`.
        totals: the totals of the report.
        findings: the findings of the report.
        seconds: the wall time.
        error: the reason for a failure, in one line.
        finished: True if an earlier run had already written the model.
        unmatched: patterns without a match in this model, each with the error that a single conversion would raise.
        trace: the traceback of an error that is a bug in this package.

    Example:
        >>> import amp_rewrite
        >>> outcomes = list(amp_rewrite.convert_many(["model.onnx"], out="converted"))
        >>> [outcome.rc for outcome in outcomes]
        [0]
    """

    source: str
    target: str
    rc: int = OK
    key: str = ""
    made: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    error: str = ""
    finished: bool = False
    unmatched: Mapping[str, str] = field(default_factory=dict)
    trace: str = ""

    @property
    def brief(self) -> str:
        """The source and the outcome."""
        return f"{self.source}: {self.fate}"

    @property
    def fate(self) -> str:
        """The outcome in a few words."""
        if self.error:
            return self.error
        totals = self.totals
        casts = totals.get("casts_to_low", 0) + totals.get("casts_to_float32", 0)
        lowered = f"{totals.get('compute_lowered', 0)} of {count(totals.get('compute_ops', 0), 'compute op')} lowered"
        sizes = f"{size(totals.get('weights_before', 0))} → {size(totals.get('weights_after', 0))} of weights"
        words = [lowered, count(casts, "Cast"), sizes, f"{self.seconds:.1f} s"]
        if self.findings:
            words.insert(2, count(len(self.findings), "finding"))
        if self.finished:
            words = ["already finished"]
        return ", ".join(words)

    def text(self) -> str:
        """Return source, target and outcome as text."""
        return f"{self.source} → {self.target}\n  {self.fate}\n"

    def to_json(self) -> str:
        """Return the outcome as one line of JSON."""
        encoded = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("findings", "trace")}
        encoded["findings"] = [asdict(finding) for finding in self.findings]
        encoded["seconds"] = round(self.seconds, 3)
        optional = ("error", "finished", "unmatched", "trace")
        return json.dumps({name: value for name, value in encoded.items() if value or name not in optional})

    @classmethod
    def from_json(cls, line: str) -> Outcome:
        """Return the outcome in a line written by `to_json`.

        Raises:
            ValueError: the line was not written by `to_json`.
        """
        outcome: Outcome = _READER(decode(line))
        return outcome


_READER = record(Outcome, required=("source", "target", "rc"))


# -- the job ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings of a batch. `write`: False for a dry run.

    The `overwrite` option of the request also replaces files that no earlier run wrote.
    """

    request: Request
    out: Path
    resume: bool = False
    write: bool = True
    summary: Path | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A model to convert, and the settings for it.

    `key`: a hash of the request. `named`: the command-line options that messages may name; None in Python. `files`: the
    external data of the source. `earlier`: the outcome of an earlier run. `folder`: the base of relative paths.
    """

    source: Path
    target: Path
    settings: BatchSettings
    key: str
    named: Collection[str] | None
    files: tuple[str, ...] = ()
    earlier: Outcome | None = None
    folder: str = ""

    def place(self, path: str | Path) -> Path:
        """Return a path relative to `folder`; a URL is returned unchanged."""
        return Path(path) if url_of(path) else Path(self.folder, path)


def key_of(request: Request, resolved: Request) -> str:
    """Return a hash of all settings with an effect on decisions: version, options, op lists and data.

    `resolved`: the request for the installed runtime.
    """
    own = {name: getattr(request, name) for name, row in OPTIONS.items() if row.group != OUTPUT and name != "lists"}
    content = [VERSION, own, resolved.op_lists.fingerprint, resolved.settings, request.drawn]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _key(job: Job) -> str:
    """Return a hash of the key of a job and the states of all its files."""
    files = [job.place(job.source), *map(job.place, job.files)]
    for place in map(Path, filter(None, (job.settings.request.data, job.settings.request.ranges))):
        files += sorted(place.rglob("*")) if place.is_dir() else [place]
    content = [job.key, *(f"{file.name}:{state_of(file)}" for file in files)]
    return hashlib.sha256("\n".join(content).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _states(target: Path) -> str:
    """Return the states of a written model and its data files; empty if a file is missing."""
    if not state_of(target):
        return ""
    states = [state_of(file) for file in (target, *map(Path, data_of(target)))]
    return " ".join(states) if all(states) else ""


def _check_ownership(target: Path, earlier: Outcome | None) -> None:
    """Raise ModelError for an existing file unless an earlier run or a lost worker wrote it."""
    if not os.path.lexists(target):
        return
    is_own = earlier is not None and earlier.made.split()[:1] == [state_of(target)]
    if earlier is None or not earlier.made:
        with suppress(ModelError):
            is_own = bool(Model.load(target).recorded("version"))
    if not is_own:
        way = f"name another folder, or use {spelled('overwrite', True)}"
        raise ModelError(f"{target} already exists, and no earlier run wrote it; {way}")


def run(job: Job) -> Outcome:
    """Run a job and return its outcome, even a failure; only an interrupt propagates."""
    start, trace = time.perf_counter(), ""
    outcome = Outcome(name_of(job.source), name_of(job.target))
    try:
        with nullcontext() if job.named is None else option_spelling(job.named):
            done = _convert(job, outcome)
            return done if done.finished else replace(done, seconds=time.perf_counter() - start)
    except (AmpRewriteError, OSError) as cause:
        where = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
        error = where + one_line(cause.strerror or cause if isinstance(cause, OSError) else cause)
    except RecursionError:
        error = "an expression, a file or a model is nested too deeply; flatten it"
    except MemoryError:
        error = "out of memory; give the process more memory, or run fewer conversions at a time"
    except Exception as cause:  # noqa: BLE001 the end of a worker: a bug must not affect the other models
        trace = traceback.format_exc()
        error = one_line(f"internal error in amp-rewrite ({type(cause).__name__}: {cause}); please report it")
    return replace(outcome, rc=FAILED, error=error, trace=trace, seconds=time.perf_counter() - start)


def _convert(job: Job, outcome: Outcome) -> Outcome:
    """Convert the model of a job, unless an earlier run did, and complete its outcome."""
    key, old, target = _key(job), job.earlier, job.place(job.target)
    if old is not None and (old.rc, old.key) == (OK, key) and old.made and old.made == _states(target):
        return replace(old, target=outcome.target, finished=True)
    with staged(job.place(job.source), target, job.files) as (source, path):
        model = Model.load(source)
        with allow_unmatched() as unmatched:
            converted, _ = convert_by(job.settings.request, model, feed_of(job.settings.request, model))
        report = converted.report
        outcome = replace(
            outcome,
            key=key,
            evidence={name: value for name, value in asdict(report.evidence).items() if value},
            totals=asdict(report.totals),
            findings=tuple(report.findings),
            unmatched=dict(unmatched),
        )
        if report.evidence.level == CHECK_FAILED:
            missed = "the tolerance is not met" if report.evidence.criterion else report.evidence.objection
            return replace(outcome, rc=MISSED, error=f"not written: {missed}")
        if not job.settings.write:
            return outcome
        make_parent_folder(path)
        if not job.settings.request.overwrite:
            _check_ownership(path, old)
        result, external = converted.result, job.settings.request.external_data
        if external is None:
            external = result.nbytes > MAX_INLINE_BYTES
        weights = f"{job.target.name}_data"  # as in optimum and transformers.js
        result.save(path, overwrite=True, external_data=external and weights)
    return replace(outcome, made=_states(target))


# -- the summary -------------------------------------------------------------------------------------------

_MAX_BYTES = 1 << 30  # bytes
_JSONL = (".jsonl", ".ndjson", ".json")


class Summary:
    """A file of outcomes. `add` appends one; `complete` writes the last one of each source, in order of the sources.

    A last line cut off by a crash or a full disk is ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, *, overwrite: bool, resume: bool) -> None:
        if url := url_of(self.path):
            raise ReportError(f"cannot write a summary to {url}: lines are appended to it; name a local file")
        if self.path.suffix.lower() not in _JSONL:
            fact = f"cannot write a summary to {self.path}: it contains a line of JSON for each model"
            raise ReportError(f"{fact}; name a .jsonl file")
        check_output_path(self.path, ReportError)
        if os.path.lexists(self.path) and not (overwrite or resume):
            way = f"continue with {spelled('resume', True)}, or use {spelled('overwrite', True)}"
            raise ReportError(f"{self.path} already exists; {way}")

    def read(self) -> Mapping[str, Outcome]:
        """Return the last outcome of each source; an empty mapping if there is no file.

        Raises ReportError for a file that is not a summary.
        """
        try:
            with open_regular(self.path) as file:
                content = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as cause:
            raise ReportError(f"cannot read {self.path}: {cause.strerror or cause}; name another summary") from cause
        lines = content.split(b"\n")
        latest: dict[str, Outcome] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                outcome = Outcome.from_json(line.decode())
            except ValueError as error:
                if number == len(lines):  # cut off
                    break
                fact = "is not a line written by convert"
                raise ReportError(f"{self.path}:{number} {fact} ({error}); name a summary, or a new file") from error
            latest[outcome.source] = outcome
        return latest

    def add(self, outcome: Outcome) -> None:
        """Append a line, in one write."""
        with self._writing(), self.path.open("ab") as file:
            file.write(f"{outcome.to_json()}\n".encode())

    def complete(self, outcomes: Iterable[Outcome]) -> None:
        """Replace the content of the file by these outcomes, atomically."""
        with self._writing():
            lines = "".join(f"{outcome.to_json()}\n" for outcome in outcomes)
            write_whole(Path(os.path.realpath(self.path)), lines.encode())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            reason = cause.strerror or cause
            raise ReportError(f"cannot write {self.path}: {reason}; models written so far are kept") from cause
