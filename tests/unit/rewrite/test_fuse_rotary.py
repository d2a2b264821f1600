"""Rotary embeddings, and attention with keys and values shared by several heads of queries."""

import re
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto

from amp_rewrite import DType, convert
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.equivalence import UNIT
from support import cases
from support.contrib_models import fused, random_feed
from support.fusing import kinds, outputs_of

RNG = np.random.default_rng(5)
NUMBERS: dict[str, object] = {
    "w": RNG.standard_normal((16, 32)).astype(np.float32),
    "angles": RNG.standard_normal((3, 8)).astype(np.float32),
    "others": RNG.standard_normal((3, 8)).astype(np.float32),
    "half": np.float32(0.5),
    "start": np.array([0]),
    "middle": np.array([8]),
    "end": np.array([16]),
    "last": np.array([-1]),
    "two": np.array([2]),
    "heads": np.array([0, 0, 2, 16]),
    "fewer": np.array([0, 0, 1, 16]),
    "twice": np.array([1, 1, 2, 1, 1]),
    "repeated": np.array([0, 2, -1, 16]),
    "flat": np.array([0, 0, 32]),
    "causal": np.where(np.tri(3), 0, -np.float32(1e38)).astype(np.float32),
}
SHAPES = {"x": (2, 3, 16), "z": (2, 3, 16), "u": (2, 3, 16), "y": (2, 3, 32), "r": (2, 2, 3, 16)}
TABLES = "both=Concat[axis=-1](angles,angles);cos=Cos(both);sin=Sin(both);"


def rotation(x: str, y: str) -> str:
    """Return the ops of x · cos + (−second half, first half) · sin."""
    return (
        f"{y}s=Mul({x},cos);{y}1=Slice({x},start,middle,last);{y}2=Slice({x},middle,end,last);{y}n=Neg({y}2);"
        f"{y}t=Concat[axis=-1]({y}n,{y}1);{y}c=Mul({y}t,sin);{y}=Add({y}s,{y}c);"
    )


QUERIES = "xm=MatMul(x,w);xs=Reshape(xm,heads);q0=Transpose[perm=0 2 1 3](xs);"
ROTATED = QUERIES + TABLES + rotation("q0", "r").rstrip(";")
KEYS = "zs=Reshape(z,fewer);k0=Transpose[perm=0 2 1 3](zs);"
VALUES = "us=Reshape(u,fewer);v0=Transpose[perm=0 2 1 3](us);"
REPEATED = "".join(f"{x}a=Unsqueeze({x}1,two);{x}w=Expand({x}a,twice);{x}=Reshape({x}w,repeated);" for x in "kv")
REST = (
    "kt=Transpose[perm=0 1 3 2](k);p=MatMul(q,kt);s0=Mul(p,half);s=Add(s0,causal);h=Softmax[axis=-1](s);o=MatMul(h,v);"
    "ot=Transpose[perm=0 2 1 3](o);y=Reshape(ot,flat)"
)
GROUPED = QUERIES + KEYS + VALUES + TABLES + rotation("q0", "q") + rotation("k0", "k1") + "v1=Identity(v0);"
GROUPED = GROUPED.replace("v1=Identity(v0);", "") + REPEATED.replace("v1", "v0") + REST
UNROTATED = QUERIES.replace("q0", "q") + KEYS.replace("k0", "k1") + VALUES.replace("v0", "v1") + REPEATED + REST


def model(text: str, outputs: str = "y", shapes: Any = (), opset: int = 18, **more: object) -> ModelProto:
    read = set(re.findall(r"\w+", text))
    constants = {name: array for name, array in {**NUMBERS, **more}.items() if name in read}
    return cases.build(
        text, outputs.split(), shapes={**SHAPES, **dict(shapes)}, types={}, constants=constants, opset=opset
    )


def after(proto: ModelProto, **options: object) -> list[str]:
    result, _ = fused(proto, **options)
    feed = random_feed(proto)
    for first, second in zip(outputs_of(proto, feed), outputs_of(result, feed), strict=True):
        np.testing.assert_allclose(second, first, rtol=0, atol=256 * UNIT * float(np.abs(first).max()))
    return kinds(result)


