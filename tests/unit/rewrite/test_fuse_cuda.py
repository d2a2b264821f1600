"""Forms without a fast CUDA kernel: biases of attention and products, patches, the standard's Attention."""

import json
import re
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

import amp_rewrite
from amp_rewrite.rewrite import const_eval
from amp_rewrite.rewrite.attention import build
from amp_rewrite.rewrite.equivalence import UNIT
from amp_rewrite.rewrite.passes import canonicalize, decompose
from amp_rewrite.settings.choices import Target
from support import cases
from support.contrib_models import fused, random_feed
from support.fusing import kinds, outputs_of

Array = np.ndarray[Any, Any]

RNG = np.random.default_rng(3)
NUMBERS: dict[str, object] = {
    **{name: RNG.standard_normal((8, 8)).astype(np.float32) for name in ("wq", "wk", "wv", "wo")},
    **{name: RNG.standard_normal(8).astype(np.float32) for name in ("bq", "bk", "bv", "bo", "gain")},
    "heads": np.array([0, 0, 2, 4]),
    "flat": np.array([0, 0, 8]),
    "half": np.float32(0.5),
    "zero": np.float32(0),
    "lowest": np.float32(-3.4e38),
    "infinite": np.float32(-np.inf),
    "wide": np.ones((2, 5, 8), np.float32),
}
TOKENS = {"x": (2, 5, 8), "z": (2, 5, 8), "mask": (2, 1, 5, 5), "y": (2, 5, 8), "out": (2, 2, 5, 4)}
HEADS = "".join(
    f"{x}m=MatMul({read},w{x});{x}b=Add({x}m,b{x});{x}s=Reshape({x}b,heads);{x}=Transpose[perm=0 2 1 3]({x}s);"
    for x, read in zip("qkv", "xzz", strict=True)
)
SCORES = "kt=Transpose[perm=0 1 3 2](k);p=MatMul(q,kt);s0=Mul(p,half);"
SOFTMAX = "h=Softmax[axis=-1](s);"
ZEROED = "h0=Softmax[axis=-1](s);none=IsNaN(h0);h=Where(none,zero,h0);"
REST = "o=MatMul(h,v);ot=Transpose[perm=0 2 1 3](o);f=Reshape(ot,flat);pm=MatMul(f,wo);y=Add(pm,bo)"
UNMASKED = SCORES.replace("s0", "s") + SOFTMAX
HIDDEN = SCORES + "s=Where(mask,s0,lowest);" + SOFTMAX
BLIND = SCORES + "s=Where(mask,s0,infinite);" + ZEROED


def model(text: str, outputs: str = "y", opset: int = 18, shapes: Any = (), **more: object) -> ModelProto:
    read = set(re.findall(r"\w+", text))
    constants = {name: array for name, array in {**NUMBERS, **more}.items() if name in read}
    shapes, types = {**TOKENS, **dict(shapes)}, {"mask": "bool"}
    return cases.build(text, outputs.split(), shapes=shapes, types=types, constants=constants, opset=opset)


def after(proto: ModelProto, **options: object) -> ModelProto:
    """Return the fused model, after comparing its results."""
    result, _ = fused(proto, **options)
    feed: dict[str, Array] = random_feed(proto)
    if "mask" in feed:
        feed["mask"] = feed["mask"] > -0.5
        feed["mask"][..., 1, :] = False
    for first, second in zip(outputs_of(proto, feed), outputs_of(result, feed), strict=True):
        np.testing.assert_allclose(second, first, rtol=0, atol=256 * UNIT * float(np.abs(first).max()))
    return result


# -- biases of attention ---------------------------------------------------------------------------


