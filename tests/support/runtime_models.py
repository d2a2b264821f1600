"""Small seeded models with residual streams beyond float16, in the spellings of runtimes and exporters."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

Array = NDArray[Any]
WIDTH, HEADS, TOKENS, WORDS, LARGE = 64, 4, 6, 40, 2.0e5


class Draft:
    """Nodes and constants of an unfinished model."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.large = 0.0

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add an op and return its result or results."""
        domain, _, op_type = kind.rpartition("::")
        names = [f"{op_type.lower()}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, names[0], domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self.tensors.append(numpy_helper.from_array(array, f"c{len(self.tensors)}"))
        return self.tensors[-1].name

    def weights(self, *shape: int, fan_in: int = WIDTH) -> Array:
        return np.asarray(self.rng.standard_normal(shape) / np.sqrt(fan_in), np.float32)

    def linear(self, x: str, into: int = WIDTH, out: int = WIDTH) -> str:
        return str(self.op("MatMul", x, self.constant(self.weights(into, out, fan_in=into))))

    def model(self, inputs: Mapping[str, Array], outputs: Mapping[str, tuple[int, ...]], opset: int) -> ModelProto:
        fed = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in inputs.items()
        ]
        results = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape) for n, shape in outputs.items()]
        graph = helper.make_graph(self.nodes, "g", fed, results, self.tensors)
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    # -- parts ---------------------------------------------------------------------------------------

    def rms(self, x: str) -> str:
        square = self.op("Mul", x, x)
        mean = self.op("ReduceMean", square, self.constant(np.array([-1])))
        root = self.op("Sqrt", self.op("Add", mean, self.constant(1e-6)))
        return str(self.op("Mul", self.op("Mul", x, self.op("Reciprocal", root)), self.constant(self.gain())))

    def gain(self) -> Array:
        """Return the gain of a norm, which compensates two `large` channels as training does."""
        gain = np.full(WIDTH, max(1.0, self.large / np.sqrt(WIDTH / 2)))
        gain[[3, 5]] = 0.0 if self.large else 1.0
        return gain

    def outliers(self) -> Array:
        """Return a bias that makes two channels large."""
        self.large = LARGE
        return np.where(np.isin(np.arange(WIDTH), (3, 5)), LARGE * np.where(np.arange(WIDTH) == 3, 1, -1), 0.0)

    def heads(self, x: str) -> str:
        wide = self.op("Reshape", x, self.constant(np.array([0, 0, HEADS, WIDTH // HEADS])))
        return str(self.op("Transpose", wide, perm=[0, 2, 1, 3]))

    def attention(self, x: str, of: str | None = None) -> str:
        q, k, v = (self.heads(self.linear(y)) for y in (x, of or x, of or x))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        mixed = self.op("MatMul", self.op("Softmax", self.op("Mul", scores, self.constant(0.25)), axis=-1), v)
        rows = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return str(self.op("Reshape", rows, self.constant(np.array([0, 0, WIDTH]))))

    def silu(self, x: str) -> str:
        return str(self.op("Mul", x, self.op("Sigmoid", x)))

    def gated(self, x: str) -> str:
        gate = self.silu(self.linear(x, out=2 * WIDTH))
        return self.linear(str(self.op("Mul", gate, self.linear(x, out=2 * WIDTH))), 2 * WIDTH)


Planted = tuple[ModelProto, Mapping[str, Array]]


def _table(d: Draft, scale: float = 1.0) -> Array:
    d.large = LARGE
    table = d.rng.standard_normal((WORDS, WIDTH)).astype(np.float32)
    table[:, 3], table[:, 5] = LARGE / scale, -LARGE / scale
    return table


def cached_decoder() -> Planted:
    """A decoder of onnxruntime-genai: grouped queries, norms with sums, caches, embedding tied to the head."""
    d = Draft(1)
    table = d.constant(_table(d))
    x = d.op("Gather", table, "ids")
    width = WIDTH // HEADS
    feeds: dict[str, Array] = {
        "ids": d.rng.integers(0, WORDS, (1, 1)),
        "lengths": np.array([3], np.int32),
        "total": np.array(4, np.int32),
    }
    results: dict[str, tuple[int, ...]] = {"logits": (1, 1, WORDS)}
    norm, gain = "com.microsoft::SkipSimplifiedLayerNormalization", d.constant(d.gain())
    stream, read = x, d.rms(x)
    tables = [d.constant(f(d.rng.uniform(0, 3, (8, width // 2)))) for f in (np.cos, np.sin)]
    for layer in range(2):
        past = [f"past_{kind}_{layer}" for kind in "kv"]
        feeds |= {name: d.rng.standard_normal((1, 2, 4, width)).astype(np.float32) for name in past}
        q, k, v = d.linear(read), d.linear(read, out=2 * width), d.linear(read, out=2 * width)
        mixed, *caches = d.op(
            "com.microsoft::GroupQueryAttention", q, k, v, *past, "lengths", "total", *tables, outputs=3,
            num_heads=HEADS, kv_num_heads=2, do_rotary=1,
        )  # fmt: skip
        for kind, cache in zip("kv", caches, strict=True):
            d.nodes.append(helper.make_node("Identity", [cache], [f"present_{kind}_{layer}"]))
            results[f"present_{kind}_{layer}"] = (1, 2, 4, width)
        read, _, _, stream = d.op(norm, stream, d.linear(mixed), gain, outputs=4, epsilon=1e-6)
        read, _, _, stream = d.op(norm, stream, d.gated(read), gain, outputs=4, epsilon=1e-6)
    d.nodes.append(helper.make_node("MatMul", [read, d.op("Transpose", table, perm=[1, 0])], ["logits"]))
    return d.model(feeds, results, 21), feeds


def experts() -> Planted:
    """A decoder with a mixture of experts in one op; as in gpt-oss, the second matrices produce large numbers."""
    d = Draft(2)
    x = "x"
    for layer in range(2):
        x = d.op("Add", x, d.linear(d.attention(d.rms(x))))
        n = d.op("Reshape", d.rms(x), d.constant(np.array([-1, WIDTH])))
        first, second = d.constant(d.weights(6, 2 * WIDTH, WIDTH)), d.constant(d.weights(6, WIDTH, 2 * WIDTH))
        bias = np.zeros((6, WIDTH)) if layer else np.tile(d.outliers(), (6, 1))
        mixed = d.op(
            "com.microsoft::MoE", n, d.linear(n, out=6), first, "", second, d.constant(bias),
            k=2, activation_type="silu", normalize_routing_weights=1,
        )  # fmt: skip
        x = d.op("Add", x, d.op("Reshape", mixed, d.constant(np.array([1, TOKENS, WIDTH]))))
    d.nodes.append(helper.make_node("MatMul", [d.rms(x), d.constant(d.weights(WIDTH, WORDS))], ["logits"]))
    feeds = {"x": d.rng.standard_normal((1, TOKENS, WIDTH)).astype(np.float32)}
    return d.model(feeds, {"logits": (1, TOKENS, WORDS)}, 21), feeds


def scaled_embeddings() -> Planted:
    """Gemma's spelling: embeddings times √d, four norms per block, capped logits, embedding tied to the head."""
    d = Draft(3)
    table = d.constant(_table(d, 8.0))
    x = d.op("Mul", d.op("Gather", table, "ids"), d.constant(8.0))
    for _ in range(2):
        for part in (lambda n: d.linear(d.attention(n)), d.gated):
            y = part(d.rms(x))
            d.large, large = 0.0, d.large  # the second norm has no outliers
            x, d.large = d.op("Add", x, d.rms(y)), large
    logits = d.op("MatMul", d.rms(x), d.op("Transpose", table, perm=[1, 0]))
    capped = d.op("Tanh", d.op("Div", logits, d.constant(30.0)))
    d.nodes.append(helper.make_node("Mul", [capped, d.constant(30.0)], ["logits"]))
    feeds = {"ids": d.rng.integers(0, WORDS, (1, TOKENS))}
    return d.model(feeds, {"logits": (1, TOKENS, WORDS)}, 21), feeds