def test_a_rotation_of_split_heads_rotates_tokens_by_features() -> None:
    assert after(model(ROTATED, "r")) == [
        *("MatMul", "Concat", "Cos", "Sin", "Slice", "Reshape", "Slice", "Reshape"),
        *("RotaryEmbedding", "Reshape", "Transpose"),
    ]


EQUAL = np.concatenate([NUMBERS["angles"]] * 2, axis=-1)  # type: ignore[arg-type, list-item]
WIDE = np.random.default_rng(8).standard_normal((3, 16)).astype(np.float32)
WIDE[:, 8:] = WIDE[:, :8]
PICKED = np.random.default_rng(6).integers(0, 16, (3, 16))


def turned(old: str = "", new: str = "", *outputs: str, **more: object) -> ModelProto:
    """Return a rotation with a part replaced, or with additional outputs."""
    shapes = {"given": (3, 16), "batches": (2, 1, 3, 16)}
    shapes |= {name: (2, 2, 3, 8 if name in ("e", "rn", "r1") else 16) for name in outputs}
    constants = {"table": EQUAL, "rows": np.array([2, 0, 1]), "places": PICKED, **more}
    text = ROTATED.replace(old, new)
    return model(text, " ".join(("r", *outputs)), shapes, **{n: a for n, a in constants.items() if n in text})


def of_tables(*shape: int, heads: object = 2) -> ModelProto:
    """Return a rotation of split heads by constant tables of this shape."""
    shapes = {"q": (1, heads, 3, 16), "r": (1,) * max(len(shape) - 4, 0) + (1, heads, 3, 16)}
    return model(rotation("q", "r").rstrip(";"), "r", shapes, cos=WIDE.reshape(shape), sin=WIDE.reshape(shape))


