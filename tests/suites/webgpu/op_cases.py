"""Single float16 ops, with the shapes at which the device's error is compared with the emulation's.

The list was fixed before any result at these shapes was known; other shapes revealed the order of sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

IR_VERSION = 10


@dataclass(frozen=True, slots=True)
class OpCase:
    """An op with the shapes of its float16 inputs; `ints`: constant inputs after them. `shift` is added to values."""

    op_type: str
    shapes: Sequence[tuple[int, ...]]
    opset: int = 18
    ints: Sequence[Sequence[int]] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shift: float = 0.0
    positive: bool = False
    domain: str = ""
    scalar: bool = False
    """Whether the integer inputs are scalars instead of lists."""

    @property
    def name(self) -> str:
        sizes = " ".join("×".join(map(str, shape)) for shape in self.shapes)
        words = ", ".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op_type} {sizes}{f' ({words})' if words else ''}"

    def model(self) -> ModelProto:
        """Return the op as a float16 model."""
        names = [f"x{i}" for i in range(len(self.shapes))]
        lists = [np.array(v[0] if self.scalar else v, np.int64) for v in self.ints]
        extra = [numpy_helper.from_array(a, f"c{i}") for i, a in enumerate(lists)]
        node = helper.make_node(
            self.op_type, [*names, *(t.name for t in extra)], ["y"], domain=self.domain, **self.attributes
        )
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)
            for name, shape in zip(names, self.shapes, strict=True)
        ]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
        graph = helper.make_graph([node], "case", inputs, [output], extra)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        model: ModelProto = helper.make_model(graph, opset_imports=imports if self.domain else imports[:1])
        model.ir_version = IR_VERSION
        return model

    def feeds(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return normal values, rounded to float16."""
        rng = np.random.default_rng(seed)
        arrays = {f"x{i}": rng.standard_normal(shape) + self.shift for i, shape in enumerate(self.shapes)}
        if self.positive:
            arrays = {name: np.abs(array) + 0.01 for name, array in arrays.items()}
        return {name: array.astype(np.float16) for name, array in arrays.items()}

    def widened(self) -> ModelProto:
        """Return the same op in float32."""
        model = self.model()
        for formal in (*model.graph.input, *model.graph.output):
            formal.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        return model


def _of(op_type: str, *shapes: tuple[int, ...], **more: Any) -> OpCase:
    return OpCase(op_type, shapes, **more)


CASES: tuple[OpCase, ...] = (
    _of("MatMul", (24, 96), (96, 40)),
    _of("MatMul", (16, 768), (768, 48)),
    _of("MatMul", (7, 2050), (2050, 13)),
    _of("MatMul", (2, 3, 20, 36), (2, 3, 36, 20)),
    _of("MatMul", (5, 6), (6, 7)),
    _of("Gemm", (12, 192), (192, 20), (20,)),
    _of("Gemm", (12, 192), (20, 192), (20,), attributes={"transB": 1}),
    _of("Gemm", (9, 75), (21, 75), (21,), attributes={"transB": 1, "alpha": 0.5, "beta": 2.0}),
    _of("Conv", (1, 12, 14, 14), (20, 12, 3, 3), (20,), attributes={"pads": [1, 1, 1, 1]}),
    _of("Conv", (1, 3, 28, 28), (16, 3, 7, 7), attributes={"strides": [4, 4]}),
    _of("Conv", (2, 96, 6, 6), (24, 96, 1, 1)),
    _of("Conv", (1, 24, 12, 12), (24, 1, 3, 3), attributes={"group": 24, "pads": [1, 1, 1, 1]}),
    _of("Conv", (1, 10, 40), (12, 10, 5), attributes={"dilations": [2]}),
    _of("ConvTranspose", (1, 12, 7, 7), (12, 8, 4, 4), attributes={"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    _of("Einsum", (6, 90), (90, 11), attributes={"equation": "ij,jk->ik"}),
    _of("Einsum", (2, 3, 9, 48), (2, 3, 10, 48), attributes={"equation": "bhid,bhjd->bhij"}),
    _of("ReduceSum", (20, 700), ints=[[1]]),
    _of("ReduceSum", (500, 18), ints=[[0]]),
    _of("ReduceMean", (24, 384), ints=[[-1]], shift=1.0),
    _of("ReduceMean", (2, 10, 11, 13), ints=[[2, 3]], shift=1.0),
    _of("ReduceMean", (3, 8, 9), attributes={"keepdims": 0}, shift=1.0),
    _of("ReduceL1", (20, 300), ints=[[1]]),
    _of("ReduceL2", (20, 300), ints=[[1]]),
    _of("ReduceSumSquare", (20, 300), ints=[[1]]),
    _of("ReduceLogSum", (20, 300), ints=[[1]], positive=True),
    _of("ReduceLogSumExp", (20, 300), ints=[[1]]),
    _of("ReduceProd", (20, 48), ints=[[1]], positive=True),
    _of("Softmax", (12, 196), attributes={"axis": -1}),
    _of("Softmax", (3, 50, 10), attributes={"axis": 1}),
    _of("Softmax", (2, 4, 17, 1031), attributes={"axis": -1}),
    _of("LogSoftmax", (12, 130), attributes={"axis": -1}),
    _of("LayerNormalization", (10, 312), (312,), (312,), shift=0.5),
    _of("LayerNormalization", (2, 9, 45), (45,)),
    _of("RMSNormalization", (10, 312), (312,), opset=23),
    _of("InstanceNormalization", (2, 6, 15, 15), (6,), (6,), shift=1.0),
    _of("BatchNormalization", (2, 6, 9, 9), (6,), (6,), (6,), (6,), positive=True),
    _of("GlobalAveragePool", (2, 9, 21, 19), shift=1.0),
    _of("AveragePool", (1, 5, 17, 17), attributes={"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}, shift=1.0),
    _of("CumSum", (6, 150), ints=[[1]], scalar=True),
    _of("SkipLayerNormalization", (1, 11, 208), (1, 11, 208), (208,), domain="com.microsoft"),
    _of("Exp", (9, 211), opset=20),
    _of("Log", (9, 211), opset=20, positive=True),
    _of("Sigmoid", (9, 211), opset=20),
    _of("Tanh", (9, 211), opset=20),
    _of("Erf", (9, 211), opset=20),
    _of("Gelu", (9, 211), opset=20),
    _of("Softplus", (9, 211), opset=22),
    _of("Add", (9, 211), (9, 211)),
    _of("Mul", (9, 211), (9, 211)),
    _of("Div", (9, 211), (9, 211), positive=True),
    _of("Sqrt", (9, 211), positive=True),
    _of("Pow", (9, 211), (9, 211), positive=True),
    _of("Sin", (9, 211), opset=20),
    _of("Cos", (9, 211), opset=20),
    _of("Reciprocal", (9, 211), positive=True),
    _of("HardSwish", (9, 211), opset=20),
    _of("Elu", (9, 211), opset=20),
)
