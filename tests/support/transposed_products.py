"""A table of models in which a product reads a transposed operand, and a process that opens them.

    python transposed_products.py FOLDER

Opens FOLDER/0.onnx, 1.onnx … on onnxruntime's CPU provider with default settings, in child processes, and prints a
line for each: "opens", "crashes" or the runtime's error.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
SIZES = (2, 3, 4, 5)
WIDTH = 6
"""Columns of the other operand."""


@dataclass(frozen=True)
class Row:
    """A Transpose before a product.

    `left`: the transposed operand is the left one. `other`: the other operand is a "weight", "moved" by another
    Transpose, or "varying". `flat`: it has two axes instead of as many as the transposed one. `between`: the op between
    Transpose and product. `known`: the input has a known shape. `biased`: a sum follows. `inner`: all of it is in a
    branch of If.
    """

    perm: tuple[int, ...]
    left: bool = True
    product: str = "MatMul"
    other: str = "weight"
    flat: bool = True
    between: str = ""
    known: bool = True
    biased: bool = False
    inner: bool = False
    opset: int = 17

    def model(self, code: int) -> ModelProto:
        """Build the model in a type; after a Cast it computes in float32."""
        array = np.float16 if code == HALF and self.between != "Cast" else np.float32
        wide = code if array == np.float16 else FLOAT
        rank, shape = len(self.perm), [SIZES[axis] for axis in self.perm]
        inner = shape[-1] if self.left else shape[-2]
        operand = (inner, WIDTH) if self.left else (WIDTH, inner)
        beside = operand if self.flat else (1,) * (rank - 2) + operand
        inputs = [helper.make_tensor_value_info("x", code, SIZES[:rank])]
        nodes, tensors = [*self._transpose()], []
        if self.other == "varying":
            inputs.append(helper.make_tensor_value_info("v", wide, beside))
            nodes.append(helper.make_node("Relu", ["v"], ["w"]))
        elif self.other == "moved":
            tensors.append(numpy_helper.from_array(_numbers(operand[::-1], array), "v"))
            nodes.append(helper.make_node("Transpose", ["v"], ["w"], perm=[1, 0]))
        else:
            tensors.append(numpy_helper.from_array(_numbers(beside, array), "w"))
        nodes.append(self._product())
        if self.biased:
            tensors.append(numpy_helper.from_array(np.ones(1, array), "b"))
            nodes.append(helper.make_node("Add", ["p", "b"], ["s"]))
        nodes.append(helper.make_node("Tanh", [nodes[-1].output[0]], ["y"]))
        if not self.known:  # a Reshape to an input shape hides the rank
            inputs[0] = helper.make_tensor_value_info("f", code, [int(np.prod(SIZES[:rank]))])
            inputs.append(helper.make_tensor_value_info("n", TensorProto.INT64, ["rank"]))
            nodes.insert(0, helper.make_node("Reshape", ["f", "n"], ["x"]))
        result = helper.make_tensor_value_info("y", wide, [f"y{axis}" for axis in range(rank)])
        graph = helper.make_graph(nodes, "g", inputs, [result], tensors)
        if self.inner:
            graph = self._in_branch(graph, wide)
        domains = {"": self.opset, "com.microsoft": 1}
        imports = [helper.make_opsetid(*domain) for domain in domains.items()]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)

    def _transpose(self) -> Iterator[NodeProto]:
        numbers = {"Reshape": [0] * len(self.perm), "Expand": [1], "Unsqueeze": [0]}.get(self.between)
        reads = ["t"] if numbers is None else ["t", "k"]
        yield helper.make_node("Transpose", ["x"], ["t"], perm=self.perm)
        if numbers is not None:
            yield helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array(numbers)))
        if self.between == "Unsqueeze":
            yield helper.make_node("Unsqueeze", reads, ["u"])
            yield helper.make_node("Squeeze", ["u", "k"], ["r"])
        else:
            attributes = {"to": FLOAT} if self.between == "Cast" else {}
            yield helper.make_node(self.between or "Identity", reads, ["r"], **attributes)

    def _product(self) -> NodeProto:
        reads = ["r", "w"] if self.left else ["w", "r"]
        if self.product == "Einsum":
            axes = "abcd"[: len(self.perm)]
            terms = f"{axes},{axes[-1]}z->{axes[:-1]}z" if self.left else f"z{axes[-2]},{axes}->{axes[:-2]}z{axes[-1]}"
            return helper.make_node("Einsum", reads, ["p"], "product", equation=terms)
        domain = "com.microsoft" if self.product == "FusedMatMul" else ""
        return helper.make_node(self.product, reads, ["p"], "product", domain=domain)

    def _in_branch(self, graph: onnx.GraphProto, code: int) -> onnx.GraphProto:
        inputs = [*graph.input, helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
        del graph.input[:]
        dims = [1] * len(self.perm)
        zero = helper.make_node("Constant", [], ["z"], value=helper.make_tensor("value", code, dims, [0.0]))
        other = helper.make_graph([zero], "e", [], [helper.make_tensor_value_info("z", code, dims)])
        node = helper.make_node("If", ["c"], ["Y"], then_branch=graph, else_branch=other)
        result = helper.make_tensor_value_info("Y", code, [f"Y{axis}" for axis in range(len(dims))])
        return helper.make_graph([node], "o", inputs, [result])


def _numbers(shape: Sequence[int], dtype: type) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 7 - 3).reshape(shape).astype(dtype) / dtype(8)


def rows() -> list[Row]:
    """Build the table: all permutations of two to four axes, and variants of some of them."""
    moves = [perm for rank in (2, 3, 4) for perm in permutations(range(rank))]
    table = [Row(perm, left) for perm, left in product(moves, (True, False))]
    for perm, between in product(((1, 0, 2), (1, 2, 3, 0), (0, 2, 1), (2, 0, 1)), ("", "Cast")):
        row = Row(perm, between=between)
        table += [
            *(replace(row, opset=opset) for opset in (9, 13, 15, 19, 21, 23, 24)),
            *(replace(row, other=other, left=left) for other, left in product(("moved", "varying"), (True, False))),
            *(replace(row, flat=False, known=known, other=o) for known in (True, False) for o in ("weight", "varying")),
            *(replace(row, product=op, left=left) for op in ("FusedMatMul", "Einsum") for left in (True, False)),
            *(replace(row, known=False, biased=biased) for biased in (True, False)),
            replace(row, inner=True),
            replace(row, biased=True),
        ]
        table += [replace(row, between=kind) for kind in ("Reshape", "Expand", "Dropout", "Unsqueeze") if not between]
    table += [Row((1, 0), left, "Gemm") for left in (True, False)]
    return list(dict.fromkeys(table))


def verdicts(models: Sequence[ModelProto], folder: Path) -> list[str]:
    """Return the line of each model, from a separate process."""
    for number, model in enumerate(models):
        onnx.save(model, folder / f"{number}.onnx")
    done = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _main(folder: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    paths = sorted(folder.glob("*.onnx"), key=lambda path: int(path.stem))
    while paths:
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            for path in paths:
                try:
                    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
                    line = "opens"
                except Exception as error:  # noqa: BLE001  onnxruntime's share no other base
                    line = " ".join(str(error).split())
                os.write(theirs, f"{line}\n".encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as answers:
            lines = answers.read().splitlines()
        lines += ["crashes"] if os.waitpid(child, 0)[1] else []
        print(*lines, sep="\n", flush=True)
        del paths[: len(lines)]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
