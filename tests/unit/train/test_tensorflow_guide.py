"""Sections of TensorFlow's guide and lines of its table that no other test holds, and the table's own tests."""

import re
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.settings.op_lists import load_lists
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD
from support.train.nets import CROSS_ENTROPY, PLACE, batches, mlp

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "reference" / "tensorflow.md"
ROWS = [line for line in TABLE.read_text("utf-8").splitlines() if re.match(r"\| [^-]", line)]


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("row", [r for r in ROWS if _cells(r)[2] != "tests"], ids=lambda row: _cells(row)[0][:40])
def test_each_line_of_the_table_names_its_tests_unless_there_is_nothing_to_test(row: str) -> None:
    _, here, tests = _cells(row)
    named = re.findall(r"`([^`]+)`", tests)
    assert named or here.startswith("not")
    for name in named:
        assert (ROOT / name if "/" in name else Path(__file__).with_name(name)).is_file()


LINES = [
    line for line in Path(__file__).with_name("tensorflow_rows.txt").read_text("utf-8").splitlines() if "|" in line
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(" | ")[0])
def test_each_line_of_tensorflow_has_tests_that_exist_or_says_why_not(line: str) -> None:
    tests = line.partition(" | ")[2]
    for part in () if tests.startswith("- ") else tests.split("; "):
        name, _, functions = part.partition(": ")
        path = ROOT / "tests" / f"{name}.py" if "/" in name else Path(__file__).with_name(f"{name}.py")
        defined = set(re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))
        assert functions and set(functions.split(", ")) <= defined


@pytest.mark.parametrize(("value", "square"), [(256.0, np.inf), (1e-5, 0.0), (255.0, 65024.0)])
def test_squares_overflow_and_vanish_in_float16(value: float, square: float) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float16[1] x) => (float16[1] y) { y = Mul (x, x) }'
    runner = Runner.open(emulate(Model(onnx.parser.parse_model(text))))
    (result,) = runner.run({"x": np.array([value], runner.inputs[0].dtype.numpy)}).values()
    with np.errstate(over="ignore", under="ignore"):
        assert np.float16(value) * np.float16(value) == np.asarray(result)[0] == square


def test_a_dynamic_scale_prints_its_current_value() -> None:
    scale = DynamicLossScale(8.0, increment_period=1)
    scale.update([np.ones(1, np.float32)])
    assert "current_loss_scale=16.0" in repr(scale)


@pytest.mark.parametrize(
    ("op_type", "color"),
    [("ArgMax", "clear"), ("Floor", "clear"), ("Conv", "allow"), ("Add", "gray"), ("AveragePool", "gray")],
)
def test_the_lists_have_the_classes_of_tensorflow(op_type: str, color: str) -> None:
    for to in (DType.FLOAT16, DType.BFLOAT16):
        assert load_lists(to).classify("", op_type, {}, 2).color.value == color


def test_weights_that_are_set_back_train_as_before() -> None:
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=SGD(0.1)), **PLACE)
    start, data = trainer.get_weights(), list(batches(4))
    first = trainer.fit(data).losses
    trainer.set_weights(start)
    assert trainer.fit(data).losses == first
