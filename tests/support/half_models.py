"""Small half models, and what there is to say of a converted one."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert

HALF = "float16[8,8]"


def half(
    body: str, inputs: str = f"{HALF} x", outputs: str = f"{HALF} y", *, opset: int = 18, held: str = ""
) -> ModelProto:
    """A model of this text; `w` is a weight of float16 where it is named."""
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{head} g ({inputs}) => ({outputs}) {held} {{ {body} }}")
    if any("w" in node.input for node in _nodes(model.graph)):
        values = np.linspace(-1, 1, 64).reshape(8, 8).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(values, "w"))
    return model


def _nodes(graph: onnx.GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        for a in node.attribute:
            if a.HasField("g"):
                yield from _nodes(a.g)
        yield node


def told(model: ModelProto) -> list[str]:
    """The nodes of a model, one line each, those of bodies before their owner."""
    return [_line(node) for node in _nodes(model.graph)]


def _line(node: NodeProto) -> str:
    stated = {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}
    to = DType.of(stated["to"]).spelling if node.op_type == "Cast" else ""  # type: ignore[union-attr]
    return f"{', '.join(node.output)} = {node.op_type}{f'<{to}>' if to else ''}({', '.join(node.input)})"


def weights(model: ModelProto) -> dict[str, str]:
    """The element types of the initializers."""
    return {t.name: helper.tensor_dtype_to_np_dtype(t.data_type).name for t in model.graph.initializer}


def written(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def raised(model: object, *keep: str, **options: str) -> Converted:
    """The model with what these patterns name in float32."""
    return convert(model, keep=keep, **options)


def rules(result: Converted) -> dict[str, tuple[str, str | None]]:
    """Of each op the type that it gets, and the rule."""
    return {row.name: (row.dtype, row.rule) for row in result.report.rows}


def raised_ops(result: Converted) -> set[str]:
    return {row.name for row in result.report.raised}