OWN = "y0=Attention(q,k,v);ot=Transpose[perm=0 2 1 3](y0);f=Reshape(ot,flat);pm=MatMul(f,wo);y=Add(pm,bo)"
PACKED_HEADS = "".join(f"{x}m=MatMul({read},w{x});{x}=Add({x}m,b{x});" for x, read in zip("qkv", "xzz", strict=True))
PACKED_OWN = "f=Attention[q_num_heads=2,kv_num_heads=2](q,k,v);pm=MatMul(f,wo);y=Add(pm,bo)"
SHARED = PACKED_HEADS + PACKED_OWN.replace("kv_num_heads=2", "kv_num_heads=1")
FEWER = {
    name: RNG.standard_normal((8, 4) if "w" in name else 4).astype(np.float32) for name in ("wk", "wv", "bk", "bv")
}
HALVED = HEADS.replace("v=Transpose[perm=0 2 1 3](vs)", "v0=Transpose[perm=0 2 1 3](vs);v=Mul(v0,half)")
TRIANGLE = HIDDEN.replace("mask", "tri")


@pytest.mark.parametrize(
    ("text", "opset", "remaining"),
    [
        (HEADS + UNMASKED + REST, 18, "bq y_bias"),
        (HEADS + HIDDEN + REST, 18, "bq y_bias"),
        (HEADS + TRIANGLE + REST, 18, "bq y_bias"),
        (HEADS + TRIANGLE + REST, 23, "bq y_bias"),
        (HEADS + UNMASKED + "size=Shape(k);e=Cast[to=float](size);" + REST, 18, "bq y_bias"),
        (HEADS + UNMASKED + "e=Neg(k);" + REST, 18, "bq bk y_bias"),  # others read the keys
        (HEADS + BLIND + REST, 18, "bq bv bo"),  # zeros in the weights
        (HEADS + OWN, 23, "bq y_bias"),
        (HEADS + OWN.replace("Attention(", "Attention[is_causal=1]("), 23, "bq y_bias"),
        (HEADS + OWN.replace("k,v)", "k,v,mask)"), 23, "bq bv bo"),  # a row without keys is 0
        (HEADS + OWN.replace("Attention(", "Attention[softcap=2.0]("), 23, "bq bk bv bo"),
        (HEADS + OWN.replace("y0=Attention(q,k,v)", "y0,pk,pv=Attention(q,k,v,,past,past)"), 23, "bq bk bv bo"),
        (PACKED_HEADS + PACKED_OWN, 23, "bq y_bias"),
        (SHARED, 23, "bq y_bias"),
        (HEADS + UNMASKED + "e=Relu(kb);" + REST, 18, "bq bk y_bias"),
        (HEADS + UNMASKED + "e=Relu(vb);" + REST, 18, "bq bv bo"),
        (HEADS + UNMASKED + REST + ";e=Relu(f)", 18, "bq bv bo"),
        (HEADS.replace("ks=Reshape(kb", "kr=Tanh(kb);ks=Reshape(kr") + UNMASKED + REST, 18, "bq bk y_bias"),
        (HEADS + UNMASKED + REST.replace("pm=", "r=Relu(f);pm=").replace("(f,wo)", "(r,wo)"), 18, "bq bv bo"),
        (HEADS.replace("km,bk", "km,wide") + UNMASKED + REST, 18, "bq wide y_bias"),  # a different bias for each token
        (HEADS + UNMASKED + REST.replace("f,wo", "f,w"), 18, "bq bv bo"),  # a weight that is an input
        (HEADS + UNMASKED.replace("h=Soft", "h0=Soft") + "h=Mul(h0,half);" + REST, 18, "bq bk bv bo"),
        (HALVED + OWN, 23, "bq bv bo"),
        (HEADS.replace("bk", "per_token").replace("bv", "per_token") + OWN, 23, "bq per_token bo"),
        (HEADS + OWN.replace("f=Reshape(ot,flat)", "f=Reshape(y0,mixed)"), 23, "bq bv bo"),  # heads mixed with tokens
    ],
)  # fmt: skip
def test_biases_of_an_attention_move_on_every_target(text: str, opset: int, remaining: str) -> None:
    numbers = {
        "tri": np.tri(5, dtype=bool),
        "mixed": np.array([2, 5, 8]),
        "per_token": RNG.standard_normal((5, 1)).astype(np.float32),
        **(FEWER if text == SHARED else {}),
    }
    extra = (4,) if "Shape" in text else (2, 5, 8) if "e=Relu" in text else (2, 2, 5, 4)
    shapes = {"past": (2, 2, 3, 4), "w": (8, 8), "e": extra}
    result = after(
        model(text, "y e" if ";e=" in text else "y", opset=opset, shapes=shapes, **numbers),
        target=Target.ONNX,
        fuse="basic",
    )
    addends = {name for n in result.graph.node if n.op_type == "Add" for name in n.input}
    assert addends & {"bq", "bk", "bv", "bo", "per_token", "wide", "y_bias"} == set(remaining.split())


