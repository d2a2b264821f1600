"""The switchable twin: under any mask it gives what the converted model of that mask gives when it is emulated."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from onnx import ModelProto

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.instrument.switchable import SwitchableModel, switchable_model
from amp_rewrite.files.model import Model
from amp_rewrite.pipeline.conversion import finish
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.settings.request import Request
from suites.models.test_fixtures import LOW, batch, source
from suites.models.test_properties import bounded
from support.cases import build, feeds
from support.corpus import KINDS
from support.random_graphs import Graph, graphs
from support.rounded_once import rounded_once

# What the noise of float32 may flip is the last bit of a low value: eps, grown along the longest of the fixtures.
FLIPS = {DType.FLOAT16: 4 * 2.0**-10, DType.BFLOAT16: 4 * 2.0**-7}


def board_of(draft: Draft, *others: Coloring) -> SwitchableModel | None:
    """The switchable model of all vertices that the coloring without pins, or another one, lowers."""
    colorings = (draft.paint(), *others)
    may = {vertex for base in colorings for vertex, paint in base.paints.items() if paint.dtype is base.to}
    return switchable_model(draft.view, may, colorings[0].to, io=draft.io, saturate=draft.hazards.saturate)


def apart(draft: Draft, feed: Mapping[str, Any], seeds: int = 4) -> float:
    """The largest difference, in units of the largest output, over random sets of pinned ops."""
    board = board_of(draft)
    assert board is not None
    ops = sorted({v[0] for v in board.may})
    generators = map(np.random.default_rng, range(seeds))
    pinned = [[op for op in ops if rng.random() < seed / 3] for seed, rng in enumerate(generators)]
    colorings = [draft.paint([Pin(op, "repair", None, "") for op in some]) for some in pinned]
    board = board_of(draft, *colorings)  # a pin may let another op become low
    assert board is not None
    twin = Runner.open(board.model)
    worst = 0.0
    for coloring in colorings:
        assert board.covers(coloring)
        found = twin.run({**feed, board.input: board.mask(coloring)})
        expected = Runner.open(rounded_once(finish(draft, coloring).result, io="float32")).run(feed)
        for name, named in board.outputs.items():
            a, b = np.asarray(expected[name], np.float64), np.asarray(found[named], np.float64)
            assert (np.isfinite(a) == np.isfinite(b)).all()
            finite = np.isfinite(a)
            worst = max(worst, float(np.abs(a - b)[finite].max(initial=0) / np.abs(a)[finite].max(initial=1e-30)))
    return worst


@pytest.mark.parametrize("low", LOW, ids=lambda t: t.spelling)
@pytest.mark.parametrize("name", KINDS)
def test_it_agrees_with_the_emulation_on_exported_models(name: str, low: DType) -> None:
    draft = Draft.of(source(name), Request.of(to=low, target="onnx"))
    if board_of(draft) is None:
        pytest.skip("nothing of it becomes low" if draft.view.opsets[""] >= 13 else "no Cast to bfloat16 yet")
    assert apart(draft, batch(name, "input"), seeds=2 if "unet" in name else 4) <= FLIPS[low]


@given(graph=graphs(), chosen=st.randoms(use_true_random=False))
@bounded
def test_it_agrees_with_the_emulation_on_random_graphs(graph: Graph, chosen: Random) -> None:
    note(graph.text())
    model = graph.model()
    feed = feeds(model)
    try:
        draft = Draft.of(model, Request.of(level="lower-all"))
        plain = Runner.open(Model.load(model)).run(feed)
    except ModelError:
        return  # onnxruntime or onnx refuses the model itself
    board = board_of(draft)
    if board is None or not all(np.isfinite(value).all() for value in plain.values() if isinstance(value, np.ndarray)):
        return
    pins = [Pin(op.id, "repair", None, "") for op in draft.view.ops if chosen.random() < 0.4]
    coloring = draft.paint(pins)
    if not board.covers(coloring):
        return
    found = Runner.open(board.model).run({**feed, board.input: board.mask(coloring)})
    expected = Runner.open(rounded_once(finish(draft, coloring).result, io="float32")).run(feed)
    for name, named in board.outputs.items():
        a, b = np.asarray(expected[name], np.float64), np.asarray(found[named], np.float64)
        largest = max(1.0, np.abs(a).max(initial=0))
        assert np.abs(a - b).max(initial=0) <= FLIPS[DType.FLOAT16] * largest


def heavy() -> ModelProto:
    """Two readers of one weight above the bound from which weights are left in their files."""
    weight = np.random.default_rng(0).standard_normal((96, 96)).astype(np.float32) / 10
    return build(
        "a=MatMul(x,w);b=Relu(a);y=MatMul(b,w);z=Add(y,w)",
        ["y", "z"],
        constants={"w": weight},
        shapes=dict.fromkeys("xyz", (96, 96)),
    )


def test_heavy_weights_are_switched_with_the_op_that_reads_them() -> None:
    draft = Draft.of(heavy(), Request.of(target="onnx"))
    x = np.random.default_rng(1).standard_normal((96, 96)).astype(np.float32)

    assert apart(draft, {"x": x}) <= FLIPS[DType.FLOAT16]
    board = board_of(draft)
    assert board is not None
    rounded = [t.name for t in board.model.proto.graph.initializer if t.data_type == DType.FLOAT16.code]
    assert rounded == ["w/float16"]  # once, in the low type


def test_low_inputs_and_outputs_are_rounded_whatever_the_mask() -> None:
    model = build("a=MatMul(x,w);y=Relu(a)", ["y"], constants={"w": np.eye(8, dtype=np.float32)})
    draft = Draft.of(model, Request.of(target="onnx", io="low"))
    board = board_of(draft)
    assert board is not None
    x = np.full((8, 8), 1 + 2.0**-12, np.float32)

    off = np.zeros(len(board.switches), np.bool_)
    mask = board.mask(draft.paint([Pin(op.id, "repair", None, "") for op in draft.view.ops]))
    found = Runner.open(board.model).run({"x": x, board.input: mask})

    assert (np.asarray(found[board.outputs["y"]]) == 1).all()
    assert mask.any() and not off.any()


def test_a_colouring_that_the_twin_was_not_built_for_is_not_covered() -> None:
    draft = Draft.of(heavy(), Request.of(target="onnx"))
    base = draft.paint()
    board = switchable_model(draft.view, {next(iter(base.paints))}, base.to)

    assert board is not None
    assert not board.covers(base)
    assert board.covers(draft.paint([Pin(op.id, "repair", None, "") for op in draft.view.ops]))


def test_there_is_no_twin_of_a_half_model_nor_of_old_ones() -> None:
    draft = Draft.of(heavy(), Request.of(target="onnx"))
    half = Draft.of(finish(draft, draft.paint()).result, Request.of(target="onnx"))
    old = Draft.of(build("y=MatMul(x,x)", ["y"], opset=10), Request.of(target="onnx"))

    assert [board_of(d) for d in (half, old)] == [None, None]
