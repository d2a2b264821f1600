"""Small seeded models that break in half precision like large ones, each with data that triggers the problem.

The problem is in the data or in intermediate values, so that op lists and constants do not reveal it.

    python tests/support/hard_models.py FOLDER      # writes NAME.onnx and NAME.npz of each
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from amp_rewrite.dtypes import DType
from support.cases import build
from support.retyped import retyped

Array = NDArray[Any]

WIDTH = 32
TOKENS = 12
# The first opset with bfloat16 in Conv and InstanceNormalization.
OPSET = 22
LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True)
class Hard:
    """A model and a batch that breaks it in half precision, with a description, the cause and the fix."""

    model: ModelProto
    batch: Mapping[str, Array]
    what: str
    cause: str
    fix: str


class _Draft:
    """Statements and constants of an unfinished model; `place` prefixes the names of its ops."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.statements: list[str] = []
        self.constants: dict[str, Array] = {}
        self.place = ""
        self.names: dict[str, int] = {}

    def op(self, call: str, name: str = "") -> str:
        """Add an op, such as "Add(a,b)", and return its result's name."""
        name = self.place + (name or call.split("(")[0].split("[")[0].lower())
        self.names[name] = self.names.get(name, 0) + 1
        name += f"_{self.names[name]}" if self.names[name] > 1 else ""
        self.statements.append(f"{name}={call}")
        return name

    def constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value, None if np.asarray(value).dtype.kind == "i" else np.float32)
        return name

    def weight(self, *shape: int, gain: float = 1.0) -> str:
        return self.constant(self.weights(*shape, gain=gain))

    def weights(self, *shape: int, gain: float = 1.0) -> Array:
        fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else shape[0]
        return self.rng.standard_normal(shape) * gain / np.sqrt(fan_in)

    def linear(self, x: str, name: str, *, out: int = WIDTH, into: int = WIDTH, gain: float = 1.0) -> str:
        return self.op(f"MatMul({x},{self.weight(into, out, gain=gain)})", name)

    def model(self, result: str, inputs: Mapping[str, Array]) -> ModelProto:
        """Finish the model; types and shapes of its inputs follow `inputs`."""
        self.statements.append(f"y=Identity({result})")
        integers = {name: "int" for name, array in inputs.items() if array.dtype.kind == "i"}
        shapes = {name: array.shape for name, array in inputs.items()}
        return build(
            ";".join(self.statements), ["y"], shapes=shapes, types=integers, constants=self.constants, opset=OPSET
        )

    # -- parts of transformers -----------------------------------------------------------------------

    def rms_norm(self, x: str) -> str:
        square = self.op(f"Pow({x},{self.constant(2.0)})", "square")
        mean = self.op(f"ReduceMean[keepdims=1]({square},{self.constant(np.array([-1]))})", "mean")
        root = self.op(f"Sqrt({self.op(f'Add({mean},{self.constant(1e-6)})', 'variance')})", "root")
        return self.op(f"Mul({self.op(f'Div({x},{root})', 'unit')},{self.constant(np.ones(WIDTH))})", "norm")

    def attention(self, n: str, gain: float = 1.0, **more: Any) -> str:
        """Add self-attention of `n` with its four projections."""
        q, k, v = (self.linear(n, name) for name in ("query", "key", "value"))
        return self.linear(self.attended(q, k, v, **more), "attention", gain=gain)

    def attended(self, q: str, k: str, v: str, *, bias: str | None = None, scale: float = WIDTH**-0.5) -> str:
        scores = self.op(f"MatMul({q},{self.op(f'Transpose[perm=0 2 1]({k})')})", "products")
        scores = self.op(f"Mul({scores},{self.constant(scale)})", "scaled")
        if bias is not None:
            scores = self.op(f"Add({scores},{bias})", "scores")
        return self.op(f"MatMul({self.op(f'Softmax[axis=-1]({scores})', 'weights')},{v})", "mixed")

    def add(self, x: str, y: str) -> str:
        return self.op(f"Add({x},{y})", "stream")

    def gate(self, x: str) -> str:
        return self.op(f"Mul({x},{self.op(f'Sigmoid({x})')})", "gate")

    # -- parts of image models -----------------------------------------------------------------------

    def conv(self, x: str, name: str, out: int, into: int, *, gain: float = 1.0, bias: float = 0.0) -> str:
        weight, offset = self.weight(out, into, 3, 3, gain=gain), self.constant(np.full(out, bias))
        return self.op(f"Conv[pads=1 1 1 1]({x},{weight},{offset})", name)

    def group_norm(self, x: str, channels: int, size: int, groups: int = 4) -> str:
        flat = self.op(f"Reshape({x},{self.constant(np.array([1, groups, -1]))})")
        normed = self.instance_norm(flat, groups)
        return self.op(f"Reshape({normed},{self.constant(np.array([1, channels, size, size]))})")

    def instance_norm(self, x: str, channels: int) -> str:
        scale, bias = self.constant(np.ones(channels)), self.constant(np.zeros(channels))
        return self.op(f"InstanceNormalization({x},{scale},{bias})", "norm")


