"""What is known of constants that are read in parts: rows, fills and largest numbers; matrices behind copies."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from amp_rewrite.decide.bounds import weights
from amp_rewrite.decide.bounds.state import State
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View

ROWS = np.arange(-12, 12, dtype=np.float32).reshape(6, 4) / 4
LONG = np.sqrt((ROWS**2).sum(axis=1).max())


def view_of(array: np.ndarray, body: str = "y = Identity (w)", kind: str = "float") -> View:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g () => ({kind} y) {{ {body} }}')
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.append(numpy_helper.from_array(array, "w"))
    return View.of(Model.load(model))


def known(array: np.ndarray, monkeypatch: pytest.MonkeyPatch, *, frugal: bool = False, wide: int = 99) -> State:
    """The state of a constant that counts as large, read in parts of 8 numbers."""
    for name, number in (("MOST", 3), ("PART", 8), ("_WIDE", wide)):
        monkeypatch.setattr(weights, name, number)
    view = view_of(array, kind="int64" if array.dtype == np.int64 else "float")
    state = weights.constant(view, next(v.id for v in view.values if v.name == "w"), frugal=frugal)
    assert state is not None
    return state


def test_of_a_large_constant_columns_and_the_longest_row_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    state = known(ROWS, monkeypatch)
    assert (state.lo.tolist(), state.hi.tolist()) == (ROWS.min(axis=0).tolist(), ROWS.max(axis=0).tolist())
    assert (state.fills, state.whole) == (False, False)
    assert state.ball is not None and (state.ball.axes, state.ball.sizes) == ((-1,), (4,))
    assert state.ball.radius.tolist() == [pytest.approx(LONG)]


def test_columns_of_wide_rows_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    state = known(ROWS, monkeypatch, wide=3)
    assert (state.lo.tolist(), state.hi.tolist(), state.ball) == ([-3], [2.75], None)


def test_fills_are_left_out_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = ROWS.copy()
    filled[0, 0], filled[5, 3] = -3e38, np.nan
    state = known(filled, monkeypatch)
    left = np.where(np.abs(filled) < 1e30, filled, 0)
    assert (state.lo.tolist(), state.hi.tolist()) == (left.min(axis=0).tolist(), left.max(axis=0).tolist())
    assert (state.fills, state.ball) == (True, None)


def test_integers_are_whole_and_nothing_is_known_of_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(np.arange(8).reshape(2, 4), monkeypatch).whole
    table = weights.table_of(view_of(ROWS).model, numpy_helper.from_array(np.ones((0, 4), np.float32)))
    assert (table.lo.tolist(), table.hi.tolist(), table.longest) == ([0], [0], 0)


@pytest.mark.parametrize(("factor", "told"), [(1.0, True), (16 / 3, False)])
def test_a_frugal_walk_reads_of_small_numbers_the_largest_alone(
    factor: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = known(ROWS * np.float32(factor), monkeypatch, frugal=True)
    assert (state.why == "the largest number of 'w'", state.lo.size == 1) == (told, told)
    assert state.absmax == pytest.approx(3 * factor)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("y = Identity (w)", (False, 6, 4)),
        ("t = Transpose (w) y = Identity (t)", (True, 4, 6)),
        ("t = Transpose <perm = [1, 0]> (w) u = Transpose (t) y = Identity (u)", (False, 6, 4)),
        ("t = Transpose <perm = [0, 1]> (w) y = Identity (t)", None),
        ("t = Cast <to = 10> (w) y = Cast <to = 1> (t)", (False, 6, 4)),
        ("t = Cast <to = 7> (w) y = Cast <to = 1> (t)", None),
        ("t = Relu (w) y = Identity (t)", None),
    ],
)
def test_a_matrix_is_a_constant_behind_copies_and_transposes(body: str, found: tuple[bool, int, int] | None) -> None:
    view = view_of(ROWS, body)
    value = view.ops[-1].outputs[0]
    matrix = weights.matrix_of(view, value)
    assert (matrix and (matrix.turned, matrix.rows, matrix.columns)) == found
    turned = weights.matrix_of(view, value, turned=True)
    assert (turned and (turned.turned, turned.rows, turned.columns)) == (found and (not found[0], found[2], found[1]))


def test_parts_of_a_matrix_are_lines_of_it_or_columns_if_it_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BLOCK", 2)
    monkeypatch.setattr(weights, "PART", 18)
    for body, expected in (("y = Identity (w)", ROWS), ("y = Transpose (w)", ROWS.T)):
        view = view_of(ROWS, body)
        matrix = weights.matrix_of(view, view.ops[-1].outputs[0])
        assert matrix is not None
        made = list(weights.parts(view.model, matrix))
        assert [max(part.row, part.column) for part in made] == [0, 4]
        whole = np.concatenate([part.values for part in made], axis=1 if matrix.turned else 0)
        assert np.array_equal(whole, expected)
