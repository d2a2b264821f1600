"""Tensors that may lie in a data file beside the model."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from amp_rewrite.files.layout import _movable


@pytest.mark.parametrize(
    ("dtype", "shape", "movable"),
    [
        (np.float32, (256,), True),
        (np.float32, (255,), False),  # less than 1 KiB
        (np.float32, (16, 16), True),
        (np.float16, (512,), True),
        (np.bool_, (1024,), True),
        (np.int8, (2000,), True),
        (np.int64, (200,), False),  # may hold shapes
        (np.int32, (4096,), False),
        (np.int32, (4097,), True),  # more than any shape
        (np.int64, (20, 20), True),
    ],
)
def test_large_tensors_move_but_for_lists_that_may_be_shapes(
    dtype: type[np.generic], shape: tuple[int, ...], movable: bool
) -> None:
    assert _movable(numpy_helper.from_array(np.zeros(shape, dtype), "t")) is movable


def test_texts_and_segments_do_not_move() -> None:
    texts = TensorProto(data_type=TensorProto.STRING, dims=[4], string_data=[b"x" * 1000] * 4)
    piece = numpy_helper.from_array(np.zeros(4096, np.float32), "t")
    piece.segment.begin, piece.segment.end = 0, 4096
    assert not _movable(texts) and not _movable(piece)