def test_a_projection_without_a_bias_gets_the_values_bias() -> None:
    result = after(model(HEADS + UNMASKED + REST.replace("pm=MatMul(f,wo);y=Add(pm,bo)", "y=MatMul(f,wo)")))
    assert [n.output[0] for n in result.graph.node if n.op_type == "Add"] == ["qb", "y"]


JOINED = "m=MatMul(x,w3);b=Add(m,b3);q0,k0,v0=Split[axis=2](b,parts);"
JOINED += "".join(f"{x}s=Reshape({x}0,heads);{x}=Transpose[perm=0 2 1 3]({x}s);" for x in "qkv")
WIDE = {"w3": RNG.standard_normal((8, 24)).astype(np.float32), "b3": RNG.standard_normal(24).astype(np.float32)}


def test_only_the_queries_part_of_a_bias_before_a_split_stays() -> None:
    result = after(model(JOINED + UNMASKED + REST, parts=np.array([8, 8, 8]), **WIDE))
    biases = {t.name: list(t.dims) for t in result.graph.initializer if "bias" in t.name}
    assert biases == {"q0_bias": [8], "y_bias_wide": [1, 1, 8]}


@pytest.mark.parametrize(
    ("text", "outputs"),
    [(JOINED + UNMASKED + REST + ";e=Relu(b)", "y e"), (JOINED.replace("q0,k0", "k0,q0") + UNMASKED + REST, "y")],
)
def test_a_bias_before_another_split_stays(text: str, outputs: str) -> None:
    result = after(model(text, outputs, shapes={"e": (2, 5, 24)}, parts=np.array([8, 8, 8]), **WIDE))
    assert any(name.startswith("b3") for n in result.graph.node if n.op_type == "Add" for name in n.input)


def test_a_scalar_bias_applies_to_each_feature() -> None:
    result = after(model(HEADS + UNMASKED + REST, bv=np.full(1, 0.5, np.float32)))
    assert "bv_wide" not in {name for n in result.graph.node for name in n.input}


def test_a_bias_that_overflows_after_its_projection_stays() -> None:
    large = np.full(8, 6e4, np.float32)
    _, notes = fused(model(HEADS + UNMASKED + REST, bv=large, wo=np.full((8, 8), 2, np.float32)))
    assert [message for kind, _, message in notes if kind == "not_fused"] == [
        "1 match is not fused (it ends at f): the bias after its projection would exceed the range of float16"
    ]


def test_a_shared_bias_is_not_changed_for_its_other_readers() -> None:
    text = (HEADS + UNMASKED + REST).replace("bv", "bo").replace("bk", "bo") + ";e=Add(x,bo)"
    result = after(model(text, "y e", shapes={"e": (2, 5, 8)}))
    assert "bo" in {name for n in result.graph.node for name in n.input}


# -- biases of products ----------------------------------------------------------------------------

GEMM = "rows=Reshape(x,joined);g=Gemm(rows,wq,bq);y=Reshape(g,apart)"
SHAPES: dict[str, object] = {"joined": np.array([-1, 8]), "apart": np.array([2, 5, 8])}


def test_a_gemm_between_reshapes_is_a_product_and_a_sum() -> None:
    result = after(model(GEMM, **SHAPES))
    assert kinds(result) == ["MatMul", "Add"]
    bias = next(t for t in result.graph.initializer if t.name == result.graph.node[1].input[1])
    assert list(bias.dims) == [1, 1, 8]


