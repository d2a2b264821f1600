"""Reference conversions for comparison: round only the operands of products, or operands and results.

Every mixed-precision conversion changes at least the former; the latter matches PyTorch's autocast for matrix products
and convolutions. Both stay float32 models: a Cast to the low type and a Cast back round a value.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import numpy as np
import onnx.inliner
import onnx.shape_inference
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from amp_rewrite.dtypes import DType

OPERANDS: Mapping[str, int] = {
    "Attention": 3,
    "Conv": 2,
    "ConvTranspose": 2,
    "Einsum": 64,
    "GRU": 3,
    "Gemm": 2,
    "LSTM": 3,
    "MatMul": 2,
    "RNN": 3,
}
"""Products, convolutions and recurrent cells, with the number of leading inputs to multiply."""


def rounded_products(model: ModelProto, to: DType, *, results: bool, draw: int | None = None) -> ModelProto:
    """Copy a model and round the operands of its products to `to`; with `results` also their results.

    Functions are inlined; products in bodies of If, Loop and Scan count. With a `draw`, a seed, values get random
    errors instead of rounding, each within the bound of rounding to nearest.
    """
    copy = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(model))
    rounding = _Rounding(to, results) if draw is None else _Drawing(to, results, draw)
    rounding.graph(copy.graph, {})
    return copy


class _Rounding:
    def __init__(self, to: DType, results: bool) -> None:
        self.to, self.results, self.number = to, results, count()

    def graph(self, graph: GraphProto, outer: Mapping[str, int]) -> None:
        """Round around the products of a graph; `outer`: element types of outer values by name."""
        types = {**outer, **{t.name: t.data_type for t in graph.initializer}}
        types.update((v.name, v.type.tensor_type.elem_type) for v in (*graph.input, *graph.value_info, *graph.output))
        nodes: list[NodeProto] = []
        rounded: dict[str, str] = {}
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    self.graph(attribute.g, types)
            operands = OPERANDS.get(node.op_type, 0) if node.domain in ("", "ai.onnx") else 0
            for slot, name in enumerate(node.input[:operands]):
                if types.get(name) != TensorProto.FLOAT:
                    continue
                if name not in rounded:
                    rounded[name] = f"rounded_{next(self.number)}"
                    nodes.extend(self.casts(name, rounded[name]))
                node.input[slot] = rounded[name]
            nodes.append(node)
            for slot, name in enumerate(node.output if operands and self.results else ()):
                if types.get(name) == TensorProto.FLOAT:
                    node.output[slot] = f"unrounded_{next(self.number)}"
                    nodes.extend(self.casts(node.output[slot], name))
        del graph.node[:], graph.value_info[:]
        graph.node.extend(nodes)

    def casts(self, source: str, target: str) -> Iterator[NodeProto]:
        low = f"low_{next(self.number)}"
        yield helper.make_node("Cast", [source], [low], to=self.to.code)
        yield helper.make_node("Cast", [low], [target], to=TensorProto.FLOAT)


class _Drawing(_Rounding):
    """Pseudorandom errors of the size of rounding, by the sine of a multiple of the value, which every runtime has.

    If they change a model much, its results are right only by chance.
    """

    def __init__(self, to: DType, results: bool, draw: int) -> None:
        super().__init__(to, results)
        self.draw = draw

    def casts(self, source: str, target: str) -> Iterator[NodeProto]:
        number, half = next(self.number), float(self.to.eps) / 2
        phase, wave, share, error = (f"{word}_{number}" for word in ("phase", "wave", "share", "error"))
        for name, value in ((phase, 1e5 * (1 + 0.618 * self.draw) + number), (share, half)):
            tensor = helper.make_tensor("", TensorProto.FLOAT, [], [value])
            yield helper.make_node("Constant", [], [f"{name}_number"], value=tensor)
        yield helper.make_node("Mul", [source, f"{phase}_number"], [phase])
        yield helper.make_node("Sin", [phase], [wave])
        yield helper.make_node("Mul", [wave, f"{share}_number"], [share])
        yield helper.make_node("Mul", [source, share], [error])
        yield helper.make_node("Add", [source, error], [target])


def relative_error(exact: Sequence[object], results: Sequence[object]) -> float:
    """Return the largest error of all outputs, relative to the largest magnitude of each.

    Infinite if an integer or bool differs, or if only one of two numbers is finite.
    """
    worst = 0.0
    for a, b in zip(map(np.asarray, exact), map(np.asarray, results), strict=True):
        if a.shape != b.shape or (a.dtype.kind != "f" and not np.array_equal(a, b)):
            return np.inf
        if a.dtype.kind != "f" or not a.size:
            continue
        finite = np.isfinite(a)
        if not np.array_equal(np.isfinite(b), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return np.inf
        if finite.any():
            scale = max(float(np.abs(a[finite]).max()), 1e-30)
            worst = max(worst, float(np.abs(a[finite].astype(np.float64) - b[finite]).max()) / scale)
    return worst
