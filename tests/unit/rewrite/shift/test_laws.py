"""Operators and random graphs with shifted values: the same bits for any exponents, and the cost in digits."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.files.casting import Array, Fit
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import COPIES
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.canonicalize import canonicalize
from amp_rewrite.rewrite.shift.emit import refusal
from amp_rewrite.rewrite.shift.laws import kinds
from amp_rewrite.rewrite.shift.plan import MAX_ADDED_ERROR, constant_fits, is_exact, value_fits
from amp_rewrite.settings.request import Request
from support import cases as texts
from support.one_op import Case, cases
from support.random_graphs import Graph, graphs
from support.shifting import bits, sandwiched, shifted_at_random, shifted_to

_UNTESTED = {"BatchNormalization", "RoiAlign", "SimplifiedLayerNormalization"}
_UNTESTED |= {"ConcatFromSequence", "SequenceAt", "SequenceErase"}
"""Records with their own test or without an onnx case that onnxruntime runs; copies of sequences."""


def _changed(case: Case) -> int:
    """Compare the bits for two seeds; return the number of changed nodes, 0 without a kernel on this machine."""
    model = sandwiched(case.model)
    try:
        view = View.of(Model.load(model))
        before = bits(model, case.feeds)
    except AmpRewriteError:
        return 0
    if refusal(view):
        return 0
    changed = 0
    for seed in range(2):
        shift = shifted_at_random(view, seed)
        changed += len(shift.results)
        assert bits(shift.view.model.to_proto(), case.feeds) == before, (case.name, seed)
    return changed


def test_no_operator_changes_a_bit_under_any_shift() -> None:
    tested = {case.op_type for case in cases() if _changed(case)}
    assert {kind for kind in kinds() if ":" not in kind} - _UNTESTED <= tested


WEIGHTS = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
GAIN = WEIGHTS[0]
PASSED = {
    "a residual stream": "h=MatMul(x,w);r=Relu(h);a=Add(h,r);y=MatMul(a,w)",
    "a bias": "h=Gemm(x,w,g);y=Gemm(h,w,g)",
    "a norm": "h=MatMul(x,w);y=LayerNormalization(h,g,g)",
    "an RMS norm": "h=MatMul(x,w);y=RMSNormalization(h,g)",
    "a written-out norm": "h=MatMul(x,w);s=Mul(h,h);m=ReduceMean(s,axes);e=Add(m,eps);r=Sqrt(e);n=Div(h,r);y=Mul(n,g)",
    "an inverse root": (
        "h=MatMul(x,w);s=Pow(h,two);m=ReduceMean(s,axes);e=Add(m,eps);r=Sqrt(e);i=Reciprocal(r);n=Mul(h,i);y=Mul(n,g)"
    ),
    "one over a root": (
        "h=MatMul(x,w);s=Pow(h,two);m=ReduceMean(s,axes);e=Add(m,eps);r=Sqrt(e);i=Div(one,r);n=Mul(h,i);y=Mul(n,g)"
    ),
    "a bounded value": "h=MatMul(x,w);r=Clip(h,low,high);y=MatMul(r,w)",
    "a scale before a softmax": "h=MatMul(x,w);s=Mul(h,c);y=Softmax(s)",
    "pooled regions": "h=MatMul(x,w);i=Reshape(h,image);p=RoiAlign(i,rois,zero);f=Reshape(p,line);y=MatMul(f,ones)",
}
ENDED = {
    "a nonlinear op": "h=MatMul(x,w);y=Gelu(h)",
    "an output": "y=MatMul(x,w)",
    "two readers of one value": "h=MatMul(x,w);s=Sigmoid(h);t=Tanh(h);y=Add(s,t)",
    "an input of the stream": "h=MatMul(x,w);a=Add(x,h);y=MatMul(a,w)",
    "a power by logarithms": "h=MatMul(x,w);y=Pow(h,c)",
}
CONSTANTS = {
    "w": WEIGHTS,
    "g": GAIN,
    "c": np.float32(0.3),
    "one": np.float32(1),
    "two": np.float32(2),
    "axes": np.array([-1]),
    "image": np.array([1, 1, 4, 8]),
    "line": np.array([1, 1]),
    "ones": np.full((1, 1), 1.5, np.float32),
    "rois": np.array([[0.3, 0.4, 5.2, 3.1]], np.float32),
    "zero": np.array([0]),
    "eps": np.float32(1e-6),
    "low": np.float32(-1.5),
    "high": np.float32(1.5),
}


def _shifted(text: str, exponent: int) -> tuple[Any, Any, dict[str, Any]]:
    read = re.findall(r"[(,](\w+)", text)
    constants = {name: array for name, array in CONSTANTS.items() if name in read}
    model = texts.build(text, ["y"], shapes={"x": (4, 8)}, constants=constants, opset=16 if "RoiAlign" in text else 24)
    name = "h" if "h=" in text else "y"
    shift = shifted_to(View.of(Model.load(model)), {name: exponent})
    return model, shift, {"x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)}


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.parametrize("exponent", [1, 12])
def test_a_shift_passes_without_a_mul(name: str, exponent: int) -> None:
    model, shift, feed = _shifted(PASSED[name], exponent)
    assert any(origin.exponent == exponent for origin in shift.origins.values())
    assert not shift.muls
    assert bits(shift.view.model.to_proto(), feed) == bits(model, feed)


@pytest.mark.parametrize("name", ENDED)
def test_a_shift_ends_in_one_mul(name: str) -> None:
    model, shift, feed = _shifted(ENDED[name], 3)
    nodes = [node.op_type for node in shift.view.model.proto.graph.node]
    assert nodes.count("Mul") == 1
    assert bits(shift.view.model.to_proto(), feed) == bits(model, feed)


@given(graph=graphs(), seed=st.integers(0, 1000), truth=st.booleans())
@settings(max_examples=60)
def test_a_random_shift_of_a_random_graph_changes_no_bit(graph: Graph, seed: int, truth: bool) -> None:
    note(graph.text())
    view = canonicalize(View.of(Model.load(graph.model())), Request.of(fuse="none")).view
    if refusal(view):
        return
    feeds = graph.feeds(np.random.default_rng(seed), truth)
    before = view.model.to_proto()
    after = shifted_at_random(view, seed).view.model.to_proto()
    onnx.checker.check_model(after)
    assert [value.name for value in after.graph.output] == [value.name for value in before.graph.output]
    assert bits(after, feeds) == bits(before, feeds)


RNG = np.random.default_rng(3)


def floats(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


def integers(*numbers: int, dtype: type = np.int32) -> NDArray[Any]:
    return np.array(numbers, dtype)


class Node(NamedTuple):
    """One op: its inputs in order, its outputs, its attributes. `weights`: its constant inputs."""

    kind: str
    inputs: Mapping[str, Any]
    outputs: str = "y"
    attributes: Mapping[str, Any] = {}
    weights: str = ""


def qkv() -> dict[str, Any]:
    return {"q": floats(2, 3, 8), "k": floats(2, 3, 8), "v": floats(2, 3, 8)}


def grouped(more: Mapping[str, Any] = {}, *, packed: bool = False) -> dict[str, Any]:
    """Return queries with four heads, keys and values with two, caches, and lengths; `more` inputs follow."""
    q = {"q": floats(1, 1, 64 + 64), "k": None, "v": None} if packed else {"q": floats(1, 1, 64), "k": floats(1, 1, 32)}
    q = q if packed else {**q, "v": floats(1, 1, 32)}
    caches = {"past_k": floats(1, 2, 4, 16), "past_v": floats(1, 2, 4, 16)}
    return {**q, **caches, "lengths": integers(3), "total": np.array(4, np.int32), **more}


ROTATED = {"cos": np.cos(floats(8, 8)), "sin": np.sin(floats(8, 8))}
GROUPED = {"num_heads": 4, "kv_num_heads": 2}
CACHED = "y,present_k,present_v"
NODES = {
    "attention of several heads": Node("MultiHeadAttention", qkv(), CACHED, {"num_heads": 2}),
    "a mask and an explicit scale": Node(
        "MultiHeadAttention",
        {**qkv(), "bias": None, "padding": integers(2, 3), "mask": floats(2, 2, 3, 3)},
        "y",
        {"num_heads": 2, "scale": 0.3},
    ),
    "a scale of zero": Node("MultiHeadAttention", qkv(), "y", {"num_heads": 2, "scale": 0.0, "unidirectional": 1}),
    "a bias": Node("MultiHeadAttention", {**qkv(), "b": floats(24)}, "y", {"num_heads": 2}, "b"),
    "a cache": Node(
        "MultiHeadAttention",
        {**qkv(), "b": None, "p": None, "m": None, "past_k": floats(2, 2, 5, 4), "past_v": floats(2, 2, 5, 4)},
        CACHED,
        {"num_heads": 2},
    ),
    "grouped queries": Node("GroupQueryAttention", grouped(ROTATED), CACHED, {**GROUPED, "do_rotary": 1}),
    "grouped queries, packed": Node(
        "GroupQueryAttention", grouped(ROTATED, packed=True), CACHED, {**GROUPED, "do_rotary": 1, "scale": 0.0}
    ),
    "a softcap and sinks": Node(
        "GroupQueryAttention",
        grouped({"cos": None, "sin": None, "positions": None, "mask": None, "sink": floats(4)}),
        CACHED,
        {**GROUPED, "softcap": 5.0},
    ),
    "experts": Node(
        "MoE",
        {"x": floats(3, 8), "router": floats(3, 4), "w1": floats(4, 6, 8), "b1": floats(4, 6), "w2": floats(4, 8, 6),
         "b2": floats(4, 8)},
        "y",
        {"k": 2, "activation_type": "silu", "normalize_routing_weights": 1},
        "w1 b1 w2 b2",
    ),
    "quantized experts": Node(
        "QMoE",
        {"x": floats(3, 32), "router": floats(3, 4), "w1": RNG.integers(0, 255, (4, 32, 16)).astype(np.uint8),
         "s1": np.abs(floats(4, 32)), "b1": floats(4, 32), "w2": RNG.integers(0, 255, (4, 32, 16)).astype(np.uint8),
         "s2": np.abs(floats(4, 32)), "b2": floats(4, 32)},
        "y",
        {"k": 2, "activation_type": "gelu", "expert_weight_bits": 4},
        "w1 s1 b1 w2 s2 b2",
    ),
    "a scaled product": Node("FusedMatMul", {"x": floats(4, 8), "w": floats(8, 3)}, "y", {"alpha": 0.3}),
    "four-bit weights": Node(
        "MatMulNBits",
        {"x": floats(4, 32), "w": RNG.integers(0, 255, (3, 1, 16)).astype(np.uint8), "s": np.abs(floats(3))},
        "y",
        {"K": 32, "N": 3, "bits": 4, "block_size": 32},
        "w s",
    ),
    "a sum and its norm": Node(
        "SkipLayerNormalization",
        {"x": floats(2, 3, 8), "z": floats(2, 3, 8), "g": floats(8), "b": floats(8), "c": floats(8)},
        "y,,,sum",
        {},
        "g b c",
    ),
    "a sum and its RMS norm": Node(
        "SkipSimplifiedLayerNormalization",
        {"x": floats(2, 3, 8), "z": floats(2, 3, 8), "g": floats(8)},
        "y,,,sum",
        {"epsilon": 1e-6},
        "g",
    ),
    "a rotation": Node(
        "RotaryEmbedding",
        {"x": floats(1, 2, 3, 16), "at": np.array([[0, 1, 2]]), **ROTATED},
    ),
    "steps": Node("QuantizeLinear", {"x": floats(4, 8), "s": np.abs(floats(1))[0], "z": np.uint8(3)}, "y", {}, "s z"),
    "from steps": Node("DequantizeLinear", {"x": integers(3, 4, dtype=np.uint8), "s": np.float32(0.3)}, "y", {}, "s"),
}  # fmt: skip
ELSEWHERE = {
    "packed queries, keys and values": Node("MultiHeadAttention", {"q": floats(2, 3, 2, 3, 4)}, "y", {"num_heads": 2}),
    "packed keys and values": Node(
        "MultiHeadAttention", {"q": floats(2, 3, 8), "k": floats(2, 3, 2, 2, 4)}, "y", {"num_heads": 2}
    ),
    "norms of queries and keys": Node(
        "GroupQueryAttention",
        grouped({**ROTATED, **dict.fromkeys(("at", "mask", "sink", "ks", "vs")), "qn": floats(16), "kn": floats(16)}),
        CACHED,
        {**GROUPED, "do_rotary": 1, "qk_norm_epsilon": 1e-4},
        "qn kn",
    ),
}
"""Forms without a CPU kernel."""


def built(one: Node) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    arrays = {name: np.asarray(array) for name, array in one.inputs.items() if array is not None}
    node = helper.make_node(
        one.kind, [name if array is not None else "" for name, array in one.inputs.items()], one.outputs.split(","),
        domain="com.microsoft", **one.attributes,
    )  # fmt: skip
    weights = one.weights.split()
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    inputs = [helper.make_tensor_value_info(n, types[n], a.shape) for n, a in arrays.items() if n not in weights]
    output_type = {"QuantizeLinear": TensorProto.UINT8}.get(one.kind, TensorProto.FLOAT)
    outputs = [helper.make_tensor_value_info(n, output_type, None) for n in node.output if n]
    tensors = [numpy_helper.from_array(arrays[name], name) for name in weights]
    graph = helper.make_graph([node], "g", inputs, outputs, tensors)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return model, {name: array for name, array in arrays.items() if name not in weights}


@pytest.mark.parametrize("name", NODES)
def test_no_operator_of_onnxruntime_changes_a_bit_under_a_shift(name: str) -> None:
    model, feeds = built(NODES[name])
    model = sandwiched(model)
    view = View.of(Model.load(model))
    before, shifted = bits(model, feeds), False
    for seed in range(8):
        shift = shifted_at_random(view, seed)
        after = shift.view.model.to_proto()
        (node,) = (node for node in after.graph.node if node.domain)
        origins = (shift.origins.get(value) for value in (*node.input, *node.output))
        shifted |= any(origin is not None and origin.exponent for origin in origins)
        assert bits(after, feeds) == before, seed
    assert shifted


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_attribute_absorbs_the_shift_of_packed_or_normed_queries(name: str) -> None:
    view = View.of(Model.load(sandwiched(built(ELSEWHERE[name])[0])))
    shift = shifted_to(view, {"q_inner": 4, "k_inner": 4})
    (node,) = (node for node in shift.view.model.proto.graph.node if node.domain)
    numbers = {a.name: a.f for a in node.attribute}
    if "qk_norm_epsilon" in numbers:
        assert numbers["qk_norm_epsilon"] == np.float32(1e-4) / 256
    else:
        assert numbers["scale"] == 0.5 * 256
    assert not shift.muls.keys() & {op.id for op in view.ops if op.domain}


def test_every_record_of_onnxruntimes_operators_is_run() -> None:
    recorded = {kind.partition("::")[2] for kind in kinds() - COPIES.keys() if kind.startswith("com.microsoft::")}
    assert recorded == {one.kind for one in NODES.values()}


TO = DType.FLOAT16
NORMAL = np.random.default_rng(0).standard_normal(1 << 14)


def fit_of(array: Array) -> Fit:
    sizes = np.abs(array[array != 0])
    return Fit(
        count=array.size,
        absmax=float(sizes.max(initial=0)),
        absmin=float(sizes.min(initial=np.inf)) if sizes.size else 0.0,
        flushed=int((sizes <= TO.smallest_subnormal / 2).sum()),
        subnormal=int(((sizes > TO.smallest_subnormal / 2) & (sizes < TO.tiny)).sum()),
    )


def added(array: Array, exponent: int, *, flush: bool) -> float:
    """Return the ratio of the rounding errors after and before a shift."""
    shifted = np.ldexp(array, -exponent).astype(np.float16).astype(np.float64)
    if flush:
        shifted = np.where(np.abs(shifted) < TO.tiny, 0, shifted)
    after, before = np.ldexp(shifted, exponent) - array, array.astype(np.float16).astype(np.float64) - array
    return float(np.linalg.norm(after) / np.linalg.norm(before))


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0, 1e4])
def test_counts_distinguish_shifts_that_lose_digits(size: float, flush: bool) -> None:
    array = (NORMAL * size).astype(np.float32).astype(np.float64)
    predicted = [e for e in range(40) if value_fits(fit_of(array), e, TO, flush=flush)]
    precise = [e for e in range(40) if e == 0 or added(array, e, flush=flush) <= MAX_ADDED_ERROR]
    assert predicted == list(range(len(predicted)))
    assert precise[-1] - 6 <= predicted[-1] <= precise[-1]
    parts = np.split(array.astype(np.float32), [5000])
    assert [e for e in range(1, 40) if constant_fits(parts, fit_of(array), e, TO, flush=flush)] == precise[1:]


@pytest.mark.parametrize(
    ("fit", "exponent", "fits"),
    [
        (Fit(), 20, True),
        (Fit(count=4, absmax=1.0, absmin=1.0), 14, True),
        (Fit(count=4, absmax=1.0, absmin=1.0), 24, False),
        (Fit(count=4, absmax=1.0, absmin=1e-7, flushed=1), 0, True),
        (Fit(count=4, absmax=1.0, absmin=1e-7, flushed=1), -3, True),
    ],
)
def test_without_small_numbers_a_shift_keeps_all_digits(fit: Fit, exponent: int, fits: bool) -> None:
    assert value_fits(fit, exponent, TO, flush=False) is fits


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_constant_must_stay_in_its_range(size: int) -> None:
    constant = np.full(size, 0.5, np.float32)
    constant[size // 3] = 2  # of a large constant, only a sample is rounded
    fits = [constant_fits([constant], fit_of(constant), e, TO, flush=False) for e in (-14, -15)]
    assert fits == [True, False]


@pytest.mark.parametrize(
    ("numbers", "exponent", "exact"),
    [
        ([1.0, 3.0], 126, True),
        ([1.0, 1 + 2.0**-23], 126, True),
        ([1.0, 1 + 2.0**-23], 127, False),
        ([1.0, 3.0], 151, False),
        ([1.0], -127, True),
        ([2.0], -127, False),
        ([2.0**-149], -3, True),
        ([2.0**-149], 1, False),
        ([np.nan, np.inf, 1.0], 3, True),
    ],
)
def test_a_power_of_two_is_exact_unless_it_drops_bits(numbers: list[float], exponent: int, exact: bool) -> None:
    array = np.array(numbers, np.float32)
    finite = array[np.isfinite(array)].astype(np.float64)
    assert is_exact(fit_of(finite), [array], exponent) is exact