def vision_tower() -> Planted:
    """A vision tower: patches, gated layers with large results, two-step merging, GELU."""
    d = Draft(4)
    x = d.op("Conv", "image", d.constant(d.weights(WIDTH, 3, 4, 4, fan_in=48)), strides=[4, 4])
    x = d.op("Transpose", d.op("Reshape", x, d.constant(np.array([0, WIDTH, -1]))), perm=[0, 2, 1])
    for layer in range(3):
        x = d.op("Add", x, d.linear(d.attention(d.rms(x))))
        y = d.gated(d.rms(x))
        x = d.op("Add", x, y if layer else d.op("Add", y, d.constant(d.outliers())))
    n = d.op("LayerNormalization", x, d.constant(d.gain()), d.constant(np.zeros(WIDTH)), axis=-1)
    merged = d.op("Reshape", n, d.constant(np.array([1, -1, 4 * WIDTH])))
    d.nodes.append(helper.make_node("MatMul", [d.op("Gelu", d.linear(merged, 4 * WIDTH)),
                                               d.constant(d.weights(WIDTH, WIDTH))], ["y"]))  # fmt: skip
    feeds = {"image": d.rng.standard_normal((1, 3, 16, 16)).astype(np.float32)}
    return d.model(feeds, {"y": (1, 4, WIDTH)}, 21), feeds


