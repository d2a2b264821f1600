"""The keywords of a criterion, which says how near outputs must be: one table, for Python and the command line.

`evidence/metric.py` reads them and judges by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

from amp_rewrite.settings.option import DATA, Kind, Option

if TYPE_CHECKING:
    from amp_rewrite.files.casting import Array

MetricName = Literal["cosine", "psnr", "snr", "top1", "scaled"]
"""Names of the measures, for static checkers."""


class CriterionKeywords(TypedDict, total=False):
    """Keywords of a criterion, with their types for static checkers."""

    tolerance: float | None
    rtol: float | None
    atol: float | None
    metric: MetricName | Callable[[Array, Array], float] | None
    at_least: float | None
    at_most: float | None


CRITERION = {
    option.name: option
    for option in (
        Option(
            name="tolerance",
            kind=Kind.NUMBER,
            group=DATA,
            metavar="X",
            help="Largest error, relative to each output's largest value.",
            doc="largest error, relative to the largest value of the output",
        ),
        Option(
            name="rtol",
            kind=Kind.NUMBER,
            group=DATA,
            metavar="X",
            help="Instead: |a - b| <= atol + rtol |a| in every element.",
            doc="tolerance relative to the reference's value",
        ),
        Option(
            name="atol",
            kind=Kind.NUMBER,
            group=DATA,
            metavar="X",
            help="See --rtol.",
            doc="absolute tolerance, added to the relative one",
        ),
        Option(
            name="metric",
            group=DATA,
            metavar="|".join(get_args(MetricName)),
            help="Instead: a metric with a bound.",
            doc="the name of a metric, or a callable of reference and candidate, with one of the bounds",
        ),
        Option(
            name="at_least",
            kind=Kind.NUMBER,
            group=DATA,
            metavar="X",
            help="Lower bound, for metrics where higher is better.",
            doc="lower bound of `metric`",
        ),
        Option(
            name="at_most",
            kind=Kind.NUMBER,
            group=DATA,
            metavar="X",
            help="Upper bound, for metrics where lower is better.",
            doc="upper bound of `metric`",
        ),
    )
}
"""Each keyword of a criterion, by name."""
