"""Graphs of several shapes with any number of nodes: chains, alternating types, fans, nested sums, windows, heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import NodeProto

WIDTH = 8
_DEPTH = 1000


def chain(count: int) -> Iterator[NodeProto]:
    """Yield a chain of MatMul, Add, Relu, Transpose: allow, gray, clear, clear."""
    kinds = (("MatMul", "w"), ("Add", "b"), ("Relu", ""), ("Transpose", ""))
    for i in range(count):
        kind, constant = kinds[i % len(kinds)]
        yield _node(kind, [f"v{i}", constant] if constant else [f"v{i}"], f"v{i + 1}")
    yield _node("Identity", [f"v{count}"], "y")


def pingpong(count: int) -> Iterator[NodeProto]:
    """Yield alternating allow and deny ops, with a Cast between any two."""
    for i in range(count):
        yield _node("CumSum", [f"v{i}", "axis"], f"v{i + 1}") if i % 2 else _node("MatMul", [f"v{i}", "w"], f"v{i + 1}")
    yield _node("Identity", [f"v{count}"], "y")


def fanout(count: int) -> Iterator[NodeProto]:
    """Yield one MatMul read by all other ops, and one Concat that reads them all."""
    yield _node("MatMul", ["v0", "w"], "root")
    for i in range(count):
        yield _node(("Relu", "Tanh", "Neg")[i % 3], ["root"], f"r{i}")
    yield _node("Concat", [f"r{i}" for i in range(count)], "wide", axis=1)
    yield _node("ReduceMax", ["wide"], "y")


def nested(count: int) -> Iterator[NodeProto]:
    """Yield sums of sums, a thousand levels deep, between MatMuls; each level also reads the entry."""
    entry, last = "v0", "v0"
    for i in range(count):
        output = f"n{i}"
        if i % _DEPTH == 0:
            yield _node("MatMul", [last, "w"], output)
            entry = output
        else:
            yield _node("Add", [entry, last] if i % 2 else [last, entry], output)
        last = output
    yield _node("Identity", [last], "y")


def skips(count: int) -> Iterator[NodeProto]:
    """Yield sums with the value from eight ops earlier, among products, exponentials and activations."""
    kinds = ("Add", "Tanh", "Add", "MatMul", "Add", "Exp", "Tanh", "Add", "Tanh", "Add", "Tanh")
    for i in range(count):
        kind = kinds[i * i % len(kinds)]
        others = {"Add": [f"v{max(0, i - 8)}"], "MatMul": ["w"]}
        yield _node(kind, [f"v{i}", *others.get(kind, [])], f"v{i + 1}")
    yield _node("Identity", [f"v{count}"], "y")


def windows(count: int) -> Iterator[NodeProto]:
    """Yield window layers, as in a Swin transformer: Reshape, Transpose, a product, a Softmax, and the inverse."""
    last = "v0"
    for i in range(count // 8):
        names = [f"{part}{i}" for part in "abcdefgh"]
        yield _node("Reshape", [last, "shape"], names[0])
        yield _node("Transpose", [names[0]], names[1], perm=[1, 0])
        yield _node("MatMul", [names[1], "w"], names[2])
        yield _node("Softmax", [names[2]], names[3], axis=-1)
        yield _node("MatMul", [names[3], "w"], names[4])
        yield _node("Transpose", [names[4]], names[5], perm=[1, 0])
        yield _node("Reshape", [names[5], "shape"], names[6])
        yield _node("Add", [names[6], last], names[7])
        last = names[7]
    yield _node("Identity", [last], "y")


def heads(count: int) -> Iterator[NodeProto]:
    """Yield layers of 500 attention heads and their sum, with a residual stream."""
    last, number = "v0", 500
    for layer in range(max(1, count // (7 * number))):
        for i in range(number):
            q, k, t, s, m, a, o = (f"{part}{layer}_{i}" for part in "qktsmao")
            yield _node("MatMul", [last, "w"], q)
            yield _node("MatMul", [last, "w"], k)
            yield _node("Transpose", [k], t, perm=[1, 0])
            yield _node("MatMul", [q, t], s)
            yield _node("Mul", [s, "b"], m)
            yield _node("Softmax", [m], a, axis=-1)
            yield _node("MatMul", [a, k], o)
        yield _node("Sum", [f"o{layer}_{i}" for i in range(number)], f"sum{layer}")
        yield _node("Add", [last, f"sum{layer}"], f"h{layer}")
        last = f"h{layer}"
    yield _node("Identity", [last], "y")


SHAPES: dict[str, Callable[[int], Iterator[NodeProto]]] = {
    "chain": chain,
    "pingpong": pingpong,
    "fanout": fanout,
    "nested": nested,
    "skips": skips,
    "windows": windows,
    "heads": heads,
}


def _node(kind: str, inputs: list[str], output: str, **attributes: object) -> NodeProto:
    from onnx import helper

    return helper.make_node(kind, inputs, [output], name=f"{kind}_{output}", **attributes)


def build(shape: str, count: int, path: str) -> int:
    """Write a model of a shape with about `count` nodes; return its number of nodes."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array(random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH, "w"),
        numpy_helper.from_array(random.standard_normal(WIDTH).astype(np.float32), "b"),
        numpy_helper.from_array(np.array(0, np.int64), "axis"),
        numpy_helper.from_array(np.array([WIDTH, WIDTH]), "shape"),
    ]
    nodes = list(SHAPES[shape](count))
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        shape,
        [helper.make_tensor_value_info("v0", TensorProto.FLOAT, (WIDTH, WIDTH))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("rows", "columns"))],
        [constant for constant in constants if constant.name in read],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return len(nodes)
