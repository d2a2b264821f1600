"""The keywords of a criterion, which says how near outputs must be: one table, for Python and the command line.

`evidence/metric.py` reads them and judges by them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from amp_rewrite.settings.option import DATA, Kind, Option

if TYPE_CHECKING:
    from amp_rewrite.files.casting import Array


class CriterionKeywords(TypedDict, total=False):
    """Keywords of a criterion, with their types for static checkers."""

    tolerance: float | None
    rtol: float | None
    atol: float | None
    metric: str | Callable[[Array, Array], float] | None
    at_least: float | None
    at_most: float | None


USUAL_TOLERANCES = {"float16": "1e-2", "bfloat16": "8e-2"}
"""The tolerance to start with, by low type."""
STARTS = ", ".join(f"{tolerance} for {low}" for low, tolerance in USUAL_TOLERANCES.items())

_criterion = partial(Option, group=DATA, keyword=False)
_number = partial(_criterion, kind=Kind.NUMBER, metavar="X")
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
            doc="tolerance relative to the reference's value, in place of `tolerance`: |a - b| ≤ atol + rtol |a| in"
            " every element",
        ),
        _number(name="atol", doc="absolute tolerance, added to the relative one"),
        _criterion(
            name="metric",
            metavar="NAME=X",
            help="Instead: a metric with its bound: cosine=0.999, psnr=40, snr=40, top1=0.99 or scaled=0.01.",
            doc="a metric with its bound, as in `cosine=0.999`; in Python also a callable of reference and candidate,"
            " with `at_least` or `at_most`",
        ),
        _number(name="at_least", doc="lower bound of a callable `metric`", setting=False),
        _number(name="at_most", doc="upper bound of a callable `metric`", setting=False),
    )
}
"""Each keyword of a criterion, by name. `repair` and `verify` take them, `convert` does not."""
