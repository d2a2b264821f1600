"""The pipeline: load, view, paint, plan, apply, check, report."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnx import ModelProto

from amp_rewrite.check import check, check_source
from amp_rewrite.config import from_environment
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.expand import inline_functions, inline_schema_functions, spell_out_casts
from amp_rewrite.files.model import Model
from amp_rewrite.finding import Finding
from amp_rewrite.lists import Level, OpLists, environment_edits, load_lists
from amp_rewrite.painting.color import Coloring
from amp_rewrite.painting.painter import paint
from amp_rewrite.pattern import io_types, overrides, parse_io
from amp_rewrite.plan import Plan, plan_casts
from amp_rewrite.policy import Safety, Target
from amp_rewrite.reports.dump import dump
from amp_rewrite.reports.inventory import report_of
from amp_rewrite.reports.report import Report
from amp_rewrite.rewrite import apply
from amp_rewrite.safety.cluster import clusters
from amp_rewrite.safety.hazards import Hazards, hazards
from amp_rewrite.version import VERSION
from amp_rewrite.view import View

METADATA_KEY = "amp_rewrite"
"""The metadata entry of a converted model: by which version, to which type, with which lists."""

_ListSource = str | Path | Mapping[str, object]


@dataclass(frozen=True)
class Converted:
    """What `convert` gives: the model, why it is as it is, and the steps in between.

    `result` holds the model with its weights still in their files: save that for models of any size.
    """

    result: Model
    report: Report
    view: View
    coloring: Coloring
    plan: Plan

    @cached_property
    def model(self) -> ModelProto:
        """The converted model, whole in memory. ModelError over 2 GB; `save` has no such limit."""
        return self.result.to_proto()

    def save(self, path: str | Path, *, overwrite: bool = False, external_data: bool | None = None) -> None:
        """Write the model, weights streamed, whole or not at all; see `Model.save`."""
        self.result.save(path, overwrite=overwrite, external_data=external_data)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python's search for cycles paused: in a large graph it takes a fifth of the time, and there are none."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@_uncollected()
def convert(
    model: object,
    *,
    to: str | DType = "float16",
    lists: Sequence[_ListSource] | _ListSource = (),
    level: str | Level | None = None,
    target: str | Target = "ort-cuda",
    safety: str | Safety = "default",
    keep: Sequence[str] = (),
    lower: Sequence[str] = (),
    io: str | Sequence[str] | None = None,
    gray_follows_allow: bool | None = None,
    folder: str | Path | None = None,
) -> Converted:
    """A float32 model in mixed precision, with a report that says why each op is what it is.

    `model`: a path, bytes, a ModelProto (`folder`: where its external data lies), a torch ONNXProgram or an
    onnx_ir.Model; it is never changed. `to`: "float16" or "bfloat16". `lists`: YAML files, mappings or shipped
    names on top of the default lists. `keep`, `lower`: patterns for ops that stay float32, or that are lowered.
    `io`: "keep", "low" or globs such as "past_*=float16". AMP_REWRITE_LEVEL, AMP_REWRITE_LISTS, the list edits
    (AMP_REWRITE_DENYLIST_ADD …) and AMP_REWRITE_LOG_PATH are read here, and an argument wins over them.

    Raises ModelError, ListError, PatternError, PolicyError or ConfigError, each saying what to do. A model with
    nothing to lower comes back unchanged.
    """
    request = _Request.of(to, lists, level, target, safety)
    source = Model.load(model, folder=folder)
    view, expansions = _expanded(source, request)
    found = hazards(view, request.to) if request.safe else Hazards()
    kept, lowered = overrides(view, _texts(keep), _texts(lower))
    io_low = io_types(view, parse_io(io), request.to)
    coloring = paint(
        view,
        request.lists,
        request.to,
        level=request.level,
        target=request.target,
        pins=found.pins,
        clusters=found.clusters,
        norms=found.clusters if request.safe else clusters(view),
        numbers=found.numbers,
        keep=kept,
        lower=lowered,
        low_inputs=io_low,
        gray_follows_allow=gray_follows_allow,
        shapes_follow=request.safe,
    )
    plan = plan_casts(view, coloring, io_low, found.saturate)
    result, doubts = _carried_out(source, view, plan, request)
    planned = {(finding.kind, finding.subject) for finding in plan.findings}
    hazardous = [f for f in found.findings if (f.kind, f.subject) not in planned]
    changes = () if plan.empty else (*expansions, *hazardous, *doubts)
    report = request.report(source, view, coloring, plan, (*changes, *_unserved(view, coloring)))
    return Converted(result, report, view, coloring, plan)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked for, by arguments and environment, read and checked."""

    to: DType
    lists: OpLists
    level: Level
    target: Target
    safety: Safety
    log_path: Path | None

    @classmethod
    def of(
        cls,
        to: str | DType,
        lists: Sequence[_ListSource] | _ListSource,
        level: str | Level | None,
        target: str | Target,
        safety: str | Safety,
    ) -> _Request:
        environment = from_environment(os.environ)
        low = _low(to)
        chosen = level if level is not None else str(environment.get("level", "default"))
        return cls(
            low,
            _lists(low, lists, environment),
            chosen if isinstance(chosen, Level) else Level.parse(chosen),
            target if isinstance(target, Target) else Target.parse(target),
            safety if isinstance(safety, Safety) else Safety.parse(safety),
            Path(str(environment["log_path"])) if "log_path" in environment else None,
        )

    @property
    def safe(self) -> bool:
        """Whether this project's rules hold on top of TensorFlow's."""
        return self.safety is Safety.DEFAULT

    @property
    def settings(self) -> dict[str, str]:
        return {"level": self.level.value, "target": self.target.value, "safety": self.safety.value}

    def report(
        self, source: Model, view: View, coloring: Coloring, plan: Plan, findings: tuple[Finding, ...]
    ) -> Report:
        """The report; with AMP_REWRITE_LOG_PATH also dumps of before, after and the four lists."""
        name = source.path.name if source.path else None
        made = report_of(
            view, coloring, plan, name=name, tool=VERSION, lists=self.lists, findings=findings, **self.settings
        )
        if self.log_path is not None:
            dump(self.log_path, report_of(view, name=name, tool=VERSION), made, self.lists)
        return made


