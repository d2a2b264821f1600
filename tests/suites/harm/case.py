"""Cases of the suite: small models with inputs, the principle under test and the allowed error."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.emulate import emulate
from support import objections
from support.cases import ir_version
from support.rounded_products import relative_error, rounded_products

TOLERANCE = {DType.FLOAT16: 2e-2, DType.BFLOAT16: 16e-2}
"""The largest allowed error of an output, relative to its largest magnitude."""
HIT, NEAR = "hit", "near"
"""A hit needs its principle; a near miss resembles one but must not trigger the principle."""
WORDS = ("lowers", "stays", "reason")
AnyCase = TypeVar("AnyCase", bound="Case")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model of a principle.

    `text`: the graph in ONNX text; a line that starts with `* ` is repeated `repeat` times, with the numbers of this
    and the next repetition as `@t` and `@n`. `weights`: initializers outside the text, `feeds`: the inputs; both are
    expressions over `np` and `rng`, a generator seeded by the name. `lowers`, `stays`: first outputs of ops that must
    or must not be low. `types`: the low types to test. `tolerance`: a factor for `TOLERANCE`, with its `reason`.
    `free`: the lengths of inputs and outputs are unknown, except for axes in `fixed`.
    """

    principle: str
    kind: str
    name: str
    text: str
    weights: str = "{}"
    feeds: str = "{}"
    lowers: str = ""
    stays: str = ""
    types: tuple[str, ...] = ("float16", "bfloat16")
    repeat: int = 1
    tolerance: float = 1.0
    reason: str = ""
    opset: int = 17
    domains: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[int, ...] = ()
    to: DType = DType.FLOAT16
    free: bool = False

    def __str__(self) -> str:
        """Return the name of the case in test ids."""
        return " ".join((self.principle, self.kind, self.name, self.to.spelling, "free" if self.free else "static"))

    @property
    def limit(self) -> float:
        return TOLERANCE[self.to] * self.tolerance

    def arrays(self, expression: str, times: int = 1) -> Iterator[dict[str, np.ndarray]]:
        """Evaluate an expression several times with the same random generator."""
        rng = np.random.default_rng([ord(letter) for letter in self.name])
        terms = {"np": np, "rng": rng, "normal": lambda *shape: rng.standard_normal(shape)}
        code = compile(expression, self.name, "eval")
        for terms["t"] in range(times):
            yield {name: _float32(np.asarray(value)) for name, value in eval(code, terms).items()}

    def model(self) -> ModelProto:
        """Return a fresh copy of the model."""
        imports = ", ".join(f'"{d}": {v}' for d, v in {"": self.opset, **self.domains}.items())
        head = f"<ir_version: {ir_version(self.opset)}, opset_import: [{imports}]>"
        model = onnx.parser.parse_model(f"{head}\n{self.text}")
        for name, array in next(self.arrays(self.weights)).items():
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        for port in (*model.graph.input, *model.graph.output) if self.free else ():
            for at, dim in enumerate(port.type.tensor_type.shape.dim):
                if not self.fixed or at not in self.fixed:
                    dim.dim_param = f"{port.name}_{at}"
        return model

    def batch(self) -> dict[str, np.ndarray]:
        """Return values for the inputs."""
        return next(self.arrays(self.feeds))


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float64 else array


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a conversion and the two references, relative to the largest magnitude of each output."""

    ours: float
    operands: float
    results: float


@cache
def converted(case: Case) -> Converted:
    """Convert the model of a case without onnxruntime's fused operators. The result is shared: never change it."""
    return convert(case.model(), to=case.to, **{"fuse": "basic", **case.options})


def lowered(case: Case) -> set[str]:
    """Return the first results of the lowered ops."""
    result = converted(case)
    low = {op for (op, _), paint in result.coloring.paints.items() if paint.dtype is result.coloring.to}
    return {result.view.ops[op].node.output[0] for op in low}


@cache
def errors(case: Case) -> Errors:
    """Run a conversion, emulated, and both references on the inputs of a case."""
    model, batch = case.model(), case.batch()
    exact = objections.run(model, batch, "BASIC")
    twin = emulate(converted(case).model).to_proto()
    types = {port.name: helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type) for port in twin.graph.input}
    ours = objections.run(twin, {name: array.astype(types[name]) for name, array in batch.items()}, "BASIC")
    references = (rounded_products(model, case.to, results=results) for results in (False, True))
    return Errors(*(relative_error(exact, y) for y in (ours, *(objections.run(r, batch, "BASIC") for r in references))))


def table(path: Path, make: type[AnyCase]) -> Iterator[AnyCase]:
    """Yield the cases of a file in each type.

    Blank lines separate models. The comment above a model starts with `# hit: NAME` or `# near: NAME`, followed by a
    line for each non-default field of `make`.
    """
    title, *blocks = path.read_text("utf-8").split("\n\n")
    assert title.startswith("# ")
    for block in blocks:
        case = _case(path.stem, block.strip(), make)
        for spelling in case.types:
            yield replace(case, to=DType.parse(spelling))


def _case(principle: str, block: str, make: type[AnyCase]) -> AnyCase:
    lines = block.splitlines()
    count = next(number for number, line in enumerate(lines) if not line.startswith("# "))
    (kind, name), *fields = (line.removeprefix("# ").split(":", 1) for line in lines[:count])
    assert kind in (HIT, NEAR)
    values: dict[str, Any] = {}
    for key, text in fields:
        plain = key in (*WORDS, "weights", "feeds")
        values[key] = text.strip() if plain else eval(text, {})
    return make(principle, kind, name.strip(), _repeated(lines[count:], values.get("repeat", 1)), **values)


def _repeated(lines: Sequence[str], times: int) -> str:
    """Repeat each group of lines that start with `* `."""
    text: list[str] = []
    for starred, group in groupby(lines, lambda line: line.startswith("* ")):
        block = "\n".join(line.removeprefix("* ") for line in group)
        steps = range(times) if starred else (0,)
        text += [block.replace("@t", str(t)).replace("@n", str(t + 1)) for t in steps]
    return "\n".join(text)


TABLES = sorted(Path(__file__).parent.glob("*.onnxtxt"))
CASES = tuple(replace(case, free=case.to.spelling == case.types[-1]) for path in TABLES for case in table(path, Case))
"""Each case in its types; in the last one lengths are free."""


def every(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrize a test by cases, with their names as ids."""
    return pytest.mark.parametrize("case", cases, ids=map(str, cases))
