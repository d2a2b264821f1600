"""Cases of the suite: models that run once, or many times with outputs fed back, and errors of their conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from amp_rewrite.pipeline.conversion import Converted, finish
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.settings.request import Request
from suites.harm.case import Case, table
from support import objections
from support.drafts import painted
from support.rounded_products import relative_error, rounded_products

RUNS = 300
"""Runs of a model whose outputs are fed back."""


@dataclass(frozen=True, slots=True, eq=False)
class NeedCase(Case):
    """One model of a class, which is its `principle`.

    `fed`: the input to which each output is fed back. `feeds` is evaluated for each run, with its number as `t`; what
    is fed back replaces it from the second run on. The schema alone decides what may be low, not a table of kernels,
    and what is written out stays so.
    """

    fed: Mapping[str, str] = field(default_factory=dict)
    opset: int = 22
    options: Mapping[str, Any] = field(default_factory=lambda: {"target": "onnx", "fuse": "none"})

    def __str__(self) -> str:
        """Return the name of the case in test ids."""
        return " ".join((self.principle, self.kind, self.name, self.to.spelling))


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors over all runs, relative to the largest magnitude of each output.

    `ours`: of a conversion. `plain`: of one without safety rules. Each is the larger one with and without placement,
    because one of them alone may lower or hold an op by chance. `products`: of rounding what products read and give.
    """

    ours: float
    plain: float
    products: float


@cache
def made(case: NeedCase, safety: str, place: bool = True) -> Converted:
    """Convert the model of a case, with or without placement. Shared: never change it."""
    draft = Draft.of(case.model(), Request.of(to=case.to, **{**case.options, "safety": safety}))
    return finish(draft, painted(draft, place=place))


def warned(case: NeedCase) -> bool:
    """True if the safety rules made a finding."""
    with_rules, without = ({f.kind for f in made(case, s).report.findings} for s in ("default", "none"))
    return bool(with_rules - without - {"mostly_float32"})


@cache
def errors(case: NeedCase) -> Errors:
    """Run the conversions of a case, emulated, and products alone."""
    exact = _outputs(case.model(), case)

    def error(model: ModelProto) -> float:
        return relative_error(exact, _outputs(model, case))

    def largest(safety: str) -> float:
        return max(error(emulate(made(case, safety, place).model).to_proto()) for place in (True, False))

    return Errors(largest("default"), largest("none"), error(rounded_products(case.model(), case.to, results=True)))


def _outputs(model: ModelProto, case: NeedCase) -> list[np.ndarray]:
    """Return each output, stacked over the runs."""
    session: Any = objections.session(model, "BASIC")
    names = [port.name for port in session.get_outputs()]
    state: dict[str, np.ndarray] = {}
    rows = []
    for batch in case.arrays(case.feeds, RUNS if case.fed else 1):
        rows.append(session.run(None, {**batch, **state}))
        state = {case.fed[name]: value for name, value in zip(names, rows[-1], strict=True) if name in case.fed}
    return [np.stack(column) for column in zip(*rows, strict=True)]


CASES = tuple(case for path in sorted(Path(__file__).parent.glob("*.onnxtxt")) for case in table(path, NeedCase))
