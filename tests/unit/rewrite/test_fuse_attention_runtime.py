"""Attention as one operator: at which opset, in which type, where the runtime places it, and in exporters' models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.opset import at_opset
from amp_rewrite.settings.choices import Fuse, Target
from support.attention_models import BIASED, INVERTED, MASK, PLAIN, SCORES, TESTED, WEIGHTS, feed_of, model_of
from support.contrib_models import MERGED, REST, SOFTMAX, SPLIT, attention_of
from support.contrib_models import SCORES as SCORES_OF_HEADS


@pytest.mark.parametrize(
    ("model", "target", "fuse", "opset"),
    [
        (model_of(PLAIN, opset=18), Target.ORT_CUDA, "basic", 23),
        (model_of(PLAIN, opset=18), Target.TENSORRT, "basic", 18),
        (model_of(PLAIN, opset=18), Target.ORT_CUDA, "none", 18),
        (attention_of(SPLIT + SCORES_OF_HEADS + SOFTMAX + REST + MERGED), Target.ORT_CUDA, "contrib", 18),
    ],
)
def test_the_opset_that_has_the_operator_is_the_better_one(
    model: ModelProto, target: Target, fuse: Fuse, opset: int
) -> None:
    """Unless nothing is fused there, or the runtime's own operator stands for it at any opset."""
    view, told = at_opset(View.of(Model.load(model)), "auto", DType.FLOAT16, target, fuse=fuse)
    assert view.opsets[""] == opset
    if opset == 23:
        assert told[0].message == "opset 18 became 23; the target serves attention as one op better"


def test_a_pool_that_would_lose_its_kernel_weighs_more() -> None:
    body = "r = MaxPool <kernel_shape = [1, 1]> (q)  " + PLAIN.replace("(q, t)", "(r, t)")
    view, told = at_opset(View.of(Model.load(model_of(body, opset=18))), "auto", DType.FLOAT16, Target.ORT_CUDA)
    assert view.opsets[""] == 18
    assert "opset 23 serves attention as one op better, but not MaxPool" in told[0].message


PROJECTED = "q = MatMul (x, u)  k = MatMul (x, u)  v = MatMul (x, u)  " + SCORES
BODIES = {
    "none": PROJECTED + "p = Softmax (z)  o = MatMul (p, v)  y = MatMul (o, u)",
    "bool": PROJECTED + "m = Where (mask, z, fill)  p = Softmax (m)  o = MatMul (p, v)  y = MatMul (o, u)",
    "bias": PROJECTED + "b = Tile (bias, tiles)  m = Add (z, b)  p = Softmax (m)  o = MatMul (p, v)  y = MatMul (o, u)",
}


KEPT = {"none": [], "bool": [], "bias": ["op=Tile"]}


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
def test_it_is_lowered_like_a_product_with_its_mask_in_its_type(kind: str, to: str) -> None:
    made = amp_rewrite.convert(projected(kind), to=to, keep=KEPT[kind], fuse="basic")
    assert [(row.op, row.dtype) for row in made.report.rows if row.op in ("Attention", "MatMul", "Tile")] == [
        *[("MatMul", to)] * 3,
        *([("Tile", "float32")] if kind == "bias" else []),
        ("Attention", to),
        ("MatMul", to),
    ]
    types = View.of(Model.load(made.model))
    (op,) = [op for op in types.ops if op.kind == "Attention"]
    masks = {"none": [], "bool": ["bool"], "bias": [to]}[kind]
    assert [types.dtype(v).spelling for v in op.inputs] == [to, to, to, *masks]  # type: ignore[union-attr, arg-type]
    assert amp_rewrite.convert(made.model, to=to, keep=KEPT[kind], fuse="basic").plan.empty


FORMS = {
    "multiplied": model_of(SCORES + INVERTED + WEIGHTS, ", int64[2,1,3,5] ids"),
    "tested": model_of(SCORES + TESTED + WEIGHTS, ", int64[2,1,3,5] ids"),
    "chosen": model_of(SCORES + "a = Where (mask, bias, fill)  m = Add (z, a)  " + WEIGHTS, MASK),
    "two biases": model_of(BIASED + "a = Cast <to = 1> (ids)  m = Add (b, a)  " + WEIGHTS, ", int64[2,1,3,5] ids"),
}


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_in_half_precision_it_is_as_near_as_half_precision_is(form: str, to: str) -> None:
    """Rows without a key among them, by emulation. Twice the unit roundoff, for scores up to four and some ten sums."""
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[to]
    made = amp_rewrite.convert(FORMS[form], to=to)
    assert [row.dtype for row in made.report.rows if row.op == "Attention"] == [to]
    feed = feed_of(FORMS[form])
    verdict = amp_rewrite.verify(FORMS[form], made.model, [feed], rtol=16 * unit, atol=16 * unit)
    assert verdict.ok, verdict.because
