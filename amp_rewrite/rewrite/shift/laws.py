"""Laws of operators: linear equations between the exponents of their inputs and results.

A value is *shifted* by an exponent e if the graph computes it multiplied by 2⁻ᵉ. If the laws of an op hold, the op
computes its shifted results exactly from its shifted inputs, unless a float32 number becomes subnormal. In a law, `x0`,
`x1` … are inputs and `y0`, `y1` … results; any other name is an attribute, which is stored multiplied by 2⁻ᵉ. A port
without a law has exponent 0, so a shift ends there. Laws about ports that are missing from an op are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import attribute, int_attribute, text_attribute
from amp_rewrite.ir.dataflow import number
from amp_rewrite.ir.op_classes import COPIES
from amp_rewrite.ir.schema import default_attributes
from amp_rewrite.ir.shapes import Shape
from amp_rewrite.ir.view import Op, View


class OpPort(NamedTuple):
    """An input ("x"), a result ("y") or an attribute (its name, at slot -1) of an op."""

    side: str
    slot: int = -1

    @property
    def is_attribute(self) -> bool:
        return self.slot < 0


Law = tuple[tuple[int, OpPort], ...]
"""Terms (coefficient, port): the weighted exponents sum to zero. The result comes first, if there is one."""


def laws_of(view: View, op: Op) -> Sequence[Law]:
    """Return the laws of an op's float32 ports, including fixed exponents of 0."""
    values = ((OpPort(side, i), v) for side, vs in (("y", op.outputs), ("x", op.inputs)) for i, v in enumerate(vs))
    ports = [port for port, value in values if value is not None and view.tensor_dtype(value) is DType.FLOAT]
    laws, constrained = list[Law](), set[OpPort]()
    if not op.bodies and op.signature is not None:
        available = {*ports, OpPort("scale"), *(OpPort(a.name) for a in op.node.attribute)}
        available.update(map(OpPort, default_attributes(op.signature)))
        laws = [law for law in _candidate_laws(view, op, ports) if available.issuperset(port for _, port in law)]
        constrained = {port for law in laws for _, port in law}
        if op.kind in _INVARIANT:
            constrained.add(OpPort("x", 0))
    return [*laws, *(((1, port),) for port in ports if port not in constrained)]


def _candidate_laws(view: View, op: Op, ports: Sequence[OpPort]) -> Iterator[Law]:
    inputs, results = ([port for port in ports if port.side == side] for side in ("x", "y"))
    if op.kind in _SPECIAL:
        yield from _SPECIAL[op.kind](view, op)
    elif op.kind == "Einsum":
        yield (1, results[0]), *((-1, port) for port in inputs)
    else:
        table = _UNIFORM if op.kind in _UNIFORM else _FOLLOWING
        sources = inputs if op.kind in _UNIFORM else [port for port in inputs if not port.slot]
        yield from (((1, result), (-1, port_in)) for result in results for port_in in sources if op.kind in table)
        yield from _TABLE.get(op.kind, ())


def kinds() -> frozenset[str]:
    return frozenset((*_UNIFORM, *_FOLLOWING, *_INVARIANT, *_TABLE, *_SPECIAL, "Einsum"))


# -- the table ---------------------------------------------------------------------------------------


def _port(name: str) -> OpPort:
    return OpPort(name[0], int(name[1:])) if name[0] in "xy" and name[1:].isdigit() else OpPort(name)


def _law(**terms: int) -> Law:
    """Return the law of a zero sum: the exponents of these ports, times these factors."""
    return tuple((factor, _port(name)) for name, factor in terms.items())


def _equal(first: str, *others: str) -> list[Law]:
    """Return the laws of equal exponents for all these ports."""
    return [_law(**{first: 1, other: -1}) for other in others]


def _rows(kinds: str, *laws: Law) -> dict[str, Sequence[Law]]:
    return dict.fromkeys(kinds.split(), laws)