def test_rows_in_another_layout_are_reshaped() -> None:
    text = "t=Transpose[perm=0 2 1 3](x);" + GEMM.replace("Reshape(x", "Reshape(t")
    assert kinds(after(model(text, shapes={"x": (2, 2, 5, 4)}, **SHAPES))) == ["Transpose", "Reshape", "MatMul", "Add"]


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        ("e=Gemm[alpha=0.5](w,wq,bq);", 8),
        ("e=Gemm(w,wq,bq);", 8),
        ("d=Reshape(x,joined);h=Gemm(d,wq,bq);e=Reshape(h,joined);", 10),
    ],
)
def test_a_gemm_that_stays_does_not_block_the_next_one(other: str, rows: int) -> None:
    proto = model(other + GEMM, "y e", shapes={"w": (8, 8), "e": (rows, 8)}, **SHAPES)
    assert {"Gemm", "MatMul"} <= {*kinds(after(proto))}


@pytest.mark.parametrize(
    "text",
    [
        GEMM.replace("Gemm", "Gemm[transB=1]"),
        GEMM.replace("Gemm", "Gemm[alpha=0.5]"),
        GEMM.replace("Gemm", "Gemm[beta=2.0]"),
        GEMM.replace("rows,wq", "rows,w"),
        GEMM.replace("wq,bq", "wq,b"),
        GEMM + ";e=Relu(g)",
    ],
)
def test_another_gemm_stays(text: str) -> None:
    outputs = "y e" if ";e=" in text else "y"
    proto = model(text, outputs, shapes={"w": (8, 8), "b": (10, 8), "e": (10, 8)}, **SHAPES)
    assert "Gemm" in kinds(after(proto))


@pytest.mark.parametrize(
    ("producer", "shape", "rank"),
    [("MatMul(x,wq)", (2, 5, 8), 3), ("MatMul(x,wq)", (5, 8), 1), ("Relu(x)", (2, 5, 8), 1)],
)
def test_a_bias_of_three_axes_is_added_to_a_product_of_three(producer: str, shape: tuple[int, ...], rank: int) -> None:
    result = after(model(f"m={producer};y=Add(m,bq)", shapes={"x": shape, "y": shape}))
    add = next(n for n in result.graph.node if n.op_type == "Add")
    assert next(len(t.dims) for t in result.graph.initializer if t.name == add.input[1]) == rank


# -- patches ---------------------------------------------------------------------------------------

CONV = "c=Conv[kernel_shape=2 4,strides=2 4](image,k,kb);r=Reshape(c,tokens);y=Transpose[perm=0 2 1](r)"
IMAGE: dict[str, Any] = {"image": (2, 3, 4, 12), "y": (2, 6, 5)}
KERNEL: dict[str, object] = {
    "k": RNG.standard_normal((5, 3, 2, 4)).astype(np.float32),
    "kb": RNG.standard_normal(5).astype(np.float32),
    "tokens": np.array([0, 5, -1]),
}


@pytest.mark.parametrize(("text", "expected"), [(CONV, ["MatMul", "Add"]), (CONV.replace(",kb", ""), ["MatMul"])])
def test_a_convolution_of_patches_is_a_product(text: str, expected: list[str]) -> None:
    result = after(model(text, shapes=IMAGE, **KERNEL))
    assert kinds(result) == ["Reshape", "Transpose", "Reshape", *expected]


def test_a_convolution_that_stays_does_not_block_the_next_one() -> None:
    proto = model("e=Conv[strides=2 4](image,k);" + CONV, "y e", shapes={**IMAGE, "e": (2, 5, 2, 3)}, **KERNEL)
    assert {"Conv", "MatMul"} <= {*kinds(after(proto))}


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (CONV.replace("strides=2 4", "strides=2 2"), {"y": (2, 10, 5)}),
        (CONV.replace("strides=2 4", "strides=2 4,pads=0 0 2 0"), {"y": (2, 9, 5)}),
        (CONV, {"image": (2, 3, 5, 12)}),
        (CONV.replace("strides=2 4", "strides=2 4,dilations=1 1,group=1"), None),
        (CONV + ";e=Relu(c)", {"e": (2, 5, 2, 3)}),
    ],
)
def test_another_convolution_stays(text: str, shapes: dict[str, Any] | None) -> None:
    proto = model(text, "y e" if ";e=" in text else "y", shapes={**IMAGE, **(shapes or {})}, **KERNEL)
    assert ("Conv" in kinds(after(proto))) == (shapes is not None)


