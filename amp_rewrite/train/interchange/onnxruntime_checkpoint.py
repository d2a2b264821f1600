"""Checkpoints of onnxruntime-training, from version 1.17 on: a flatbuffer with parameters, moments and properties.

The tables are those of `checkpoint.fbs` in onnxruntime; numbers in this file are offsets of their fields. Reading and
writing needs the package flatbuffers, which onnxruntime depends on, and no training build.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.scratch import replacing

if TYPE_CHECKING:
    from amp_rewrite.train.step.trainer import Trainer

_IDENTIFIER, _VERSION, _GROUP = b"ODTC", 1, "group0"
_SLOTS = {"m": "momentum0", "v": "momentum1"}
"""Slots of Adam and AdamW, by the names of onnxruntime's moments."""


@dataclass(frozen=True, eq=False)
class OnnxRuntimeCheckpoint:
    """A checkpoint of onnxruntime-training's on-device loop.

    The optimizers of that loop are AdamW, whose moments are the slots `m` and `v`, and SGD without slots.

    Attributes:
        parameters: trained parameters by name.
        frozen: parameters that are not trained, by name.
        steps: number of steps of the optimizer.
        learning_rate: the optimizer's initial rate; `load_into` leaves the trainer's own.
        slots: moments by parameter and slot, as `Trainer.optimizer_slots` gives them.
        properties: the user's numbers and texts by name.

    Example:
        >>> from amp_rewrite.train import AdamW, OnnxRuntimeCheckpoint, Trainer, training_step
        >>> trainer = Trainer(training_step("model.onnx", loss="cross_entropy(probability, label)", optimizer=AdamW()))
        >>> OnnxRuntimeCheckpoint.of(trainer).write("checkpoint")
        >>> OnnxRuntimeCheckpoint.read("checkpoint").load_into(trainer)
    """

    parameters: Mapping[str, Array]
    frozen: Mapping[str, Array] = field(default_factory=dict)
    steps: int = 0
    learning_rate: float = 0.0
    slots: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    properties: Mapping[str, int | float | str] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: Trainer) -> OnnxRuntimeCheckpoint:
        """Return the state of a trainer of AdamW, Adam or SGD.

        Raises:
            TrainingError: the optimizer has slots that onnxruntime's optimizers lack.
        """
        slots = trainer.optimizer_slots()
        foreign = {slot for own in slots.values() for slot in own} - _SLOTS.keys()
        if foreign:
            raise TrainingError(
                f"onnxruntime-training has no optimizer with the slots {sorted(foreign)}; use AdamW, or SGD without"
                " momentum"
            )
        return cls(trainer.get_weights(), steps=trainer.steps, learning_rate=float(trainer.rate()), slots=slots)

    @classmethod
    def read(cls, path: str | Path) -> OnnxRuntimeCheckpoint:
        """Return the checkpoint that a file holds.

        Raises:
            TrainingError: the file is not such a checkpoint, is damaged, or keeps tensors in another file.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as cause:
            raise TrainingError(f"cannot read {path}: {cause.strerror or cause}") from cause
        if data[4:8] != _IDENTIFIER:
            raise TrainingError(
                f"{path} is not a checkpoint of onnxruntime-training 1.17 or later; write it again with such a version"
            )
        try:
            return _checkpoint(_root(data))
        except (struct.error, IndexError, ValueError, TypeError, OverflowError) as cause:
            raise TrainingError(f"{path} is damaged; write the checkpoint again") from cause

    def write(self, path: str | Path) -> None:
        """Write the checkpoint as one file; a checkpoint at `path` is replaced."""
        with replacing(Path(path)) as file:
            file.write(_written(self))

    def load_into(self, trainer: Trainer) -> None:
        """Continue from these parameters, moments and steps; what the checkpoint lacks stays.

        Raises:
            TrainingError: a parameter is not trained by the step, or has another shape.
        """
        trainer.set_weights(self.parameters)
        trainer.set_optimizer_state(self.steps, self.slots)


# -- reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a flatbuffer; a field is named by its offset in the table of fields."""

    table: Any

    def number(self, at: int, kind: str) -> Any:
        """Return a number, 0 if it is absent."""
        import flatbuffers.number_types as kinds

        offset = self.table.Offset(at)
        return self.table.Get(getattr(kinds, f"{kind}Flags"), self.table.Pos + offset) if offset else 0

    def text(self, at: int) -> str:
        offset = self.table.Offset(at)
        return self.table.String(self.table.Pos + offset).decode() if offset else ""

    def child(self, at: int) -> _Table | None:
        offset = self.table.Offset(at)
        return self._at(self.table.Indirect(self.table.Pos + offset)) if offset else None

    def children(self, at: int) -> Iterator[_Table]:
        offset = self.table.Offset(at)
        if offset:
            start = self.table.Vector(offset)
            for position in range(self.table.VectorLen(offset)):
                yield self._at(self.table.Indirect(start + 4 * position))

    def array(self, at: int, dtype: type[np.generic]) -> Array:
        offset = self.table.Offset(at)
        if not offset:
            return np.zeros(0, dtype)
        return np.frombuffer(self.table.Bytes, dtype, self.table.VectorLen(offset), self.table.Vector(offset))

    def _at(self, position: int) -> _Table:
        from flatbuffers.table import Table

        return _Table(Table(self.table.Bytes, position))


