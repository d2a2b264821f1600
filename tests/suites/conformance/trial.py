"""One case in one mode: convert, check, open, emulate, judge."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, count
from amp_rewrite.evidence.calibrate import calibrate
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_nodes
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from suites.conformance import runtime
from suites.conformance.case import Case, cases, inputs_to_feed
from suites.conformance.judge import STANDARD_TOLERANCE, bound, objection, unlike
from support.objections import LEVELS, of_checker, session
from support.rounded_once import rounded_once

RANDOM = frozenset({"Dropout", "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"}) | frozenset(
    {"RandomUniform", "RandomUniformLike"}
)

QUANTIZERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"})


@dataclass(frozen=True, slots=True)
class Mode:
    """Settings of a conversion."""

    level: str
    target: str
    safety: str
    to: DType

    @property
    def name(self) -> str:
        return f"{self.level}{' without safety' if self.safety == 'none' else ''} to {self.to.spelling}"


MODES = {
    mode.name: mode
    for to in (DType.FLOAT16, DType.BFLOAT16)
    for mode in (
        Mode("default", "ort-cuda", "default", to),
        Mode("lower-all", "onnx", "default", to),
        Mode("unsafe-force-all", "onnx", "default", to),
        Mode("unsafe-force-all", "onnx", "none", to),
    )
}


@dataclass(frozen=True, slots=True)
class Ground:
    """The result of the float32 model itself.

    `state` is "counted" (onnxruntime runs it), "refused" (it does not), or "unlabelled" (it fails the checker with
    versions that onnxruntime opens); `note` is the reason. `agrees`: its outputs match the standard's.
    """

    case: str
    state: str
    note: str = ""
    agrees: bool = True
    relabeled: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case in a mode.

    `verdict` is "right", "data" (right only with the ranges of its own inputs), or the failure: "convert", "check",
    "load", "run", "wrong", "crash", "hang". `how`: the reference of a right one.
    """

    case: str
    mode: str
    verdict: str
    how: str = ""
    note: str = ""

    @property
    def fine(self) -> bool:
        return self.verdict in ("right", "data")


@dataclass(frozen=True)
class _Run:
    feeds: runtime.Feeds
    expected: list[object]
    float32: list[object]


@dataclass(frozen=True)
class _Baseline:
    """A case with its float32 results; `valid`: the full checker accepts the model."""

    ground: Ground
    model: ModelProto
    valid: bool
    runs: tuple[_Run, ...]


# -- float32 -----------------------------------------------------------------------------------------


def ground_of(key: str) -> Ground:
    """Return the result of a case's float32 model."""
    return _baseline(key).ground


@lru_cache(maxsize=1)
def _baseline(key: str) -> _Baseline:
    case = cases()[key]
    model = case.model
    fault = next(iter(of_checker(model)), None)
    if case.relabeled and fault is not None:
        return _Baseline(
            Ground(key, "unlabelled", fault, relabeled=True), case.original, not of_checker(case.original), ()
        )
    try:
        runs = tuple(_runs(case, model))
    except runtime.refusals() as refusal:
        ground = Ground(key, "refused", str(refusal), relabeled=case.relabeled)
        return _Baseline(ground, model, fault is None, ())
    agrees = all(objection(run.float32, run.expected, STANDARD_TOLERANCE) is None for run in runs)
    return _Baseline(Ground(key, "counted", "", agrees, case.relabeled), model, fault is None, runs)


def _runs(case: Case, model: ModelProto) -> Iterator[_Run]:
    names = [value.name for value in inputs_to_feed(model)]
    for inputs, outputs in case.samples:
        feeds = runtime.feeds_of(names, inputs)
        yield _Run(feeds, [runtime.numpy_of(value) for value in outputs], runtime.run(model, feeds))


# -- one trial ---------------------------------------------------------------------------------------


def attempt(key: str, mode: Mode) -> Outcome:
    """Try a case in a mode. Any other error ends the process."""
    baseline = _baseline(key)

    def outcome(verdict: str, how: str = "", note: str = "") -> Outcome:
        return Outcome(key, mode.name, verdict, how, note)

    try:
        result = _converted(baseline.model, mode)
    except (AmpRewriteError, *runtime.refusals()) as error:  # onnx's own tools raise other errors
        return outcome("convert", note=f"{type(error).__name__}: {error}")
    model = result.model
    if baseline.valid and (faults := of_checker(model)):
        return outcome("check", note=faults[0])
    if model == baseline.model:
        return outcome("right", "unchanged")
    if baseline.ground.state != "counted":
        return outcome("right", "valid")
    if mode.to is DType.FLOAT16:  # the CPU provider has too few bfloat16 kernels
        try:
            for level in LEVELS:
                session(model, level)
        except runtime.refusals() as refusal:
            return outcome("load", note=str(refusal))
    try:
        how, wrong = _verdict(baseline, result, mode)
        if wrong is None:
            return outcome("right", how)
        overflow = _with_data(baseline, mode)
    except runtime.refusals() as refusal:
        return outcome("run", note=str(refusal))
    return outcome("data", note=overflow) if overflow else outcome("wrong", note=wrong)


