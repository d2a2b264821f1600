"""Double buffers: state that stays on the device, written by one run and read by the next, without copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from amp_rewrite.errors import ModelError
from amp_rewrite.runtime.ort_errors import model_errors
from amp_rewrite.runtime.ortvalue import Array, copied, from_array, overwrite, strange_of, to_array

Side = Literal[0, 1]
"""One of the two sets of a `DoubleBuffer`."""


@dataclass(frozen=True, slots=True, eq=False)
class DoubleBuffer:
    """Named tensors on a device, in two sets: a run reads one and writes the other. Made by `Runner.double_buffer`.

    The owner keeps track of the current side. A run never writes to the set that it reads, so a run that fails or is
    interrupted leaves the state unchanged.
    """

    place: tuple[str, int]
    sides: tuple[Mapping[str, Any], Mapping[str, Any]] = field(repr=False)
    _ort: Any = field(repr=False)

    @classmethod
    def of(cls, ort: Any, initial: Mapping[str, Array], place: tuple[str, int]) -> DoubleBuffer:
        """Allocate both sets and copy the values to side 0."""
        # onnxruntime's memory is aligned for vector instructions, so sums are the same in every run
        sides = ({name: _room(ort, array, place) for name, array in initial.items()} for _ in "01")
        buffer = cls(place, (next(sides), next(sides)), ort)
        buffer.put(0, initial)
        return buffer

    def put(self, side: Side, values: Mapping[str, Array]) -> None:
        """Copy values of the tensors' shapes and types to one side."""
        for name, value in values.items():
            _fill(self._ort, self.sides[side][name], value)

    def view(self, side: Side, name: str) -> Array:
        """Return the values of a tensor; on a CPU without a copy, valid until a run writes to that side."""
        return to_array(self._ort, self.sides[side][name])

    def arrays(self, side: Side) -> dict[str, Array]:
        """Return copies of all tensors of a side."""
        return {name: np.array(self.view(side, name)) for name in self.sides[side]}


@dataclass(frozen=True, slots=True, eq=False)
class BufferedRunner:
    """An open model with its state in a `DoubleBuffer`, made by `Runner.buffered`.

    `inputs`: names of inputs to feed besides the state. `told`: outputs that runs return.
    """

    buffer: DoubleBuffer
    inputs: frozenset[str]
    told: tuple[str, ...]
    provider: str
    _session: Any = field(repr=False)
    _ort: Any = field(repr=False)
    _bound: tuple[Any, Any] = field(repr=False)
    _fed: dict[str, tuple[Any, Any]] = field(repr=False)
    _shielded: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(
        cls,
        ort: Any,
        opened: tuple[Any, str],
        buffer: DoubleBuffer,
        successors: Mapping[str, str],
        told: Sequence[str],
        spoiled: frozenset[str],
    ) -> BufferedRunner:
        """Bind a model. `opened`: onnxruntime's session, and its provider.

        `successors`: the output that succeeds each tensor. `spoiled`: inputs that runs write into.
        """
        session, provider = opened
        inputs = frozenset(port.name for port in session.get_inputs())
        state, _ = buffer.sides
        read = [name for name in state if name in inputs]
        shielded = {name: copied(ort, state[name], *buffer.place) for name in read if name in spoiled}
        bound = tuple(session.io_binding() for _ in "01")
        for here, now, after in zip(bound, buffer.sides, reversed(buffer.sides), strict=True):
            for name in read:
                here.bind_ortvalue_input(name, shielded.get(name, now[name]))
            for name in told:  # first, so that they are the first results
                here.bind_output(name)
            for name, output in successors.items():
                here.bind_ortvalue_output(output, after[name])
        fed = inputs - state.keys()
        return cls(buffer, fed, tuple(told), provider, session, ort, (bound[0], bound[1]), {}, shielded)

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read one side, write the other, and return `told`, valid until the next run. ModelError if a run fails."""
        bound = self._bound[side]
        with model_errors("run"):
            for name, value in self._shielded.items():
                overwrite(value, self.buffer.sides[side][name])
            for name, array in feeds.items():
                self._feed(name, array)
            for name in self.told:  # again: a result of the last run would be taken for memory of that shape
                bound.bind_output(name)
            bound.synchronize_inputs()
            self._session.run_with_iobinding(bound)
            bound.synchronize_outputs()
            results = bound.get_outputs_as_ortvaluevector()
            values = [self._ort.OrtValue(results[at]) for at in range(len(self.told))]
            return {name: to_array(self._ort, value) for name, value in zip(self.told, values, strict=True)}

    def _feed(self, name: str, array: Array) -> None:
        """Copy an array to the device; its memory there is reused while shape and type stay the same."""
        like, held = self._fed.get(name, (None, None))
        if like != (array.shape, array.dtype):
            if name not in self.inputs:
                raise ModelError(f"{name!r} is not an input to feed; the inputs are {', '.join(sorted(self.inputs))}")
            held = _room(self._ort, array, self.buffer.place)
            for bound in self._bound:
                bound.bind_ortvalue_input(name, held)
            self._fed[name] = (array.shape, array.dtype), held  # last, so that an interrupt leaves a consistent state
        _fill(self._ort, held, array)


def _room(ort: Any, array: Array, place: tuple[str, int]) -> Any:
    like = from_array(ort, array)
    return ort.OrtValue.ortvalue_from_shape_and_type(list(like.shape()), like.element_type(), *place)


def _fill(ort: Any, value: Any, array: Array) -> None:
    if strange_of(array) is None:
        value.update_inplace(array)
    else:
        overwrite(value, from_array(ort, array))