def detector() -> Planted:
    """A detector: convolutions with large results, a batch norm, and query attention with a norm after each sum."""
    d = Draft(5)
    x = d.op(
        "Relu", d.op("Conv", "image", d.constant(LARGE / 2 * d.weights(WIDTH, 3, 4, 4, fan_in=48)), strides=[4, 4])
    )
    ones, zeros = d.constant(np.ones(WIDTH)), d.constant(np.zeros(WIDTH))
    x = d.op("Relu", d.op("Add", x, d.op("Conv", x, d.constant(d.weights(WIDTH, WIDTH, 3, 3, fan_in=600)),
                                         pads=[1, 1, 1, 1])))  # fmt: skip
    x = d.op("BatchNormalization", x, ones, zeros, d.constant(np.full(WIDTH, 1e4)), d.constant(np.full(WIDTH, 1e10)))
    memory = d.op("Transpose", d.op("Reshape", x, d.constant(np.array([0, WIDTH, -1]))), perm=[0, 2, 1])
    y = d.constant(d.rng.standard_normal((1, TOKENS, WIDTH)))
    for _ in range(2):
        for of in (None, memory):
            y = d.op("LayerNormalization", d.op("Add", y, d.linear(d.attention(y, of))), ones, zeros, axis=-1)
    d.nodes.append(helper.make_node("Sigmoid", [d.linear(y, out=6)], ["boxes"]))
    feeds = {"image": d.rng.standard_normal((1, 3, 16, 16)).astype(np.float32)}
    return d.model(feeds, {"boxes": (1, TOKENS, 6)}, 21), feeds


def image_decoder() -> Planted:
    """An image decoder: group norms, SiLU, upsampling, large numbers in the middle, pixels clipped to [0, 1]."""
    d = Draft(6)

    def conv(x: str, out: int, by: float = 1.0, into: int = 16) -> str:
        kernel = d.constant(by * d.weights(out, into, 3, 3, fan_in=9 * into))
        return str(d.op("Conv", x, kernel, d.constant(np.zeros(out)), pads=[1, 1, 1, 1]))

    def norm(x: str) -> str:
        return str(d.op("GroupNormalization", x, d.constant(np.ones(16)), d.constant(np.zeros(16)), num_groups=4))

    x = conv("latent", 16, into=4)
    for by in (1.0, 1e5, 1.0):
        x = d.op("Add", x, conv(d.silu(norm(x)), 16, by))
        x = d.op("Resize", x, "", d.constant(np.array([1, 1, 2, 2], np.float32)), mode="nearest")
    pixels = d.op("Add", d.op("Mul", conv(d.silu(norm(x)), 3), d.constant(0.5)), d.constant(0.5))
    d.nodes.append(helper.make_node("Clip", [pixels, d.constant(0.0), d.constant(1.0)], ["pixels"]))
    feeds = {"latent": d.rng.standard_normal((1, 4, 2, 2)).astype(np.float32)}
    return d.model(feeds, {"pixels": (1, 3, 16, 16)}, 21), feeds


MODELS: Mapping[str, Callable[[], Planted]] = {
    make.__name__: make for make in (cached_decoder, experts, scaled_embeddings, vision_tower, detector, image_decoder)
}
