"""Shape inference in parts gives what onnx gives at once."""

from __future__ import annotations

import numpy as np
import onnx.shape_inference
import pytest
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

from amp_rewrite.ir.graphs import all_graphs
from amp_rewrite.ir.shapes import onnx_shapes
from amp_rewrite.ir.shapes.onnx_shapes import MADE_UP, infer_shapes

WIDTH = 3
Port = tuple[str, tuple[object, ...]]


def model_of_branches(count: int) -> ModelProto:
    """A chain of Ifs whose bodies capture the value before; NonZero makes lengths up on the way."""
    nodes, value = [], "x"
    for at in range(count):
        branches = {}
        for side in ("then_branch", "else_branch"):
            result = helper.make_tensor_value_info(f"{side}{at}", 1, None)
            product = helper.make_node("MatMul", [value, "w"], [result.name])
            branches[side] = helper.make_graph([product], f"{side}{at}", [], [result])
        nodes.append(helper.make_node("If", ["c"], [f"y{at}"], **branches))
        nodes.append(helper.make_node("NonZero", [f"y{at}"], [f"n{at}"]))
        value = f"y{at}"
    inputs = [helper.make_tensor_value_info("x", 1, ["N", WIDTH]), helper.make_tensor_value_info("c", 9, [])]
    outputs = [helper.make_tensor_value_info(value, 1, None)]
    weight = numpy_helper.from_array(np.ones((WIDTH, WIDTH), np.float32), "w")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def ports(model: ModelProto) -> list[Port]:
    """The declared shapes of all graphs, without the names that inference made up."""
    return sorted(_port(p) for graph in all_graphs(model.graph) for p in (*graph.value_info, *graph.output))


def _port(port: ValueInfoProto) -> Port:
    dims = port.type.tensor_type.shape.dim
    return port.name, tuple("?" if d.dim_param.startswith(MADE_UP) else d.dim_param or d.dim_value for d in dims)


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_parts_give_the_shapes_that_onnx_infers_at_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(onnx_shapes, "_MOST", most)
    model = model_of_branches(7)
    before = model.SerializeToString(deterministic=True)
    result = infer_shapes(model, strict_mode=True, check_type=True)
    assert ports(result) == ports(onnx.shape_inference.infer_shapes(model))
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in model.graph.node]
    assert model.SerializeToString(deterministic=True) == before


def test_lengths_made_up_in_different_parts_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_shapes, "_MOST", 1)
    shapes = {p.name: p.type.tensor_type.shape.dim for p in infer_shapes(model_of_branches(4)).graph.value_info}
    names = [shapes[f"n{at}"][1].dim_param for at in range(4)]
    assert len(set(names)) == len(names)
    assert all(name.startswith(MADE_UP) for name in names)


def test_an_error_of_a_part_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_shapes, "_MOST", 1)
    model = model_of_branches(3)
    model.graph.node[-1].op_type = "Reshape"
    with pytest.raises(onnx.shape_inference.InferenceError):
        infer_shapes(model, strict_mode=True, check_type=True)
