"""The pipeline: load, view, paint, plan, apply, check, report."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    low = _low(to)
    environment = from_environment(os.environ)
    op_lists = _lists(low, lists, environment)
    chosen = level if level is not None else str(environment.get("level", "default"))
    how = chosen if isinstance(chosen, Level) else Level.parse(chosen)
    aim = target if isinstance(target, Target) else Target.parse(target)
    care = safety if isinstance(safety, Safety) else Safety.parse(safety)

    source = Model.load(model, folder=folder)
    inlined, inlinings = inline_functions(source)
    view, expansions = inline_schema_functions(View.of(inlined), op_lists, low, aim)
    view = spell_out_casts(view)
    found = hazards(view, low) if care is Safety.DEFAULT else Hazards()
    kept, lowered = overrides(view, _texts(keep), _texts(lower))
    io_low = io_types(view, parse_io(io), low)
    coloring = paint(
        view,
        op_lists,
        low,
        level=how,
        target=aim,
        pins=found.pins,
        clusters=found.clusters,
        norms=found.clusters or clusters(view),
        keep=kept,
        lower=lowered,
        low_inputs=io_low,
        gray_follows_allow=gray_follows_allow,
        shapes_follow=care is Safety.DEFAULT,
        numbers=found.numbers,
    )
    plan = plan_casts(view, coloring, io_low, found.saturate)
    settings = {"level": how.value, "target": aim.value, "safety": care.value}
    if plan.empty:
        check_source(source)
        result, findings = source, _unserved(view, coloring)
    else:
        result = _signed(apply(view, plan), low, op_lists, settings)
        doubts = check(inlined, view, plan, result)
        planned = {(finding.kind, finding.subject) for finding in plan.findings}
        hazardous = (f for f in found.findings if (f.kind, f.subject) not in planned)
        findings = (*inlinings, *expansions, *hazardous, *_unserved(view, coloring), *doubts)
    name = source.path.name if source.path else None
    report = report_of(view, coloring, plan, name=name, tool=VERSION, lists=op_lists, findings=findings, **settings)
    if "log_path" in environment:
        dump(Path(str(environment["log_path"])), report_of(view, name=name, tool=VERSION), report, op_lists)
    return Converted(result, report, view, coloring, plan)


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


def _signed(result: Model, to: DType, lists: OpLists, settings: Mapping[str, str]) -> Model:
    """The model with a metadata entry that says how it was made."""
    proto = result.proto
    words = [f"version={VERSION}", f"to={to.spelling}", f"lists={lists.name}@{lists.fingerprint[:12]}"]
    words += [f"{key}={value}" for key, value in settings.items()]
    entry = next((p for p in proto.metadata_props if p.key == METADATA_KEY), None) or proto.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, " ".join(words)
    return replace(result, proto=proto)
