"""The reasons of a conversion for single ops."""

from __future__ import annotations

from typing import Unpack

from amp_rewrite.errors import PolicyError
from amp_rewrite.pipeline.convert import Converted, convert
from amp_rewrite.pipeline.repair import Repaired
from amp_rewrite.reports.explain import Explanation, explained, makers
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.sources import ReportSource, is_report, report_in
from amp_rewrite.settings.options import Options, takes_options


@takes_options
def explain(model: ReportSource, *names: str, **options: Unpack[Options]) -> Explanation:
    """Return the reasons for the types of ops in a conversion, each chain of them back to the op that decides.

    `model`: the result of `convert` or `repair`, a report or its file; or a model as `convert` takes it, which is then
    converted with the options. `names`: ops by name or path, types of ops ("Softmax"), patterns ("op=Softmax"), inputs
    of the model, for the ops that read them, and other values, for the op that makes each.

    Raises what `convert` raises; PatternError, with names to use instead, for a name that is unknown or that several
    ops have; PolicyError for options of a conversion that is done.
    """
    if isinstance(model, Repaired):
        model = model.converted
    if not isinstance(model, (Converted, Report)) and not is_report(model):
        model = convert(model, **options)
    elif options:
        raise PolicyError(f"{', '.join(options)}: the conversion is done; leave the options out, or explain the model")
    known = makers(model.view) if isinstance(model, Converted) else {}
    return explained(report_in(model), names, known)
