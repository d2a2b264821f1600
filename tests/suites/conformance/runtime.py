"""Run models on onnxruntime's CPU provider with types that numpy supports."""

import copy
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from support import objections

Feeds = Mapping[str, object]

WITHOUT_NUMPY = {
    TensorProto.BFLOAT16: TensorProto.FLOAT,
    **dict.fromkeys((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ), TensorProto.FLOAT),
    **dict.fromkeys((TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ), TensorProto.FLOAT),
    **dict.fromkeys((TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0), TensorProto.FLOAT),
    **dict.fromkeys((TensorProto.INT4, TensorProto.INT2), TensorProto.INT8),
    **dict.fromkeys((TensorProto.UINT4, TensorProto.UINT2), TensorProto.UINT8),
}
"""Types without support in onnxruntime's Python interface, each with a wider supported one."""


@cache
def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions of onnxruntime and of its binding."""
    return (*objections.refusals(), RuntimeError, ValueError, TypeError)


def run(model: ModelProto, feeds: Feeds) -> list[object]:
    """Return the outputs in order, widened if numpy lacks their type; raises one of `refusals`.

    Graph optimization is off: it hides roundings in fused kernels, and from BASIC on it removes a Dropout whose
    training mode is only known at run time.
    """
    return objections.run(*_for_numpy(model, feeds), "DISABLE_ALL")


def numpy_of(value: object) -> object:
    """Return a value of a case in the form of `run`: arrays (or lists of them) of types that numpy supports."""
    if isinstance(value, (list, tuple)):
        return [numpy_of(item) for item in value]
    if value is None:
        return None
    array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
    if array.dtype.kind in "OSU":
        return array
    wider = WITHOUT_NUMPY.get(helper.np_dtype_to_tensor_dtype(array.dtype))
    return array.astype(helper.tensor_dtype_to_np_dtype(wider)) if wider else array


def feeds_of(names: Sequence[str], values: Sequence[object]) -> dict[str, object]:
    """Return arrays, or lists of them, by input name."""
    return {
        name: numpy_helper.to_array(v) if isinstance(v, TensorProto) else v if isinstance(v, list) else np.asarray(v)
        for name, v in zip(names, values, strict=True)
        if v is not None
    }


def _for_numpy(model: ModelProto, feeds: Feeds) -> tuple[ModelProto, Feeds]:
    """Turn inputs without numpy support into constants, and put a Cast after such outputs."""
    odd_inputs = [v for v in model.graph.input if v.type.tensor_type.elem_type in WITHOUT_NUMPY and v.name in feeds]
    odd_outputs = [v for v in model.graph.output if v.type.tensor_type.elem_type in WITHOUT_NUMPY]
    if not odd_inputs and not odd_outputs:
        return model, feeds
    supported, arrays = copy.deepcopy(model), dict(feeds)
    for value in odd_inputs:
        supported.graph.input.remove(value)
        supported.graph.initializer.append(numpy_helper.from_array(np.asarray(arrays.pop(value.name)), value.name))
    for at, value in enumerate(model.graph.output):
        wider = WITHOUT_NUMPY.get(value.type.tensor_type.elem_type)
        if wider is not None:
            supported.graph.node.append(helper.make_node("Cast", [value.name], [f"{value.name}_wide"], to=wider))
            supported.graph.output[at].name = f"{value.name}_wide"
            supported.graph.output[at].type.tensor_type.elem_type = wider
    return supported, arrays
