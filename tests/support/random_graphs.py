"""Random typed graphs with a proven bound on the rounding errors of their outputs.

A graph is data: steps of one template, branches (an If), loops and scans. It is rendered as ONNX text and interpreted
by `spreads`, which bounds each value's magnitude and rounding error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx.parser
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper

from support.cases import ir_version
from support.objections import graphs as bodies
from support.random_rarer import CONSTANTS as RARELY
from support.random_rarer import FUNCTIONS, RARER
from support.random_templates import LATEST, NOTHING_PROMISED, TEMPLATES, Spread, Template

TRIPS = 2
_FINITE = 1e4
"""Larger values could overflow float16 in between."""


@dataclass(frozen=True, slots=True)
class Step:
    result: str
    template: Template
    reads: tuple[str, ...]
    weight: str


@dataclass(frozen=True, slots=True)
class Body:
    steps: tuple[Statement, ...]
    result: str


@dataclass(frozen=True, slots=True)
class Branch:
    """An If. Both bodies use the same names, and each has its own constant `{result}_k`."""

    result: str
    then: Body
    other: Body


@dataclass(frozen=True, slots=True)
class Looped:
    """A Loop that carries `{result}_s`."""

    result: str
    start: str
    body: Body


@dataclass(frozen=True, slots=True)
class Scanned:
    """A Scan that carries `{result}_s` and reads two elements in turn as `{result}_x`; it returns its last output."""

    result: str
    start: str
    elements: tuple[str, str]
    body: Body


Statement = Step | Branch | Looped | Scanned


@dataclass(frozen=True, slots=True)
class Graph:
    opset: int
    steps: tuple[Statement, ...]
    outputs: tuple[str, ...]
    overridable: bool
    names: str
    holding: bool = False
    """Whether inputs include a sequence and a half tensor, and outputs a sequence."""

    def text(self) -> str:
        """Render the graph as ONNX text."""
        domains = {s.template.domain for s in _steps(self.steps)} - {""}
        imports = [f'"": {self.opset}', *(f'"{domain}": 1' for domain in sorted(domains))]
        inputs = "float[4,4] x, float[4,4] z, bool c" + (", float[4,4] w1" if self.overridable else "")
        edges = ", ".join(f"float[4,4] {name}" for name in self.outputs)
        body = "\n".join(map(_rendered, self.steps))
        if self.holding:
            inputs += ", seq(float[4,4]) held, float16[4,4] half"
            edges += ", seq(float[4,4]) kept"
            body += (
                "\nhalf_1 = MatMul (half, half) half_2 = Cast <to = 1> (half_1) "
                f"held_1 = SequenceInsert (held, half_2) kept = SequenceInsert (held_1, {self.steps[-1].result})"
            )
        function = (
            f'<domain: "own", opset_import: ["": {self.opset}]>\n'
            "F (u) => (v) { k = Constant <value = float[1] {0.5}> () m = Mul (u, k) v = Tanh (m) }"
        )
        if any(name in body for name in ("own.G", "own.H")):
            function += FUNCTIONS.format(opset=self.opset)
        return (
            f"<ir_version: {ir_version(self.opset)}, opset_import: [{', '.join(imports)}]>\n"
            f"g ({inputs}) => ({edges}) {{\n{body}\n}}\n{function if 'own' in domains else ''}"
        )

    def model(self) -> ModelProto:
        model = onnx.parser.parse_model(self.text())
        rarely = {name: array for name, array in RARELY.items() if re.search(rf"[ (]{name}[,)]", self.text())}
        constants = {**_CONSTANTS, **rarely}
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
        if self.names != "":
            for graph in bodies(model.graph):  # names unique in one graph but repeated in the next
                for at, node in enumerate(graph.node):
                    node.name = self.names.format(at or "")
        return model

    def feeds(self, rng: np.random.Generator, truth: bool) -> dict[str, object]:
        """Return numbers from -1 to 1 for every input except weights."""
        fed: dict[str, object] = {name: _numbers(rng) for name in ("x", "z")}
        containers = {"held": [_numbers(rng)], "half": _numbers(rng).astype(np.float16)} if self.holding else {}
        return {**fed, "c": np.array(truth), **containers}

    def bounds(self, eps: float) -> dict[str, float]:
        """Bound the error of each output under rounding to a type of that eps; inf if unbounded."""
        start = dict.fromkeys(("x", "z"), (1.0, eps))
        found = spreads(self.steps, start, eps)
        return {name: found[name][1] for name in self.outputs}


def _numbers(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-1, 1, (4, 4)).astype(np.float32)


def _steps(statements: Sequence[Statement]) -> list[Step]:
    found = []
    for statement in statements:
        match statement:
            case Step():
                found.append(statement)
            case Branch(_, then, other):
                found += [*_steps(then.steps), *_steps(other.steps)]
            case Looped(_, _, body) | Scanned(_, _, _, body):
                found += _steps(body.steps)
    return found


def _rendered(statement: Statement) -> str:
    r = statement.result
    match statement:
        case Step(_, template, reads, weight):
            return template.text.format(o=r, a=reads[0], b=reads[-1], w=weight)
        case Branch(_, then, other):
            bodies = (
                f"{side} = {side}_{r} () => (float[4,4] {body.result}) <float[4,4] {r}_k = {{{', '.join(constant)}}}> "
                f"{{ {' '.join(map(_rendered, body.steps))} }}"
                for side, body, constant in (
                    ("then_branch", then, ["0.5"] * 16),
                    ("else_branch", other, ["-0.25"] * 16),
                )
            )
            return f"{r} = If (c) <{', '.join(bodies)}>"
        case Looped(_, start, body):
            return (
                f"{r} = Loop (trips, yes, {start}) <body = b_{r} (int64 {r}_i, bool {r}_c, float[4,4] {r}_s) => "
                f"(bool {r}_m, float[4,4] {body.result}) {{ {r}_m = Identity ({r}_c) "
                f"{' '.join(map(_rendered, body.steps))} }}>"
            )
        case Scanned(_, start, (first, second), body):
            return (
                f"{r}_a = Reshape ({first}, cube) {r}_b = Reshape ({second}, cube) "
                f"{r}_e = Concat <axis = 0> ({r}_a, {r}_b) {r}_l, {r}_t = Scan <num_scan_inputs = 1, body = b_{r} "
                f"(float[4,4] {r}_s, float[4,4] {r}_x) => (float[4,4] {body.result}, float[4,4] {r}_o) "
                f"{{ {' '.join(map(_rendered, body.steps))} {r}_o = Identity ({body.result}) }}> ({start}, {r}_e) "
                f"{r} = Gather ({r}_t, second)"
            )


# -- rounding errors -----------------------------------------------------------------------------------


def spreads(steps: Sequence[Statement], known: Mapping[str, Spread], eps: float) -> dict[str, Spread]:
    """Return the spreads of all values in one graph, including outer ones."""
    found = dict(known)
    for statement in steps:
        found[statement.result] = _spread(statement, found, eps)
    return found


def _spread(statement: Statement, known: Mapping[str, Spread], eps: float) -> Spread:
    match statement:
        case Step(_, template, reads, _):
            operands = [known[name] for name in reads]
            size, off = template.spread(*operands)
            largest = max(1.0, size, *(s for s, _ in operands))
            off += template.roundings * eps * largest
            return (size, off) if largest + off < _FINITE else NOTHING_PROMISED
        case Branch(r, then, other):
            mine = {**known, f"{r}_k": (0.5, eps)}
            ends = [spreads(body.steps, mine, eps)[body.result] for body in (then, other)]
            return max(size for size, _ in ends), max(off for _, off in ends)
        case Looped(r, start, body):
            state = known[start]
            for _ in range(TRIPS):
                state = spreads(body.steps, {**known, f"{r}_s": state}, eps)[body.result]
            return state
        case Scanned(r, start, elements, body):
            state = known[start]
            for element in elements:
                inside = {**known, f"{r}_s": state, f"{r}_x": known[element]}
                state = spreads(body.steps, inside, eps)[body.result]
            return state


# -- drawing -------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph of some ten statements, at most three levels deep."""
    opset = draw(st.integers(9, LATEST))
    usable = [t for t in (*TEMPLATES, *RARER) if t.since <= opset <= t.until]
    steps = draw(_statements(usable, ("x", "z"), "", 2, 8))
    results = [s.result for s in steps]
    outputs = {results[-1], *draw(st.sets(st.sampled_from(results), max_size=2))}
    names = draw(st.sampled_from(["", "n{}", "x_float16_cast{}"]))
    ends = tuple(name for name in results if name in outputs)
    return Graph(opset, steps, ends, draw(st.booleans()), names, opset >= 11 and draw(st.booleans()))