def llama_outlier(blocks: int = 5) -> Hard:
    draft, vocabulary, channel = _Draft(1), 40, 5
    embedding = draft.rng.standard_normal((vocabulary, WIDTH))
    embedding[:, channel] *= 0.1
    embedding[0, channel] = 300
    x = draft.op(f"Gather({draft.constant(embedding)},ids)", "embedding")
    for block in range(blocks):
        draft.place = f"block{block}_"
        x = draft.add(x, draft.attention(draft.rms_norm(x), gain=0.5))
        n = draft.rms_norm(x)
        gate, up = draft.weights(WIDTH, 2 * WIDTH), draft.weights(WIDTH, 2 * WIDTH)
        down = draft.weights(2 * WIDTH, WIDTH)
        if block == 1:  # the unit that responds to the first token and writes one of its channels
            gate[:, 0], up[:, 0], down[0] = 0, 0, 0
            gate[channel, 0] = up[channel, 0] = 8
            down[0, channel] = 35
        gated = draft.gate(draft.op(f"MatMul({n},{draft.constant(gate)})", "gating"))
        inner = draft.op(f"Mul({gated},{draft.op(f'MatMul({n},{draft.constant(up)})', 'up')})", "inner")
        x = draft.add(x, draft.op(f"MatMul({inner},{draft.constant(down)})", "down"))
    draft.place = ""
    y = draft.linear(draft.rms_norm(x), "head", out=vocabulary)
    batch = {"ids": np.concatenate([[0], draft.rng.integers(1, vocabulary, TOKENS - 1)])[None]}
    return Hard(
        draft.model(y, batch),
        batch,
        f"A Llama-like decoder of {blocks} blocks: written-out RMSNorm, attention, SwiGLU. One channel of the first "
        "token is 300; the MLP of the second block raises it to 70,000, where it stays.",
        "300² in the first norm, then a residual stream beyond 65504",
        "norms (from the graph) and the product that writes the 70,000 (from data) stay float32",
    )


def t5_outlier(blocks: int = 6) -> Hard:
    draft, buckets = _Draft(7), 16
    apart = np.clip(np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS)) + buckets // 2, 0, buckets - 1)
    table = draft.constant(draft.rng.standard_normal((buckets, 1)))
    bias = draft.op(f"Gather({table},{draft.constant(apart)})", "buckets")
    bias = draft.op(f"Transpose[perm=2 0 1]({bias})", "bias")
    gains = {0: 1.0, 1: 30.0, 2: 40_000.0}
    x = "x"
    for block in range(blocks):
        draft.place = f"block{block}_"
        gain = gains.get(block, 4000.0)
        spread = draft.attention(draft.rms_norm(x), gain=min(gain, 1000.0), bias=bias, scale=1 / 8)
        x = draft.add(x, spread)
        inner = draft.op(f"Relu({draft.linear(draft.rms_norm(x), 'wi', out=2 * WIDTH)})")
        x = draft.add(x, draft.linear(inner, "wo", into=2 * WIDTH, gain=gain))
    draft.place = ""
    scaled = draft.op(f"Mul({draft.rms_norm(x)},{draft.constant(WIDTH**-0.5)})", "scaled")
    y = draft.linear(scaled, "head", gain=WIDTH**0.5)
    batch = {"x": draft.rng.standard_normal((1, TOKENS, WIDTH)).astype(np.float32)}
    return Hard(
        draft.model(y, batch),
        batch,
        f"A T5-like encoder of {blocks} blocks: written-out RMSNorm, relative position bias, ReLU. The feed-forward "
        "layer of the third block writes up to 90,000 into all channels.",
        "a feed-forward layer and the subsequent residual stream beyond 65504",
        "norms (from the graph) and the product that writes the 90,000 (from data) stay float32",
    )


