"""Time and memory against the number of nodes.

    python benchmarks/run.py graph_scale [--nodes 1000 10000 100000] [--shapes chain pingpong fanout nested]

Each model is converted by `amp-rewrite` in a process of its own, checks, report and writing included. The time
per node, start-up taken off, must not grow.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shared import measure

if TYPE_CHECKING:
    from onnx import NodeProto

WIDTH = 8
_DEPTH = 1000


@dataclass(frozen=True, slots=True)
class Point:
    """One conversion: of which shape, how many nodes, what it cost."""

    shape: str
    nodes: int
    wall: float
    cpu: float
    peak: int
    startup: float

    @property
    def per_node(self) -> float:
        """Microseconds of processor time per node, start-up taken off."""
        return max(self.cpu - self.startup, 0.0) / self.nodes * 1e6


def chain(count: int) -> Iterator[NodeProto]:
    """One path of MatMul, Add, Relu, Transpose: allow, gray, clear, clear."""
    kinds = (("MatMul", "w"), ("Add", "b"), ("Relu", ""), ("Transpose", ""))
    for i in range(count):
        kind, constant = kinds[i % len(kinds)]
        yield _node(kind, [f"v{i}", constant] if constant else [f"v{i}"], f"v{i + 1}")
    yield _node("Identity", [f"v{count}"], "y")


def pingpong(count: int) -> Iterator[NodeProto]:
    """Allow and deny in turn: a Cast between any two ops."""
    for i in range(count):
        yield _node("CumSum", [f"v{i}", "axis"], f"v{i + 1}") if i % 2 else _node("MatMul", [f"v{i}", "w"], f"v{i + 1}")
    yield _node("Identity", [f"v{count}"], "y")


def fanout(count: int) -> Iterator[NodeProto]:
    """One MatMul that all others read, and one Concat that reads them all."""
    yield _node("MatMul", ["v0", "w"], "root")
    for i in range(count):
        yield _node(("Relu", "Tanh", "Neg")[i % 3], ["root"], f"r{i}")
    yield _node("Concat", [f"r{i}" for i in range(count)], "wide", axis=1)
    yield _node("ReduceMax", ["wide"], "y")


def nested(count: int) -> Iterator[NodeProto]:
    """Sums of sums, a thousand levels deep, between MatMuls; each level reads the entry too."""
    entry, last = "v0", "v0"
    for i in range(count):
        made = f"n{i}"
        if i % _DEPTH == 0:
            yield _node("MatMul", [last, "w"], made)
            entry = made
        else:
            yield _node("Add", [entry, last] if i % 2 else [last, entry], made)
        last = made
    yield _node("Identity", [last], "y")


SHAPES: dict[str, Callable[[int], Iterator[NodeProto]]] = {
    "chain": chain,
    "pingpong": pingpong,
    "fanout": fanout,
    "nested": nested,
}


def _node(kind: str, inputs: list[str], output: str, **attributes: object) -> NodeProto:
    from onnx import helper

    return helper.make_node(kind, inputs, [output], name=f"{kind}_{output}", **attributes)


def build(shape: str, count: int, path: str) -> int:
    """Write a model of this shape and of about this many nodes; how many it has."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array(random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH, "w"),
        numpy_helper.from_array(random.standard_normal(WIDTH).astype(np.float32), "b"),
        numpy_helper.from_array(np.array(0, np.int64), "axis"),
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


def measured(shape: str, count: int, folder: Path, startup: float) -> Point:
    """The cost of converting one model."""
    path = folder / f"{shape}_{count}.onnx"
    nodes = measure.apart(build, shape, count, str(path))
    out = folder / "out.onnx"
    found = measure.cost([*measure.own_command(), path, "-o", out, "--overwrite"])
    if found.code:
        sys.exit(f"amp-rewrite failed on {path.name}: {found.said}")
    path.unlink()
    out.unlink()
    return Point(shape, nodes, found.wall, found.cpu, found.peak, startup)


def table(points: list[Point]) -> list[str]:
    """The lines of the results' table."""
    head = ["shape", "nodes", "seconds", "processor seconds", "µs per node", "peak MB"]
    return measure.markdown(
        head,
        [
            (p.shape, p.nodes, f"{p.wall:.2f}", f"{p.cpu:.2f}", f"{p.per_node:.0f}", f"{p.peak / 1e6:.0f}")
            for p in points
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    measure.warm_up()
    points = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as name:
        folder = Path(name)
        startup = min(measured("chain", 1, folder, 0.0).cpu for _ in range(2))
        for shape in given.shapes:
            for count in given.nodes:
                points.append(measured(shape, count, folder, startup))
                p = points[-1]
                print(
                    f"{p.shape:9} {p.nodes:7}  {p.wall:6.2f} s  cpu {p.cpu:6.2f} s  {p.per_node:7.1f} us/node"
                    f"  {p.peak / 1e6:6.0f} MB",
                    flush=True,
                )
                if not given.dry_run:  # a long run that is broken off keeps what it has
                    measure.write("graph_scale", measure.machine(), points, table(points))


if __name__ == "__main__":
    main()
