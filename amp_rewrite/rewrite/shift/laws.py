"""Laws of operators, by which the exponents of their inputs and results depend on each other.

A value is *shifted* by an exponent e if the graph computes it times 2⁻ᵉ. A law is a linear equation of exponents; an op
whose laws hold computes its shifted results from its shifted inputs to the bit, as long as no float32 number becomes
subnormal. `x0`, `x1` … are inputs, `y0`, `y1` … results, `x*` and `y*` each of them; any other word is an attribute
that is stored times 2⁻ᵉ. A port that no law names has exponent 0: a shift ends there. `?` names a port of any
exponent. Equations about an omitted port do not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import attribute, int_attribute, text_attribute
from amp_rewrite.ir.dataflow import number
from amp_rewrite.ir.schema import default_attributes
from amp_rewrite.ir.shapes import Shape
from amp_rewrite.ir.view import Op, ValueId, View

_TABLE = """
y* = x*           : Add Concat Identity Max Mean Min Mod Sub Sum
y0 = x*           : Clip
y* = x0           : Abs AveragePool Compress CumSum DepthToSpace Expand Flatten Gather GatherElements GatherND
y* = x0           : GlobalAveragePool GlobalMaxPool GridSample Neg ReduceL1 ReduceL2 ReduceMax
y* = x0           : ReduceMean ReduceMin ReduceSum Relu Reshape ReverseSequence Slice SpaceToDepth Split Squeeze
y* = x0           : Tile TopK Transpose Trilu Unsqueeze LeakyRelu MaxPool MaxUnpool CenterCropPad Col2Im
y* = x0           : PRelu
y0 = x0           : DFT Dropout RoiAlign RotaryEmbedding com.microsoft::RotaryEmbedding
y0 = x1, y0 = x2  : Where
y0 = x0, y0 = x1  : TensorScatter
y0 = x0, alpha = - 2x0 : LRN
y0 = x0, alpha = x0 : ThresholdedRelu
y0 = x0, lambd = x0, bias = x0 : Shrink
y0 = x1 + x0      : Mul MatMul
y0 = x2 + x0      : STFT
y0 = x1 + x0 + alpha : com.microsoft::FusedMatMul
y0 = x*+          : Einsum
y0 = x1 + x0, y0 = x2 : Conv ConvTranspose
y0 = x1 + x0 + alpha, y0 = x2 + beta : Gemm
y0 = x1 + x0, y0 = x3 : DeformConv
y0 = x0 + x2, y0 = x5 : com.microsoft::MatMulNBits
x2 = - x0, x6 = - x0, y0 = x4, y0 = x5 : com.microsoft::MoE
x3 = - x0, x9 = - x0, y0 = x6, y0 = x7 : com.microsoft::QMoE
y0 = - x0         : Reciprocal
2y0 = x0          : Sqrt
y0 = 2x0          : ReduceSumSquare
y0 = x1, y0 = x2, y1 = x0, y2 = - x0, epsilon = 2x0 : LayerNormalization SimplifiedLayerNormalization
y0 = x1, y0 = x2, epsilon = 2x0 : RMSNormalization InstanceNormalization GroupNormalization
x1 = x0, x4 = x0, y3 = x0, y1 = x0, y2 = - x0, epsilon = 2x0, y0 = x2, y0 = x3 : com.microsoft::SkipLayerNormalization
x1 = x0, x3 = x0, y3 = x0, y2 = - x0, epsilon = 2x0, y0 = x2 : com.microsoft::SkipSimplifiedLayerNormalization
?x0               : LpNormalization Sign Shape Size ArgMax ArgMin Hardmax IsInf IsNaN NonZero
x0 = x1           : Equal Greater GreaterOrEqual Less LessOrEqual QuantizeLinear com.microsoft::QuantizeLinear
y0 = x1           : DequantizeLinear com.microsoft::DequantizeLinear
y1 = x0           : DynamicQuantizeLinear
"""
_EXACT_POWERS = (1, 2, 3)
"""Powers that are products; runtimes compute others by logarithms, whose rounding does not scale."""


class OpPort(NamedTuple):
    """An input ("x"), a result ("y") or an attribute (its name, at slot -1) of an op."""

    side: str
    slot: int = -1

    @property
    def is_attribute(self) -> bool:
        """True for an attribute."""
        return self.slot < 0


Law = tuple[tuple[int, OpPort], ...]
"""Terms (coefficient, port) whose sum of exponents is zero. The result comes first, if there is one."""


@dataclass(frozen=True, slots=True)
class Laws:
    """The laws of one op, and its ports of any exponent; float32 ports in none of them have exponent 0."""

    laws: tuple[Law, ...] = ()
    ignored: frozenset[OpPort] = frozenset()


def laws_of(view: View, op: Op) -> Laws:
    """Return the laws of an op about its float32 ports, fixed ones included."""
    return _read(_stated(view, op), tuple(_ports(view, op)))


@cache
def _read(stated: str, present: tuple[OpPort, ...]) -> Laws:
    ports = dict.fromkeys(present)
    laws: list[Law] = []
    ignored: set[OpPort] = set()
    for text in stated.split(",") if stated else ():
        if text.startswith("?"):
            ignored.add(_port(text[1:]))
        else:
            laws.extend(_expanded(text.strip(), ports))
    named = {port for law in laws for _, port in law} | ignored
    laws.extend(((1, port),) for port in ports if port not in named)
    return Laws(tuple(laws), frozenset(ignored))


def attribute_value(op: Op, name: str, shape: Callable[[int], Shape | None]) -> float | None:
    """Return the number in a float attribute, stated or not; None if it is not known.

    `shape` gives that of an input. onnxruntime's operators take a `scale` of 0 for one that is not stated.
    """
    stated = attribute(op.node, name)
    if name == "scale" and (stated is None or (op.domain and not stated.f)):
        width = _head_width(op, shape)
        return float(np.float32(1) / np.sqrt(np.float32(width))) if width else None
    if stated is None and op.signature is not None:
        stated = default_attributes(op.signature).get(name)
    return stated.f if stated is not None else 0.0


def _head_width(op: Op, shape: Callable[[int], Shape | None]) -> int | None:
    """Return the width of an attention's heads as its own attributes and shapes state it; None if they do not."""
    dims, heads = shape(0), int_attribute(op.node, "num_heads", int_attribute(op.node, "q_num_heads", 0))
    if dims is None or dims[-1] is None:
        return None
    if len(dims) > 3:
        return dims[-1]
    if not _has(op, 1):
        heads = heads + 2 * kept if (kept := int_attribute(op.node, "kv_num_heads", 0)) else 0
    return dims[-1] // heads if heads and dims[-1] % heads == 0 else None


