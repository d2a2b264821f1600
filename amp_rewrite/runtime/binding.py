"""Inputs and outputs that stay where the model runs: bound once, run often, nothing copied in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.runtime.ort_errors import one_line
from amp_rewrite.runtime.ortvalue import Array, copied, from_array, from_tensor, to_array
from amp_rewrite.runtime.ports import Port


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """An open model's inputs and outputs on its device. Made by `Runner.bind` or `Session.bind`.

    `inputs` are OrtValues by name; `given_outputs` those that results are written into.
    """

    outputs: tuple[str, ...]
    inputs: Mapping[str, Any]
    given_outputs: Mapping[str, Any]
    device: str
    index: int
    _ort: Any = field(repr=False)
    _session: Any = field(repr=False)
    _bound: Any = field(repr=False)

    @classmethod
    def of(
        cls,
        ort: Any,
        session: Any,
        ports: tuple[Mapping[str, Port], Mapping[str, Port]],
        feeds: Mapping[str, object],
        outputs: Sequence[str] | Mapping[str, object],
        place: tuple[str, int],
        fixed: bool,
    ) -> Binding:
        """The binding of feeds, and of outputs: by name, or by name with the tensor to write into.

        `fixed`: outputs keep their address from run to run, as a CUDA graph wants it; their shapes have to be known.
        """
        bound = session.io_binding()
        values = {name: _value(ort, ports[0][name], value, *place) for name, value in feeds.items()}
        targets = dict(outputs) if isinstance(outputs, Mapping) else {}
        given = {name: _target(ort, ports[1][name], tensor, *place) for name, tensor in targets.items()}
        for name in outputs if fixed else ():
            if name not in given:
                given[name] = _room(ort, ports[1][name], *place)
        for name, value in values.items():
            bound.bind_ortvalue_input(name, value)
        for name in outputs:
            if name in given:
                bound.bind_ortvalue_output(name, given[name])
            else:
                bound.bind_output(name, *place)
        return cls(tuple(outputs), values, given, *place, ort, session, bound)

    def feed(self, feeds: Mapping[str, object]) -> None:
        """Copy new values over the bound ones, which keep their address: a tensor that was bound is written over.

        ModelError for another name, shape or type.
        """
        for name, given in feeds.items():
            if name not in self.inputs:
                known = ", ".join(map(repr, self.inputs))
                raise ModelError(f"input {name!r} is not bound; bound are {known}")
            old, new = self.inputs[name], _any_value(self._ort, given)
            if (list(old.shape()), old.element_type()) != (list(new.shape()), new.element_type()):
                raise ModelError(
                    f"input {name!r} was bound as {_told(old)}, and this is {_told(new)}; bind again for another shape"
                )
            old.update_inplace(new)

    def run(self) -> dict[str, Any]:
        """Run once, and the results as OrtValues by name, on the device; they speak DLPack (`torch.from_dlpack`).

        A result that was bound to a tensor is in that tensor. ModelError for what onnxruntime objects to.
        """
        with one_line("run"):
            self._bound.synchronize_inputs()
            self._session.run_with_iobinding(self._bound)
            self._bound.synchronize_outputs()
            return dict(zip(self.outputs, self._bound.get_outputs(), strict=True))

    def arrays(self) -> dict[str, Array]:
        """Run once, and the results as numpy arrays of their own, bfloat16 as that of ml_dtypes."""
        return {name: np.array(to_array(self._ort, value)) for name, value in self.run().items()}


def _value(ort: Any, port: Port, given: object, device: str, index: int) -> Any:
    """What is fed to an input, on the device."""
    if isinstance(given, ort.OrtValue):
        value = given if given.device_name().lower() == device else copied(ort, given, device, index)
    elif _speaks_dlpack(given):
        value = from_tensor(ort, given, device, index)
    else:
        value = from_array(ort, np.array(given), device, index)  # on a CPU the two share memory
    _check(port, value, "input")
    return value


def _any_value(ort: Any, given: object) -> Any:
    """A value where it lies."""
    if isinstance(given, ort.OrtValue):
        return given
    if not _speaks_dlpack(given):
        return from_array(ort, given)
    kind, at = given.__dlpack_device__()  # type: ignore[attr-defined]
    return from_tensor(ort, given, "cpu" if int(kind) == 1 else "cuda", at)


def _speaks_dlpack(given: object) -> bool:
    # numpy's arrays do, too, but without bfloat16, and not those that are read only
    return hasattr(given, "__dlpack__") and not isinstance(given, np.ndarray)


def _target(ort: Any, port: Port, tensor: object, device: str, index: int) -> Any:
    """The memory of a tensor, to be written into."""
    value = tensor if isinstance(tensor, ort.OrtValue) else _any_value(ort, tensor)
    if value.device_name().lower() != device:
        raise ModelError(
            f"output {port.name!r} is written on {device}, and its tensor lies on {value.device_name().lower()}"
            "; make it there"
        )
    _check(port, value, "output")
    return value


def _room(ort: Any, port: Port, device: str, index: int) -> Any:
    """New memory for an output of known shape."""
    dims = [d for d in port.shape or () if isinstance(d, int)]
    if port.shape is None or len(dims) != len(port.shape) or port.dtype is None:
        raise ModelError(
            f"the shape of output {port.name!r} is not known before it is run, and a CUDA graph writes to fixed"
            f" addresses; give outputs={{{port.name!r}: tensor}}"
        )
    return ort.OrtValue.ortvalue_from_shape_and_type(dims, port.dtype.code, device, index)


def _check(port: Port, value: Any, kind: str) -> None:
    if port.dtype is not None and value.element_type() != port.dtype.code:
        raise ModelError(f"{kind} {port.name!r} is {port.dtype.spelling}, and this is {_told(value)}; cast it")


def _told(value: Any) -> str:
    found = DType.of(value.element_type())
    return f"{found.spelling if found else value.data_type()}{list(value.shape())}"
