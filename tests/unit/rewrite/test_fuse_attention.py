"""Written-out attention: forms fused into one operator with equal results, the best opset, and forms that stay."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.attention.build import AttentionReplacement, attention_mismatch, write_attention
from amp_rewrite.rewrite.attention.legality import FusibleAttention, fusible_attentions
from amp_rewrite.rewrite.equivalence import UNIT
from amp_rewrite.rewrite.opset import at_opset
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.settings.choices import Fuse, Target
from support.attention_models import (
    BIASED,
    GUARDED,
    HIDDEN,
    INVERTED,
    KEYS,
    MASK,
    OLD,
    OLD_KINDS,
    PLAIN,
    SCORES,
    SUMMED,
    TESTED,
    WEIGHTS,
    ZEROED,
    K,
    Q,
    V,
    agree,
    attention,
    feed_of,
    model_of,
    unused,
)
from support.contrib_models import MERGED, REST, SOFTMAX, SPLIT, attention_of
from support.contrib_models import SCORES as SCORES_OF_HEADS
from support.fusing import kinds, outputs_of, standard


@pytest.mark.parametrize(
    ("body", "scale"),
    [
        (KEYS + "m = MatMul (q, t)  " + WEIGHTS, 1.0),
        (KEYS + "s = MatMul (q, t)  m = Mul (half, s)  " + WEIGHTS, 0.5),
        (KEYS + "s = MatMul (q, t)  m = Div (s, two)  " + WEIGHTS, 0.5),
        (KEYS + "r = Mul (q, half)  m = MatMul (r, t)  " + WEIGHTS, 0.5),
        (KEYS + "r = Mul (q, root)  u = Mul (t, root)  m = MatMul (r, u)  " + WEIGHTS, 0.5),
        (KEYS + "r = Div (q, two)  u = Mul (t, two)  s = MatMul (r, u)  m = Mul (s, half)  " + WEIGHTS, 0.5),
    ],
)
def test_the_scale_is_found_in_every_position(body: str, scale: float) -> None:
    model = model_of(body)
    result, notes = standard(model)
    assert (kinds(result), list(attention(result).input)) == (["Attention"], ["q", "k", "v"])
    assert {a.name: helper.get_attribute_value(a) for a in attention(result).attribute} == {
        "scale": pytest.approx(scale, rel=2 * UNIT)
    }
    assert [kind for kind, _, _ in notes] == ["fused"]
    agree(model, result)


@pytest.mark.parametrize(
    ("before", "key", "expected"),
    [
        ("t = Transpose <perm = [0, 2, 3, 1]> (k)  ", "float[2,5,2,4] k", ["Transpose", "Attention"]),
        ("a = Reshape (k, merged)  b = Transpose <perm = [0, 2, 1]> (a)  t = Reshape (b, parted)  ", K, ["Attention"]),
        ("t = Relu (k)  ", "float[2,2,4,5] k", ["Relu", "Transpose", "Attention"]),
    ],
)
def test_keys_are_read_before_their_transpose(before: str, key: str, expected: list[str]) -> None:
    model = model_of(before + "m = MatMul (q, t)  " + WEIGHTS, inputs=f"{Q}, {key}, {V}")
    result, _ = standard(model)
    assert kinds(result) == expected
    agree(model, result)


GROUPED = """a = Unsqueeze (k, second)  b = Expand (a, repeated)  c = Reshape (b, grouped)
    d = Unsqueeze (v, second)  e = Expand (d, repeated)  f = Reshape (e, grouped)
    t = Transpose <perm = [0, 1, 3, 2]> (c)  m = MatMul (q, t)  p = Softmax (m)  y = MatMul (p, f)"""


def test_heads_repeated_for_groups_of_queries_are_read_unrepeated() -> None:
    inputs = "float[2,2,3,4] q, float[2,1,5,4] k, float[2,1,5,4] v"
    model = model_of(GROUPED, inputs=inputs, output="float[2,2,3,4] y")
    result, _ = standard(model)
    assert (kinds(result), list(attention(result).input)) == (["Attention"], ["q", "k", "v"])
    agree(model, result)


def test_interleaved_heads_are_not_groups() -> None:
    """[k0, k1, k0, k1] does not repeat each head, so it stays."""
    deal = GROUPED.replace("second)", "first)")
    inputs = "float[2,4,3,4] q, float[2,2,5,4] k, float[2,2,5,4] v, int64[1] first"
    model = model_of(deal, inputs=inputs, output="float[2,4,3,4] y")
    for tensor, numbers in (("repeated", [2, 2, 2, 5, 4]), ("grouped", [2, 4, 5, 4])):
        (old,) = [t for t in model.graph.initializer if t.name == tensor]
        old.CopyFrom(numpy_helper.from_array(np.array(numbers), tensor))
    del model.graph.input[3]
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "first"))
    result, _ = standard(model)
    assert list(attention(result).input) == ["q", "c", "f"]
    agree(model, result)


@pytest.mark.parametrize("copy", ["Identity", "Cast <to = 1>"])
def test_copies_between_the_softmax_and_its_products_are_fused(copy: str) -> None:
    body = f"t = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, t)  z = {copy} (s)  m = Mul (z, half)  "
    model = model_of(body + f"g = Softmax (m)  h = {copy} (g)  p = {copy} (h)  y = MatMul (p, v)")
    result, _ = standard(model)
    assert kinds(result) == ["Attention"]
    agree(model, result)


ROWS_HIDDEN = "a row of its mask may hide every key"


FROM_W = "the bias of its scores comes from w, which may contain −inf, so a NaN would become 0"
CAPPED = "its scores are capped by Tanh, and releases of the runtime differ in whether the mask comes first"
BEYOND = "the bias of its scores reaches 3.4e+38, beyond the range of float16"
FROM_U = FROM_W.replace("from w", "from u")
TOO_FAR = "the bias of its scores reaches 2.55e+38, beyond the range of float16"
A_BILLION = "the bias of its scores reaches 1e+09, beyond the range of float16"
SCALED = "its mask is scaled with its scores"
NARROW = "its mask does not cover every query and every key"
WEIGHTED_IN_A_BODY = """p = Softmax (z)  y = If (c) <
    then_branch = t () => (float[2,2,3,6] o) { h = Identity (p)  o = MatMul (h, v) },
    else_branch = e () => (float[2,2,3,6] u) { u = RandomNormal <shape = [2, 2, 3, 6]> () }>"""
FOREIGN = "its mask is not known to have the batch, heads and length of its queries, or 1 in their place"


@pytest.mark.parametrize(
    ("body", "more", "why"),
    [
        (PLAIN.replace("axis = -1", "axis = 2"), "", "its softmax is not over the last axis"),
        (
            "r = Mul (q, minus)  " + PLAIN.replace("(q,", "(r,"),
            "",
            "its scale is -1, but runtimes require a positive, finite scale",
        ),
        (SCORES + "m = Where (mask, z, inf)  " + WEIGHTS, MASK, f"{ROWS_HIDDEN}, and would become 0 instead of NaN"),
        (SCORES.replace("z = Mul (s, half)", "z = Where (mask, s, fill)  m = Mul (z, half)") + WEIGHTS, MASK, SCALED),
        (SCORES + "m = Where (mask, z, modest)  " + WEIGHTS, MASK, "the_m replaces scores, but is not a mask"),
        (SCORES + "n = Where (mask, zero, billion)  m = Add (z, n)  " + WEIGHTS, MASK, A_BILLION),
        (BIASED + "m = Add (b, bias)  " + WEIGHTS, "", "a bias is added to its scores twice"),
        (SCORES + "b = Where (some, z, fill)  m = Where (some, b, fill)  " + WEIGHTS, "", "two masks hide its scores"),
        (SCORES + "m = Add (z, w)  " + WEIGHTS, ", float[1,1,3,5] w", FROM_W),
        (SCORES + "w = Mul (bias, fill)  m = Add (z, w)  " + WEIGHTS, "", TOO_FAR),
        (SCORES + INVERTED.replace("Cast <to = 1>", "Identity") + WEIGHTS, ", float[2,1,1,5] ids", BEYOND),
        (SCORES + INVERTED.replace("one,", "root,") + WEIGHTS, ", int64[2,1,1,5] ids", BEYOND),
        (SCORES + "h = Sigmoid (w)  u = Div (h, half)  m = Add (z, u)  " + WEIGHTS, ", float[1,1,3,5] w", FROM_U),
        (SCORES + "g = MatMul (w, u)  m = Add (z, g)  " + WEIGHTS, ", float[1,1,3,2] w, float[2,5] u", FROM_U),
        (SCORES + "g = Tanh (z)  h = Mul (g, two)  m = Add (h, bias)  " + WEIGHTS, "", CAPPED),
        (SCORES + "m = Where (mask, z, fill)  " + WEIGHTS, ", bool[b,1,3,5] mask", FOREIGN),
        (SCORES + "m = Where (mask, z, fill)  " + WEIGHTS, ", bool[2,1,1,5] mask", NARROW),
        (SCORES + "m = Where (mask, z, fill)  " + WEIGHTS, ", bool[5] mask", NARROW),
        (SCORES + WEIGHTED_IN_A_BODY, ", bool c", "other ops read the result of the_s"),
    ],
)
def test_near_misses_of_the_operator_stay(body: str, more: str, why: str) -> None:
    model = model_of(body, more, output="float[a,b,c,d] y" if "[b" in more else "float[2,2,3,6] y")
    result, notes = standard(model)
    assert [(kind, subject, message.split(": ", 1)[1]) for kind, subject, message in notes if kind == "not_fused"] == [
        ("not_fused", "attention", why)
    ]
    assert "Attention" not in kinds(result)


@pytest.mark.parametrize(
    ("operands", "why"),
    [
        ("float[2,2,3,4] q, float[1,2,5,4] k, float[2,2,5,6] v", "agree in batch"),
        ("float[2,2,3,4] q, float[2,1,5,4] k, float[2,1,5,6] v", "agree in heads"),
        ("float[2,2,3,4] q, float[2,2,5,4] k, float[2,1,5,6] v", "be equal in number"),
        ("float[b,2,3,4] q, float[c,2,5,4] k, float[c,2,5,6] v", "agree in batch"),
        ("float[2,2,3,4] q, float[2,2,5,4] k, float[5,6] v", "have four axes"),
    ],
)
def test_shapes_that_the_operator_does_not_broadcast_stay(operands: str, why: str) -> None:
    model = model_of(PLAIN, inputs=operands, output="float[a,b,c,d] y")
    result, notes = standard(model)
    assert kinds(result) == kinds(model)
    assert [message.endswith(why) for _, _, message in notes] == [True]


def test_attention_of_three_axes_stays() -> None:
    body = "t = Transpose <perm = [0, 2, 1]> (k)  s = MatMul (q, t)  m = Mul (s, half)  " + WEIGHTS
    model = model_of(body, inputs="float[4,3,4] q, float[4,5,4] k, float[4,5,6] v", output="float[4,3,6] y")
    assert "its queries, keys and values are not known to have four axes" in standard(model)[1][0][2]


def test_tensorrt_keeps_the_ops_of_its_own_fusions() -> None:
    result, notes = standard(model_of(PLAIN), target=Target.TENSORRT)
    assert kinds(result) == ["Transpose", "MatMul", "Softmax", "MatMul"]
    assert [kind for kind, _, _ in notes] == ["not_fused"]


def test_a_softmax_without_products_is_not_attention() -> None:
    for body in (
        "p = Softmax (q)  y = Relu (p)",
        "p = Softmax (q)  y = MatMul (p, w)",
        KEYS + "s = MatMul (q, t)  y = Softmax (s)",
    ):
        assert standard(model_of(body, ", float[4,6] w", output="float[a,b,c,d] y"))[1] == []


def without(written: AttentionReplacement, op_type: str) -> AttentionReplacement:
    """Return the replacement without the last node of a type; readers of the node read its operand."""
    (*_, removed) = [node for node in written.leading if node.op_type == op_type]
    renamed = {removed.output[0]: removed.input[1 if op_type == "Where" else 0]}
    nodes = []
    for node in (*(n for n in written.leading if n is not removed), written.node):
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        nodes.append(copy)
    return replace(written, leading=tuple(nodes[:-1]), node=nodes[-1])


@pytest.mark.parametrize("op_type", ["Where", "Or", "Not"])
def test_an_ignored_row_without_a_key_would_be_noticed(op_type: str) -> None:
    view = View.of(Model.load(model_of(SCORES + "m = Where (mask, z, fill)  " + WEIGHTS, MASK)))
    ((_, site),) = fusible_attentions(view, Context(DType.FLOAT16))
    assert isinstance(site, FusibleAttention)
    assert attention_mismatch(site, write_attention(site)) is None
    assert str(attention_mismatch(site, without(write_attention(site), op_type))).startswith(
        "on random inputs the results differ by up to"
    )


IDS = ", int64[2,1,3,5] ids"
CHOSEN = "a = Where (mask, bias, fill)  m = Add (z, a)  "
COMPUTED = ", float[1,1,3,5] w"
HALVED = "h = Sigmoid (w)  u = Div (h, two)  m = Add (z, u)  "
OTHER = "o = Cast <to = 1> (others)  d = Cast <to = 9> (ids)  c = Where (d, fill, o)  m = Add (z, c)  "
"""Like a mask from a test for 0, but with another summand for visible scores, which must be added."""
OTHERS = IDS + ", int64[2,1,3,5] others"
ADDED = ["Where", "Where", "Where"]


@pytest.mark.parametrize(
    ("body", "more", "expected", "read"),
    [
        (SCORES + "m = Where (every, z, fill)  " + WEIGHTS, "", ["Attention"], 3),
        (SCORES + "m = Where (some, z, fill)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "m = Add (z, added)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "n = Where (some, zero, billion)  m = Add (z, n)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "m = Add (bias, z)  " + WEIGHTS, "", ["Attention"], 4),
        (SCORES + "b = Add (z, bias)  m = Where (some, b, fill)  " + WEIGHTS, "", ["Where", "Attention"], 4),
        (BIASED + "m = Where (mask, b, fill)  " + WEIGHTS, MASK, [*HIDDEN, *["Where"] * 3, "Attention"], 4),
        (BIASED + "m = Where (mask, b, inf)  " + GUARDED, MASK, [*HIDDEN, "Where", *ZEROED], 4),
        (SCORES + SUMMED + "m = Add (z, b)  " + WEIGHTS, MASK, [*HIDDEN, *["Where"] * 3, "Attention"], 4),
        (SCORES + OLD + WEIGHTS, IDS, [*OLD_KINDS, "Attention"], 4),
        (SCORES + INVERTED + WEIGHTS, IDS, [*OLD_KINDS, "Greater", *HIDDEN, *ADDED, "Attention"], 4),
        (SCORES + TESTED + WEIGHTS, IDS, ["Cast", "Sub", "Cast", "Not", *HIDDEN, "Where", "Attention"], 4),
        (SCORES + HALVED + WEIGHTS, COMPUTED, ["Sigmoid", "Div", "Attention"], 4),
        (SCORES + OTHER + WEIGHTS, OTHERS, ["Cast", "Cast", "Not", *HIDDEN, *ADDED, "Attention"], 4),
        (SCORES + CHOSEN + WEIGHTS, MASK, [*HIDDEN, *["Where"] * 3, "Attention"], 4),
        (BIASED + "a = Cast <to = 1> (ids)  m = Add (b, a)  " + WEIGHTS, IDS, ["Cast", "Add", "Attention"], 4),
        (SCORES + "m = Where (mask, z, fill)  " + WEIGHTS, MASK, [*HIDDEN, "Where", "Attention"], 4),
        (SCORES + "m = Where (mask, fill, z)  " + WEIGHTS, MASK, ["Not", *HIDDEN, "Where", "Attention"], 4),
        (SCORES + "a = Where (mask, zero, fill)  m = Add (z, a)  " + WEIGHTS, MASK, [*HIDDEN, "Where", "Attention"], 4),
        (SCORES + "m = Where (mask, z, fill)  " + GUARDED, MASK, [*HIDDEN, "Where", "Attention"], 4),
        (SCORES + "m = Where (mask, z, inf)  " + GUARDED, MASK, [*HIDDEN, *ZEROED], 4),
        (SCORES + "a = Where (mask, inf, zero)  m = Add (a, z)  " + GUARDED, MASK, ["Not", *HIDDEN, *ZEROED], 4),
    ],
)  # fmt: skip
def test_each_form_of_mask_agrees_on_rows_without_a_key(body: str, more: str, expected: list[str], read: int) -> None:
    model = model_of(body, more)
    result, notes = standard(model)
    assert (kinds(result), len(attention(result).input)) == (expected, read)
    assert [kind for kind, subject, _ in notes if subject != "constants"] == ["fused"]
    agree(model, result)


def test_a_row_without_a_key_stays_the_mean_of_all_values_or_0() -> None:
    """This does not rely on the runtime's own results for such rows."""
    for end, body in (("mean", "fill)  " + WEIGHTS), ("zero", "inf)  " + GUARDED)):
        model = model_of(SCORES + "m = Where (mask, z, " + body, MASK)
        feed = feed_of(model)
        (y,) = outputs_of(standard(model)[0], feed)
        expected = feed["v"].mean(axis=2) if end == "mean" else np.zeros((2, 2, 6))
        np.testing.assert_allclose(y[:, :, 1], expected, atol=16 * UNIT * float(np.abs(feed["v"]).max()))