def _stated(view: View, op: Op) -> str:
    if op.bodies or op.signature is None:
        return ""
    special = _SPECIAL.get(op.kind)
    return special(view, op) if special is not None else _rows().get(op.kind, "")


@cache
def _rows() -> Mapping[str, str]:
    rows: dict[str, str] = {}
    for line in _TABLE.strip().splitlines():
        laws, _, kinds = line.partition(" : ")
        rows.update(dict.fromkeys(kinds.split(), laws.strip()))
    return rows


def kinds() -> frozenset[str]:
    """Return the kinds of ops with laws."""
    return frozenset((*_rows(), *_SPECIAL))


# -- the grammar of the table ------------------------------------------------------------------------


def _ports(view: View, op: Op) -> Iterator[OpPort]:
    for side, values in (("y", op.outputs), ("x", op.inputs)):
        for slot, value in enumerate(values):
            if value is not None and view.tensor_dtype(value) is DType.FLOAT:
                yield OpPort(side, slot)


_TERM = re.compile(r"([+-]?)\s*(\d*)([a-z]\w*)")


def _port(word: str) -> OpPort:
    return OpPort(word[0], int(word[1:])) if word[0] in "xy" and word[1:].isdigit() else OpPort(word)


def _expanded(text: str, ports: Mapping[OpPort, None]) -> Iterator[Law]:
    """Yield the laws of an equation, one for each port that a `*` stands for; none if a port is omitted."""
    left, _, right = (part.strip() for part in text.partition("="))
    lefts = [port for port in ports if port.side == left[0]] if left.endswith("*") else None
    if right.endswith("*+"):
        terms = [(-1, port) for port in ports if port.side == right[0]]
        yield ((1, _port(left)), *terms)
        return
    rights = [port for port in ports if port.side == right[0]] if right.endswith("*") else None
    for first in lefts if lefts is not None else (None,):
        for second in rights if rights is not None else (None,):
            head = _terms(left, 1) if first is None else [(1, first)]
            tail = _terms(right, -1) if second is None else [(-1, second)]
            law = (*head, *tail)
            if all(port.is_attribute or port in ports for _, port in law):
                yield law


