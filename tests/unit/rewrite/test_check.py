"""The last look at a converted model: whoever tells the types, a result that is not as planned is refused."""

from dataclasses import replace

import onnx.parser
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConversionError
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.check import check

index = View.of

PLAIN = "t = Tanh (a)  s = Softmax (t)"
CONTRIB = "t = com.microsoft.QuickGelu (a)  s = Softmax (t)"
BODY = """s = If (flag) <then_branch = e () => (float[8,8] p) { t = Tanh (a)  u = MatMul (t, x)  p = Tanh (u) },
    else_branch = o () => (float[8,8] q) { v = MatMul (a, a)  w = MatMul (v, v)  q = Relu (w) }>"""
LOOP = """n = Constant <value_int = 2> ()
    s = Loop (n, flag, a) <body = b (int64 i, bool c, float[8,8] h) => (bool d, float[8,8] o) {
        d = Identity (c)  t = Tanh (h)  u = MatMul (t, x)  o = Tanh (u) }>"""
OLD = "c = LessOrEqual (a, a)  t = Where (c, a, a)  s = Relu (t)"
TEXTS = {
    "onnx": PLAIN,
    "onnx, of bodies": BODY,
    "onnx, of one body": LOOP,
    "our schemas": CONTRIB,
    "our schemas, of an old opset": OLD,
}


def converted(body: str) -> Converted:
    opset = 12 if body == OLD else 18
    text = f"""<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>
    g (float[8,8] x, bool flag) => (float[8,8] y) {{
        a = MatMul (x, x)
        {body}
        y = MatMul (s, x)
    }}"""
    return convert(onnx.parser.parse_model(text), target="onnx")


@pytest.mark.parametrize("teller", TEXTS)
def test_what_is_as_planned_passes_by_the_teller_that_is_meant(teller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = converted(TEXTS[teller])
    asked = []
    monkeypatch.setattr(View, "of", lambda model: asked.append(model) or index(model))
    assert check(found.view.model, found.view, found.plan, found.result) == ()
    assert bool(asked) is teller.startswith("our schemas")


@pytest.mark.parametrize("teller", TEXTS)
def test_a_value_of_another_type_than_planned_is_refused(teller: str) -> None:
    found = converted(TEXTS[teller])
    value = next(v for v in sorted(found.plan.retype) if v not in found.plan.rename)
    name = found.view.value_name(value)
    lied = replace(found.plan, retype={**found.plan.retype, value: DType.FLOAT})
    with pytest.raises(ConversionError) as caught:
        check(found.view.model, found.view, lied, found.result)
    told = f"value {name!r} is float16 after the conversion, not float32 as planned; nothing was written;"
    assert str(caught.value) == f"{told} please report this"
