"""A verdict says so where no input makes a difference to the reference."""

from __future__ import annotations

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

from amp_rewrite import convert, verify
from amp_rewrite.evidence.verdict import Verdict
from support.hard_models import Array

IGNORES = "a model that ignores its inputs passes, too"
MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
m (float[N,8] x) => (float[N,8] y) {
  p = MatMul (x, w)
  y = Add (p, b)
}
"""


def verdict(slope: float, *batches: Array, tolerance: float = 1e-2) -> Verdict:
    """Compare y = slope * x + 1 with its conversion."""
    proto = onnx.parser.parse_model(MODEL)
    weights = {"w": np.eye(8, dtype=np.float32) * slope, "b": np.ones(8, np.float32)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return verify(proto, convert(proto), [{"x": batch} for batch in batches], tolerance=tolerance)


def noted(found: Verdict) -> bool:
    assert found.ok
    return any(IGNORES in note for note in found.notes)


def rows(*numbers: float) -> Array:
    return np.array([[number] * 8 for number in numbers], np.float32)


@pytest.mark.parametrize("batches", [(rows(1, 2),), (rows(1), rows(2)), (rows(1, 1), rows(2, 2))])
def test_outputs_within_the_tolerance_of_each_other_get_a_note(batches: tuple[Array, ...]) -> None:
    assert noted(verdict(1e-4, *batches))
    assert not noted(verdict(1.0, *batches))


@pytest.mark.parametrize("batches", [(rows(1),), (rows(1, 1),), (rows(1), rows(1))])
def test_equal_inputs_tell_nothing(batches: tuple[Array, ...]) -> None:
    assert not noted(verdict(1e-4, *batches))


def test_one_input_that_differs_is_enough() -> None:
    assert not noted(verdict(1e-4, rows(1), rows(2), rows(1e3)))


def test_a_smaller_tolerance_tells_inputs_apart() -> None:
    assert not noted(verdict(1e-2, rows(1), rows(2), tolerance=5e-3))
    assert noted(verdict(1e-2, rows(1), rows(2), tolerance=2e-2))


def test_batches_of_other_shapes_differ() -> None:
    assert not noted(verdict(1e-4, rows(1), rows(2, 2)))
