"""Initializers whose rows are copies of one row: the row becomes the initializer, and an Expand repeats it.

An exporter folds `token.expand(batch, …)` into such an initializer, and one token type for all positions. Trained as it
is, its rows would part, although the module has one token. Behind an Expand the gradients of the rows are added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from onnx.helper import make_node
from onnx.numpy_helper import from_array

from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.view import View


def row_of(array: Array) -> Array:
    """Return the array with one element along each axis, other than the last, along which it holds copies.

    Of an array of equal numbers only the first axis counts: other axes may hold tokens of equal start.
    """
    equal = bool(array.size and (array == array.flat[0]).all())
    for axis in range(1 if equal else array.ndim - 1):
        one = array.take([0], axis)
        array = one if (array == one).all() else array
    return array


def with_one_row(model: Model, names: Collection[str]) -> Model:
    """Return the model with one row in each of these initializers; the main graph reads it through an Expand."""
    if not names:
        return model
    taken = set(View.of(model).names)
    proto = clone(model.proto)
    graph = proto.graph
    expanded: dict[str, str] = {}
    rows: dict[str, tuple[int, ...]] = {}
    expands = []
    for tensor in graph.initializer:
        if tensor.name not in names:
            continue
        array = model.array(tensor)
        full, shape = claimed(f"{tensor.name}/rows", taken), claimed(f"{tensor.name}/shape", taken)
        graph.initializer.append(from_array(np.array(array.shape, np.int64), shape))
        expands.append(make_node("Expand", [tensor.name, shape], [full], name=full))
        expanded[tensor.name] = full
        row = row_of(array)
        rows[tensor.name] = row.shape
        tensor.CopyFrom(from_array(np.ascontiguousarray(row), tensor.name))
    for formal in graph.input:
        for dim, size in zip(formal.type.tensor_type.shape.dim, rows.get(formal.name, ()), strict=False):
            dim.dim_value = size
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = expanded.get(name, name)
    refill(graph, "node", [*expands, *graph.node])
    refill(graph, "value_info", [info for info in graph.value_info if info.name not in names])
    return replace(model, proto=proto)