@st.composite
def _statements(
    draw: st.DrawFn, usable: Sequence[Template], known: tuple[str, ...], prefix: str, depth: int, most: int
) -> tuple[Statement, ...]:
    steps: list[Statement] = []
    seen = list(known)
    for at in range(draw(st.integers(1, most))):
        result = f"{prefix}_{at}" if prefix else _named(draw, at, seen)
        kind = draw(st.sampled_from(["step"] * 6 + (["if", "loop", "scan"] if depth else [])))
        if kind == "step":
            template = draw(st.sampled_from(usable))
            reads = tuple(draw(st.sampled_from(seen[-4:] + seen[:2])) for _ in range(template.operands))
            steps.append(Step(result, template, reads, draw(st.sampled_from(["w0", "w1"]))))
        elif kind == "if":
            inside = (*seen, f"{result}_k")
            steps.append(Branch(result, *(draw(_body(usable, inside, result, depth - 1)) for _ in range(2))))
        elif kind == "scan":
            body = draw(_body(usable, (*seen, f"{result}_s", f"{result}_x"), result, depth - 1, empty=False))
            start, first, second = (draw(st.sampled_from(seen)) for _ in range(3))
            steps.append(Scanned(result, start, (first, second), body))
        else:
            body = draw(_body(usable, (*seen, f"{result}_s"), result, depth - 1, empty=False))
            steps.append(Looped(result, draw(st.sampled_from(seen)), body))
        seen.append(result)
    return tuple(steps)


