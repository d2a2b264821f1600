"""Reading and casting in another thread: the same bytes, errors where they are waited for, no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import store
from amp_rewrite.files.model import Model, baked, scaled
from amp_rewrite.files.store import prefetch
from amp_rewrite.files.tensors import CHUNK, Sources

SIZES = (3, CHUNK, CHUNK + 1, 7 * CHUNK + 5, 1, 30 * CHUNK)  # of several pieces, and of more than are in flight


def weights() -> ModelProto:
    random = np.random.default_rng(0)
    held = [numpy_helper.from_array(random.standard_normal(size, np.float32), f"w{i}") for i, size in enumerate(SIZES)]
    made = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> main (float x) => (float y) {y = Identity(x)}'
    )
    made.graph.initializer.extend([*held, helper.make_tensor("text", TensorProto.STRING, [1], ["a"])])
    return made


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Weights in a file: the even ones to be cast, the odd ones to be copied and to be scaled."""
    onnx.save_model(weights(), tmp_path / "weights.onnx")
    loaded = Model.load(tmp_path / "weights.onnx")
    for tensor in loaded.proto.graph.initializer[: len(SIZES) : 2]:
        tensor.CopyFrom(baked(tensor, DType.FLOAT16, model=loaded))
    for tensor in loaded.proto.graph.initializer[3 : len(SIZES) : 2]:
        tensor.CopyFrom(scaled(tensor, -5, name=tensor.name, model=loaded))
    return loaded


def written(model: Model, folder: Path, *, external: bool) -> dict[str, bytes]:
    folder.mkdir()
    model.save(folder / "out.onnx", external_data=external)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("external", [False, True])
def test_a_large_model_is_written_as_a_small_one(model, external, tmp_path, monkeypatch):
    alone = written(model, tmp_path / "alone", external=external)
    threads: list[str] = []
    fill = Sources.fill
    monkeypatch.setattr(Sources, "fill", lambda *given: (threads.append(threading.current_thread().name), fill(*given)))
    monkeypatch.setattr(store, "WORTH_IT", 0)
    assert written(model, tmp_path / "ahead", external=external) == alone
    assert {name.startswith("amp-rewrite") for name in threads} == {True} and len({*threads}) == 1
    kinds = [t.data_type for t in onnx.load(tmp_path / "ahead" / "out.onnx").graph.initializer[: len(SIZES)]]
    assert kinds == [TensorProto.FLOAT16, TensorProto.FLOAT] * (len(SIZES) // 2)


def pieces(count: int, sources: Sources, asked: list[int]) -> Iterator[memoryview]:
    for i in range(count):
        asked.append(i)
        sources.made[:2] = divmod(i, 256)
        yield sources.made[:2].data


def test_what_making_a_piece_raises_is_raised_to_who_waits_for_it():
    def broken(sources: Sources) -> Iterator[memoryview]:
        yield from pieces(50, sources, [])
        raise ModelError("the file ends")

    seen = 0
    with Sources() as sources, pytest.raises(ModelError, match=r"^the file ends$"):
        for _ in prefetch(broken(sources), sources):
            seen += 1
    assert 0 < seen <= 50