# -- unaligned products ----------------------------------------------------------------------------

ODD = {"x": (2, 5, 8), "y": (2, 5, 13)}
VOCABULARY = RNG.standard_normal((13, 8)).astype(np.float32)


@pytest.fixture
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decompose, canonicalize):
        monkeypatch.setattr(module, "LARGE_WEIGHT", 100)


@pytest.mark.usefixtures("small_weights_count")
@pytest.mark.parametrize("text", ["y=MatMul(x,words)", "t=Transpose(table);y=MatMul(x,t)"])
def test_an_odd_number_of_columns_is_padded_and_sliced(text: str) -> None:
    result = after(model(text, shapes=ODD, words=VOCABULARY.T.copy(), table=VOCABULARY))
    assert kinds(result)[-3:] == ["Concat", "MatMul", "Slice"]
    assert [list(t.dims) for t in result.graph.initializer if t.name.startswith("zeros")] == [[8, 51]]


@pytest.mark.usefixtures("small_weights_count")
def test_a_table_that_also_embeds_tokens_stays_unchanged() -> None:
    text = "e=Gather(table,ids);t=Transpose(table);y=MatMul(e,t)"
    result = after(model(text, shapes=ODD, table=VOCABULARY, ids=np.array([[0, 12, -1, 3, 4]] * 2)))
    assert "table" in result.graph.node[0].input


@pytest.mark.usefixtures("small_weights_count")
@pytest.mark.parametrize(
    ("text", "width", "more"),
    [
        ("y=MatMul(x,words)", 16, {"words": np.ones((8, 16), np.float32)}),
        ("y=MatMul(x,words)", 11, {"words": np.ones((8, 11), np.float32)}),
        ("y=MatMul(x,given)", 13, {}),
        ("t=Transpose(given);y=MatMul(x,t)", 13, {}),
    ],
)
def test_another_product_keeps_its_columns(text: str, width: int, more: dict[str, object]) -> None:
    shape = (13, 8) if "Transpose" in text else (8, 13)
    result = after(model(text, shapes={"x": (2, 5, 8), "y": (2, 5, width), "given": shape}, **more))
    assert "Slice" not in kinds(result)


# -- the standard's Attention ----------------------------------------------------------------------

FOUR = {"q": (2, 2, 5, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4), "y": (2, 2, 5, 4)}
PACKED = dict.fromkeys("qkvy", (2, 5, 8))


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("y=Attention(q,k,v)", FOUR),
        ("y=Attention[scale=0.25](q,k,v,mask)", FOUR),
        ("y=Attention(q,k,v,mask)", {**FOUR, "mask": (5, 5)}),
        ("y=Attention[is_causal=1](q,k,v)", FOUR),
        ("y=Attention(q,k,v)", {**FOUR, **dict.fromkeys("kv", (2, 1, 5, 4))}),
        ("y=Attention[q_num_heads=2,kv_num_heads=2](q,k,v)", PACKED),
        ("y=Attention[q_num_heads=2,kv_num_heads=1](q,k,v,mask)", {**PACKED, **dict.fromkeys("kv", (2, 5, 4))}),
    ],
)
def test_standard_attention_becomes_the_runtimes_own(text: str, shapes: dict[str, Any]) -> None:
    result = after(model(text, shapes=shapes, opset=23))
    assert kinds(result).count("MultiHeadAttention") == 1
    assert "Attention" not in kinds(result)
    node = next(n for n in result.graph.node if n.op_type == "MultiHeadAttention")
    assert ("unidirectional" in {a.name for a in node.attribute}) == ("is_causal" in text)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("y=Attention[softcap=2.0](q,k,v)", FOUR),
        ("y=Attention[is_causal=1](q,k,v)", {**FOUR, **dict.fromkeys("kv", (2, 2, 7, 4))}),
        ("y,pk,pv=Attention(q,k,v,,past,past)", {**FOUR, "past": (2, 2, 3, 4)}),
        ("y=Attention[softmax_precision=11](q,k,v)", FOUR),
        ("y=Attention[q_num_heads=2,kv_num_heads=2](q,k,v)", {**PACKED, "v": (2, 5, "W")}),
    ],
)
def test_another_attention_stays(text: str, shapes: dict[str, Any]) -> None:
    assert "Attention" in kinds(after(model(text, shapes=shapes, opset=23)))


