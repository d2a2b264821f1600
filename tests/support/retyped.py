"""Models in another floating type."""

import numpy as np
from ml_dtypes import finfo
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.files.protos import all_graphs, all_nodes, clone


def retyped(model: ModelProto, code: int, *, clipped: bool = False) -> ModelProto:
    """Copy a model and change every float32 tensor, declaration and type attribute to another floating type.

    With `clipped`, constants beyond the type's range become its largest number, as in the export of a half model.
    """
    out = clone(model)
    nodes = list(all_nodes(out.graph.node))
    # The schema of Resize allows scales only in float32.
    scales = {node.input[2] for node in nodes if node.op_type == "Resize" and len(node.input) > 2}
    for graph in all_graphs(out.graph):
        for formal in (*graph.input, *graph.output, *graph.value_info):
            if formal.type.tensor_type.elem_type == TensorProto.FLOAT:
                formal.type.tensor_type.elem_type = code
        for tensor in graph.initializer:
            if tensor.name not in scales:
                _retype(tensor, code, clipped)
    for attribute in (a for node in nodes for a in node.attribute):
        if attribute.name in ("to", "dtype", "output_dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = code
        if attribute.HasField("t"):
            _retype(attribute.t, code, clipped)
    return out


def _retype(tensor: TensorProto, code: int, clipped: bool) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        dtype, array = helper.tensor_dtype_to_np_dtype(code), numpy_helper.to_array(tensor)
        most = float(finfo(dtype).max)
        with np.errstate(over="ignore"):
            array = (np.clip(array, -most, most) if clipped else array).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
