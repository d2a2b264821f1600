"""A small language for graphs.

    a=MatMul(x,w);p,q=Split[axis=0](a);s=Sum(p,q)

Each statement is one node, named after its first output. `[name=value]` are attributes: integers, decimal numbers,
strings, or a list of numbers separated by spaces. Names without a statement are graph inputs.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

_STATEMENT = re.compile(r"^([\w,]+)=(?:([\w.]+)::)?(\w+)(?:\[([^\]]*)\])?\(([\w,]*)\)$")
_TYPES = {"bool": TensorProto.BOOL, "int": TensorProto.INT64, "half": TensorProto.FLOAT16, "float": TensorProto.FLOAT}


def build(
    graph: str,
    outputs: Sequence[str],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    types: Mapping[str, str] | None = None,
    constants: Mapping[str, object] | None = None,
    opset: int = 17,
    domains: Mapping[str, int] | None = None,
) -> ModelProto:
    """Build the model of a graph in the case language.

    `shapes` and `types` describe graph inputs, by default float of 8 by 8; `constants` turns free names into
    initializers. Shape inference determines the types of outputs; ValueError if it cannot.
    """
    shapes, types, constants = shapes or {}, types or {}, constants or {}
    nodes = [_node(part.strip()) for part in graph.split(";") if part.strip()]
    results = {name for node in nodes for name in node.output}
    read = dict.fromkeys(name for node in nodes for name in node.input if name)
    inputs = [
        helper.make_tensor_value_info(name, _TYPES[types.get(name, "float")], shapes.get(name, (8, 8)))
        for name in read
        if name not in results and name not in constants
    ]
    tensors = [numpy_helper.from_array(_array(value), name) for name, value in constants.items()]
    free = [helper.make_empty_tensor_value_info(name) for name in outputs]
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, free, tensors), opset_imports=imports, ir_version=ir_version(opset)
    )
    found = {v.name: v for v in onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output}
    del model.graph.output[:]
    for name in outputs:
        if not found[name].type.WhichOneof("value"):
            raise ValueError(f"output {name!r} has no type that can be inferred; check the case")
        _give_shape(found[name].type, shapes.get(name, (8, 8)))
        model.graph.output.append(found[name])
    return model


def ir_version(opset: int) -> int:
    """Return the lowest IR version for an opset of ai.onnx."""
    return helper.find_min_ir_version_for([helper.make_opsetid("", opset)])


def _give_shape(proto: onnx.TypeProto, shape: Sequence[int]) -> None:
    """Give an element of a sequence a shape, which the checker requires."""
    tensor = proto.sequence_type.elem_type.tensor_type if proto.HasField("sequence_type") else proto.tensor_type
    if not tensor.HasField("shape"):
        tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in shape)


Feed = np.ndarray | list[np.ndarray]


def feeds(model: ModelProto) -> dict[str, Feed]:
    """Return values for every input without an initializer: floats in [0.05, 0.25], Trues and zeros.

    An input named `trips` gets 3; a sequence gets two tensors.
    """
    rng = np.random.default_rng(1)
    filled = {t.name for t in model.graph.initializer}
    found = {v.name: _filling(v.type, rng) for v in model.graph.input if v.name not in filled}
    return {**found, "trips": np.array(3, np.int64)} if "trips" in found else found


def _filling(proto: onnx.TypeProto, rng: np.random.Generator) -> Feed:
    if proto.HasField("sequence_type"):
        return [np.asarray(_filling(proto.sequence_type.elem_type, rng)) for _ in range(2)]
    tensor = proto.tensor_type
    shape = [d.dim_value or 2 for d in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if tensor.elem_type == TensorProto.STRING:
        return np.full(shape, "a", dtype=object)
    if np.issubdtype(dtype, np.floating):
        return np.asarray(rng.uniform(0.05, 0.25, shape), dtype)
    return np.ones(shape, dtype) if dtype == np.bool_ else np.zeros(shape, dtype)


def _array(value: object) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _node(statement: str) -> onnx.NodeProto:
    match = _STATEMENT.match(statement.replace(", ", ","))
    if match is None:
        raise ValueError(f"not a statement of the case language: {statement!r}")
    written, domain, op_type, attributes, read = match.groups()
    results = ["" if name == "_" else name for name in written.split(",")]
    return helper.make_node(
        op_type,
        read.split(",") if read else [],
        results,
        name=results[0],
        domain=domain or "",
        **dict(_attribute(part) for part in (attributes or "").split(",") if part),
    )


def _attribute(text: str) -> tuple[str, object]:
    name, _, value = text.strip().partition("=")
    if name == "to" and value in _TYPES:
        return name, int(_TYPES[value])
    words = [_scalar(word) for word in value.split(" ")]
    return name, words if len(words) > 1 or name in _LISTS else words[0]


def _scalar(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


_LISTS = {"axes", "pads", "strides", "kernel_shape", "dilations"}