def large_logits(layers: int = 11) -> Hard:
    draft = _Draft(2)
    x = "x"
    for layer in range(layers):
        x = draft.op(f"Relu({draft.linear(x, f'dense{layer}', gain=1.4)})")
    y = draft.op(f"Softmax[axis=-1]({draft.linear(x, 'logits', gain=-26_000)})")
    batch = {"x": draft.rng.standard_normal((4, WIDTH)).astype(np.float32)}
    return Hard(
        draft.model(y, batch),
        batch,
        f"A classifier with {layers + 1} dense layers and logits of up to 90,000 before the final softmax.",
        "logits beyond 65504; inf - inf in the softmax",
        "the last product and the softmax stay float32 (from data)",
    )


def vae_decoder(channels: int = 8, size: int = 4) -> Hard:
    draft = _Draft(3)
    batch = {"x": draft.rng.standard_normal((1, channels, size, size)).astype(np.float32)}
    x = draft.conv("x", "conv_in", channels, channels)
    for level in range(3):
        for block in range(3):
            draft.place = f"level{level}_block{block}_"
            inner = draft.conv(draft.gate(draft.group_norm(x, channels, size)), "conv1", channels, channels)
            inner = draft.gate(draft.group_norm(inner, channels, size))
            gain = 36_000 if (level, block) == (1, 1) else 1.0
            x = draft.add(x, draft.conv(inner, "conv2", channels, channels, gain=gain))
        draft.place = f"level{level}_"
        x = _image_attention(draft, x, channels, size) if level == 0 else x
        if level < 2:
            size *= 2
            scales = draft.constant(np.array([1, 1, 2, 2], np.float32))
            x = draft.op(f"Resize[mode=nearest,coordinate_transformation_mode=asymmetric]({x},,{scales})")
            x = draft.conv(x, "upsample", channels, channels)
    draft.place = ""
    y = draft.conv(draft.gate(draft.group_norm(x, channels, size)), "conv_out", 3, channels)
    return Hard(
        draft.model(y, batch),
        batch,
        "The decoder of an image VAE: nine residual blocks with group norms at three sizes, attention at the smallest, "
        "convolutions after nearest-neighbor upsampling. Activations reach 80,000 at the middle size and 100,000 at "
        "the largest.",
        "a residual stream beyond 65504, read by a convolution without a norm before it",
        "the convolutions that write and read it stay float32, with all sums and norms in between (from data)",
    )


def _image_attention(draft: _Draft, x: str, channels: int, size: int) -> str:
    flat = draft.op(f"Reshape({x},{draft.constant(np.array([1, channels, size * size]))})")
    tokens = draft.op(f"Transpose[perm=0 2 1]({flat})")
    q, k, v = (draft.linear(tokens, name, out=channels, into=channels) for name in ("query", "key", "value"))
    mixed = draft.linear(draft.attended(q, k, v, scale=channels**-0.5), "attention", out=channels, into=channels)
    back = draft.op(f"Transpose[perm=0 2 1]({mixed})")
    return draft.add(x, draft.op(f"Reshape({back},{draft.constant(np.array([1, channels, size, size]))})"))


def offset_norm(layers: int = 11, channels: int = 4, size: int = 8) -> Hard:
    draft = _Draft(4)
    batch = {"x": draft.rng.standard_normal((1, channels, size, size)).astype(np.float32)}
    batch["x"][:, 0] = 1
    weight = draft.weights(channels, channels, 3, 3, gain=0.5)
    weight[:, 0], weight[:, 0, 1, 1] = 0, 3000  # an offset of its channel rather than a bias that a rule could drop
    x = draft.op(f"Conv[pads=1 1 1 1](x,{draft.constant(weight)})", "offset")
    x = draft.instance_norm(x, channels)
    for layer in range(layers):
        x = draft.op(f"Relu({draft.conv(x, f'conv{layer}', channels, channels, gain=1.7)})")
    return Hard(
        draft.model(x, batch),
        batch,
        f"{layers + 1} convolutions; the first passes 3000 ± 0.5 to an instance norm; the ± 0.5 is the image.",
        "near 3000, the spacing is 2 in float16 and 16 in bfloat16",
        "the first convolution and the norm stay float32 (from the search; all values fit, so ranges do not show it)",
    )


