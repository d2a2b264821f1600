"""Binding of inputs: a model exported with its parameters as inputs gets them back as initializers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx.numpy_helper import from_array

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.runtime.ports import input_ports


def bind(model: object, values: Mapping[str, object], *, folder: str | Path | None = None) -> Model:
    """Return a new model with some inputs replaced by initializers.

    Exporters merge equal initializers and fold weights into others; parameters exported as inputs stay separate, each
    under its name.

    Args:
        model: as `Model.load` takes it; it is not changed.
        values: arrays by input name.
        folder: where the external data of a ModelProto lies.

    Returns:
        The model with fewer inputs.

    Raises:
        TrainingError: a name is not an input, or a value has another type or shape.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import bind
        >>> [v.name for v in bind("model.onnx", {"image": np.zeros((2, 1, 8, 8), np.float32)}).proto.graph.input]
        []
    """
    source = Model.load(model, folder=folder)
    ports = {port.name: port for port in input_ports(source)}
    proto = clone(source.proto)
    for name, value in values.items():
        if name not in ports:
            raise TrainingError(f"{name!r} is not an input of the model; its inputs are {', '.join(map(repr, ports))}")
        array, port = np.asarray(value), ports[name]
        if not port.admits(array.shape) or port.dtype is None or port.dtype.numpy != array.dtype:
            expected = f"{port.dtype.spelling if port.dtype else 'not a tensor'} {list(port.shape or ())}"
            actual = f"{array.dtype} {list(array.shape)}"
            raise TrainingError(f"the value of {name!r} is {actual}, but the input is {expected}; convert the value")
        proto.graph.initializer.append(from_array(np.ascontiguousarray(array).reshape(array.shape), name))
    refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in values])
    return replace(source, proto=proto)