def test_a_square_triangle_becomes_the_causal_attribute() -> None:
    body = SCORES + "m = Where (past, z, fill)  " + WEIGHTS
    model = model_of(body, inputs=f"float[2,2,5,4] q, {K}, {V}", output="float[2,2,5,6] y")
    result, _ = standard(model)
    assert (kinds(result), len(result.graph.initializer)) == (["Attention"], len(unused(model)))
    assert helper.get_node_attr_value(attention(result), "is_causal") == 1
    agree(model, result)


@pytest.mark.parametrize(
    ("model", "target", "fuse", "opset"),
    [
        (model_of(PLAIN, opset=18), Target.ORT_CUDA, "basic", 23),
        (model_of(PLAIN, opset=18), Target.TENSORRT, "basic", 18),
        (model_of(PLAIN, opset=18), Target.ORT_CUDA, "none", 18),
        (attention_of(SPLIT + SCORES_OF_HEADS + SOFTMAX + REST + MERGED), Target.ORT_CUDA, "contrib", 18),
    ],
)
def test_an_opset_with_the_operator_is_preferred(model: ModelProto, target: Target, fuse: Fuse, opset: int) -> None:
    """Unless nothing is fused there, or the runtime's own operator replaces the ops at every opset."""
    view, notes = at_opset(View.of(Model.load(model)), "auto", DType.FLOAT16, target, fuse=fuse)
    assert view.opsets[""] == opset
    if opset == 23:
        assert notes[0].message == "opset 18 became 23; the target supports attention as one op better"


