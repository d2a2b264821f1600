"""The exported models of tests/models with an outlier: one product in the middle of each writes 70,000 into a sum.

Only the weights of that product are scaled. Trained models have such products in their residual streams; models with
random weights do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from amp_rewrite.evidence.calibrate import calibrate
from suites.models.test_fixtures import batch, source

OUTLIER = 70_000
PLANTED = (
    "bert_dynamo23",
    "gpt2_dynamo18",
    "gpt2_ts17",
    "llama_dynamo21",
    "llama_dynamo23",
    "llama_ts16",
    "t5_dynamo18",
    "t5_ts14",
    "unet_dynamo21",
    "unet_ts15",
    "vit_dynamo22",
    "vit_ts17",
    "whisper_step_dynamo20",
)


@dataclass(frozen=True)
class Planted:
    """A model, a batch, and the name of the product with scaled weights."""

    model: ModelProto
    batch: Mapping[str, NDArray[Any]]
    product: str


def planted(name: str) -> Planted:
    """Return one of `PLANTED`, scaled by a factor of three digits calibrated on the batch."""
    model, fed = onnx.load(source(name)), batch(name, "input")
    products = _products(model)
    product = products[len(products) // 2]
    factor = OUTLIER / calibrate(model, fed).values[product.output[0]].absmax
    for weight in (t for t in model.graph.initializer if t.name in product.input):  # including a bias
        scaled = numpy_helper.to_array(weight) * np.float32(f"{factor:.3g}")
        weight.CopyFrom(numpy_helper.from_array(scaled, weight.name))
    return Planted(model, fed, product.name)


def _products(model: ModelProto) -> list[NodeProto]:
    """Products with an unshared weight whose result, with or without a bias, is added to a data-dependent value."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    changing = {value.name for value in graph.input} - weights
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        if changing.intersection(node.input):
            changing.update(node.output)
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def added(node: NodeProto) -> bool:
        for reader in readers.get(node.output[0], ()):
            others = changing.intersection(reader.input) - {node.output[0]}
            if reader.op_type == "Add" and others:
                return True
            if reader.op_type in ("Add", "Reshape") and added(reader):
                return True
        return False

    kinds = ("MatMul", "Gemm", "Conv")
    weighted = [n for n in graph.node if n.op_type in kinds and n.input[1] in weights]
    return [n for n in weighted if len(readers[n.input[1]]) == 1 and added(n)]
