"""Convert an in-memory program and print the memory needed: python program_memory.py KIND FOLDER."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir

import amp_rewrite

WIDTH, MATRICES = 1024, 13


def peak() -> int:
    """Return the high-water mark of this process in bytes; unlike ru_maxrss it is not inherited from the parent."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def weight(kind: str, index: int) -> ir.TensorProtocol:
    """Return a tensor of 4 WIDTH² float32, either in memory, every fourth one transposed, or lazy."""
    shape = (WIDTH, 4 * WIDTH) if index % 2 == 0 else (4 * WIDTH, WIDTH)

    def values() -> np.ndarray:
        out = np.resize(np.sin(np.arange(4099, dtype=np.float32) + index) / 50, shape)
        return out.astype(np.float32)

    if kind == "lazy":
        facts = {"dtype": ir.DataType.FLOAT, "shape": ir.Shape(shape)}
        return ir.LazyTensor(lambda: ir.Tensor(values()), **facts, cache=True, name=f"w{index}")
    return ir.Tensor(values() if index % 4 else np.asfortranarray(values()), name=f"w{index}")


def program(kind: str) -> ir.Model:
    """Return a chain of matrix products."""
    floats = ir.TensorType(ir.DataType.FLOAT)
    first = last = ir.Value(name="x", shape=ir.Shape(["n", WIDTH]), type=floats)
    nodes, weights = [], []
    for index in range(MATRICES):
        weights.append(ir.Value(name=f"w{index}", const_value=weight(kind, index)))
        nodes.append(ir.Node("", "MatMul", [last, weights[-1]], name=f"product{index}"))
        last = nodes[-1].outputs[0]
        last.name = f"h{index}"
    last.shape, last.type = ir.Shape(["n", WIDTH]), floats
    graph = ir.Graph([first], [last], nodes=nodes, initializers=weights, opset_imports={"": 20}, name="chain")
    return ir.Model(graph, ir_version=10)


def main(kind: str, folder: Path) -> None:
    model = program(kind)
    before = peak()
    amp_rewrite.convert(model).save(folder / "converted.onnx")
    grown = peak() - before
    ir.save(model, folder / "model.onnx")
    amp_rewrite.convert(folder / "model.onnx").save(folder / "expected.onnx")
    same = (folder / "converted.onnx").read_bytes() == (folder / "expected.onnx").read_bytes()
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    print(json.dumps({"weights": weights, "grown": grown, "same": same}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
