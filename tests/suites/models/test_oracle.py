"""Colorings compared with TensorFlow's own for 300 random graphs."""

import gzip
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto

from amp_rewrite.decide.coloring.paint import paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.view import View
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.request import Request
from support.counting import crossings, lowered_ops
from support.paths import TESTS

COUNTS = {"default": 180, "treat-gray-as-deny": 50, "tensor-cores-only": 40, "unsafe-force-all": 30}
"""The number of graphs in the file at each level."""


@cache
def oracle() -> tuple[dict[str, Any], ...]:
    packed = (TESTS / "data" / "tf_oracle.json.gz").read_bytes()
    return tuple(json.loads(gzip.decompress(packed))["graphs"])


@cache
def tensorflow(level: Level, newer: bool) -> Request:
    return Request(lists=("tensorflow",), level=level, target=Target.ONNX, safety="none", gray_follows_allow=newer)


def answer(
    model: ModelProto, level: Level, *, newer: bool, shuffled: np.random.Generator | None = None
) -> dict[str, Any]:
    """Color a model and return the result in the oracle's terms."""
    view = View.of(Model.load(model if shuffled is None else reordered(model, shuffled)))
    coloring = paint(Problem(view, tensorflow(level, newer)))
    cross = crossings(view, coloring)
    return {
        "half": list(lowered_ops(view, coloring)),
        "to_half": list(cross.to_low),
        "to_float": list(cross.to_float),
        "initializers": len(cross.constants),
    }


def disagreements(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Describe the differences by key; empty if there are none."""
    lines = []
    for key in ("half", "to_half", "to_float"):
        missing = sorted(set(expected[key]) - set(actual[key]))
        extra = sorted(set(actual[key]) - set(expected[key]))
        if missing or extra:
            lines.append(f"{key}: missing {missing}, extra {extra}")
    if expected["initializers"] != actual["initializers"]:
        lines.append(f"initializers: {expected['initializers']} expected, {actual['initializers']} found")
    return "; ".join(lines)


def reordered(model: ModelProto, rng: np.random.Generator) -> ModelProto:
    """Sort the nodes in a random topological order."""
    shuffled = clone(model)
    known = {"", *(v.name for v in model.graph.input), *(t.name for t in model.graph.initializer)}
    waiting = list(model.graph.node)
    del shuffled.graph.node[:]
    while waiting:
        ready = [n for n in waiting if known.issuperset(n.input)]
        chosen = ready[int(rng.integers(len(ready)))]
        waiting.remove(chosen)
        known.update(chosen.output)
        shuffled.graph.node.append(chosen)
    return shuffled


@pytest.mark.parametrize("rules", ["classic", "newer"])
@pytest.mark.parametrize("level", COUNTS)
def test_every_graph_is_painted_as_tensorflow_paints_it(level: Level, rules: str) -> None:
    graphs = [g for g in oracle() if g["level"] == level]
    assert len(graphs) == COUNTS[level]
    found = []
    for graph in graphs:
        actual = answer(onnx.parser.parse_model(graph["graph"]), level, newer=rules == "newer")
        if difference := disagreements(graph[rules], actual):
            found.append(f"{graph['id']}: {difference}")
    assert not found, f"{len(found)} of {len(graphs)} graphs differ, the first:\n" + "\n".join(found[:5])


def test_the_oracle_distinguishes_the_newer_rule_from_the_classic_one() -> None:
    assert sum(g["classic"] != g["newer"] for g in oracle()) == 77


@pytest.mark.parametrize("rules", ["classic", "newer"])
def test_paint_does_not_depend_on_the_order_of_the_nodes(rules: str) -> None:
    rng = np.random.default_rng(7)
    found = []
    for graph in oracle()[::3]:
        model = onnx.parser.parse_model(graph["graph"])
        actual = answer(model, graph["level"], newer=rules == "newer", shuffled=rng)
        if difference := disagreements(graph[rules], actual):
            found.append(f"{graph['id']}: {difference}")
    assert not found, "\n".join(found[:5])
