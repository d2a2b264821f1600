"""A transformer encoder as a plain ONNX model: attention and GELU written out, weights drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.numpy_helper import from_array

HEADS = 4


def encoder(layers: int, width: int, tokens: int, classes: int = 4) -> ModelProto:
    """Return an encoder from `x` [N, tokens, width] to `logits` [N, classes], with a hidden width of 4 * width."""
    net = _Net(width)
    x = "x"
    for layer in range(layers):
        x = net.layer(x, f"layers.{layer}")
    mean = net.op("ReduceMean", x, net.constant("axis", np.array([1], np.int64)), keepdims=0)
    net.nodes.append(helper.make_node("MatMul", [mean, net.weight("head.weight", width, classes)], ["logits"]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", tokens, width])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", classes])]
    graph = helper.make_graph(net.nodes, "encoder", inputs, outputs, net.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return model


@dataclass
class _Net:
    """The graph under construction."""

    width: int
    nodes: list[NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        if all(tensor.name != name for tensor in self.tensors):
            self.tensors.append(from_array(value, name))
        return name

    def weight(self, name: str, *shape: int, mean: float = 0.0, spread: float = 0.05) -> str:
        return self.constant(name, np.array(mean + self.rng.normal(size=shape) * spread, np.float32))

    def number(self, value: float) -> str:
        return self.constant(f"number {value}", np.array(value, np.float32))

    def norm(self, x: str, name: str) -> str:
        scale = self.weight(f"{name}.weight", self.width, mean=1.0, spread=0.01)
        return self.op("LayerNormalization", x, scale, self.weight(f"{name}.bias", self.width, spread=0.01), axis=-1)

    def linear(self, x: str, name: str, inner: int, outer: int) -> str:
        product = self.op("MatMul", x, self.weight(f"{name}.weight", inner, outer))
        return self.op("Add", product, self.weight(f"{name}.bias", outer, spread=0.01))

    def heads(self, x: str) -> str:
        shape = self.constant("heads", np.array([0, 0, HEADS, self.width // HEADS], np.int64))
        return self.op("Transpose", self.op("Reshape", x, shape), perm=[0, 2, 1, 3])

    def layer(self, x: str, name: str) -> str:
        width = self.width
        normed = self.norm(x, f"{name}.norm1")
        q, k, v = (self.heads(self.linear(normed, f"{name}.{p}_proj", width, width)) for p in "qkv")
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        mixed = self.op("MatMul", self.op("Softmax", self.op("Mul", scores, self.number((width / HEADS) ** -0.5))), v)
        flat = self.constant("flat", np.array([0, 0, width], np.int64))
        joined = self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), flat)
        x = self.op("Add", x, self.linear(joined, f"{name}.out_proj", width, width))
        up = self.linear(self.norm(x, f"{name}.norm2"), f"{name}.up", width, 4 * width)
        erf = self.op("Add", self.op("Erf", self.op("Div", up, self.number(2**0.5))), self.number(1.0))
        gelu = self.op("Mul", self.op("Mul", up, erf), self.number(0.5))
        return self.op("Add", x, self.linear(gelu, f"{name}.down", 4 * width, width))
