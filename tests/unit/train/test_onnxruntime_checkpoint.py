"""Checkpoints of onnxruntime-training: written, read by onnxruntime's own classes, and loaded into a trainer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.interchange import onnxruntime_checkpoint
from amp_rewrite.train.interchange.onnxruntime_checkpoint import OnnxRuntimeCheckpoint
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD, AdamW, Optimizer
from support.train.nets import CROSS_ENTROPY, PLACE, batches, mlp


def _trainer(rule: Optimizer) -> Trainer:
    return Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=rule, policy="float32"), **PLACE)


@pytest.fixture
def checkpoint_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reader that onnxruntime's compiler of flatbuffers generated."""
    monkeypatch.syspath_prepend(str(Path(onnxruntime.__file__).parent / "tools" / "ort_format_model"))
    yield importlib.import_module("ort_flatbuffers_py.fbs.Checkpoint").Checkpoint
    for name in [name for name in sys.modules if name.startswith("ort_flatbuffers_py")]:
        del sys.modules[name]


def test_a_checkpoint_has_the_fields_that_onnxruntime_reads(tmp_path: Path, checkpoint_class: Any) -> None:
    trainer = _trainer(AdamW(0.01))
    trainer.fit(list(batches(3)))
    path = tmp_path / "checkpoint"
    OnnxRuntimeCheckpoint.of(trainer).write(path)

    data = path.read_bytes()
    assert checkpoint_class.CheckpointBufferHasIdentifier(data, 0)
    read = checkpoint_class.GetRootAs(data, 0)
    module, group = read.ModuleState(), read.OptimizerGroups(0)
    tensors = [module.RequiresGradParams(i) for i in range(module.RequiresGradParamsLength())]
    assert group.InitialLearningRate() == np.float32(0.01)
    values = {t.Name().decode(): t.RawDataAsNumpy().view(np.float32).reshape(t.DimsAsNumpy()) for t in tensors}
    weights = trainer.get_weights()
    assert (read.Version(), group.GroupName(), group.Step(), group.OptimizerStatesLength()) == (1, b"group0", 3, 4)
    assert values.keys() == weights.keys() and {t.DataType() for t in tensors} == {1}
    assert all((values[name] == weights[name]).all() for name in weights)
    state = group.OptimizerStates(0)
    assert [state.Momentums(i).Name() for i in range(2)] == [b"momentum0", b"momentum1"]


@pytest.mark.parametrize("rule", [AdamW(0.01), SGD(0.1)], ids=["adamw", "sgd"])
def test_a_trainer_goes_on_from_a_checkpoint_bit_by_bit(rule: Optimizer, tmp_path: Path) -> None:
    data = list(batches(6))
    whole = _trainer(rule).fit(data).losses
    first = _trainer(rule)
    first.fit(data[:3])
    OnnxRuntimeCheckpoint.of(first).write(tmp_path / "checkpoint")
    second = _trainer(rule)
    OnnxRuntimeCheckpoint.read(tmp_path / "checkpoint").load_into(second)
    assert second.steps == 3 and second.fit(data[3:]).losses == whole[3:]


def test_frozen_parameters_and_properties_come_back(tmp_path: Path) -> None:
    made = OnnxRuntimeCheckpoint(
        {"w": np.ones((2, 3), np.float32)},
        {"table": np.arange(4, dtype=np.int64), "half": np.array(0.5, np.float16)},
        properties={"epoch": 3, "best": 0.25, "name": "first", "zero": 0},
    )
    made.write(tmp_path / "checkpoint")
    read = OnnxRuntimeCheckpoint.read(tmp_path / "checkpoint")
    assert read.properties == made.properties and read.slots == {} and read.steps == 0
    assert {n: (a.dtype, a.tolist()) for n, a in read.frozen.items()} == {
        n: (a.dtype, a.tolist()) for n, a in made.frozen.items()
    }


class Tables(dict[int, Any]):
    """A table of a flatbuffer by the positions of its fields, as the format has them."""

    def children(self, at: int) -> list[Any]:
        return list(self.get(at, []))

    def child(self, at: int) -> Any:
        return self.get(at)

    def number(self, at: int, _kind: str) -> Any:
        return self.get(at, 0)

    def text(self, at: int) -> str:
        return str(self[at])


def test_a_checkpoint_of_several_groups_has_the_most_steps_and_the_first_rate() -> None:
    groups = [Tables({6: steps, 8: rate}) for steps, rate in ((3, 0.5), (7, 0.25), (0, 0.125))]
    bag = Tables({4: [Tables({4: "epoch", 6: 2})], 6: [Tables({4: "best", 6: 0.5})], 8: [Tables({4: "name", 6: "a"})]})
    read = onnxruntime_checkpoint._checkpoint(Tables({8: groups, 10: bag}))  # type: ignore[arg-type]
    assert (read.steps, read.learning_rate) == (7, 0.5)
    assert read.properties == {"epoch": 2, "best": 0.5, "name": "a"}
    read = onnxruntime_checkpoint._checkpoint(Tables())  # type: ignore[arg-type]
    assert (read.steps, read.learning_rate, read.properties, read.parameters) == (0, 0.0, {}, {})


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(TrainingError, match="cannot read"):
        OnnxRuntimeCheckpoint.read(path)
    path.write_bytes(b"something else")
    with pytest.raises(TrainingError, match=r"is not a checkpoint of onnxruntime-training 1\.17 or later"):
        OnnxRuntimeCheckpoint.read(path)
    OnnxRuntimeCheckpoint({"w": np.ones((20, 30), np.float32)}).write(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(TrainingError, match="is damaged"):
        OnnxRuntimeCheckpoint.read(path)
    with pytest.raises(TrainingError, match=r"no optimizer with the slots \['momentum'\]"):
        OnnxRuntimeCheckpoint.of(_trainer(SGD(0.1, momentum=0.9)))
