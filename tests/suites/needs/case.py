"""Cases of the suite: models that run once, or many times with outputs fed back, and errors of their conversions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.emulate import emulate
from suites.harm.case import Case, table
from support import objections
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


@cache
def made(case: NeedCase, safety: str, placement: str = "mincut") -> Converted:
    """Convert the model of a case. Shared: never change it."""
    options = {**case.options, "safety": safety, "placement": placement}
    return convert(case.model(), to=case.to, **options)


def warned(case: NeedCase) -> bool:
    """True if the safety rules made a finding."""
    with_rules, without = ({f.kind for f in made(case, s).report.findings} for s in ("default", "none"))
    return bool(with_rules - without - {"mostly_float32"})


@cache
def exact(case: NeedCase) -> list[np.ndarray]:
    return _outputs(case.model(), case)


def error(case: NeedCase, safety: str = "default", placement: str = "mincut") -> float:
    """Run a conversion, emulated; return its error over all runs, relative to the largest magnitude of an output."""
    twin = emulate(made(case, safety, placement).model).to_proto()
    return relative_error(exact(case), _outputs(twin, case))


@cache
def error_of_products(case: NeedCase) -> float:
    """Return the error of rounding what products read and give."""
    return relative_error(exact(case), _outputs(rounded_products(case.model(), case.to, results=True), case))


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
