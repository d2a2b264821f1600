"""Bounds by reason against what they were: of exported models, random graphs, each operator alone and between others.

`make golden` runs this file as a program, which writes them as they are.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from amp_rewrite import AmpRewriteError
from amp_rewrite.decide.bounds.analysis import bounds
from amp_rewrite.decide.bounds.bound import BoundOptions
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.bound_graphs import random_graph
from support.one_op import Case, cases

TESTS = Path(__file__).parents[2]
FILE = TESTS / "golden" / "bounds.json"
Problem = tuple[Path | ModelProto, BoundOptions]


def exported() -> Iterator[Problem]:
    for path in sorted(TESTS.glob("models/*.onnx")):
        yield path, BoundOptions()


def random_graphs() -> Iterator[Problem]:
    for seed in range(60):
        yield random_graph(seed, 8), BoundOptions()
        yield random_graph(seed, 8), BoundOptions(to=DType.BFLOAT16, exponent=9, inputs={"x": (-3.0, 2.0)}, below=False)


def single_ops() -> Iterator[Problem]:
    """Each case twice: of inputs in a range, and with all inputs but the first as constants."""
    for case in cases():
        floats = {name: a for name, a in case.feeds.items() if isinstance(a, np.ndarray) and a.dtype == np.float32}
        ranges = {name: (float(a.min()), float(a.max())) for name, a in floats.items() if a.size}
        yield case.model, BoundOptions(inputs=ranges)
        yield with_constants(case), BoundOptions(inputs=ranges)


def with_constants(case: Case) -> ModelProto:
    model = ModelProto.FromString(case.model.SerializeToString())
    for value in model.graph.input[1:]:
        array = case.feeds[value.name]
        if isinstance(array, np.ndarray):
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
    return model


def ops_between() -> Iterator[Problem]:
    """Each case between a norm or a softmax and a product: balls and sums of rows are passed on, or lost."""
    for case in cases():
        for kind, inputs in (("LayerNormalization", ("gain",)), ("Softmax", ())):
            if (model := between(with_constants(case), kind, inputs)) is not None:
                yield model, BoundOptions()


def between(model: ModelProto, kind: str, inputs: Sequence[str]) -> ModelProto | None:
    """The model with such an op before its first input, and a product behind its first output."""
    graph = model.graph
    x, y = ([*values, ValueInfoProto()][0] for values in (graph.input, graph.output))
    widths = [[dim.dim_value for dim in end.type.tensor_type.shape.dim][-1:] for end in (x, y)]
    if not all(widths) or {end.type.tensor_type.elem_type for end in (x, y)} != {TensorProto.FLOAT}:
        return None
    for op in graph.node:
        op.input[:] = ["before" if name == x.name else name for name in op.input]
    graph.node.insert(0, helper.make_node(kind, [x.name, *inputs], ["before"], axis=-1))
    graph.node.append(helper.make_node("MatMul", [y.name, "weight"], ["after"]))
    weights = {name: np.linspace(0.5, 2, *widths[0]) for name in inputs}
    for name, array in {**weights, "weight": np.linspace((-1, 2), 2, *widths[1])}.items():
        graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    y.CopyFrom(helper.make_tensor_value_info("after", TensorProto.FLOAT, None))
    return model


SOURCES = {source.__name__: source for source in (exported, random_graphs, single_ops, ops_between)}


def summed(problems: Iterable[Problem]) -> dict[str, list[float]]:
    """By reason: values, those that fit, what they rest on, and sums of the ends and of the proved magnitudes."""
    rows: dict[str, list[float]] = {}
    for model, options in problems:
        try:
            found = bounds(View.of(Model.load(model)), options)
        except AmpRewriteError:  # an operator that this onnx does not know
            continue
        for bound in found.values():
            numbers = (math.asinh(n) if math.isfinite(n) else 0.0 for n in (bound.lo, bound.hi, bound.least))
            rests = sum(at * value for at, value in enumerate(bound.rests_on, 1)) + bound.fills
            row = (1, bound.absmax <= options.to.max, rests, *numbers)
            why = bound.because
            rows[why] = [a + b for a, b in zip(rows.get(why, [0] * len(row)), row, strict=True)]
    return dict(sorted(rows.items()))


STORED: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {"versions": []}
VERSIONS = [metadata.version(name) for name in ("onnx", "numpy")]


@pytest.mark.skipif(STORED["versions"] != VERSIONS, reason=f"bounds are those under onnx, numpy {STORED['versions']}")
@pytest.mark.parametrize("name", SOURCES)
def test_bounds_are_what_they_were(name: str) -> None:
    assert summed(SOURCES[name]()) == {kind: pytest.approx(row, rel=1e-6) for kind, row in STORED[name].items()}


if __name__ == "__main__":
    made = {name: summed(source()) for name, source in SOURCES.items()}
    tables = [
        f'"{name}": {{\n' + ",\n".join(f'"{kind}": {json.dumps(row)}' for kind, row in rows.items()) + "\n}"
        for name, rows in made.items()
    ]
    FILE.write_text("{\n" + ",\n".join([f'"versions": {json.dumps(VERSIONS)}', *tables]) + "\n}\n", "utf-8")
    sys.stdout.write(f"{FILE}: {sum(map(len, made.values()))} rows\n")