_UNIFORM = _rows("Add Clip Concat Max Mean Min Mod Sub Sum")
"""Ops with the same exponent for all inputs and results."""
_FOLLOWING = {
    **_rows(" ".join(op for op, slots in COPIES.items() if slots == (0,))),
    **_rows("Abs AveragePool Col2Im CumSum DFT GlobalAveragePool GlobalMaxPool GridSample LRN LeakyRelu MaxPool"),
    **_rows("MaxUnpool Neg PRelu Pad ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum Relu Resize RoiAlign"),
    **_rows("RotaryEmbedding Shrink ThresholdedRelu TopK Upsample com.microsoft::RotaryEmbedding"),
}
"""Ops with the exponent of their first input for all results."""
_INVARIANT = _rows("ArgMax ArgMin Hardmax IsInf IsNaN LpNormalization NonZero Shape Sign Size")
"""Ops with results independent of the exponent of their first input."""
_NORM = (*_equal("y0", "x1", "x2"), _law(epsilon=1, x0=-2))
_QUANTIZED = "QuantizeLinear com.microsoft::QuantizeLinear"
_DEQUANTIZED = "DequantizeLinear com.microsoft::DequantizeLinear"
_PRODUCT = _law(y0=1, x1=-1, x0=-1)
_TABLE: Mapping[str, Sequence[Law]] = {
    **_rows("Clip", *_equal("x0", "min", "max")),
    **_rows("Pad", *_equal("y0", "x2", "value")),
    **_rows("Resize", *_equal("y0", "extrapolation_value")),
    **_rows("LRN", _law(alpha=1, x0=2)),
    **_rows("ThresholdedRelu", *_equal("x0", "alpha")),
    **_rows("Shrink", *_equal("x0", "lambd", "bias")),
    **_rows("Where", *_equal("y0", "x1", "x2")),
    **_rows("TensorScatter", *_equal("y0", "x0", "x1")),
    **_rows("Mul MatMul", _PRODUCT),
    **_rows("Div", _law(y0=1, x0=-1, x1=1)),
    **_rows("STFT", _law(y0=1, x2=-1, x0=-1)),
    **_rows("Conv ConvTranspose", _PRODUCT, *_equal("y0", "x2")),
    **_rows("DeformConv", _PRODUCT, *_equal("y0", "x3")),
    **_rows("Gemm", _law(y0=1, x1=-1, x0=-1, alpha=-1), _law(y0=1, x2=-1, beta=-1)),
    **_rows("BatchNormalization", _PRODUCT, *_equal("y0", "x2"), *_equal("x3", "x0")),
    **_rows("Reciprocal", _law(y0=1, x0=1)),
    **_rows("Sqrt", _law(y0=2, x0=-1)),
    **_rows("ReduceSumSquare", _law(y0=1, x0=-2)),
    **_rows("RMSNormalization InstanceNormalization GroupNormalization", *_NORM),
    **_rows("LayerNormalization SimplifiedLayerNormalization", *_NORM, *_equal("y1", "x0"), _law(y2=1, x0=1)),
    **_rows("Equal Greater GreaterOrEqual Less LessOrEqual", *_equal("x0", "x1")),
    **_rows(_QUANTIZED, *_equal("x0", "x1")),
    **_rows(_DEQUANTIZED, *_equal("y0", "x1")),
    **_rows("DynamicQuantizeLinear", *_equal("y1", "x0")),
    **_rows("com.microsoft::FusedMatMul", _law(y0=1, x1=-1, x0=-1, alpha=-1)),
    **_rows("com.microsoft::MatMulNBits", _law(y0=1, x0=-1, x2=-1), *_equal("y0", "x5")),
    **_rows("com.microsoft::MoE", _law(x2=1, x0=1), _law(x6=1, x0=1), *_equal("y0", "x4", "x5")),
    **_rows("com.microsoft::QMoE", _law(x3=1, x0=1), _law(x9=1, x0=1), *_equal("y0", "x6", "x7")),
    **_rows(
        "com.microsoft::SkipLayerNormalization",
        *_equal("x0", "x1", "x4", "y3", "y1"),
        _law(y2=1, x0=1),
        _law(epsilon=1, x0=-2),
        *_equal("y0", "x2", "x3"),
    ),
    **_rows(
        "com.microsoft::SkipSimplifiedLayerNormalization",
        *_equal("x0", "x1", "x3", "y3"),
        _law(y2=1, x0=1),
        _law(epsilon=1, x0=-2),
        *_equal("y0", "x2"),
    ),
}

