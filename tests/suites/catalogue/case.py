"""Cases of the catalogue of failures, and checks of their conversions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.emulate import emulate
from suites.catalogue.naive import naive
from support import cases, objections

WRONG = r": output 0: (is not finite|is off by|differs|is .* instead of)"
"""Objections of `of_numbers`, for `Case.fails`."""
MISMATCH = r"does not match expected type|bound to different types|inconsistent type|element type|Type Error"
"""The runtime's errors on inconsistent types, for `Case.fails`."""
SQUARE: Mapping[str, Any] = {"w": (8, 8), "w2": (8, 8)}
TERMS: Mapping[str, Any] = {
    "np": np,
    "SQUARE": SQUARE,
    "POSITIVE": {"w": np.full((8, 8), 0.5), "w2": np.full((8, 8), 0.25)},
    "LOWEST": float(np.finfo(np.float32).min),
    "SEEN": np.vstack([np.zeros((1, 8)), np.tri(8)[1:]]).astype(bool),  # keys visible to each query: none to the first
    "FREQUENCIES": 10000.0 ** (-np.arange(4) / 4),
}
"""Names for the expressions of a table."""
WORDS = ("fails", "lowers", "stays", "exact", "blocked")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A minimal model of a row.

    `text`: the graph in ONNX text, possibly followed by functions; `opset`, `ir` and `domains` form its head.
    `weights`: initializers outside the text; a shape stands for seeded values of at most 0.5. `feeds`: the inputs that
    matter; the others are small. `fails`: a regular expression for the naive converter's failure; empty if it succeeds
    and only other converters are known to fail. `lowers`: first outputs of ops that must be low, so that converting
    nothing fails. `stays`: first outputs of ops that must not be low. `exact`: outputs that must be equal. `casts`: the
    largest number of Casts in the result. `blocked`, `retargets`, `clamps`, `appends`: for `naive`. Before that, nodes
    without names are named after their outputs, so that it fails in the row's way, unless `nameless`. `options`: for
    `convert`.
    """

    row: int
    name: str
    text: str
    fails: str
    lowers: str = ""
    stays: str = ""
    weights: Mapping[str, Any] = field(default_factory=dict)
    feeds: Mapping[str, Any] = field(default_factory=dict)
    exact: str = ""
    casts: int | None = None
    blocked: str = ""
    retargets: bool = False
    clamps: bool = False
    appends: bool = False
    nameless: bool = False
    opset: int = 17
    ir: int | None = None
    domains: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def to(self) -> DType:
        return DType.parse(self.options.get("to", "float16"))

    def model(self) -> ModelProto:
        """Return a fresh copy."""
        imports = {"": self.opset, **self.domains}
        domains = ", ".join(f'"{domain}": {version}' for domain, version in imports.items())
        model = onnx.parser.parse_model(
            f"<ir_version: {self.ir or cases.ir_version(self.opset)}, opset_import: [{domains}]>\n{self.text}"
        )
        rng = np.random.default_rng(self.row)
        for name, weight in self.weights.items():
            array = rng.uniform(-0.5, 0.5, weight) if isinstance(weight, tuple) else weight
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return model

    def fed(self) -> dict[str, cases.Feed]:
        """Return values for every input."""
        model = self.model()
        found = cases.feeds(model)
        return {
            name: np.asarray(self.feeds.get(name, value), getattr(value, "dtype", None))
            for name, value in found.items()
        }


def table(family: str) -> tuple[Case, ...]:
    """Read the cases of `FAMILY.onnxtxt`: models in ONNX text, separated by blank lines.

    The comment above a model starts with `# ROW: NAME`, followed by a line for each non-default field of `Case`.
    `fails` is a regular expression that may contain MISMATCH and WRONG; `lowers`, `stays`, `exact` and `blocked` are
    names; the others are Python expressions over `TERMS`.
    """
    title, *blocks = Path(__file__).with_name(f"{family}.onnxtxt").read_text("utf-8").split("\n\n")
    assert title.startswith("# ")
    return tuple(map(_row, blocks))


def _row(block: str) -> Case:
    lines = block.strip().splitlines()
    count = next(number for number, line in enumerate(lines) if not line.startswith("# "))
    (row, name), *fields = (line.removeprefix("# ").split(":", 1) for line in lines[:count])
    texts = {key: value.strip() for key, value in fields}
    values = {key: text if key in WORDS else eval(text, dict(TERMS)) for key, text in texts.items()}
    values["fails"] = texts["fails"].replace("MISMATCH", MISMATCH).replace("WRONG", WRONG)
    return Case(int(row), name.strip(), "\n".join(lines[count:]), **values)


@cache
def converted(case: Case) -> Converted:
    """Convert a case. The result is shared: never change it."""
    return convert(case.model(), **case.options)


def every(cases_: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrize a test by cases, with row and name as ids."""
    return pytest.mark.parametrize("case", cases_, ids=[f"{c.row} {c.name}" for c in cases_])


