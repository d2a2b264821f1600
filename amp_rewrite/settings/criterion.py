"""The keywords of a criterion, which says how near outputs must be: one table, for Python and the command line.

`evidence/metric.py` reads them and judges by them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


USUAL_TOLERANCES = {"float16": "1e-2", "bfloat16": "8e-2"}
"""The tolerance to start with, by low type."""
STARTS = ", ".join(f"{tolerance} for {low}" for low, tolerance in USUAL_TOLERANCES.items())

_text = partial(Option, group=DATA)
_number = partial(_text, kind=Kind.NUMBER, metavar="X")
CRITERION = {
    option.name: option
    for option in (
        _number(
            name="tolerance",
            help=f"Largest error, relative to each output's largest value; to start with, {STARTS}.",
            doc="largest error, relative to the largest value of the output",
        ),
        _number(
            name="rtol",
            help="Instead: |a - b| <= atol + rtol |a| in every element.",
            doc="tolerance relative to the reference's value",
        ),
        _number(name="atol", help="See --rtol.", doc="absolute tolerance, added to the relative one"),
        _text(
            name="metric",
            metavar="|".join(get_args(MetricName)),
            help="Instead: a metric with a bound.",
            doc="the name of a metric, or a callable of reference and candidate, with one of the bounds",
        ),
        _number(
            name="at_least", help="Lower bound, for metrics where higher is better.", doc="lower bound of `metric`"
        ),
        _number(name="at_most", help="Upper bound, for metrics where lower is better.", doc="upper bound of `metric`"),
    )
}
"""Each keyword of a criterion, by name."""
