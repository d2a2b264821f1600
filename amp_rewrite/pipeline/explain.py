"""The reasons of a conversion for single ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from amp_rewrite.errors import PolicyError
from amp_rewrite.ir.names import as_names
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.repaired import Repaired
from amp_rewrite.reports.explain import Explanation, explained
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.sources import ReportSource, is_report, report_and_view
from amp_rewrite.settings.option import Options, takes
from amp_rewrite.settings.request import KEYWORDS


@takes(KEYWORDS)
def explain(model: ReportSource, *names: str | Sequence[str], **options: Unpack[Options]) -> Explanation:
    """Return the reasons for the types of ops in a conversion, each chain back to the deciding op.

    Args:
        model: the result of `convert` or `repair`, a report or its file; or a model, which is then converted.
        *names: ops by name, path, type or pattern; inputs, for their readers; other values, for their ops; or lists.
        **options: those of `convert`, see docs/reference/options.md.

    Returns:
        The chains, which print as text.

    Raises:
        PatternError: a name is unknown, or several ops have it; with names to use instead.
        PolicyError: options are given for a conversion that is done.
        AmpRewriteError: as `convert` raises it.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.explain("model.onnx", "op=Softmax").chains[0].rows[0].dtype
        'float32'
    """
    if isinstance(model, Repaired):
        model = model.converted
    if not isinstance(model, (Converted, Report)) and not is_report(model):
        model = convert(model, **options)
    elif options:
        raise PolicyError(f"{', '.join(options)}: the conversion is done; leave the options out, or explain the model")
    report, view = report_and_view(model)
    return explained(report, [name for each in names for name in as_names(each)], view)