# -- ops whose laws depend on attributes, constants and optional inputs ---------------------------------

_EXACT_POWERS = (1, 2, 3)
"""Powers computed by multiplication. For others, runtimes use logarithms, and their rounding does not scale."""


def _pow(view: View, op: Op) -> list[Law]:
    power = number(view, op.inputs[1])
    return [_law(y0=1, x0=-int(power))] if power in _EXACT_POWERS else []


def _scatter(_: View, op: Op) -> list[Law]:
    return [] if text_attribute(op.node, "reduction") == "mul" else _equal("y0", "x0", "x2")


def _has_input(op: Op, slot: int) -> bool:
    return slot < len(op.inputs) and op.inputs[slot] is not None


def _key_value_ports(op: Op) -> tuple[str, str, Law]:
    """Return the ports of keys and values, possibly packed, and the law for `scale` to restore the scores."""
    key = "x1" if _has_input(op, 1) else "x0"
    return key, "x2" if _has_input(op, 2) else key, _law(scale=1, x0=2) if key == "x0" else _law(scale=1, x0=1, x1=1)


_SLOTS = {"Attention": (4, 9), "MultiHeadAttention": (6, 3)}
"""For each attention op, the slots of cached keys (cached values are next) and of a bias."""


def _attention(_: View, op: Op) -> list[Law]:
    """Return the laws of an attention: softcap, mask and softmax get unshifted scores.

    Packed operands, and operands that share a bias, have the same exponent.
    """
    past, bias = _SLOTS[op.op_type]
    key, value, scores = _key_value_ports(op)
    laws = [scores, *_equal("y0", value), *_equal(key, f"x{past}", "y1"), *_equal(value, f"x{past + 1}", "y2")]
    if _has_input(op, bias):
        laws += _equal("x0", f"x{bias}", *(port for port in (key, value) if port != "x0"))
    return laws


def _grouped(_: View, op: Op) -> list[Law]:
    """Return the laws of a GroupQueryAttention.

    Norms of queries and keys cancel a shift; scales of quantized caches are shifted.
    """
    key, value, scores = _key_value_ports(op)
    laws = _equal(value, "y0", "x4", "y2", "x13")
    if _has_input(op, 14) or _has_input(op, 15):
        return [*laws, _law(qk_norm_epsilon=1, x0=-2), *([_law(qk_norm_epsilon=1, x1=-2)] if key == "x1" else [])]
    return [*laws, scores, *_equal(key, "x3", "y1", "x12")]


_SPECIAL: Mapping[str, Callable[[View, Op], list[Law]]] = {
    "Attention": _attention,
    "Pow": _pow,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "com.microsoft::GroupQueryAttention": _grouped,
    "com.microsoft::MultiHeadAttention": _attention,
}

# -- attributes --------------------------------------------------------------------------------------


def attribute_value(op: Op, name: str, shape: Shape | None) -> float | None:
    """Return the value of a float attribute or its default; None if it is unknown.

    `shape` is the shape of the first input. onnxruntime's operators treat a `scale` of 0 as missing.
    """
    proto = attribute(op.node, name)
    if name == "scale" and (proto is None or (op.domain and not proto.f)):
        width = _head_width(op, shape)
        return float(np.float32(1) / np.sqrt(np.float32(width))) if width else None
    if proto is None and op.signature is not None:
        proto = default_attributes(op.signature).get(name)
    return proto.f if proto is not None else 0.0


def _head_width(op: Op, dims: Shape | None) -> int | None:
    """Return the width of an attention's heads according to its attributes and shape; None if it is unknown."""
    heads = int_attribute(op.node, "num_heads", int_attribute(op.node, "q_num_heads", 0))
    if dims is None or dims[-1] is None:
        return None
    if len(dims) > 3:
        return dims[-1]
    if not _has_input(op, 1):
        heads = heads + 2 * kv_heads if (kv_heads := int_attribute(op.node, "kv_num_heads", 0)) else 0
    return dims[-1] // heads if heads and dims[-1] % heads == 0 else None
