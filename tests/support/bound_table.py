"""For each rule of a bound: models whose runs come within 1 % of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from support.bound_rows import Row

RNG = np.random.default_rng(0)
ENDS = (-2.0, 3.0)
ONE = np.array([1])
LAST = np.array([-1])
SQUARE = np.array([0, 3, -1, 2, 5], np.int64)


def ends(*shape: int) -> np.ndarray:
    """-2 and 3 in turn."""
    return np.resize([-2.0, 3.0, 3.0, -2.0, 3.0], shape)


def one_hot(*shape: int, size: float = 1e3) -> np.ndarray:
    """A large number in each row, at another place."""
    flat = np.zeros((int(np.prod(shape[:-1])), shape[-1]))
    flat[np.arange(len(flat)), np.arange(len(flat)) % shape[-1]] = size
    return flat.reshape(shape)


def unary(kind: str, low: float, high: float, attributes: str = "", opset: int = 21) -> Row:
    """A function of one number, in many places of an interval."""
    x = np.linspace(low, high, 1024).reshape(4, 256)
    return Row("float[4,256] x", f"y = {_op(kind, attributes)} (x)", [{"x": x}], {"x": (low, high)}, opset=opset)


def _op(kind: str, attributes: str) -> str:
    return kind.replace("::", ".") + (f" <{attributes}>" if attributes else "")


def pair(kind: str, *, first: tuple[float, float] = ENDS, second: tuple[float, float] = (-1.5, 0.5)) -> Row:
    """An op of two numbers, at all ends of two intervals."""
    x, z = map(np.array, zip(*itertools.product(first, second), strict=True))
    return Row("float[4] x, float[4] z", f"y = {_op(kind, '')} (x, z)", [{"x": x, "z": z}], {"x": first, "z": second})


def logical(body: str, x: Any = ((0.0, 1.0)), z: Any = ((1.0, 1.0)), opset: int = 21) -> Row:
    """A comparison that holds in one of two places."""
    body = f"{body} y = Cast <to = 1> (t)"
    signature, feed = ("float[2] x, float[2] z", {"x": x, "z": z}) if "z" in body else ("float[2] x", {"x": x})
    return Row(signature, body, [{name: np.array(a) for name, a in feed.items()}], opset=opset)


def moved(shape: Sequence[int], body: str, constants: Mapping[str, Any] = {}, opset: int = 21, **feed: Any) -> Row:
    """An op whose results are numbers of x, which are -2 or 3."""
    more = "".join(f", {_declared(array)} {name}" for name, array in feed.items())
    signature = f"float[{','.join(map(str, shape))}] x{more}"
    return Row(signature, body, [{"x": ends(*shape), **feed}], {"x": ENDS}, constants, opset)


def _declared(array: np.ndarray) -> str:
    word = {"f": "float", "i": f"int{array.dtype.itemsize * 8}", "b": "bool"}[array.dtype.kind]
    return f"{word}[{','.join(map(str, array.shape))}]" if array.ndim else word


def bounded(signature: str, body: str, feed: Mapping[str, Any], **constants: Any) -> Row:
    """A model whose bound needs no range of its inputs, and both signs of x."""
    return Row(signature, body, [feed, {**feed, "x": -np.asarray(feed["x"])}], constants=constants)


def normed(body: str, shape: Sequence[int], opset: int = 21, **constants: Any) -> Row:
    """A norm of rows with one large number each."""
    x = one_hot(*shape)
    signature = f"float[{','.join(map(str, shape))}] x"
    return Row(signature, body, [{"x": x}, {"x": -x}], constants=constants, opset=opset)


def signs(*shape: int) -> np.ndarray:
    """1 and -1 at random."""
    return RNG.choice([-1.0, 1.0], shape)


def product(body: str, w: np.ndarray, x: np.ndarray, opset: int = 21, **constants: Any) -> Row:
    """A product of numbers from -1 to 1 with a constant, at the signs that reach its ends."""
    signature = f"float[{','.join(map(str, x.shape))}] x"
    given = {"x": (-1.0, 1.0)}
    return Row(signature, body, [{"x": x}, {"x": -x}], given, {"w": w, **constants}, opset)


def alike(body: str, w: np.ndarray, shape: Sequence[int], opset: int = 21, **constants: Any) -> Row:
    """The same where all inputs are 1, or -1."""
    return product(body, w, np.ones(shape), opset, **constants)


GAIN = np.linspace(1, 2, 256)
WIDE = RNG.standard_normal((8, 6))
COLUMN = np.sign(WIDE[:, np.abs(WIDE).sum(axis=0).argmax()])[None]
FILTERS = RNG.standard_normal((2, 2, 3, 2)) * np.array([1.0, 0.1]).reshape(2, 1, 1, 1)
BITS = RNG.integers(0, 256, (3, 2, 16), dtype=np.uint8)
MAPS = np.ones((1, 2, 6, 6))
COS45 = np.full((4, 4), np.sqrt(0.5))
ROTATED = np.concatenate([np.ones((1, 2, 4, 4)), -np.ones((1, 2, 4, 4))], axis=-1)
SAME = np.zeros((1, 4, 8))
HEADS = np.ones((1, 4, 8)) * np.array([1.0, -1.0] * 4)
GROUPED = "num_heads = 4, kv_num_heads = 2"


def _few_bits(bits: np.ndarray) -> Row:
    scales, x = np.full((3, 2), 0.1), np.zeros((1, 64))
    numbers = np.stack([bits & 15, bits >> 4], axis=-1).reshape(3, 64).astype(np.float64) - 8
    x[0] = np.sign(numbers[np.abs(numbers).sum(axis=1).argmax()])
    attributes = "K = 64, N = 3, bits = 4, block_size = 32"
    return product(f"y = com.microsoft.MatMulNBits <{attributes}> (x, w, s)", bits, x, s=scales)


def _integers(body: str, shape: Sequence[int], w: np.ndarray) -> Row:
    """A product of integers at the ends of their type."""
    low, high = (np.full(shape, n, np.int8) for n in (-128, 127))
    signature = f"int8[{','.join(map(str, shape))}] x"
    return Row(signature, f"{body} y = Cast <to = 1> (t)", [{"x": low}, {"x": high}], constants={"w": w})


def _recurrent(kind: str, gates: int) -> Row:
    w = np.full((1, 4 * gates, 4), 9.0)
    if kind == "GRU":
        w[:, :4] = 0.0  # the gate that keeps the state
    body = f"h, y = {kind} <hidden_size = 4> (x, w, r)"
    return bounded("float[8,1,4] x", body, {"x": np.ones((8, 1, 4))}, w=w, r=np.zeros((1, 4 * gates, 4)))


def _lstm() -> Row:
    """Gates that are open whatever the input is."""
    w = np.zeros((1, 16, 4))
    w[:, 12:] = 9.0
    bias = np.zeros((1, 32))
    bias[:, :12] = 20.0
    body = "h, y = LSTM <hidden_size = 4> (x, w, r, b)"
    return bounded("float[8,1,4] x", body, {"x": np.ones((8, 1, 4))}, w=w, r=np.zeros((1, 16, 4)), b=bias)


def _quantized(domain: str = "") -> Row:
    body = f"q = {domain}QuantizeLinear (x, s, z) y = Cast <to = 1> (q)"
    return Row("float[2] x", body, [{"x": np.array([-1e3, 1e3])}], constants={"s": np.float32(0.5), "z": np.int8(3)})


def _dequantized(domain: str = "") -> Row:
    return Row(
        "int8[2] x",
        f"y = {domain}DequantizeLinear (x, s, z)",
        [{"x": np.array([-128, 127], np.int8)}],
        constants={"s": np.float32(0.5), "z": np.int8(3)},
    )


ROWS: Mapping[str, Sequence[Row]] = {
    # functions of one number
    "Abs": [unary("Abs", *ENDS)],
    "Asin": [unary("Asin", -1.0, 1.0)],
    "Asinh": [unary("Asinh", -9.0, 4.0)],
    "Atan": [unary("Atan", -1.0, 2.0), unary("Atan", -900.0, 900.0)],
    "Ceil": [unary("Ceil", -2.5, 3.5)],
    "Celu": [unary("Celu", -6.0, 2.0, "alpha = 0.5"), unary("Celu", -3.0, -1.0, "alpha = 2.0")],
    "Cos": [unary("Cos", -4.0, 4.0)],
    "Elu": [unary("Elu", -9.0, 2.0, "alpha = 3.0")],
    "Erf": [unary("Erf", -3.0, 3.0)],
    "Exp": [unary("Exp", *ENDS)],
    "Floor": [unary("Floor", -2.5, 3.5)],
    "Gelu": [unary("Gelu", -6.0, 4.0), unary("Gelu", -6.0, 4.0, 'approximate = "tanh"')],
    "HardSigmoid": [unary("HardSigmoid", -5.0, 5.0), unary("HardSigmoid", -1.0, 1.0, "alpha = 0.3, beta = 0.4")],
    "HardSwish": [unary("HardSwish", -6.0, 4.0)],
    "Log": [unary("Log", 0.5, 20.0)],
    "Mish": [unary("Mish", -6.0, 4.0)],
    "Neg": [unary("Neg", *ENDS)],
    "Reciprocal": [unary("Reciprocal", 0.5, 4.0), unary("Reciprocal", -4.0, -0.5)],
    "Relu": [unary("Relu", *ENDS)],
    "Round": [unary("Round", -2.4, 3.4)],
    "Selu": [unary("Selu", -9.0, 2.0), unary("Selu", -9.0, 2.0, "alpha = 3.0, gamma = 0.5")],
    "Sigmoid": [unary("Sigmoid", -1.0, 2.0), unary("Sigmoid", -20.0, 20.0)],
    "Shrink": [unary("Shrink", -4.0, 3.0, "lambd = 1.5, bias = 0.5"), unary("Shrink", -1.0, 3.0, "bias = -2.0")],
    "Sign": [unary("Sign", *ENDS)],
    "Sin": [unary("Sin", -4.0, 4.0)],
    "Softplus": [unary("Softplus", *ENDS)],
    "Softsign": [unary("Softsign", -1e4, 1e4)],
    "Sqrt": [unary("Sqrt", 0.0, 9.0)],
    "Swish": [unary("Swish", -6.0, 4.0, opset=24), unary("Swish", -6.0, 1.0, "alpha = 3.0", 24)],
    "Tanh": [unary("Tanh", -1.0, 0.5), unary("Tanh", -9.0, 9.0)],
    "ThresholdedRelu": [
        unary("ThresholdedRelu", -4.0, 3.0, "alpha = -2.0"),
        unary("ThresholdedRelu", -1.0, 3.0, "alpha = 2.0"),
    ],
    "com.microsoft::FastGelu": [unary("com.microsoft::FastGelu", -6.0, 4.0)],
    "com.microsoft::Gelu": [unary("com.microsoft::Gelu", -6.0, 4.0)],
    "com.microsoft::QuickGelu": [
        unary("com.microsoft::QuickGelu", -6.0, 1.0),
        unary("com.microsoft::QuickGelu", -6.0, 1.0, "alpha = 0.5"),
        unary("com.microsoft::QuickGelu", -6.0, 1.0, "alpha = 5.0"),
    ],
    "And": [logical("a = Cast <to = 9> (x) b = Cast <to = 9> (z) t = And (a, b)")],
    "Or": [logical("a = Cast <to = 9> (x) b = Cast <to = 9> (z) t = Or (a, b)", z=(0.0, 0.0))],
    "Xor": [logical("a = Cast <to = 9> (x) b = Cast <to = 9> (z) t = Xor (a, b)")],
    "Not": [logical("a = Cast <to = 9> (x) t = Not (a)")],
    "IsInf": [logical("t = IsInf (x)", (0.0, np.inf))],
    "IsNaN": [logical("t = IsNaN (x)", (0.0, np.nan))],
    **{
        kind: [logical(f"t = {kind} (x, z)", (0.0, 1.0, 2.0)[:2], (1.0, 0.0))]
        for kind in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    "Equal": [logical("t = Equal (x, z)")],
    # of two
    **{kind: [pair(kind)] for kind in ("Add", "Max", "Mean", "Min", "Mul", "Sub", "Sum")},
    "Div": [
        pair("Div", second=(0.5, 4.0)),
        Row(
            "float[2,8] x",
            "s = ReduceSum (x, a) d = Add (s, e) y = Div (x, d)",
            [{"x": one_hot(2, 8)}],
            {"x": (0.0, 1e4)},
            {"a": LAST, "e": np.float32(1e-6)},
        ),
    ],
    "Pow": [
        Row("float[3] x", "y = Pow (x, p)", [{"x": np.array([*e, max(0.0, e[0])])}], {"x": e}, {"p": np.float32(p)})
        for e, p in ((ENDS, 2.0), (ENDS, 3.0), ((0.5, 4.0), 0.5), ((0.5, 4.0), -1.0))
    ],
    "Mod": [
        Row(
            "float[2] x", "y = Mod <fmod = 1> (x, k)", [{"x": np.array(feed)}], {"x": given}, {"k": np.float32(divisor)}
        )
        for given, divisor, feed in ((ENDS, 9.0, ENDS), ((-9.0, 9.0), 5.0, (-4.999, 4.999)))
    ],
    "PRelu": [pair("PRelu", second=(-0.5, 2.0))],
    "LeakyRelu": [unary("LeakyRelu", -4.0, 3.0, "alpha = 0.5"), unary("LeakyRelu", -4.0, 1.0, "alpha = -0.5")],
    "Clip": [
        Row(
            "float[2] x",
            "y = Clip (x, a, b)",
            [{"x": np.array([-9.0, 9.0])}],
            {},
            {"a": np.float32(-1), "b": np.float32(2)},
        ),
        Row("float[2] x", "y = Clip <min = -1.0, max = 2.0> (x)", [{"x": np.array([-9.0, 9.0])}], {}, {}, 10),
    ],
    "Cast": [moved((4,), "y = Cast <to = 1> (x)"), unary("Cast", *ENDS, "to = 1")],
    "CastLike": [moved((4,), "y = CastLike (x, k)", {"k": np.zeros(1)})],
    "Identity": [moved((4,), "y = Identity (x)")],
    "Dropout": [moved((4,), "y = Dropout (x)")],
    "Where": [
        moved((4,), "y = Where (c, x, k)", {"k": np.float32(5)}, c=np.array([True, True, True, False])),
        Row(
            "float[2,8] x, bool[2,8] c",
            "s = Softmax (x) y = Where (c, s, k)",
            [{"x": one_hot(2, 8), "c": np.ones((2, 8), bool)}],
            constants={"k": np.float32(0)},
        ),
    ],
    "com.microsoft::BiasGelu": [
        Row(
            "float[4,64] x",
            "y = com.microsoft.BiasGelu (x, b)",
            [{"x": np.linspace(-6, 4, 256).reshape(4, 64)}],
            {"x": (-6.0, 4.0)},
            {"b": np.full(64, 0.5)},
        )
    ],
    # moved numbers
    "Compress": [moved((4,), "y = Compress <axis = 0> (x, c)", {"c": np.array([True, True, False, False])})],
    "CenterCropPad": [moved((4, 2), "y = CenterCropPad (x, s)", {"s": np.array([6, 2])})],
    "Concat": [
        moved((2, 4), "y = Concat <axis = 1> (x, x)"),
        normed("n = RMSNormalization (x, g) y = Concat <axis = 0> (n, n)", (2, 8), 23, g=np.ones(8)),
    ],
    "ConcatFromSequence": [moved((2, 4), "s = SequenceConstruct (x, x) y = ConcatFromSequence <axis = 0> (s)")],
    "ConstantOfShape": [moved((2,), "y = ConstantOfShape <value = float[1] {3}> (s)", {"s": np.array([2])})],
    "DepthToSpace": [moved((1, 4, 2, 2), "y = DepthToSpace <blocksize = 2> (x)")],
    "Expand": [moved((1, 4), "y = Expand (x, s)", {"s": np.array([3, 4])})],
    "EyeLike": [moved((2, 2), "y = EyeLike (x)")],
    "Flatten": [moved((2, 2, 2), "y = Flatten (x)")],
    "Gather": [moved((4,), "y = Gather (x, i)", {"i": np.array([0, -3])})],
    "GatherElements": [moved((4,), "y = GatherElements (x, i)", {"i": np.array([0, 1])})],
    "GatherND": [moved((4,), "y = GatherND (x, i)", {"i": np.array([[0], [1]])})],
    "Hardmax": [moved((2, 4), "y = Hardmax (x)")],
    "MaxUnpool": [
        moved((1, 1, 4), "y = MaxUnpool <kernel_shape = [2], strides = [2]> (x, i)", {"i": np.array([[[0, 2, 5, 7]]])})
    ],
    "OneHot": [
        Row(
            "int64[2] x", "y = OneHot (x, d, v)", [{"x": np.array([0, 1])}], {}, {"d": np.array(3), "v": np.array(ENDS)}
        )
    ],
    "Pad": [
        moved((4,), "y = Pad (x, p, v)", {"p": np.array([1, 1]), "v": np.float32(-5)}),
        moved((4,), 'y = Pad <mode = "edge"> (x, p)', {"p": np.array([1, 1])}),
    ],
    "RandomUniform": [
        Row(
            "float[1] x",
            "y = RandomUniform <shape = [4096], low = -2.0, high = 3.0, seed = 1.0> ()",
            [{"x": ONE * 1.0}],
        )
    ],
    "RandomUniformLike": [moved((4096,), "y = RandomUniformLike <low = -2.0, high = 3.0, seed = 1.0> (x)")],
    "Bernoulli": [Row("float[64] x", "y = Bernoulli <seed = 1.0> (x)", [{"x": np.full(64, 0.5)}])],
    "Range": [
        Row(
            "float x",
            "y = Range (a, x, d)",
            [{"x": np.float32(3)}],
            {"x": (3.0, 3.0)},
            {"a": np.float32(-2), "d": np.float32(0.01)},
        )
    ],
    "Reshape": [
        moved((2, 4), "y = Reshape (x, s)", {"s": np.array([4, 2])}),
        normed("n = RMSNormalization (x, g) y = Reshape (n, s)", (2, 8), 23, g=np.ones(8), s=np.array([2, 2, 4])),
    ],
    "ReverseSequence": [moved((4, 2), "y = ReverseSequence (x, n)", {"n": np.array([4, 2])})],
    "Scatter": [moved((4,), "y = Scatter (x, i, x)", {"i": np.array([0, 1, 2, 3])}, 10)],
    "ScatterElements": [moved((4,), "y = ScatterElements (x, i, k)", {"i": np.array([0]), "k": np.array([5.0])})],
    "ScatterND": [moved((4,), "y = ScatterND (x, i, k)", {"i": np.array([[0]]), "k": np.array([5.0])})],
    "SequenceAt": [moved((2, 4), "s = SequenceConstruct (x, x) y = SequenceAt (s, i)", {"i": np.array(0)})],
    "SequenceConstruct": [
        moved((2, 4), "s = SequenceConstruct (x, k) y = ConcatFromSequence <axis = 0> (s)", {"k": np.full((2, 4), 5.0)})
    ],
    "SequenceInsert": [
        moved(
            (2, 4),
            "s = SequenceConstruct (x) t = SequenceInsert (s, k) y = ConcatFromSequence <axis = 0> (t)",
            {"k": np.full((2, 4), 5.0)},
        )
    ],
    "Slice": [
        moved((2, 4), "y = Slice (x, a, b, c)", {"a": ONE * 0, "b": ONE * 2, "c": ONE}),
        Row(
            "float[1] x",
            "t = Slice (w, a, b, c) y = Add (t, x)",
            [{"x": np.zeros(1)}],
            {"x": (0.0, 0.0)},
            {
                "w": np.arange(16.0).reshape(4, 4),
                "a": np.array([1, -2]),
                "b": np.array([3, 99]),
                "c": np.array([0, -1]),
            },
        ),
    ],
    "SpaceToDepth": [moved((1, 1, 4, 4), "y = SpaceToDepth <blocksize = 2> (x)")],
    "Split": [moved((4, 4), "y, z = Split <axis = 0, num_outputs = 2> (x)")],
    "Squeeze": [moved((1, 4), "y = Squeeze (x)")],
    "Tile": [moved((4,), "y = Tile (x, n)", {"n": np.array([2])})],
    "TensorScatter": [
        moved((1, 4, 2), "y = TensorScatter (x, k, i)", {"k": np.full((1, 1, 2), 5.0), "i": np.array([1])}, 24)
    ],
    "TopK": [moved((2, 4), "y, i = TopK (x, n)", {"n": np.array([4])})],
    "Transpose": [
        moved((2, 4), "y = Transpose (x)"),
        normed("n = RMSNormalization (x, g) y = Transpose (n)", (2, 8), 23, g=np.ones(8)),
    ],
    "Trilu": [moved((4, 4), "y = Trilu (x)")],
    "Unique": [moved((4,), "y = Unique (x)")],
    "Unsqueeze": [moved((4,), "y = Unsqueeze (x, a)", {"a": ONE})],
    "Upsample": [moved((1, 1, 4, 4), "y = Upsample (x, s)", {"s": np.array([1.0, 1, 2, 2])}, 9)],
    # norms
    "BatchNormalization": [
        Row(
            "float[1,2,4] x",
            "y = BatchNormalization (x, g, b, m, v)",
            [{"x": ends(1, 2, 4)}],
            {"x": ENDS},
            {"g": np.array([2.0, -1]), "b": np.array([1.0, 0]), "m": np.array([1.0, 2]), "v": np.array([0.5, 4])},
        )
    ],
    "GroupNormalization": [
        normed("y = GroupNormalization <num_groups = 2> (x, g, b)", (1, 2, 256), g=np.full(2, 2.0), b=np.ones(2)),
        Row(
            "float[1,2,512] x",
            "y = GroupNormalization <num_groups = 1> (x, g, b)",
            [{"x": s * one_hot(1, 1, 1024).reshape(1, 2, 512)} for s in (1, -1)],
            constants={"g": np.full(2, 2.0), "b": np.zeros(2)},
        ),
    ],
    "InstanceNormalization": [
        normed("y = InstanceNormalization (x, g, b)", (1, 2, 256), g=np.full(2, 2.0), b=np.ones(2))
    ],
    "LRN": [
        Row(
            "float[900,3,2,2] x",
            "y = LRN <size = 3, alpha = 3.0, beta = 0.75> (x)",
            [
                {"x": s * np.linspace(0.01, 9, 900).reshape(900, 1, 1, 1) * np.eye(3, 4).reshape(3, 2, 2)}
                for s in (1, -1)
            ],
            {"x": (-9.0, 9.0)},
        )
    ],
    "LayerNormalization": [
        normed("y = LayerNormalization (x, g, b)", (256, 256), g=GAIN, b=np.full(256, 3.0)),
        normed("y = LayerNormalization (x, g)", (256, 256), g=GAIN),
        normed("y = LayerNormalization <axis = 1> (x, g)", (1, 1, 256), g=np.ones((1, 256))),
    ],
    "LpNormalization": [normed(f"y = LpNormalization <p = {p}> (x)", (4, 8)) for p in (1, 2)],
    "MeanVarianceNormalization": [normed("y = MeanVarianceNormalization <axes = [2]> (x)", (1, 2, 256))],
    "RMSNormalization": [normed("y = RMSNormalization (x, g)", (8, 8), 23, g=GAIN[:8])],
    "SimplifiedLayerNormalization": [normed("y = SimplifiedLayerNormalization (x, g)", (8, 8), g=GAIN[:8])],
    "com.microsoft::SkipLayerNormalization": [
        normed("y = com.microsoft.SkipLayerNormalization (x, x, g, b)", (1, 256, 256), g=GAIN, b=np.ones(256)),
        moved((1, 2, 4), "z, , , y = com.microsoft.SkipLayerNormalization (x, x, g)", {"g": np.ones(4)}),
    ],
    "com.microsoft::SkipSimplifiedLayerNormalization": [
        normed("y = com.microsoft.SkipSimplifiedLayerNormalization (x, x, g)", (1, 8, 8), g=GAIN[:8])
    ],
    "Softmax": [normed("y = Softmax (x)", (4, 8)), normed("y = Softmax (x)", (4, 8), 11)],
    "LogSoftmax": [
        Row(
            "float[2,8] x",
            "y = LogSoftmax (x)",
            [{"x": np.array([[0.0] + [20.0] * 7, [20.0] + [0.0] * 7])}],
            {"x": (0.0, 20.0)},
        )
    ],
    "com.microsoft::EmbedLayerNormalization": [
        Row(
            "int32[1,2] x",
            "y, m = com.microsoft.EmbedLayerNormalization (x, , w, p, , g, b)",
            [{"x": np.array([[0, 1]], np.int32)}],
            constants={
                "w": np.stack([one_hot(1, 256)[0], -one_hot(1, 256)[0]]),
                "p": np.zeros((4, 256)),
                "g": np.ones(256),
                "b": np.zeros(256),
            },
        )
    ],
    # reductions
    "CumSum": [
        Row(
            "float[2,4] x",
            f"y = CumSum {more} (x, a)",
            [{"x": np.full((2, 4), e)} for e in ENDS],
            {"x": ENDS},
            {"a": LAST},
        )
        for more in ("", "<reverse = 1>")
    ],
    "ReduceLogSumExp": [
        Row(
            "float[2,4] x",
            "y = ReduceLogSumExp (x, a)",
            [{"x": np.full((2, 4), e)} for e in ENDS],
            {"x": ENDS},
            {"a": LAST},
        )
    ],
    **{
        kind: [
            Row(
                "float[2,4] x",
                f"y = {kind} (x, a)",
                [{"x": np.array([[-2.0], [3.0]]) * np.ones((2, 4))}, {"x": np.zeros((2, 4))}],
                {"x": ENDS},
                {"a": LAST},
            )
        ]
        for kind in ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare")
    },
    # products
    "MatMul": [
        product("y = MatMul (x, w)", WIDE, COLUMN),
        alike("y = MatMul (x, w)", np.ones((8, 2)), (1, 8)),
        Row(
            "float[2,3] x, float[3,2] z",
            "y = MatMul (x, z)",
            [{"x": s * np.ones((2, 3)), "z": np.ones((3, 2))} for s in (1, -1)],
            {"x": (-1.0, 1.0), "z": (-1.0, 1.0)},
        ),
        Row(
            "float[1,8] x",
            "n = RMSNormalization (x, g) y = MatMul (n, w)",
            [{"x": s * WIDE[:, np.square(WIDE).sum(axis=0).argmax()][None]} for s in (1e3, -1e3)],
            {},
            {"g": np.ones(8), "w": WIDE},
            23,
        ),
        Row(
            "float[2,8] x",
            "s = Softmax (x) y = MatMul (s, w)",
            [{"x": one_hot(8, 8)[[0, 7]]}],
            {},
            {"w": np.outer([3.0, 1, 1, 1, 1, 1, 1, -3], np.ones(2))},
        ),
    ],
    "Gemm": [
        product(
            "y = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (x, w, b)",
            np.ascontiguousarray(WIDE.T),
            COLUMN,
            b=np.zeros(6),
        ),
        alike("y = Gemm (x, w, b)", np.ones((8, 2)), (1, 8), b=np.full(2, 1.0)),
    ],
    "Einsum": [
        alike('y = Einsum <equation = "ij,jk->ik"> (x, w)', np.full((8, 2), 3.0), (2, 8)),
        Row(
            "float[2,8] x",
            's = Softmax (x) y = Einsum <equation = "ij,jk->ik"> (s, w)',
            [{"x": one_hot(2, 8)}],
            {},
            {"w": np.array([[3.0], [-3.0]] * 4)},
        ),
    ],
    "com.microsoft::FusedMatMul": [
        product("y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (x, w)", np.ascontiguousarray(WIDE.T), COLUMN),
        alike("y = com.microsoft.FusedMatMul (x, w)", np.ones((8, 2)), (1, 8)),
    ],
    "Attention": [
        Row(
            "float[1,2,4,8] x, float[1,2,4,8] v",
            "y = Attention (x, x, v)",
            [{"x": np.zeros((1, 2, 4, 8)), "v": np.ones((1, 2, 4, 8)) * s} for s in ENDS],
            {"v": ENDS},
            opset=23,
        )
    ],
    "com.microsoft::MultiHeadAttention": [
        Row(
            "float[1,4,8] x, float[1,4,8] v",
            "y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, v)",
            [{"x": SAME, "v": np.full((1, 4, 8), s)} for s in ENDS],
            {"v": ENDS},
        )
    ],
    "com.microsoft::GroupQueryAttention": [
        Row(
            "float[1,1,64] q, float[1,1,32] x",
            f"y, k, v = com.microsoft.GroupQueryAttention <{GROUPED}> (q, x, x, p, p, n, t)",
            [{"q": np.zeros((1, 1, 64)), "x": np.full((1, 1, 32), s)} for s in ENDS],
            {"x": ENDS},
            {"p": np.full((1, 2, 4, 16), 3.0), "n": np.array([0], np.int32), "t": np.array(1, np.int32)},
        )
    ],
    "com.microsoft::Attention": [
        alike("y = com.microsoft.Attention <num_heads = 2> (x, w, b)", np.ones((8, 24)), (1, 4, 8), b=np.zeros(24))
    ],
    "RotaryEmbedding": [
        Row(
            "float[1,2,4,8] x",
            "y = RotaryEmbedding (x, c, s)",
            [{"x": s * ROTATED} for s in (1, -1)],
            {"x": (-1.0, 1.0)},
            {"c": COS45[None], "s": COS45[None]},
            23,
        )
    ],
    "com.microsoft::RotaryEmbedding": [
        Row(
            "float[1,2,4,8] x",
            "y = com.microsoft.RotaryEmbedding (x, p, c, s)",
            [{"x": s * ROTATED} for s in (1, -1)],
            {"x": (-1.0, 1.0)},
            {"p": np.arange(4)[None], "c": COS45, "s": COS45},
        )
    ],
    "GRU": [_recurrent("GRU", 3)],
    "LSTM": [_lstm()],
    "RNN": [_recurrent("RNN", 1)],
    # quantized numbers
    "QuantizeLinear": [_quantized()],
    "com.microsoft::QuantizeLinear": [_quantized("com.microsoft.")],
    "DequantizeLinear": [_dequantized()],
    "com.microsoft::DequantizeLinear": [_dequantized("com.microsoft.")],
    "DynamicQuantizeLinear": [
        Row(
            "float[4] x",
            "q, s, z = DynamicQuantizeLinear (x) y = Identity (s)",
            [{"x": ends(4)}, {"x": 1e-6 * ends(4)}],
            {"x": ENDS},
        )
    ],
    "MatMulInteger": [_integers("t = MatMulInteger (x, w)", (1, 4), np.array([[1, -1]] * 4, np.int8))],
    "ConvInteger": [_integers("t = ConvInteger (x, w)", (1, 1, 4), np.array([[[1, 1]], [[-1, -1]]], np.int8))],
    "com.microsoft::MatMulNBits": [_few_bits(BITS), _few_bits(np.full((3, 2, 16), 255, np.uint8))],
    # windows
    "GridSample": [
        Row(
            "float[1,1,2,2] x",
            f'y = GridSample <mode = "{mode}", padding_mode = "border"> (x, k)',
            [{"x": np.full((1, 1, 2, 2), e)} for e in ENDS],
            {"x": ENDS},
            {"k": np.zeros((1, 1, 1, 2))},
        )
        for mode in ("linear", "nearest")
    ],
    "RoiAlign": [
        Row(
            "float[1,1,4,4] x",
            "y = RoiAlign (x, k, i)",
            [{"x": np.full((1, 1, 4, 4), e)} for e in ENDS],
            {"x": ENDS},
            {"k": np.array([[0.0, 0, 3, 3]]), "i": np.array([0])},
        )
    ],
    "AveragePool": [
        Row(
            "float[1,1,6,6] x",
            "y = AveragePool <kernel_shape = [2, 2]> (x)",
            [{"x": np.full((1, 1, 6, 6), s)} for s in ENDS],
            {"x": ENDS},
        )
    ],
    "MaxPool": [
        Row(
            "float[1,1,6,6] x",
            "y = MaxPool <kernel_shape = [2, 2]> (x)",
            [{"x": np.full((1, 1, 6, 6), s)} for s in ENDS],
            {"x": ENDS},
        )
    ],
    "GlobalAveragePool": [
        Row(
            "float[1,1,6,6] x",
            "y = GlobalAveragePool (x)",
            [{"x": np.full((1, 1, 6, 6), s)} for s in ENDS],
            {"x": ENDS},
        )
    ],
    "GlobalMaxPool": [
        Row("float[1,1,6,6] x", "y = GlobalMaxPool (x)", [{"x": np.full((1, 1, 6, 6), s)} for s in ENDS], {"x": ENDS})
    ],
    "Conv": [
        product("y = Conv (x, w, b)", FILTERS, np.sign(FILTERS[:1]), b=np.zeros(2)),
    ],
    "ConvTranspose": [
        alike("y = ConvTranspose <strides = [2, 2]> (x, w, b)", np.full((2, 3, 4, 4), 0.5), (1, 2, 6, 6), b=np.zeros(3))
    ],
    "Resize": [
        moved((1, 1, 4, 4), "y = Resize (x, , s)", {"s": np.array([1.0, 1, 2, 2])}),
        Row(
            "float[1,1,1,8] x",
            'y = Resize <mode = "cubic", coordinate_transformation_mode = "asymmetric"> (x, , s)',
            [{"x": s * np.array([[[[1.0, -1, 1, 1, -1, -1, -1, -1]]]])} for s in (1, -1)],
            {"x": (-1.0, 1.0)},
            {"s": np.array([1.0, 1, 1, 2])},
        ),
    ],
}
"""Rows of each kind."""