def masked_rows(blocks: int = 4) -> Hard:
    draft = _Draft(5)
    seen = np.tril(np.ones((1, TOKENS, TOKENS), np.int64))
    seen[:, 3] = 0
    batch = {"x": draft.rng.standard_normal((1, TOKENS, WIDTH)).astype(np.float32), "mask": seen}
    hidden = draft.op(f"Sub({draft.constant(1.0)},{draft.op('Cast[to=float](mask)')})", "hidden")
    bias = draft.op(f"Mul({hidden},{draft.constant(LOWEST)})", "bias")
    x = "x"
    for block in range(blocks):
        draft.place = f"block{block}_"
        x = draft.add(x, draft.attention(x, gain=0.5, bias=bias))
    return Hard(
        draft.model(x, batch),
        batch,
        f"{blocks} blocks of attention with an additive mask of -3.4e38 that hides every key of one row.",
        "-3.4e38 becomes -inf, and both 0 · -inf and the softmax of a fully masked row are NaN",
        "the scores to which the mask is added stay float32 (from constants)",
    )


def far_rotary(blocks: int = 4, positions: int = 8192) -> Hard:
    draft = _Draft(6)
    place = np.sort(draft.rng.integers(positions // 2, positions, (1, TOKENS)))
    place[0, -1] = positions - 1
    batch = {"x": draft.rng.standard_normal((1, TOKENS, WIDTH)).astype(np.float32), "position": place}
    half = WIDTH // 2
    at = draft.op(f"Unsqueeze({draft.op('Cast[to=float](position)', 'at')},{draft.constant(np.array([-1]))})")
    angle = draft.op(f"Mul({at},{draft.constant(10_000.0 ** (-np.arange(half) / half))})", "angle")
    cos, sin = draft.op(f"Cos({angle})"), draft.op(f"Sin({angle})")

    def rotated(x: str) -> str:
        a, b = f"{x}_a", f"{x}_b"
        draft.statements.append(f"{a},{b}=Split[axis=-1,num_outputs=2]({x})")
        left = draft.op(f"Sub({draft.op(f'Mul({a},{cos})')},{draft.op(f'Mul({b},{sin})')})")
        right = draft.op(f"Add({draft.op(f'Mul({b},{cos})')},{draft.op(f'Mul({a},{sin})')})")
        return draft.op(f"Concat[axis=-1]({left},{right})", "rotated")

    x = "x"
    for block in range(blocks):
        draft.place = f"block{block}_"
        q, k, v = (draft.linear(x, name) for name in ("query", "key", "value"))
        mixed = draft.attended(rotated(q), rotated(k), v)
        x = draft.add(x, draft.linear(mixed, "attention", gain=0.5))
    return Hard(
        draft.model(x, batch),
        batch,
        f"{blocks} blocks of attention with rotary embeddings, at positions up to {positions - 1}.",
        "beyond 4096, the spacing is 4 in float16 and 32 in bfloat16",
        "the ops that compute the angles stay float32 (from the graph; in a half-precision export, from the search)",
    )


HARD: Mapping[str, Callable[[], Hard]] = {
    maker.__name__: maker
    for maker in (llama_outlier, t5_outlier, large_logits, vae_decoder, offset_norm, masked_rows, far_rotary)
}


# -- naive half-precision models -------------------------------------------------------------------------


def halved(model: ModelProto, to: str = "float16", *, clipped: bool = False) -> ModelProto:
    """Convert a model without bodies to a low type, including inputs and outputs."""
    low = retyped(model, DType.parse(to).code, clipped=clipped)
    del low.graph.value_info[:]
    return low


def write(folder: Path) -> None:
    """Write each model and its batch to files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, maker in HARD.items():
        hard = maker()
        onnx.save(hard.model, folder / f"{name}.onnx")
        np.savez(folder / f"{name}.npz", **hard.batch)  # type: ignore[arg-type]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
