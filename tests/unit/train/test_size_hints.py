"""Hints on sizes for which tensor cores have to pad."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import onnx.parser
import pytest

from amp_rewrite import DType, Model
from amp_rewrite.train.step.training_report import size_hints


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((8, 16), ""),
        ((8, 12), "12 (pad to 16)"),
        ((3, 12, 20, 60), "3 (pad to 8), 12 (pad to 16), 20 (pad to 32), 60 (pad to 64)"),
        ((3, 12, 20, 60, 68), "3 (pad to 8), 12 (pad to 16), 20 (pad to 32), 60 (pad to 64) and 1 more"),
        ((300, 68, 60, 20, 12, 3), "3 (pad to 8), 12 (pad to 16), 20 (pad to 32), 60 (pad to 64) and 2 more"),
    ],
)
def test_the_smallest_sizes_are_named_and_the_others_counted(sizes: Sequence[int], named: str) -> None:
    weights = ", ".join(f"float16[{m},{n}] w{at}" for at, (m, n) in enumerate(pairwise(sizes)))
    products = " ".join(f"x{at + 1} = MatMul (x{at}, w{at})" for at in range(len(sizes) - 1))
    head = f'<ir_version: 10, opset_import: ["": 20]> g (float16[N,{sizes[0]}] x0, {weights})'
    text = f"{head} => (float16[N,{sizes[-1]}] x{len(sizes) - 1}) {{ {products} }}"
    model = Model.load(onnx.parser.parse_model(text))
    hints = size_hints(model, DType.FLOAT16)
    assert size_hints(model, DType.BFLOAT16) == size_hints(model, None) == ()
    words = "products in float16 have dimensions that are not multiples of 8: "
    assert [hint.partition(";")[0] for hint in hints] == ([words + named] if named else [])
