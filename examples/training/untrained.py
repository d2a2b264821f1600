"""Write a convolutional network for digits of 8 x 8 pixels with random weights, to train from scratch.

    python examples/training/untrained.py model.onnx --seed 0

Its input `image` is float32 [batch, 1, 8, 8], and its output `probability` is float32 [batch, 10]. It has 33 thousand
parameters: three convolutions, a hidden layer and a Softmax. The weights are initialized as in He et al. (2015).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx.numpy_helper import from_array

GRAPH = """<ir_version: 10, opset_import: ["": 20]>
digits (float[batch,1,8,8] image) => (float[batch,10] probability) {
  c1 = Conv <pads = [1, 1, 1, 1]> (image, "conv1.weight", "conv1.bias")  a1 = Relu (c1)
  c2 = Conv <pads = [1, 1, 1, 1]> (a1, "conv2.weight", "conv2.bias")  a2 = Relu (c2)
  p2 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a2)
  c3 = Conv <pads = [1, 1, 1, 1]> (p2, "conv3.weight", "conv3.bias")  a3 = Relu (c3)
  p3 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a3)
  f = Flatten (p3)  h = Gemm <transB = 1> (f, "hidden.weight", "hidden.bias")  a4 = Relu (h)
  logits = Gemm <transB = 1> (a4, "out.weight", "out.bias")
  probability = Softmax <axis = 1> (logits)
}"""
SHAPES = {
    "conv1": (32, 1, 3, 3),
    "conv2": (32, 32, 3, 3),
    "conv3": (48, 32, 3, 3),
    "hidden": (48, 192),
    "out": (10, 48),
}


def network(seed: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model(GRAPH)
    rng = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        weight = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        model.graph.initializer.append(from_array(weight.astype(np.float32), f"{name}.weight"))
        model.graph.initializer.append(from_array(np.zeros(shape[0], np.float32), f"{name}.bias"))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="output model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    onnx.save(network(args.seed), args.output)


if __name__ == "__main__":
    main()
