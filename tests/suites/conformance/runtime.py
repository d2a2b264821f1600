"""onnxruntime's CPU provider: opens a model, runs it, and hands over what numpy can hold."""

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
"""Types that onnxruntime's Python interface cannot take or give, and a wider one for each, which it can."""


@cache
def refusals() -> tuple[type[Exception], ...]:
    """onnxruntime's own exceptions, and those of its binding."""
    return (*objections.refusals(), RuntimeError, ValueError, TypeError)


def run(model: ModelProto, feeds: Feeds) -> list[object]:
    """The outputs in order, those of a type without numpy widened; raises one of `refusals`.

    Graph optimization is off: it hides roundings in fused kernels, and from BASIC on it takes a Dropout away whose
    training mode is only known when it runs.
    """
    able, kept = _for_numpy(model, feeds)
    return objections.run(able, kept, "DISABLE_ALL")


def numpy_of(value: object) -> object:
    """A value of a case as `run` gives it: arrays (or lists of them) of types that numpy holds."""
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
    """What to feed: arrays, or lists of them, under the names of the inputs."""
    return {
        name: numpy_helper.to_array(v) if isinstance(v, TensorProto) else v if isinstance(v, list) else np.asarray(v)
        for name, v in zip(names, values, strict=True)
        if v is not None
    }


def _for_numpy(model: ModelProto, feeds: Feeds) -> tuple[ModelProto, Feeds]:
    """The same model with inputs that numpy cannot hold made constants, and such outputs followed by a Cast."""
    odd_inputs = [v for v in model.graph.input if v.type.tensor_type.elem_type in WITHOUT_NUMPY and v.name in feeds]
    odd_outputs = [v for v in model.graph.output if v.type.tensor_type.elem_type in WITHOUT_NUMPY]
    if not odd_inputs and not odd_outputs:
        return model, feeds
    able, kept = copy.deepcopy(model), dict(feeds)
    for value in odd_inputs:
        able.graph.input.remove(value)
        able.graph.initializer.append(numpy_helper.from_array(np.asarray(kept.pop(value.name)), value.name))
    for at, value in enumerate(model.graph.output):
        wider = WITHOUT_NUMPY.get(value.type.tensor_type.elem_type)
        if wider is not None:
            able.graph.node.append(helper.make_node("Cast", [value.name], [f"{value.name}_wide"], to=wider))
            able.graph.output[at].name = f"{value.name}_wide"
            able.graph.output[at].type.tensor_type.elem_type = wider
    return able, kept