ROTATIONS: dict[str, tuple[bool, ModelProto]] = {
    "equal halves, scaled": (True, turned("cos=Cos(both)", "c0=Cos(both);cos=Mul(c0,half)")),
    "equal halves of a table": (True, turned(TABLES, "cos=Identity(table);sin=Identity(table);")),
    "equal halves of rows": (True, turned(TABLES, "cos=Gather(table,rows);sin=Gather(table,rows);")),
    "equal halves of another rank": (
        True,
        turned("both=Concat[axis=-1](angles,angles)", "both=Unsqueeze(table,start)"),
    ),
    "tables of two axes": (True, of_tables(3, 16)),
    "tables of three": (True, of_tables(1, 3, 16)),
    "tables of four": (True, of_tables(1, 1, 3, 16)),
    "an unknown number of heads": (False, of_tables(3, 16, heads="H")),
    "tables that add axes to the result": (False, of_tables(1, 1, 1, 3, 16)),
    "halves that differ": (False, turned("(angles,angles)", "(angles,others)")),
    "unknown halves": (False, turned("cos=Cos(both)", "cos=Relu(given)")),
    "halves in reverse order": (False, turned("(rn,r1)", "(r1,rn)")),
    "a wrong sign": (False, turned("rn=Neg(r2)", "rn=Abs(r2)")),
    "a different table for each batch": (False, turned("cos=Cos(both)", "c0=Cos(both);cos=Add(c0,batches)")),
    "a half with other readers": (False, turned("r=Add", "e=Relu(r2);r=Add", "e")),
    "every second number": (False, turned("Slice(q0,start,middle,last)", "Slice(q0,start,end,last,two)")),
    "elements picked from one axis": (
        False,
        turned(TABLES, "cos=Gather(table,places);sin=Gather(table,places);", table=WIDE[0]),
    ),
    **{f"{name} is an output": (False, turned("", "", name)) for name in ("rn", "r1", "rt", "rc")},
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_only_a_rotation_by_equal_halves_becomes_an_operator(name: str) -> None:
    fuses, proto = ROTATIONS[name]
    assert ("RotaryEmbedding" in after(proto)) is fuses


ONE = dict.fromkeys("xzu", (1, 3, 16))
TURN = np.asarray(NUMBERS["angles"])[None]


def by_standard(attributes: str = "", more: str = "", angles: str = "turn") -> str:
    """Return grouped attention with the standard's rotations of queries and keys, each with its own tables."""
    tables = "".join(f"c{x}=Cos({angles});s{x}=Sin({angles});" for x in "qk")
    turned = "".join(
        f"{y}=RotaryEmbedding{attributes}({x},c{z},s{z}{more});" for x, y, z in (("q0", "q", "q"), ("k0", "k1", "k"))
    )
    return QUERIES + KEYS + VALUES.replace("v0", "v1") + tables + turned + REPEATED + REST


def test_rotations_by_the_standard_operator_are_replaced() -> None:
    op_types = after(model(by_standard(), "y", ONE, 23, turn=TURN))
    assert "GroupQueryAttention" in op_types
    assert not {"RotaryEmbedding", "Expand"} & set(op_types)


@pytest.mark.parametrize(
    ("text", "shapes", "angles"),
    [
        pytest.param(by_standard("[interleaved=1]"), ONE, TURN, id="pairs side by side"),
        pytest.param(by_standard("[rotary_embedding_dim=8]"), ONE, TURN[..., :4], id="only some features"),
        pytest.param(by_standard(more=",places"), ONE, TURN[0], id="positions"),
        pytest.param(by_standard(), {}, np.concatenate([TURN, 2 * TURN]), id="a table for each batch"),
    ],
)
def test_other_rotations_by_the_standard_operator_stay(text: str, shapes: Any, angles: np.ndarray) -> None:
    proto = model(text, "y", shapes, 23, turn=angles, places=np.array([[2, 0, 1]]))
    op_types = after(proto)
    assert op_types.count("RotaryEmbedding") == len("qk")
    assert "GroupQueryAttention" not in op_types


CONSTANT = "cos=Identity(far_cos);sin=Identity(far_sin);"
GATHERED = "cos=Gather(far_cos,rows);sin=Gather(far_sin,rows);"
COMPUTED = "both=Concat[axis=-1](turn,turn);c0=Cos(both);s9=Sin(both);cos=Mul(c0,far);sin=Mul(s9,far);"
GROUPED_OF_PRODUCTS = GROUPED.replace("zs=Reshape(z,", "zm=MatMul(z,keyed);zs=Reshape(zm,")
ROTATING = ("com.microsoft::RotaryEmbedding", "com.microsoft::GroupQueryAttention")


@pytest.mark.parametrize("text", [ROTATED, GROUPED_OF_PRODUCTS], ids=["alone", "before attention"])
@pytest.mark.parametrize(
    ("tables", "far", "dtype"),
    [(CONSTANT, 1e5, DType.FLOAT), (COMPUTED, 1e5, DType.FLOAT), (GATHERED, 3e4, DType.FLOAT16)],
)
def test_tables_beyond_the_type_are_multiplied_in_float32(text: str, tables: str, far: float, dtype: DType) -> None:
    numbers = {"far_cos": far * np.cos(EQUAL), "far_sin": far * np.sin(EQUAL), "far": far}
    small = {"w": 1e-5 * np.asarray(NUMBERS["w"]), "keyed": 1e-5 * np.eye(16)}
    constants = {name: np.asarray(array, np.float32) for name, array in {**numbers, **small}.items()}
    output = "r" if text == ROTATED else "y"
    proto = model(text.replace(TABLES, tables), output, {"turn": (3, 8)}, rows=np.array([2, 0, 1]), **constants)
    converted = convert(proto).model
    view = View.of(Model(converted))
    assert {view.dtype(op.outputs[0]) for op in view.of_kinds(ROTATING)} == {dtype}
    assert _error(proto, converted) <= 1.5 * _error(proto, convert(proto, fuse="none").model)


def _error(proto: ModelProto, converted: ModelProto) -> float:
    session = onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = random_feed(proto)
    return float(np.abs(session.run(None, feed)[0] - outputs_of(proto, feed)[0]).max())


@pytest.mark.parametrize("text", [GROUPED, UNROTATED])
def test_causal_attention_reads_unrepeated_keys_and_values_and_rotates_them(text: str) -> None:
    op_types = after(model(text))
    assert {"Expand", "RotaryEmbedding", "Transpose", "MultiHeadAttention"}.isdisjoint(op_types)
    assert op_types.count("GroupQueryAttention") == 1


def test_rotated_keys_are_found_before_their_repetition() -> None:
    turned = "kf=Reshape(kw,joined);kx=Transpose[perm=0 2 1](kf);kt=Reshape(kx,parted);"
    text = UNROTATED.replace("k=Reshape(kw,repeated);", turned).replace("kt=Transpose[perm=0 1 3 2](k);", "")
    proto = model(text, joined=np.array([4, 3, 16]), parted=np.array([2, 2, 16, 3]))
    assert "GroupQueryAttention" in after(proto)


NOT_CAUSAL = np.where(np.tri(3), 0, -np.float32(1e38)).astype(np.float32)
NOT_CAUSAL[0, 1] = 0


@pytest.mark.parametrize(
    ("text", "more"),
    [
        pytest.param(GROUPED, {"causal": NOT_CAUSAL}, id="a later key is seen"),
        pytest.param(GROUPED.replace("s=Add(s0,causal)", "s=Add(s0,given)"), {}, id="a mask that is an input"),
        pytest.param(
            GROUPED.replace("ot=", "oo=Relu(o);ot=").replace("3](o)", "3](oo)"), {}, id="heads that stay separate"
        ),
    ],
)
def test_other_attentions_are_not_grouped(text: str, more: dict[str, object]) -> None:
    assert "GroupQueryAttention" not in after(model(text, shapes={"given": (2, 1, 3, 3)}, **more))


def test_queries_rotated_without_their_keys_are_not_grouped() -> None:
    """onnxruntime fuses a rotation with the attention after it, and crashes unless both operands have one."""
    text = GROUPED.replace(rotation("k0", "k1"), "").replace("k1", "k0")
    op_types = after(model(text))
    assert "RotaryEmbedding" in op_types and "GroupQueryAttention" not in op_types


@pytest.mark.parametrize("width", [4, 264])
def test_heads_without_a_fast_kernel_are_not_grouped(width: int) -> None:
    sizes = {"heads": [0, 0, 2, width], "fewer": [0, 0, 1, width], "repeated": [0, 2, -1, width]}
    numbers = {name: np.array(size) for name, size in sizes.items()} | {"flat": np.array([0, 0, 2 * width])}
    shapes = {"x": (2, 3, 16), **dict.fromkeys("zu", (2, 3, width)), "y": (2, 3, 2 * width)}
    weight = RNG.standard_normal((16, 2 * width)).astype(np.float32)
    assert "MultiHeadAttention" in after(model(UNROTATED, shapes=shapes, w=weight, **numbers))


@pytest.mark.parametrize(
    ("options", "grouped"),
    [
        ({}, True),
        ({"to": "bfloat16"}, True),
        ({"level": "tensor-cores-only"}, True),
        ({"keep": ["op=Softmax"]}, False),
        ({"target": "onnx"}, False),
    ],
)
def test_an_attention_is_grouped_if_it_is_certainly_low(options: dict[str, Any], grouped: bool) -> None:
    converted = convert(model(GROUPED), **options)
    op_types = {node.op_type: node for node in converted.model.graph.node}
    assert ("GroupQueryAttention" in op_types) == grouped


def test_an_attention_kept_float32_by_ranges_is_not_grouped() -> None:
    proto = model(GROUPED)
    wide = random_feed(proto)
    wide["u"] = wide["u"] * np.float32(1e6)
    converted = convert(proto, data=[wide], shift="none")
    assert "GroupQueryAttention" not in kinds(converted.model)
    assert "GroupQueryAttention" in kinds(convert(proto, data=[random_feed(proto)]).model)
