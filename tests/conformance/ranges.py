"""Which values of a float32 model leave the range of a low type on given inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper

from amp_rewrite.files.model import Model
from amp_rewrite.view import MAIN, Value, View
from conformance import runtime


@dataclass(frozen=True, slots=True)
class Beyond:
    """`outputs` names what is written by the ops that make or read a value out of range; `text` is for people."""

    outputs: tuple[str, ...] = ()
    text: str = ""


def beyond(model: ModelProto, feeds: Sequence[runtime.Feeds], limit: float) -> Beyond:
    """What leaves [-limit, limit] in the main graph, inputs included."""
    view = View.of(Model.load(model))
    values = {value.name: value for value in _variable(view)}
    largest = _largest(model, [name for name, value in values.items() if value.producer is not None], feeds)
    for fed in feeds:
        for name in values.keys() & fed.keys():
            largest[name] = max(largest.get(name, 0.0), _size(fed[name]))
    found = [values[name] for name, size in largest.items() if size > limit]
    if not found:
        return Beyond()
    ops = {value.producer for value in found} | {use.op for value in found for use in view.uses[value.id]}
    outputs = {view.value_name(v) for op in ops if op is not None for v in view.ops[op].outputs if v is not None}
    power = math.floor(math.log10(max(largest.values())))
    return Beyond(tuple(sorted(outputs)), f"{len(found)} values beyond {limit:g}, the largest above 1e{power}")


def _variable(view: View) -> Iterator[Value]:
    """The float32 tensors of the main graph that are not constant."""
    for value in view.values:
        found = view.types[value.id]
        tensor = found is not None and found.onnx_spelling == "tensor(float)"
        if tensor and value.scope == MAIN and view.constant(value.id) is None:
            yield value


def _largest(model: ModelProto, names: Sequence[str], feeds: Sequence[runtime.Feeds]) -> dict[str, float]:
    """The largest finite magnitude of each of the values."""
    if not names:
        return {}
    traced = ModelProto()
    traced.CopyFrom(model)
    del traced.graph.output[:]
    traced.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    largest = dict.fromkeys(names, 0.0)
    for fed in feeds:
        for name, array in zip(names, runtime.run(traced, fed), strict=True):
            largest[name] = max(largest[name], _size(array))
    return largest


def _size(value: object) -> float:
    array = np.asarray(value)
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