def test_keeping_a_pools_kernel_takes_precedence() -> None:
    body = "r = MaxPool <kernel_shape = [1, 1]> (q)  " + PLAIN.replace("(q, t)", "(r, t)")
    view, notes = at_opset(View.of(Model.load(model_of(body, opset=18))), "auto", DType.FLOAT16, Target.ORT_CUDA)
    assert view.opsets[""] == 18
    assert "opset 23 supports attention as one op better, but MaxPool less" in notes[0].message


PROJECTED = "q = MatMul (x, u)  k = MatMul (x, u)  v = MatMul (x, u)  " + SCORES
BODIES = {
    "none": PROJECTED + "p = Softmax (z)  o = MatMul (p, v)  y = MatMul (o, u)",
    "bool": PROJECTED + "m = Where (mask, z, fill)  p = Softmax (m)  o = MatMul (p, v)  y = MatMul (o, u)",
    "bias": PROJECTED + "b = Tile (bias, tiles)  m = Add (z, b)  p = Softmax (m)  o = MatMul (p, v)  y = MatMul (o, u)",
}


KEEP = {"none": [], "bool": [], "bias": ["op=Tile"]}


def projected(kind: str) -> ModelProto:
    more = ", bool[2,1,3,3] mask" if kind == "bool" else ", int64[4] tiles" if kind == "bias" else ""
    model = model_of(BODIES[kind], inputs="float[2,2,3,4] x" + more, output="float[2,2,3,4] y")
    rng = np.random.default_rng(3)
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((4, 4)).astype(np.float32), "u"))
    (old,) = [t for t in model.graph.initializer if t.name == "bias"]
    old.CopyFrom(numpy_helper.from_array(rng.standard_normal((1, 1, 1, 3)).astype(np.float32), "bias"))
    model.graph.value_info.append(helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, [1, 1, 3, 3]))
    return model


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", BODIES)
def test_attention_is_lowered_like_a_product_with_its_mask_in_its_type(kind: str, to: str) -> None:
    result = amp_rewrite.convert(projected(kind), to=to, keep=KEEP[kind], fuse="basic")
    assert [(row.op, row.dtype) for row in result.report.rows if row.op in ("Attention", "MatMul", "Tile")] == [
        *[("MatMul", to)] * 3,
        *([("Tile", "float32")] if kind == "bias" else []),
        ("Attention", to),
        ("MatMul", to),
    ]
    types = View.of(Model.load(result.model))
    (op,) = [op for op in types.ops if op.kind == "Attention"]
    masks = {"none": [], "bool": ["bool"], "bias": [to]}[kind]
    assert [types.dtype(v).spelling for v in op.inputs] == [to, to, to, *masks]  # type: ignore[union-attr, arg-type]
    assert amp_rewrite.convert(result.model, to=to, keep=KEEP[kind], fuse="basic").plan.empty


FORMS = {
    "multiplied": model_of(SCORES + INVERTED + WEIGHTS, ", int64[2,1,3,5] ids"),
    "tested": model_of(SCORES + TESTED + WEIGHTS, ", int64[2,1,3,5] ids"),
    "chosen": model_of(SCORES + "a = Where (mask, bias, fill)  m = Add (z, a)  " + WEIGHTS, MASK),
    "two biases": model_of(BIASED + "a = Cast <to = 1> (ids)  m = Add (b, a)  " + WEIGHTS, ", int64[2,1,3,5] ids"),
}


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_attention_is_accurate(form: str, to: str) -> None:
    """By emulation, including rows without keys. The tolerance allows for scores up to 4 and some ten sums."""
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[to]
    result = amp_rewrite.convert(FORMS[form], to=to)
    assert [row.dtype for row in result.report.rows if row.op == "Attention"] == [to]
    feed = feed_of(FORMS[form])
    verdict = amp_rewrite.verify(FORMS[form], result.model, [feed], rtol=16 * unit, atol=16 * unit)
    assert verdict.ok, verdict.because
