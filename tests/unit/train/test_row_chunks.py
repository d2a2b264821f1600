"""Sums of products over rows in chunks: which ones, and that their numbers stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx.helper
import pytest
from onnx import TensorProto, numpy_helper

from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.step import execution
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.row_chunks import in_row_chunks
from support.train.nets import PLACE, parsed

CHANNELS = 8
CONVOLUTIONS = {
    "pointwise": ("Conv(x, w)", (6, 6), (1, 1)),
    "padding": ("Conv<pads=[1,0,2,1]>(x, w)", (6, 6), (3, 2)),
    "strides and dilations": ("Conv<strides=[2,1], dilations=[1,2], pads=[1,1,1,1]>(x, w)", (6, 6), (3, 2)),
    "padding by dims": ('Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)', (7, 6), (3, 3)),
    "one axis": ("Conv<pads=[1,1]>(x, w)", (9,), (3,)),
    "three axes": ("Conv(x, w)", (4, 3, 4), (2, 1, 2)),
    "transposed": ("ConvTranspose<strides=[2,2]>(x, w)", (4, 4), (3, 3)),
}


def by_place(trainer: Trainer) -> tuple[Counter[str], Counter[str]]:
    """Ops in Scans, and those outside."""
    nodes = trainer._model.proto.graph.node
    inside = Counter(n.op_type for node in nodes for a in node.attribute for n in a.g.node)
    return inside, Counter(n.op_type for n in nodes)


@pytest.mark.parametrize("number", [1, 5, 12])
@pytest.mark.parametrize(("text", "place", "kernel"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_chunks_of_rows_change_the_last_bits_alone(
    text: str, place: tuple[int, ...], kernel: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    dims = ",".join(map(str, (CHANNELS, *place)))
    body = f"h = {text} p = GlobalAveragePool(h) y = Flatten(p)"
    model = parsed(f"net (float[N,{dims}] x) => (float[N,{CHANNELS}] y) {{ {body} }}")
    weight = random.standard_normal((CHANNELS, CHANNELS, *kernel)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    step = training_step(model, loss="mean_squared_error(y, t)", optimizer="sgd,lr=0.1", policy="float32")
    x = random.standard_normal((number, CHANNELS, *place)).astype(np.float32)
    data = [{"x": x, "t": random.standard_normal((number, CHANNELS)).astype(np.float32)}] * 4
    monkeypatch.setattr(execution, "BLOCK", 256)
    chunks = Trainer(step, **PLACE)
    monkeypatch.setattr(execution, "in_row_chunks", lambda model, block: model)
    whole = Trainer(step, **PLACE)

    (scans, left), (none, products) = map(by_place, (chunks, whole))
    assert (scans["MatMul"], left["MatMul"]) == (products["MatMul"], 0) and none["MatMul"] == 0 < products["MatMul"]
    np.testing.assert_allclose(chunks.fit(data).losses, whole.fit(data).losses, rtol=1e-5)
    np.testing.assert_allclose(chunks.state["w"], whole.state["w"], atol=1e-5 * np.abs(weight).max())


def product(
    wide: str = "u = Transpose<perm=[0,2,1]>(x)",
    cut: str = "v = Slice(u, begin, end, one)",
    flat: str = "w = Reshape(v, seen)",
    narrow: str = "a = Transpose<perm=[1,0,2]>(g) b = Reshape(a, three)",
) -> Model:
    """A weight gradient by hand: g [N, 3, 4] times a part of x [N, 5, 6], beside a convolution."""
    types = "float[N,5,6] x, float[N,3,4] g, float[1,1,3] q, float[1,1,1] k"
    graph = f"c = Conv(q, k) {narrow} {wide} {cut} {flat} y = MatMul(b, w)"
    model = parsed(f"net ({types}) => (float[r,s] y, float[1,1,3] c) {{ {graph} }}")
    constants = {"begin": [1], "end": [5], "one": [1], "none": [0], "last": [-2], "three": [3, -1], "seen": [-1, 5]}
    constants |= {
        "front": [0, 1, 0, 0, 0, 0],
        "batch": [1, 0, 0, 0, 0, 0],
        "across": [-1, 7],
        "six": [6, -1],
        "behind": [-1, 3],
    }
    for name, values in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
    return Model(model)


LEFT = {
    "a part of the rows": {"cut": "t = Slice(u, begin, end, one) v = Slice(t, begin, end, none)"},
    "axes from behind": {"cut": "v = Slice(u, begin, end, last)"},
    "further rows": {"cut": "t = Slice(u, begin, end, one) v = Pad(t, batch)"},
    "rows of other positions": {"cut": "v = Pad(u, front)"},
    "positions of several rows": {"cut": "", "flat": "w = Reshape(u, across)"},
    "rows apart": {"narrow": "a = Transpose<perm=[1,0,2]>(g) b = Reshape(a, six)"},
    "a product along other axes": {"narrow": "a = Transpose<perm=[0,2,1]>(g) b = Reshape(a, behind)"},
    "another op": {"flat": "t = Reshape(v, seen) w = Relu(t)"},
    "rows not first": {"wide": "u = Transpose<perm=[2,0,1]>(x)"},
}


@pytest.mark.parametrize("steps", LEFT.values(), ids=LEFT)
def test_other_products_stay(steps: dict[str, str]) -> None:
    model = product(**steps)
    assert in_row_chunks(model, 60) is model


def test_short_rows_stay() -> None:
    model = product()
    assert in_row_chunks(model, 4 * 30) is not model and in_row_chunks(model, 4 * 30 + 1) is model


@pytest.mark.parametrize(("number", "size"), [(1, 1), (7, 7), (8, 8), (9, 3), (11, 1), (12, 6), (16, 8)])
def test_a_chunk_has_the_most_rows_that_divide_the_batch(number: int, size: int) -> None:
    model = in_row_chunks(product(), 60)  # 4 blocks of 60 elements: 8 rows of 30
    (scan,) = [n for n in model.proto.graph.node if n.op_type == "Scan"]
    parts = scan.input[1:]
    model.proto.graph.output.extend(onnx.helper.make_tensor_value_info(part, TensorProto.FLOAT, None) for part in parts)
    random = np.random.default_rng(0)
    shapes = {"x": (number, 5, 6), "g": (number, 3, 4), "q": (1, 1, 3), "k": (1, 1, 1)}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found = Runner.open(model).run(feeds)
    expected = Runner.open(product()).run(feeds)["y"]

    assert [np.shape(found[part])[:2] for part in parts] == [(number // size, size)] * 2
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-5)
