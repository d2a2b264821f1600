"""A model without its heavy tensors, for onnx's checker and shape inference."""

from __future__ import annotations

from itertools import chain

import onnx
import onnx.helper
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files import wire
from amp_rewrite.files.mends import is_bare
from amp_rewrite.files.protos import all_nodes, refill
from amp_rewrite.files.tensors import is_stub, nbytes, without_values

_SPARSE_CONSTANT = 11  # the first opset whose Constant has sparse_value
_RESHAPE_WITH_SHAPE = 5  # the first opset whose Reshape takes the shape as an input
# Types that every version of Constant produces (opset 13 added bfloat16, 19 float8, 21 int4 …).
_CONSTANT_TYPES = frozenset(DType) - {d for d in DType if d.code >= DType.BFLOAT16.code}


def skeleton(proto: ModelProto, threshold: int) -> ModelProto:
    """Return a copy without tensors above `threshold` bytes, but with all types and shapes.

    Heavy initializers of the main graph become graph inputs. In bodies and functions, heavy initializers and Constants
    become Constants with an empty sparse_value. Before opset 11, which introduced sparse_value, and in the attributes
    of other ops, heavy values become zeros. EyeLike, RegexFullMatch and LabelEncoder are replaced by a Cast or an
    Identity: onnx 1.23 crashes the process while inferring their types if it does not know the type of their input, for
    example the result of a com.microsoft operator.
    """

    def hollow(tensor: TensorProto) -> list[wire.Piece] | None:
        sized = DType.of(tensor.data_type) not in (None, DType.STRING) and not tensor.HasField("segment")
        if not is_stub(tensor) and (tensor.ByteSize() <= threshold or not sized):
            return None
        bare = without_values(tensor)
        bare.data_location = TensorProto.EXTERNAL
        return [bare.SerializeToString(deterministic=True)]

    out = ModelProto()
    body = wire.pieces(proto, hollow)
    if body is None:
        out.CopyFrom(proto)
    else:
        out.ParseFromString(b"".join(p for p in body if isinstance(p, bytes)))
        out.ClearField("training_info")  # unused by the checker and by shape inference
        _main_inputs(out.graph)
        _fill(out.graph, _opset(out))
        for function in out.functions:
            _fill(function, _opset(function))
            for attribute in function.attribute_proto:
                _fill_attribute(attribute, _opset(function))
    _replace_fatal_ops(out)
    _replace_bare_ends(out)
    return out


def _replace_fatal_ops(model: ModelProto) -> None:
    """Replace ops that crash onnx's inference with ops of the same types and shapes."""
    nodes = all_nodes(chain(model.graph.node, *(function.node for function in model.functions)))
    for node in (node for node in nodes if node.op_type in _FATAL):
        kind, codes = (node.domain.removeprefix("ai.onnx"), node.op_type), None
        if kind == ("", "EyeLike"):  # without a dtype, the result has the type of the input
            dtypes = [a for a in node.attribute if a.name == "dtype"]
            codes = None if any(a.ref_attr_name for a in dtypes) else [a.i for a in dtypes]
        elif kind == ("", "RegexFullMatch"):
            codes = [TensorProto.BOOL]
        elif kind == (".ml", "LabelEncoder"):  # before version 2, no attribute gives the type
            tensors = [a.t.data_type for a in node.attribute if a.name == "values_tensor"]
            codes = (tensors + [_LABELS[a.name] for a in node.attribute if a.name in _LABELS])[:1] or None
        if codes is not None:
            del node.attribute[:]
            node.domain, node.op_type = "", "Cast" if codes else "Identity"
            node.attribute.extend(onnx.helper.make_attribute("to", to) for to in codes)


def _replace_bare_ends(model: ModelProto) -> None:
    """Drop outputs without a type or shape, which the checker rejects; turn such inputs into results of a Reshape."""
    graph = model.graph
    if any(map(is_bare, graph.output)):
        refill(graph, "output", [formal for formal in graph.output if not is_bare(formal)])
    inputs = [formal for formal in graph.input if is_bare(formal) and formal.type.tensor_type.elem_type]
    if inputs and _opset(model) >= _RESHAPE_WITH_SHAPE:
        nodes, ends = [], []
        for formal in inputs:
            flat, shape = f"{formal.name}?flat", f"{formal.name}?shape"
            ends.append(onnx.helper.make_tensor_value_info(flat, formal.type.tensor_type.elem_type, [None]))
            ends.append(onnx.helper.make_tensor_value_info(shape, TensorProto.INT64, [None]))
            nodes.append(onnx.helper.make_node("Reshape", [flat, shape], [formal.name]))
        refill(graph, "input", [*(formal for formal in graph.input if formal not in inputs), *ends])
        refill(graph, "node", [*nodes, *graph.node])


_FATAL = ("EyeLike", "LabelEncoder", "RegexFullMatch")
_LABELS = {"values_floats": TensorProto.FLOAT, "values_int64s": TensorProto.INT64, "values_strings": TensorProto.STRING}


def _opset(holder: ModelProto | FunctionProto) -> int:
    return max((o.version for o in holder.opset_import if o.domain in ("", "ai.onnx")), default=0)


def _main_inputs(graph: GraphProto) -> None:
    inputs = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if is_stub(tensor) and tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    refill(graph, "initializer", [t for t in graph.initializer if not is_stub(t)])


def _fill(holder: GraphProto | FunctionProto, opset: int) -> None:
    sparse = opset >= _SPARSE_CONSTANT
    constants: list[NodeProto] = []
    for tensor in filter(is_stub, holder.initializer if isinstance(holder, GraphProto) else ()):
        if sparse and DType(tensor.data_type) in _CONSTANT_TYPES:
            constants.append(NodeProto(op_type="Constant", output=[tensor.name]))
            _set_sparse(constants[-1].attribute.add(), tensor)
        else:
            _zero(tensor)
    if constants:
        refill(holder, "initializer", [t for t in holder.initializer if not is_stub(t)])
        refill(holder, "node", [*constants, *holder.node])
    for node in holder.node:
        constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx")
        for attribute in node.attribute:
            if constant and sparse and attribute.HasField("t") and is_stub(attribute.t):
                _set_sparse(attribute, attribute.t)
            else:
                _fill_attribute(attribute, opset)


def _fill_attribute(attribute: AttributeProto, opset: int) -> None:
    for tensor in (attribute.t, *attribute.tensors):
        if is_stub(tensor):
            _zero(tensor)
    for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
        _fill(graph, opset)


def _set_sparse(attribute: AttributeProto, tensor: TensorProto) -> None:
    """Turn the attribute into a sparse_value of zeros, with the tensor's shape and type."""
    values = TensorProto(data_type=tensor.data_type, dims=[0])
    indices = TensorProto(data_type=TensorProto.INT64, dims=[0])
    sparse = onnx.SparseTensorProto(dims=tensor.dims, values=values, indices=indices)
    attribute.CopyFrom(AttributeProto(name="sparse_value", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse))


def _zero(tensor: TensorProto) -> None:
    tensor.ClearField("data_location")
    tensor.raw_data = bytes(nbytes(tensor))