@st.composite
def _body(
    draw: st.DrawFn, usable: Sequence[Template], known: tuple[str, ...], prefix: str, depth: int, empty: bool = True
) -> Body:
    if empty and draw(st.integers(0, 7)) == 0:
        return Body((), f"{prefix}_k")  # a branch with a constant but no nodes
    steps = draw(_statements(usable, known, prefix, depth, 3))
    return Body(steps, steps[-1].result)


def _named(draw: st.DrawFn, at: int, seen: Sequence[str]) -> str:
    """Draw a plain name, or one that a converter is likely to generate itself."""
    taken = [f"{name}_{dtype}" for name in (*seen[:2], "w0") for dtype in ("float16", "float32", "bfloat16")]
    free = [name for name in taken if name not in seen]
    return draw(st.sampled_from([f"v{at}", f"v{at}", f"v{at}", *free[:3]]))


def _constants() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    integers = {
        "square": [4, 4],
        "cube": [1, 4, 4],
        "image": [1, 1, 4, 4],
        "order": [3, 2, 1, 0],
        "zero": [0],
        "axis": [1],
        "two": [2],
        "four": [4],
        "twofold": [2, 1],
        "odd": [1, 3, 5, 7],
        "first": 0,
        "second": 1,
        "pair": 2,
        "trips": TRIPS,
    }
    floats = {
        "w0": rng.uniform(-0.25, 0.25, (4, 4)),
        "w1": rng.uniform(-0.25, 0.25, (4, 4)),
        "bias": np.full(4, 0.1),
        "ones": np.ones(4),
        "kernel": np.full((1, 1, 1, 1), 0.7),
        "high": 0.5,
    }
    truths = {"mask": np.tri(4, dtype=bool), "yes": np.array(True)}
    return {
        **{name: np.array(value, np.int64) for name, value in integers.items()},
        **{name: np.array(value, np.float32) for name, value in floats.items()},
        **truths,
    }


_CONSTANTS = _constants()
