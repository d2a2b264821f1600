"""Inputs and outputs bound to a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.runtime.buffers import Array, as_value, overwrite, placed, to_array
from amp_rewrite.runtime.installation import model_errors, onnxruntime
from amp_rewrite.runtime.ports import Port

_NUMBERS = count(1)


def graph_number(number: int) -> Any:
    """Return the run options of the CUDA graph of this number, to record or replay; -1: without a graph."""
    options = onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """An open model's inputs and outputs on its device. Made by `Runner.bind` or `Session.bind`.

    `inputs` are OrtValues by name; `given_outputs` those that results are written into.
    """

    outputs: tuple[str, ...]
    inputs: Mapping[str, Any]
    given_outputs: Mapping[str, Any]
    _session: Any = field(repr=False)
    _bound: Any = field(repr=False)
    _options: Any = field(repr=False)

    @classmethod
    def of(
        cls,
        session: Any,
        ports: tuple[Mapping[str, Port], Mapping[str, Port]],
        feeds: Mapping[str, object],
        outputs: Sequence[str] | Mapping[str, object],
        place: tuple[str, int],
        fixed: bool,
    ) -> Binding:
        """Return the binding of feeds, and of outputs: by name, or by name with the tensor to write into.

        `ports`: inputs and outputs by name. `fixed`: outputs keep their address from run to run, as a CUDA graph
        requires; their shapes have to be known.
        """
        bound = session.io_binding()
        values: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for name, tensor in feeds.items():
            values[name] = placed(tensor, *place)
            _check(ports[0][name], values[name], "input")
            bound.bind_ortvalue_input(name, values[name])
        for name in outputs:
            if isinstance(outputs, Mapping):
                given[name] = _target(ports[1][name], outputs[name], place[0])
            elif fixed:
                given[name] = _room(ports[1][name], *place)
            else:
                bound.bind_output(name, *place)
                continue
            bound.bind_ortvalue_output(name, given[name])
        options = graph_number(next(_NUMBERS)) if fixed else None
        return cls(tuple(outputs), values, given, session, bound, options)

    def feed(self, feeds: Mapping[str, object]) -> None:
        """Copy new values into the bound inputs and tensors, in place; ModelError for another name, shape or type."""
        for name, tensor in feeds.items():
            if name not in self.inputs:
                known = ", ".join(map(repr, self.inputs))
                raise ModelError(f"input {name!r} is not bound; bound are {known}")
            old, new = self.inputs[name], as_value(tensor)
            if (list(old.shape()), old.element_type()) != (list(new.shape()), new.element_type()):
                raise ModelError(
                    f"input {name!r} is bound as {_spelled(old)}, not {_spelled(new)}; bind again for another shape"
                )
            overwrite(old, new)

    def run(self) -> dict[str, Any]:
        """Run once; return the results as OrtValues by name, on the device, for DLPack (`torch.from_dlpack`).

        A result bound to a tensor is in that tensor. ModelError for an error of onnxruntime.
        """
        with model_errors("run"):
            self._bound.synchronize_inputs()
            self._session.run_with_iobinding(self._bound, self._options)
            self._bound.synchronize_outputs()
            return dict(zip(self.outputs, self._bound.get_outputs(), strict=True))

    def arrays(self) -> dict[str, Array]:
        """Run once; return copies of the results as numpy arrays, bfloat16 as in ml_dtypes."""
        return {name: np.array(to_array(value)) for name, value in self.run().items()}


def _target(port: Port, tensor: object, device: str) -> Any:
    value = as_value(tensor)
    where = value.device_name().lower()
    if where != device:
        raise ModelError(f"output {port.name!r} is written on {device}, but its tensor is on {where}; create it there")
    _check(port, value, "output")
    return value


def _room(port: Port, device: str, index: int) -> Any:
    dims = [d for d in port.shape or () if isinstance(d, int)]
    if port.shape is None or len(dims) != len(port.shape) or port.dtype is None:
        raise ModelError(
            f"the shape of output {port.name!r} is unknown before the run, but a CUDA graph writes to fixed addresses;"
            f" pass outputs={{{port.name!r}: tensor}}"
        )
    return onnxruntime().OrtValue.ortvalue_from_shape_and_type(dims, port.dtype.code, device, index)


def _check(port: Port, value: Any, kind: str) -> None:
    if port.dtype is not None and value.element_type() != port.dtype.code:
        raise ModelError(f"{kind} {port.name!r} is {port.dtype.spelling}, not {_spelled(value)}; cast the tensor")


def _spelled(value: Any) -> str:
    dtype = DType.of(value.element_type())
    return f"{dtype.spelling if dtype else value.data_type()}{list(value.shape())}"
