"""`convert` and `explain`, the public functions for one conversion, and the conversion according to a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from amp_rewrite.errors import PolicyError, spelled
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.ir.names import as_names
from amp_rewrite.pipeline.conversion import Converted, Draft, finish
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.option import Data, Options, Progress, checked, takes
from amp_rewrite.settings.request import KEYWORDS, Request

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.evidence.ranges import Ranges
    from amp_rewrite.pipeline.repair import Repaired
    from amp_rewrite.reports.explain import Explanation
    from amp_rewrite.reports.sources import ReportSource


@takes(KEYWORDS)
@checked
@gc_paused()
def convert(
    model: ModelSource,
    *,
    data: Data | None = None,
    ranges: Ranges | str | Path | None = None,
    headroom: float = HEADROOM,
    folder: str | Path | None = None,
    check: bool | Mapping[str, Any] | Feed = False,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Converted:
    """Convert a float32 model to mixed precision; the report says why each op has its type.

    With `ranges` or `data`, an op stays float32 if a value that it reads or computes exceeds the range of `to`. A model
    with nothing to lower is returned unchanged. The environment variables AMP_REWRITE_LEVEL and AMP_REWRITE_LISTS set
    defaults for `level` and `lists`.

    Args:
        model: a path, bytes, a ModelProto, a torch ONNXProgram or an onnx_ir.Model; it is never changed.
        data: a Feed, or an argument of `Feed.of`; ranges are measured on it first.
        ranges: the result of `calibrate`, or its file.
        headroom: a safety factor: measured values times this must be in the range of `to`.
        folder: the folder of a ModelProto's external data.
        check: True to run one random batch in float32 and in half precision, unless data or ranges are given, and to
            keep ops in float32 if the results are wrong. A mapping contains keywords of `Feed.randomly`; a Feed is the
            batch itself. The report contains the outcome.
        progress: called as `progress(stage, done, total)`.
        **options: see docs/reference/options.md.

    Returns:
        The converted model with its report. The weights of a program in memory must not change until it is saved.

    Raises:
        ModelError: the model is invalid or cannot be read.
        ListError: an op list is invalid.
        PatternError: a pattern of `keep`, `lower` or `io` is malformed or matches nothing.
        PolicyError: an option has an unknown value, or both `data` and `ranges` are given.
        ConfigError: an environment variable is malformed.
        EvidenceError: the ranges belong to another model.

    Example:
        >>> import amp_rewrite
        >>> converted = amp_rewrite.convert("model.onnx", to="float16")
        >>> converted.save("model_float16.onnx")
    """
    if data is not None and ranges is not None:
        raise PolicyError(f"{spelled('data')} and {spelled('ranges')} both provide ranges; leave one out")
    request = Request.of(progress=progress, **options)
    source = Model.load(model, folder=folder)
    if check and data is None and ranges is None:
        from amp_rewrite.pipeline.smoke_check import smoke_checked  # late: only a check runs models

        batch = {} if check is True else check
        return smoke_checked(partial(_converted, source), batch, request)
    return _converted(source, request, data, ranges, headroom)[1]


def _converted(
    source: Model,
    request: Request,
    data: Data | None = None,
    ranges: Ranges | str | Path | None = None,
    headroom: float = HEADROOM,
    low_only: bool = True,
) -> tuple[Draft, Converted]:
    draft = Draft.of(source, request, low_only=low_only)  # load, view, canonicalize, find_needs
    if data is None and ranges is None:
        if isinstance(request.shift, int):
            shifts = spelled("shift", request.shift)
            raise PolicyError(f"{shifts} needs to know which values exceed float16; pass data or ranges")
        return draft, finish(draft, draft.paint())  # plan_casts, apply
    from amp_rewrite.pipeline.measured import ranges_of, shifted_and_guarded  # late: most conversions have no data

    draft = shifted_and_guarded(draft, ranges_of(draft, data, ranges), headroom)
    if low_only and draft.pins and not draft.is_loadable():
        return _converted(source, request, data, ranges, headroom, low_only=False)
    return draft, finish(draft, draft.paint())


@takes(KEYWORDS)
def explain(model: ReportSource, *names: str | Sequence[str], **options: Unpack[Options]) -> Explanation:
    """Return the reasons for the types of ops in a conversion, as chains back to the deciding op.

    Args:
        model: the result of `convert` or `repair`, a report or its file; or a model to convert.
        *names: names, paths, types or patterns of ops; inputs of the model, for their readers; other values, for the
            ops that compute them; or lists of these.
        **options: those of `convert`, see docs/reference/options.md.

    Returns:
        The chains, which print as text.

    Raises:
        PatternError: a name is unknown or ambiguous; the message lists names to use instead.
        PolicyError: options are given for a finished conversion.
        AmpRewriteError: `convert` raises it.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.explain("model.onnx", "op=Softmax").chains[0].rows[0].dtype
        'float32'
    """
    from amp_rewrite.reports.explain import explained  # late: few conversions are explained
    from amp_rewrite.reports.report import Report
    from amp_rewrite.reports.sources import is_report, report_and_view

    model = getattr(model, "converted", model)
    if not isinstance(model, (Converted, Report)) and not is_report(model):
        model = convert(model, **options)
    elif options:
        raise PolicyError(f"{', '.join(options)}: the conversion is done; leave the options out, or explain the model")
    report, view = report_and_view(model)
    return explained(report, [name for each in names for name in as_names(each)], view)


def feed_of(request: Request, source: Model) -> Feed | None:
    """Return the batches of a request for a model; None if it has no data."""
    from amp_rewrite.evidence.data.feed import Feed  # late: most conversions have no data

    if not request.data:
        return None
    nonfinite = bool(request.allow_nonfinite)
    return Feed.of(request.data, source, allow_nonfinite=nonfinite, feedback=request.feedback, steps=request.steps)


def convert_by(
    request: Request, source: ModelSource, feed: Feed | None, progress: Progress | None = None
) -> tuple[Converted, Repaired | None]:
    """Convert a model according to a request, with its ranges or a feed; with a feed and a criterion, repair it."""
    headroom = HEADROOM if request.headroom is None else request.headroom
    if feed is None or not request.criterion:
        measured: dict[str, Any] = {"data": feed, "ranges": request.ranges or None, "headroom": headroom}
        check = False if request.drawn is None else request.drawn
        return convert(source, **measured, **request.keywords, check=check, progress=progress), None
    from amp_rewrite.pipeline.repair import BUDGET, repair

    budget = BUDGET if request.budget is None else request.budget
    keywords = {**request.keywords, **request.criterion, "headroom": headroom, "budget": budget}
    repaired = repair(source, feed, progress=progress, **keywords)
    return repaired.converted, repaired
