"""Random small graphs of layers, norms, attention, activations and movements, for bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import ModelProto, helper, numpy_helper

ROWS, WIDTH = 6, 8


class Draft:
    """A graph that grows by random steps. `values`: those at hand, of shape 2 × 6 × 8, or 2 × 8 × 4 × 4 of maps."""

    def __init__(self, rng: np.random.Generator, maps: bool) -> None:
        self.rng, self.maps = rng, maps
        self.nodes: list[object] = []
        self.weights: list[object] = []
        self.shape = (2, 8, 4, 4) if maps else (2, ROWS, WIDTH)
        self.values = ["x"]

    def weight(self, *shape: int, least: float | None = None) -> str:
        """A new constant, normal, of rows of various sizes, or one number throughout."""
        name = f"w{len(self.weights)}"
        array = self.rng.standard_normal(shape) * 10 ** self.rng.uniform(-2, 0.5)
        if self.rng.random() < 0.3:
            array = array * np.exp(self.rng.standard_normal(shape[:1] + (1,) * (len(shape) - 1)))
        if self.rng.random() < 0.1:
            array = np.full(shape, self.rng.uniform(-1, 1))
        array = np.abs(array) + least if least is not None else array
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def integers(self, *numbers: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name

    def number(self, number: float, *shape: int) -> str:
        """A constant of one number throughout."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.full(shape, number, np.float32), name))
        return name

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))  # type: ignore[arg-type]
        return names[0]

    def any(self) -> str:
        return str(self.rng.choice(self.values[-4:]))

    def model(self, free: bool) -> ModelProto:
        last = helper.make_tensor_value_info(self.values[-1], 1, ["A", *"BCD"[: len(self.shape) - 1]])
        x = helper.make_tensor_value_info(
            "x", 1, ["N", *self.shape[1:]] if free or self.rng.random() < 0.5 else self.shape
        )
        graph = helper.make_graph(self.nodes, "g", [x], [last], self.weights)  # type: ignore[arg-type]
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _activation(d: Draft) -> str:
    kinds = (
        "Relu",
        "Sigmoid",
        "Tanh",
        "Gelu",
        "HardSwish",
        "Mish",
        "Erf",
        "Softsign",
        "Abs",
        "Neg",
        "Elu",
        "Selu",
        "LeakyRelu",
        "Softplus",
        "Sin",
        "Cos",
        "Celu",
        "HardSigmoid",
        "Sign",
        "Floor",
    )
    return d.add(str(d.rng.choice(kinds)), d.any())


def _swish(d: Draft) -> str:
    x = d.any()
    return d.add("Mul", x, d.add("Sigmoid", x))


def _gelu(d: Draft) -> str:
    x = d.any()
    root, one, half = (d.number(n) for n in (math.sqrt(2), 1.0, 0.5))
    bell = d.add("Add", d.add("Erf", d.add("Div", x, root)), one)
    return d.add("Mul", d.add("Mul", x, bell), half)


def _pair(d: Draft) -> str:
    return d.add(str(d.rng.choice(["Add", "Sub", "Mul", "Max", "Min", "Mean", "Sum"])), d.any(), d.any())


def _constant(d: Draft) -> str:
    kind = str(d.rng.choice(["Add", "Sub", "Mul", "Div"]))
    shape = (
        [(WIDTH,), (), d.shape[1:]][int(d.rng.integers(3))] if not d.maps else [(8, 1, 1), ()][int(d.rng.integers(2))]
    )
    return d.add(kind, d.any(), d.weight(*shape, least=0.05 if kind == "Div" else None))


def _where(d: Draft) -> str:
    a, b = d.any(), d.any()
    return d.add("Where", d.add("Greater", a, b), a, b)


def _clip(d: Draft) -> str:
    return d.add("Clip", d.any(), d.number(-2.0), d.number(3.5))


def _layer_norm(d: Draft) -> str:
    bias = (d.weight(WIDTH),) if d.rng.random() < 0.7 else ()
    return d.add("LayerNormalization", d.any(), d.weight(WIDTH), *bias, epsilon=1e-5)


def _written_norm(d: Draft) -> str:
    x, axes = d.any(), d.integers(-1)
    centered = d.add("Sub", x, d.add("ReduceMean", x, axes)) if d.rng.random() < 0.5 else x
    square = d.add("Pow", centered, d.number(2.0))
    size = d.add("Add", d.add("ReduceMean", square, axes), d.number(1e-3))
    normal = d.add("Div", centered, d.add("Sqrt", size))
    scaled = d.add("Mul", normal, d.weight(WIDTH))
    return d.add("Add", scaled, d.weight(WIDTH)) if d.rng.random() < 0.5 else scaled


def _linear(d: Draft) -> str:
    hidden = int(d.rng.choice([WIDTH, 16, 64, 128]))
    h = d.add("MatMul", d.any(), d.weight(WIDTH, hidden))
    if d.rng.random() < 0.7:
        h = d.add("Add", h, d.weight(hidden))
    if hidden == WIDTH:
        return h
    h = d.add(str(d.rng.choice(["Relu", "Tanh", "Gelu"])), h)
    return d.add("MatMul", h, d.weight(hidden, WIDTH))


def _gated(d: Draft) -> str:
    x = d.any()
    gate, up = (d.add("MatMul", x, d.weight(WIDTH, 64)) for _ in range(2))
    h = d.add("Mul", d.add("Mul", gate, d.add("Sigmoid", gate)), up)
    return d.add("MatMul", h, d.weight(64, WIDTH))


