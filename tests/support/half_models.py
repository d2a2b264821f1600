"""Small half-precision models, and readable forms of converted ones."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert

HALF = "float16[8,8]"


def half(
    body: str, inputs: str = f"{HALF} x", outputs: str = f"{HALF} y", *, opset: int = 18, constants: str = ""
) -> ModelProto:
    """Parse a model; `w`, if the text mentions it, is a float16 weight."""
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{head} g ({inputs}) => ({outputs}) {constants} {{ {body} }}")
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


def listing(model: ModelProto) -> list[str]:
    """Return a line for each node; nodes of bodies come before their owner."""
    return [_line(node) for node in _nodes(model.graph)]


def _line(node: NodeProto) -> str:
    integers = {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}
    to = DType.of(integers["to"]).spelling if node.op_type == "Cast" else ""  # type: ignore[union-attr]
    return f"{', '.join(node.output)} = {node.op_type}{f'<{to}>' if to else ''}({', '.join(node.input)})"


def weights(model: ModelProto) -> dict[str, str]:
    """Return the initializers' element types."""
    return {t.name: helper.tensor_dtype_to_np_dtype(t.data_type).name for t in model.graph.initializer}


def written(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def raised(model: object, *keep: str, **options: str) -> Converted:
    """Convert a model with `keep`."""
    return convert(model, keep=keep, **options)


def rules(result: Converted) -> dict[str, tuple[str, str | None]]:
    """Return each op's type and rule."""
    return {row.name: (row.dtype, row.rule) for row in result.report.rows}


def raised_ops(result: Converted) -> set[str]:
    return {row.name for row in result.report.raised}