def _expanded(source: Model, request: _Request) -> tuple[View, tuple[Finding, ...]]:
    """The view that is painted: functions inlined where painting gains by it, CastLike spelled out."""
    inlined, local = inline_functions(source)
    view, standard = inline_schema_functions(View.of(inlined), request.lists, request.to, request.target)
    return spell_out_casts(view), (*local, *standard)


def _carried_out(source: Model, view: View, plan: Plan, request: _Request) -> tuple[Model, tuple[Finding, ...]]:
    """The checked result of a plan; the source itself, unexpanded, where there is nothing to do."""
    if plan.empty:
        check_source(source)
        return source, ()
    result = _signed(apply(view, plan), request)
    return result, check(view.model, view, plan, result)


def _low(to: str | DType) -> DType:
    found = to if isinstance(to, DType) else DType.parse(to)
    if not found.low:
        raise PolicyError(f"cannot lower to {found.spelling}; use float16 or bfloat16")
    return found


def _texts(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _lists(to: DType, given: Sequence[_ListSource] | _ListSource, environment: Mapping[str, object]) -> OpLists:
    overlays = [given] if isinstance(given, (str, Path, Mapping)) else list(given)
    if not overlays:
        overlays = list(environment.get("lists", ()))  # type: ignore[call-overload]
    return load_lists(to, overlays, environment_edits(os.environ))


def _unserved(view: View, coloring: Coloring) -> tuple[Finding, ...]:
    """Ops that could not be lowered because the opset, the kernels or a type that no one knows forbids it, by type."""
    found: dict[tuple[str, str], str] = {}
    for op in view.ops:
        paint_ = coloring.of(op.id) if op.signature is not None else None
        if paint_ is not None and paint_.rule in ("schema_gate", "kernel_gate", "unknown_type"):
            found.setdefault((paint_.rule, op.kind), paint_.note)
    return tuple(Finding(rule, kind, note) for (rule, kind), note in sorted(found.items()))


def _signed(result: Model, request: _Request) -> Model:
    """The model with a metadata entry that says how it was made."""
    proto = result.proto
    words = [f"version={VERSION}", f"to={request.to.spelling}"]
    words.append(f"lists={request.lists.name}@{request.lists.fingerprint[:12]}")
    words += [f"{key}={value}" for key, value in request.settings.items()]
    entry = next((p for p in proto.metadata_props if p.key == METADATA_KEY), None) or proto.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, " ".join(words)
    return result