_NAME, _DIMS, _KIND, _RAW = 4, 8, 10, 12  # fields of a tensor


def _root(data: bytes) -> _Table:
    from flatbuffers.table import Table

    return _Table(Table(data, int.from_bytes(data[:4], "little")))


def _checkpoint(root: _Table) -> OnnxRuntimeCheckpoint:
    module, bag = root.child(6), root.child(10)
    if module is not None and module.number(10, "Bool"):
        raise TrainingError("the checkpoint keeps its tensors in another file; write it without external data")
    parameters, frozen = ({}, {}) if module is None else (_tensors(module, at) for at in (4, 6))
    groups = list(root.children(8))
    slots = {
        state.text(4): {slot: moments[name] for slot, name in _SLOTS.items() if name in moments}
        for group in groups
        for state in group.children(10)
        for moments in [_tensors(state, 6)]
    }
    properties: dict[str, int | float | str] = {}
    if bag is not None:
        properties.update((p.text(4), p.number(6, "Int64")) for p in bag.children(4))
        properties.update((p.text(4), p.number(6, "Float32")) for p in bag.children(6))
        properties.update((p.text(4), p.text(6)) for p in bag.children(8))
    steps = max((group.number(6, "Int64") for group in groups), default=0)
    rate = next((group.number(8, "Float32") for group in groups), 0.0)
    return OnnxRuntimeCheckpoint(parameters, frozen, steps, rate, slots, properties)


def _tensors(table: _Table, at: int) -> dict[str, Array]:
    found = {}
    for tensor in table.children(at):
        dtype = DType(tensor.number(_KIND, "Int32"))
        dims = [int(dim) for dim in tensor.array(_DIMS, np.int64)]
        found[tensor.text(_NAME)] = (
            np.frombuffer(tensor.array(_RAW, np.uint8).tobytes(), dtype.numpy).reshape(dims).copy()
        )
    return found


# -- writing -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FlatbufferWriter:
    """Appends tables to a flatbuffer. A field is (position in the table, how to add its value)."""

    b: Any

    def table(self, size: int, fields: Mapping[int, Callable[[int], None]]) -> int:
        self.b.StartObject(size)
        for position, add in fields.items():
            add(position)
        return int(self.b.EndObject())

    def child(self, offset: int) -> Callable[[int], None]:
        return lambda position: self.b.PrependUOffsetTRelativeSlot(position, offset, 0)

    def vector(self, offsets: list[int]) -> Callable[[int], None]:
        self.b.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self.b.PrependUOffsetTRelative(offset)
        return self.child(self.b.EndVector())

    def text(self, text: str) -> Callable[[int], None]:
        return self.child(self.b.CreateString(text))

    def number(self, value: float, kind: str) -> Callable[[int], None]:
        return lambda position: getattr(self.b, f"Prepend{kind}Slot")(position, value, 0)

    def tensor(self, name: str, array: Array) -> int:
        dims = self.b.CreateNumpyVector(np.array(array.shape, np.int64))
        raw = self.b.CreateByteVector(array.tobytes())
        kind = self.number(DType.parse(array.dtype).code, "Int32")
        return self.table(7, {0: self.text(name), 2: self.child(dims), 3: kind, 4: self.child(raw)})

    def property(self, name: str, value: int | float | str) -> int:
        kind = "Float32" if isinstance(value, float) else "Int64"
        added = self.text(value) if isinstance(value, str) else self.number(value, kind)
        return self.table(2, {0: self.text(name), 1: added})

    def tensors(self, arrays: Mapping[str, Array]) -> Callable[[int], None]:
        return self.vector([self.tensor(name, array) for name, array in sorted(arrays.items())])


def _written(checkpoint: OnnxRuntimeCheckpoint) -> bytes:
    import flatbuffers

    w = _FlatbufferWriter(flatbuffers.Builder(1 << 16))
    module = w.table(4, {0: w.tensors(checkpoint.parameters), 1: w.tensors(checkpoint.frozen)})
    states = []
    for name in sorted(checkpoint.slots):
        moments = {_SLOTS[slot]: array for slot, array in checkpoint.slots[name].items()}
        states.append(w.table(2, {0: w.text(name), 1: w.tensors(moments)}))
    steps, rate = w.number(checkpoint.steps, "Int64"), w.number(checkpoint.learning_rate, "Float32")
    group = w.table(4, {0: w.text(_GROUP), 1: steps, 2: rate, 3: w.vector(states)})
    bag = {}
    for position, kind in enumerate((int, float, str)):
        own = sorted((name, value) for name, value in checkpoint.properties.items() if type(value) is kind)
        bag[position] = w.vector([w.property(name, value) for name, value in own])
    groups = w.vector([group])
    fields = {0: w.number(_VERSION, "Int32"), 1: w.child(module), 2: groups, 3: w.child(w.table(3, bag))}
    w.b.Finish(w.table(4, fields), file_identifier=_IDENTIFIER)
    return bytes(w.b.Output())