def _terms(text: str, sign: int) -> list[tuple[int, OpPort]]:
    return [
        ((-sign if minus == "-" else sign) * int(factor or 1), _port(word))
        for minus, factor, word in _TERM.findall(text)
    ]


# -- ops whose laws depend on attributes and constants --------------------------------------------------


def _pow(view: View, op: Op) -> str:
    power = number(view, op.inputs[1])
    return f"y0 = {int(power)}x0" if power in _EXACT_POWERS else ""


def _float32(view: View, value: ValueId | None) -> bool:
    return value is not None and view.tensor_dtype(value) is DType.FLOAT


def _cast(view: View, op: Op) -> str:
    return "y0 = x0" if _float32(view, op.inputs[0]) and _float32(view, op.outputs[0]) else ""


def _batch_norm(view: View, op: Op) -> str:
    """Scale, bias and mean take the shift; variance and epsilon stay."""
    training = int_attribute(op.node, "training_mode", 0) or len(op.results) > 1
    return "" if training else "y0 = x1 + x0, y0 = x2, x3 = x0"


def _div(view: View, op: Op) -> str:
    return "y0 = - x1" if view.constant(op.inputs[0]) is not None else "y0 = x0 - x1"


def _scatter(_: View, op: Op) -> str:
    return "" if text_attribute(op.node, "reduction") == "mul" else "y0 = x0, y0 = x2"


def _resize(_: View, op: Op) -> str:
    cropped = text_attribute(op.node, "coordinate_transformation_mode") == "tf_crop_and_resize"
    return "" if cropped else "y0 = x0"


def _clip(view: View, op: Op) -> str:
    bounds = [name for name in ("min", "max") if attribute(op.node, name) is not None]
    return ", ".join(("y0 = x*", *(f"{name} = x0" for name in bounds)))


def _pad(_: View, op: Op) -> str:
    return "y0 = x0, y0 = x2" + (", value = x0" if attribute(op.node, "value") is not None else "")


def _has(op: Op, *slots: int) -> bool:
    return any(slot < len(op.inputs) and op.inputs[slot] is not None for slot in slots)


def _shows_scores(op: Op) -> bool:
    return len(op.outputs) > 3 and op.outputs[3] is not None


_SLOTS = {"Attention": (4, 9), "MultiHeadAttention": (6, 3)}
"""The inputs of attentions that hold the keys of a cache, with the values behind them, and a bias."""


def _attention(view: View, op: Op) -> str:
    """Scores are restored by `scale`; softcap, mask and softmax see them as they were. Scores as a result end it.

    Packed keys and values share an exponent with what they are packed with; so do all with a bias.
    """
    past, bias = _SLOTS[op.op_type]
    key = "x1" if _has(op, 1) else "x0"
    value = "x2" if _has(op, 2) else key
    laws = [f"scale = - x0 - {key}", f"y0 = {value}", f"x{past} = {key}", f"x{past + 1} = {value}"]
    laws += [f"y1 = {key}", f"y2 = {value}"]
    if _has(op, bias):
        laws += [f"x{bias} = x0", *(f"{port} = x0" for port in (key, value) if port != "x0")]
    return "" if _shows_scores(op) else ", ".join(laws)


def _grouped(view: View, op: Op) -> str:
    """Norms of queries and keys absorb a shift; quantized caches have scales that end it."""
    if _shows_scores(op) or _has(op, 12, 13):
        return ""
    key, value = ("x1", "x2") if _has(op, 1) else ("x0", "x0")
    laws = [f"y0 = {value}", f"x4 = {value}", f"y2 = {value}"]
    if _has(op, 14, 15):
        return ", ".join([*laws, "qk_norm_epsilon = 2x0", f"qk_norm_epsilon = 2{key}"])
    return ", ".join([*laws, f"scale = - x0 - {key}", f"x3 = {key}", f"y1 = {key}"])


_SPECIAL: Mapping[str, Callable[[View, Op], str]] = {
    "Attention": _attention,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clip,
    "Div": _div,
    "Pad": _pad,
    "Pow": _pow,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Upsample": _resize,
    "com.microsoft::GroupQueryAttention": _grouped,
    "com.microsoft::MultiHeadAttention": _attention,
}
