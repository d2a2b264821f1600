"""A long product on the device: whole, and in pieces whose float16 results are summed in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from suites.webgpu.models import rms
from suites.webgpu.worker import Device

TERMS = (128, 768, 3072)
PIECES = (128, 32, 16, 8)
ROWS, COLUMNS = 16, 64


def piece_rows(device: Device) -> list[dict[str, Any]]:
    """The RMS error of products by their terms, relative to the RMS of the exact result: whole, and by piece."""
    rows: list[dict[str, Any]] = []
    for terms in TERMS:
        rng = np.random.default_rng(terms)
        x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((ROWS, terms), (terms, COLUMNS)))
        exact = x.astype(np.float64) @ w.astype(np.float64)
        errors = {}
        for piece in (terms, *(size for size in PIECES if size < terms)):
            found = device.run(product(w, piece), {"x": x})["outputs"]["y"]
            errors[str(piece)] = rms(found, exact) / float(np.sqrt(np.mean(exact**2)))
        rows.append({"terms": terms, "errors": errors})
    return rows


def product(w: np.ndarray, piece: int) -> ModelProto:
    """x times w in float16 by pieces of so many terms, as one batched product, and their sum in float32."""
    terms, columns = w.shape
    weight = numpy_helper.from_array(w.reshape(terms // piece, piece, columns), "w")
    shape = numpy_helper.from_array(np.array([ROWS, terms // piece, piece]), "shape")
    axes = numpy_helper.from_array(np.array([0]), "axes")
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["t", "w"], ["p"]),
        helper.make_node("Cast", ["p"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["c", "axes"], ["y"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, (ROWS, terms))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, (ROWS, columns))]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight, shape, axes])
    return helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
