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

    `values`: arrays by input name. Exporters merge equal initializers and fold weights into others; parameters
    exported as inputs stay separate, each under its name.

    TrainingError for a name that is not an input, and for a value of another type or shape.
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