def _converted(model: ModelProto, mode: Mode, ranges: Ranges | None = None) -> Converted:
    return convert(model, to=mode.to, level=mode.level, target=mode.target, safety=mode.safety, ranges=ranges)


def _verdict(baseline: _Baseline, result: Converted, mode: Mode) -> tuple[str, str | None]:
    """Return the reference that all outputs agree with, and None; or the first one and the fault."""
    twin = rounded_once(result.result, io="same").to_proto()
    kinds = {node.op_type for node in all_nodes(baseline.model.graph.node)}
    relative = bound(mode.to, len(list(_lowered(result))))
    results = [runtime.run(twin, run.feeds) for run in baseline.runs]

    def worst(found: Iterator[str | None]) -> str | None:
        return next((text for text in found if text is not None), None)

    pairs = list(zip(results, baseline.runs, strict=True))
    first = worst(objection(got, run.expected, relative) for got, run in pairs)
    if first is None:
        return "expected", None
    if not baseline.ground.agrees:
        if kinds & RANDOM:
            return "statistics", worst(unlike(got, run.expected) for got, run in pairs)
        if worst(objection(got, run.float32, relative) for got, run in pairs) is None:
            return "float32", None
    rounded = [_rounded(run.feeds, result.model, mode.to) for run in baseline.runs]
    if all(feeds is not None for feeds in rounded):
        references = (runtime.run(baseline.model, feeds) for feeds in rounded if feeds is not None)
        if worst(objection(*pair, relative) for pair in zip(results, references, strict=True)) is None:
            return "rounded", None
    if kinds & QUANTIZERS and worst(objection(got, run.expected, relative, quantum=1) for got, run in pairs) is None:
        return "quantum", None
    return "expected", first


def _lowered(result: Converted) -> Iterator[int]:
    """Yield the ops that compute in the low type."""
    for op in result.view.ops:
        paint = result.coloring.of(op.id)
        if paint is not None and paint.dtype is result.coloring.to:
            yield op.id


def _rounded(feeds: runtime.Feeds, model: ModelProto, low: DType) -> dict[str, object] | None:
    """Round the inputs that the converted model reads only in the low type; None if that overflows."""
    casts: dict[str, list[bool]] = {}
    for node in all_nodes(model.graph.node):
        to_low = node.op_type == "Cast" and any(a.name == "to" and a.i == low.code for a in node.attribute)
        for name in node.input:
            casts.setdefault(name, []).append(to_low)
    found = dict(feeds)
    for name, value in feeds.items():
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and name in casts and all(casts[name]):
            if np.abs(value[np.isfinite(value)]).max(initial=0.0) > low.max:
                return None
            found[name] = value.astype(low.numpy).astype(np.float32)
    return found


# -- conversions with data ----------------------------------------------------------------------------


def _with_data(baseline: _Baseline, mode: Mode) -> str:
    """Describe the values that overflow on the samples, if a conversion with their ranges is right.

    Only data shows how large activations get. Empty if none overflows, or if the result is still wrong.
    """
    ranges = _ranges(baseline.ground.case, mode.to)
    sizes = [found.absmax for found in ranges.values.values() if found.overflow]
    if not sizes:
        return ""
    _, wrong = _verdict(baseline, _converted(baseline.model, mode, ranges), mode)
    power = math.floor(math.log10(max(sizes)))
    return f"{count(len(sizes), 'value')} beyond {mode.to.max:g}, the largest above 1e{power}" if wrong is None else ""


@lru_cache(maxsize=1)
def _ranges(key: str, to: DType) -> Ranges:
    """Return the ranges of the float32 model's values on its own samples."""
    baseline = _baseline(key)
    feed = Feed.of([dict(run.feeds) for run in baseline.runs], Model.load(baseline.model), allow_nonfinite=True)
    return calibrate(baseline.model, feed, to=to)
