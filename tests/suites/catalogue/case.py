"""What a case of the catalogue is, and the judge of what a converter made of it."""

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
"""What `of_numbers` says, for `Case.fails`."""
MISMATCH = r"does not match expected type|bound to different types|inconsistent type|element type|Type Error"
"""What the runtime says of types that do not agree, for `Case.fails`."""
SQUARE: Mapping[str, Any] = {"w": (8, 8), "w2": (8, 8)}
TERMS: Mapping[str, Any] = {
    "np": np,
    "SQUARE": SQUARE,
    "POSITIVE": {"w": np.full((8, 8), 0.5), "w2": np.full((8, 8), 0.25)},
    "LOWEST": float(np.finfo(np.float32).min),
    "SEEN": np.vstack([np.zeros((1, 8)), np.tri(8)[1:]]).astype(bool),  # which key a query sees: the first sees none
    "FREQUENCIES": 10000.0 ** (-np.arange(4) / 4),
}
"""What the expressions of a table may use."""
WORDS = ("fails", "lowers", "stays", "exact", "blocked")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One smallest model of a row.

    `text`: the graph in ONNX text; the head is made from `opset`, `ir` and `domains`; functions may follow it.
    `weights`: initializers that the text does not spell out, a shape for seeded values of at most 0.5.
    `feeds`: the inputs that matter; the others are small. `fails`: a regular expression that the naive
    converter's failure must match; empty where that survives, and only other converters are known to fail.
    `lowers`: first outputs of ops that must be in low precision, so that leaving the model alone is no way out.
    `stays`: those that must not. `exact`: outputs that must not differ at all. `casts`: how many Casts the result may
    hold. `blocked`, `retargets`, `clamps`, `appends`: for `naive`. Nodes without names are named after what they make
    before that sees them, so that it fails in the way of the row, unless `nameless`. `options`: for `convert`.
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
        """A fresh copy."""
        imports = {"": self.opset, **self.domains}
        spelled = ", ".join(f'"{domain}": {version}' for domain, version in imports.items())
        model = onnx.parser.parse_model(
            f"<ir_version: {self.ir or cases.ir_version(self.opset)}, opset_import: [{spelled}]>\n{self.text}"
        )
        rng = np.random.default_rng(self.row)
        for name, given in self.weights.items():
            array = rng.uniform(-0.5, 0.5, given) if isinstance(given, tuple) else given
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return model

    def fed(self) -> dict[str, cases.Feed]:
        """Values for every input."""
        model = self.model()
        found = cases.feeds(model)
        return {
            name: np.asarray(self.feeds.get(name, value), getattr(value, "dtype", None))
            for name, value in found.items()
        }


def table(family: str) -> tuple[Case, ...]:
    """The cases of `FAMILY.onnxtxt`: models in ONNX text, blank lines between them.

    The comment above a model is its row: `# ROW: NAME`, then a line for each field of `Case` that is not at its
    default. `fails` is a regular expression, in which MISMATCH and WRONG stand for those above; `lowers`, `stays`,
    `exact` and `blocked` are words; the others are Python, in which `TERMS` are known.
    """
    title, *blocks = Path(__file__).with_name(f"{family}.onnxtxt").read_text("utf-8").split("\n\n")
    assert title.startswith("# ")
    return tuple(map(_row, blocks))


def _row(block: str) -> Case:
    lines = block.strip().splitlines()
    count = next(number for number, line in enumerate(lines) if not line.startswith("# "))
    (row, name), *fields = (line.removeprefix("# ").split(":", 1) for line in lines[:count])
    said = {key: value.strip() for key, value in fields}
    values = {key: text if key in WORDS else eval(text, dict(TERMS)) for key, text in said.items()}
    values["fails"] = said["fails"].replace("MISMATCH", MISMATCH).replace("WRONG", WRONG)
    return Case(int(row), name.strip(), "\n".join(lines[count:]), **values)


@cache
def converted(case: Case) -> Converted:
    """The conversion of a case. Shared: never change it."""
    return convert(case.model(), **case.options)


def every(cases_: Sequence[Case]) -> pytest.MarkDecorator:
    """A test for each case, known by row and name."""
    return pytest.mark.parametrize("case", cases_, ids=[f"{c.row} {c.name}" for c in cases_])


def lowered(case: Case) -> set[str]:
    """The first results of the ops that the conversion lowers, by the names that they have in the source."""
    result = converted(case)
    low = {op for (op, _), paint in result.coloring.paints.items() if paint.dtype is result.coloring.to}
    return {re.sub(r"_shifted_m?\d+$", "", result.view.ops[op].node.output[0]) for op in low}


def of_naive(case: Case) -> list[str]:
    """Everything to object to in the naive conversion, or what it died of."""
    blocked, source = tuple(case.blocked.split()), case.model()
    for node in (n for g in objections.graphs(source.graph) for n in g.node if not (n.name or case.nameless)):
        node.name = f"{node.output[0]}_node"
    try:
        return of_result(case, naive(source, blocked, case.retargets, case.clamps, case.to.spelling, case.appends))
    except (ValueError, TypeError, onnx.checker.ValidationError) as error:
        return [f"dies: {error}"]


def naive_fails(case: Case) -> bool:
    """Whether the naive conversion fails, and in the way that the case is about; or survives, where that is said."""
    found = of_naive(case)
    return any(re.search(case.fails, text) for text in found) if case.fails else found == []


def of_result(case: Case, after: ModelProto) -> list[str]:
    """Everything to object to in a conversion of the case: form, loading, edges, casts, and numbers where it runs."""
    before = case.model()
    known = objections.of_names(before)
    broken = [text for text in objections.of_names(after) if text not in known]
    broken += [*objections.of_io(before, after), *objections.of_checker(after)]
    if case.to is DType.FLOAT16:
        broken += objections.of_loading(after)
    made = sum(n.op_type == "Cast" for g in objections.graphs(after.graph) for n in g.node)
    wasteful = [] if case.casts is None or made <= case.casts else [f"{made} Casts"]
    try:
        wasteful += objections.of_casts(after, before)
    except onnx.shape_inference.InferenceError as error:
        broken.append(f"inference: {error}")
    return [*broken, *wasteful, *([] if broken else of_numbers(case, after))]


def of_numbers(case: Case, after: ModelProto) -> list[str]:
    """Where the honestly rounded result differs from the float32 one."""
    expected = objections.run(case.model(), case.fed(), "BASIC")
    names = [v.name for v in after.graph.output]
    found = []
    for name, old, new in zip(names, expected, rounded(after, case.fed()), strict=True):
        # Some eight roundings stand one after the other, each of half an eps at most, each magnified at most fourfold.
        bound = 0.0 if name in case.exact.split() else 16 * case.to.eps
        found += [f"{name}: {text}" for text in objections.of_outputs([old], [new], bound=bound)]
    return found


def rounded(model: ModelProto, feeds: Mapping[str, Any]) -> Sequence[Any]:
    """The outputs of a model whose every low-precision result is rounded to its type."""
    return objections.run(emulate(model).to_proto(), feeds)