def _attention(d: Draft) -> str:
    x, heads = d.any(), int(d.rng.choice([1, 2, 4]))
    length = int(d.rng.choice([2, 4, 64]))
    inner = heads * length
    parts = []
    if d.rng.random() < 0.3:
        whole = d.add("Add", d.add("MatMul", x, d.weight(WIDTH, 3 * inner)), d.weight(3 * inner))
        d.nodes.append(helper.make_node("Split", [whole], [f"{whole}_{i}" for i in range(3)], axis=-1, num_outputs=3))
        parts = [f"{whole}_{i}" for i in range(3)]
    else:
        for _ in range(3):
            part = d.add("MatMul", x, d.weight(WIDTH, inner))
            parts.append(d.add("Add", part, d.weight(inner)) if d.rng.random() < 0.5 else part)
    shape = d.integers(0, 0, heads, length)
    q, k, v = (d.add("Reshape", part, shape) for part in parts)
    q, v = (d.add("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, v))
    k = d.add("Transpose", k, perm=[0, 2, 3, 1])
    scores = d.add("Mul", d.add("MatMul", q, k), d.number(length**-0.5))
    weights = d.add("Softmax", scores, axis=-1)
    mixed = d.add("Transpose", d.add("MatMul", weights, v), perm=[0, 2, 1, 3])
    flat = d.add("Reshape", mixed, d.integers(0, 0, inner))
    return d.add("MatMul", flat, d.weight(inner, WIDTH))


def _halves(d: Draft) -> str:
    x, axes = d.any(), d.integers(-1)
    first = d.add("Slice", x, d.integers(0), d.integers(4), axes)
    second = d.add("Slice", x, d.integers(4), d.integers(8), axes)
    return d.add("Concat", d.add("Neg", second), first, axis=-1)


def _turned(d: Draft) -> str:
    x = d.add("Transpose", d.any(), perm=[0, 2, 1])
    x = d.add("Softmax", x, axis=-1) if d.rng.random() < 0.5 else x
    return d.add("Transpose", x, perm=[0, 2, 1])


def _across(d: Draft) -> str:
    return d.add("Einsum", d.any(), d.weight(WIDTH, WIDTH), equation="bsd,de->bse")


def _reduced(d: Draft) -> str:
    kind = str(d.rng.choice(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceL2", "ReduceSumSquare"]))
    return d.add("Sub", d.any(), d.add(kind, d.any(), d.integers(-1)))


def _gemm(d: Draft) -> str:
    flat = d.add("Reshape", d.any(), d.integers(-1, WIDTH))
    turned = bool(d.rng.random() < 0.5)
    made = d.add("Gemm", flat, d.weight(WIDTH, WIDTH), d.weight(WIDTH), transB=int(turned), alpha=0.5, beta=2.0)
    return d.add("Reshape", made, d.integers(-1, ROWS, WIDTH))


def _convolved(d: Draft) -> str:
    size, groups = int(d.rng.choice([1, 3])), int(d.rng.choice([1, 2]))
    bias = (d.weight(8),) if d.rng.random() < 0.5 else ()
    weight = d.weight(8, 8 // groups, size, size)
    return d.add("Conv", d.any(), weight, *bias, pads=[size // 2] * 4, group=groups)


def _map_norm(d: Draft) -> str:
    if d.rng.random() < 0.5:
        return d.add("InstanceNormalization", d.any(), d.weight(8), d.weight(8))
    grouped = d.add("Reshape", d.any(), d.integers(0, 2, -1))
    ones, zeros = (d.number(n, 2) for n in (1.0, 0.0))
    normal = d.add("InstanceNormalization", grouped, ones, zeros)
    maps = d.add("Reshape", normal, d.integers(0, 8, 4, 4))
    return d.add("Add", d.add("Mul", maps, d.weight(8, 1, 1)), d.weight(8, 1, 1))


def _batch_norm(d: Draft) -> str:
    return d.add("BatchNormalization", d.any(), d.weight(8), d.weight(8), d.weight(8), d.weight(8, least=0.1))


def _pooled(d: Draft) -> str:
    kind = str(d.rng.choice(["MaxPool", "AveragePool"]))
    return d.add(kind, d.any(), kernel_shape=[3, 3], pads=[1, 1, 1, 1])


def _resized(d: Draft) -> str:
    scales = d.number(1.0, 4)
    mode = str(d.rng.choice(["linear", "nearest", "cubic"]))
    return d.add("Resize", d.any(), "", scales, mode=mode)


def _local(d: Draft) -> str:
    return d.add("LRN", d.any(), size=3, alpha=0.5, beta=0.75, bias=1.0)


Step = Callable[[Draft], str]
COMMON: tuple[Step, ...] = (_activation, _swish, _gelu, _pair, _constant, _where, _clip)
ROW_STEPS: tuple[Step, ...] = (
    *COMMON,
    _layer_norm,
    _layer_norm,
    _written_norm,
    _written_norm,
    _linear,
    _linear,
    _gated,
    _attention,
    _attention,
    _halves,
    _turned,
    _across,
    _reduced,
    _gemm,
)
MAP_STEPS: tuple[Step, ...] = (
    *COMMON,
    _convolved,
    _convolved,
    _map_norm,
    _map_norm,
    _batch_norm,
    _pooled,
    _resized,
    _local,
)


def random_graph(seed: int, steps: int = 10, *, free: bool = False) -> ModelProto:
    """A graph of so many steps, `free` in its first dimension. A norm comes first in most: something is proved."""
    rng = np.random.default_rng(seed)
    draft = Draft(rng, maps=bool(rng.random() < 0.3))
    menu = MAP_STEPS if draft.maps else ROW_STEPS
    if rng.random() < 0.8:
        draft.values.append((_map_norm if draft.maps else _written_norm if rng.random() < 0.5 else _layer_norm)(draft))
    for _ in range(steps):
        draft.values.append(menu[int(rng.integers(len(menu)))](draft))
    return draft.model(free)