@pytest.mark.parametrize("shape", [(1, 1, 5, 5), (2, 1, 5, 5), (5, 5)])
def test_a_constant_triangle_is_causal_for_all_equal_batches(shape: tuple[int, ...]) -> None:
    text = "kt=Transpose[perm=0 1 3 2](k);p=MatMul(q,kt);s=Where(seen,p,lowest);" + SOFTMAX + "y=MatMul(h,v)"
    triangle = np.broadcast_to(np.tri(5, dtype=bool), shape).copy()
    causal = after(model(text, shapes=FOUR, seen=triangle))
    attributes = {a.name for n in causal.graph.node if n.op_type == "MultiHeadAttention" for a in n.attribute}
    assert "unidirectional" in attributes
    triangle[..., 0, 1] = True
    other = after(model(text, shapes=FOUR, seen=triangle))
    assert "unidirectional" not in {a.name for n in other.graph.node for a in n.attribute}


@pytest.mark.parametrize("equal", [True, False])
def test_a_large_mask_of_equal_batches_is_read_by_the_batch(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(const_eval, "_MAX_ELEMENTS", 40)
    text = (
        "kt=Transpose[perm=0 1 3 2](k);p=MatMul(q,kt);c=And(seen,seen);s=Where(c,p,lowest);" + SOFTMAX + "y=MatMul(h,v)"
    )
    seen = np.broadcast_to(np.tri(5, dtype=bool), (2, 1, 5, 5)).copy()
    seen[1, 0, 0, 1] = not equal
    result = after(model(text, shapes=FOUR, seen=seen))
    assert ("unidirectional" in {a.name for n in result.graph.node for a in n.attribute}) == equal


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5, 5)])
def test_a_large_mask_is_also_causal_and_no_file_gets_another_one(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(const_eval, "_MAX_ELEMENTS", 20)
    monkeypatch.setattr(build, "_MAX_STORED", 20)
    text = "kt=Transpose[perm=0 1 3 2](k);p=MatMul(q,kt);s=Where(hidden,lowest,p);" + SOFTMAX + "y=MatMul(h,v)"
    hidden = np.broadcast_to(~np.tri(5, dtype=bool), shape).copy()
    causal = after(model(text, shapes=FOUR, hidden=hidden))
    assert "unidirectional" in {a.name for n in causal.graph.node for a in n.attribute}
    hidden[..., 4, 0] = True
    other = after(model(text, shapes=FOUR, opset=23, hidden=hidden), fuse="basic")
    assert "Attention" in kinds(other)
    assert "is_causal" not in {a.name for n in other.graph.node for a in n.attribute}
    assert [tuple(t.dims) for t in other.graph.initializer if t.data_type == TensorProto.BOOL] == [shape]


TABLED = "m=MatMul(x,wq);b=Add(m,bq);c=Concat[axis=1](first,b);y=Add(c,table)"
TABLE: dict[str, object] = {
    "table": RNG.standard_normal((1, 6, 8)).astype(np.float32),
    "rows": RNG.standard_normal((1, 5, 8)).astype(np.float32),
}
JOINED_TOKENS = {"first": (2, 1, 8), "y": (2, 6, 8), "e": (2, 5, 8)}


@pytest.mark.parametrize(
    ("text", "adds"),
    [
        (TABLED, 1),
        (TABLED.replace("(first,b)", "(b,first)"), 1),
        (TABLED.replace("Add(m,bq)", "Add(bq,m)").replace("Add(c,table)", "Add(table,c)"), 1),
        ("m=MatMul(x,wq);b=Add(m,bq);y=Add(b,rows)", 1),
        (TABLED + ";e=Relu(b)", 2),  # others read the sum
        (TABLED + ";e=Slice(c,nil,five,one)", 2),  # others read the concatenation
        (TABLED.replace("table)", "z)"), 2),  # the table is an input
        (TABLED.replace("bq)", "wide)"), 2),  # not one number for each feature
        (TABLED.replace("axis=1](first,b)", "axis=2](left,b)").replace("table", "other"), 2),
        (TABLED.replace("table", "half"), 2),  # one number for all rows
    ],
)
def test_a_bias_before_a_table_is_folded_into_its_rows(text: str, adds: int) -> None:
    shapes: dict[str, Any] = {**JOINED_TOKENS, "z": (2, 6, 8), "left": (2, 5, 1)}
    more = {
        **TABLE,
        "other": np.ones((1, 5, 9), np.float32),
        "nil": np.array([0]),
        "five": np.array([5]),
        "one": np.array([1]),
    }
    if "left" in text:
        shapes["y"] = (2, 5, 9)
    outputs = "y e" if ";e=" in text else "y"
    result = after(model(text, outputs, shapes=shapes, **more))
    assert kinds(result).count("Add") == adds


def test_a_table_that_would_overflow_with_the_bias_stays() -> None:
    large = {"table": np.full((1, 6, 8), 6e4, np.float32), "bq": np.full(8, 6e3, np.float32)}
    _, notes = fused(model(TABLED, shapes=JOINED_TOKENS, **large))
    assert "adding the bias would take the table out of the range of float16" in str(notes)


# -- rows of a mask --------------------------------------------------------------------------------

DIAGONAL = "seen=Or(mask,eye);" + HEADS + HIDDEN.replace("Where(mask", "Where(seen")


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        (HEADS + HIDDEN, 1),
        (DIAGONAL, 0),
        (DIAGONAL.replace("Or(", "And("), 1),
        ("no=Not(mask);both=And(no,other);seen=Not(both);" + DIAGONAL.partition(";")[2], 0),
        ("no=Not(mask);both=Or(no,other);seen=Not(both);" + DIAGONAL.partition(";")[2], 1),
        (DIAGONAL.replace("eye", "but_one"), 1),
    ],
)
def test_rows_are_tested_unless_each_is_known_to_have_a_key(text: str, tests: int) -> None:
    eye = np.eye(5, dtype=bool)
    more = {"eye": eye, "other": ~eye, "but_one": eye & (np.arange(5) > 0)}
    assert kinds(after(model(text + REST, **more))).count("ReduceSum") == tests


@pytest.mark.parametrize("text", [HEADS + HIDDEN + REST, HEADS + BLIND + REST])
def test_rows_promised_to_have_a_key_are_not_tested(text: str) -> None:
    proto = model(text)
    converted = amp_rewrite.convert(proto, assume="rows-see-a-key")
    assert not {"ReduceSum", "IsNaN"} & set(kinds(converted.model))
    assert json.loads(converted.report.to_json())["model"]["assume"] == "rows-see-a-key"
    assert "ReduceSum" in kinds(amp_rewrite.convert(proto).model)


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", [HEADS + HIDDEN + REST, HEADS + BLIND + REST])
def test_rows_are_tested_in_the_low_type(text: str, to: Any) -> None:
    converted = amp_rewrite.convert(model(text), to=to).model
    (counting,) = (n for n in converted.graph.node if n.op_type == "ReduceSum")
    (counted,) = (n for n in converted.graph.node if counting.input[0] in n.output)
    assert (counted.op_type, list(counted.input)) == ("Cast", ["mask"])
    low = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[to]
    assert [a.i for a in counted.attribute] == [low]
    assert [n.op_type for n in converted.graph.node if counting.output[0] in n.input] == ["Cast"]
