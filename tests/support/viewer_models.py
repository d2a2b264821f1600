"""Models whose nodes viewers name in unusual ways: without names, with equal ones, in branches, in functions."""

from __future__ import annotations

import onnx.parser
from onnx import ModelProto, TensorProto, helper
from onnx.helper import make_graph, make_node, make_tensor_value_info

HOSTILE = "</script><b>\"'\u202e\x07 line\nbreak\\"
X = make_tensor_value_info("x", TensorProto.FLOAT, [2])
FUNCTIONS = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
g (float[2] x, float16[2] h) => (float[2] y, float16[2] z) {
  a = own.twice (x)
  y = own.twice (a)
  z = own.once (h)
}
<domain: "own", opset_import: ["" : 20, "own" : 1]> twice (p) => (q) { r = own.once (p) q = own.once (r) }
<domain: "own", opset_import: ["" : 20, "own" : 1]> once (p) => (q) { t = Relu (p) q = Exp (t) }
"""


def unnamed() -> ModelProto:
    """Nodes without names, with equal ones, and with those that the others would get."""
    names = ("", "", "node_1", "node", "same", "same", "same_1", "same", HOSTILE, HOSTILE)
    values = ["x", *(f"v{i}" for i in range(len(names)))]
    nodes = [make_node("Relu", [values[i]], [values[i + 1]], name=name or None) for i, name in enumerate(names)]
    return _model(nodes, values[-1])


def nested() -> ModelProto:
    """An If in a Loop in an If, a Loop in a Loop, and nodes of equal names or none at every depth."""
    inner_if = _if("choose", "i", "then_value", "else_value")
    body = _body("within", [inner_if, make_node("Exp", ["i"], ["body_out"])], "body_out")
    deeper = _body("deepest", [make_node("Neg", ["d"], ["deep_out"], name="same")], "deep_out", state="d")
    wrapped = _body(
        "middle", [_loop("same", "m", "m_out", deeper), make_node("Relu", ["m_out"], ["mid_out"])], "mid_out", "m"
    )
    branch = make_graph(
        [_loop("same", "x", "looped", body), make_node("Relu", ["looped"], ["out_then"])],
        "then",
        [],
        [_float("out_then")],
    )
    other = make_graph([make_node("Neg", ["x"], ["out_else"], name="same")], "else", [], [_float("out_else")])
    outer = make_node("If", ["c"], ["chosen"], name="same", then_branch=branch, else_branch=other)
    nodes = [
        make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True])),
        make_node("Constant", [], ["n"], value=helper.make_tensor("n", TensorProto.INT64, [], [2])),
        outer,
        _loop("same", "chosen", "twice", wrapped),
        make_node("Exp", ["twice"], ["y"]),
    ]
    return _model(nodes, "y")


def functions() -> ModelProto:
    """Functions that call functions, in two types."""
    return onnx.parser.parse_model(FUNCTIONS)


def empty() -> ModelProto:
    """A graph without nodes."""
    return helper.make_model(make_graph([], "g", [X], [X]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def nameless() -> ModelProto:
    """A graph whose name is missing."""
    model = unnamed()
    model.graph.ClearField("name")
    return model


def blank() -> ModelProto:
    """A graph whose name is empty."""
    model = unnamed()
    model.graph.name = ""
    return model


VIEWED = {
    "blank": blank,
    "empty": empty,
    "functions": functions,
    "nameless": nameless,
    "nested": nested,
    "unnamed": unnamed,
}


def _float(name: str) -> onnx.ValueInfoProto:
    return make_tensor_value_info(name, TensorProto.FLOAT, [2])


def _if(name: str, reads: str, one: str, two: str) -> onnx.NodeProto:
    then = make_graph([make_node("Relu", [reads], [one], name="same")], "then", [], [_float(one)])
    other = make_graph([make_node("Neg", [reads], [two])], "else", [], [_float(two)])
    return make_node("If", ["keep"], [f"{name}_out"], name=name, then_branch=then, else_branch=other)


def _body(name: str, nodes: list[onnx.NodeProto], out: str, state: str = "i") -> onnx.GraphProto:
    inputs = [
        make_tensor_value_info(f"{name}_at", TensorProto.INT64, []),
        make_tensor_value_info("keep" if name == "within" else f"{name}_keep", TensorProto.BOOL, []),
        _float(state),
    ]
    copied = make_node("Identity", [inputs[1].name], [f"{name}_go"])
    outputs = [make_tensor_value_info(f"{name}_go", TensorProto.BOOL, []), _float(out)]
    return make_graph([copied, *nodes], name, inputs, outputs)


def _loop(name: str, reads: str, out: str, body: onnx.GraphProto) -> onnx.NodeProto:
    return make_node("Loop", ["n", "c", reads], [out], name=name, body=body)


def _model(nodes: list[onnx.NodeProto], out: str) -> ModelProto:
    graph = make_graph(nodes, "main_graph", [X], [_float(out)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