def lowered(case: Case) -> set[str]:
    """Return the first results of the lowered ops, by their names in the source."""
    result = converted(case)
    low = {op for (op, _), paint in result.coloring.paints.items() if paint.dtype is result.coloring.to}
    return {re.sub(r"_shifted_m?\d+$", "", result.view.ops[op].node.output[0]) for op in low}


def of_naive(case: Case) -> list[str]:
    """Return all objections to the naive conversion, or its error."""
    blocked, source = tuple(case.blocked.split()), case.model()
    for node in (n for g in objections.graphs(source.graph) for n in g.node if not (n.name or case.nameless)):
        node.name = f"{node.output[0]}_node"
    try:
        return of_result(case, naive(source, blocked, case.retargets, case.clamps, case.to.spelling, case.appends))
    except (ValueError, TypeError, onnx.checker.ValidationError) as error:
        return [f"fails: {error}"]


def naive_fails(case: Case) -> bool:
    """Whether the naive conversion fails as the case states, or succeeds if it states nothing."""
    found = of_naive(case)
    return any(re.search(case.fails, text) for text in found) if case.fails else found == []


def of_result(case: Case, after: ModelProto) -> list[str]:
    """Return all objections to a conversion of the case: form, loading, edges, casts, and numbers if it runs."""
    before = case.model()
    known = objections.of_names(before)
    broken = [text for text in objections.of_names(after) if text not in known]
    broken += [*objections.of_io(before, after), *objections.of_checker(after)]
    if case.to is DType.FLOAT16:
        broken += objections.of_loading(after)
    count = sum(n.op_type == "Cast" for g in objections.graphs(after.graph) for n in g.node)
    wasteful = [] if case.casts is None or count <= case.casts else [f"{count} Casts"]
    try:
        wasteful += objections.of_casts(after, before)
    except onnx.shape_inference.InferenceError as error:
        broken.append(f"inference: {error}")
    return [*broken, *wasteful, *([] if broken else of_numbers(case, after))]


def of_numbers(case: Case, after: ModelProto) -> list[str]:
    """Object to differences between the emulated result and the float32 one."""
    expected = objections.run(case.model(), case.fed(), "BASIC")
    names = [v.name for v in after.graph.output]
    found = []
    for name, old, new in zip(names, expected, rounded(after, case.fed()), strict=True):
        # At most some eight roundings in sequence, each of half an eps, each magnified at most fourfold.
        bound = 0.0 if name in case.exact.split() else 16 * case.to.eps
        found += [f"{name}: {text}" for text in objections.of_outputs([old], [new], bound=bound)]
    return found


def rounded(model: ModelProto, feeds: Mapping[str, Any]) -> Sequence[Any]:
    """Emulate a model and return its outputs."""
    return objections.run(emulate(model).to_proto(), feeds)
