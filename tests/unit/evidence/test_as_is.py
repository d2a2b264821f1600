"""Measurements see through local functions, and accept no model that contradicts its own declarations."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from amp_rewrite.deploy.session import Session
from amp_rewrite.deploy.timing import bench
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.locate import locate
from amp_rewrite.evidence.verify import verify

HEAD = '<ir_version: 8, opset_import: ["" : 17, "l" : 1]>'
WIDE = (
    "k = Constant <value_floats = [60000.0]> () p = Mul (a, k) s = Constant <value_floats = [400.0]> () c = Mul (p, s)"
)
LOW = (
    "h = Cast <to = 10> (a) k = Constant <value = float16[1] {60000}> () p = Mul (h, k) q = Cast <to = 1> (p)"
    " s = Constant <value_floats = [400.0]> () c = Mul (q, s)"
)
BATCH = {"x": np.array([400, 1, 2, 3], np.float32)}


def calling(body: str, depth: int = 1) -> onnx.ModelProto:
    """A model of one call of a function, through others that only call."""
    functions = [f"{{ c = l.f{i + 1} (a) }}" for i in range(depth - 1)] + [f"{{ {body} }}"]
    text = "".join(
        f'<opset_import: ["" : 17, "l" : 1], domain: "l"> f{i} (a) => (c) {f}\n' for i, f in enumerate(functions)
    )
    return onnx.parser.parse_model(f"{HEAD} g (float[4] x) => (float[4] y) {{ y = l.f0 (x) }}\n{text}")


def plain(body: str, stated: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} g (float[4] x) => (float[4] y) {stated} {{ {body} }}")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_overflow_inside_a_function_is_seen(depth: int) -> None:
    verdict = verify(calling(WIDE), calling(LOW, depth), BATCH, rtol=0.01, emulate=True)

    assert not verdict.ok and "float16 emulated" in verdict.candidate.as_
    assert "where the reference is finite" in verdict.because


def test_locate_names_the_op_inside_a_function() -> None:
    located = locate(calling(WIDE), calling(LOW, 2), BATCH)

    assert located.low == "float16"
    assert located.first_jump is not None and located.first_jump.kind == "Mul" and located.first_jump.overflows


MISDECLARED = {
    "an output": plain("h = Cast <to = 10> (x)  y = Exp (h)"),
    "a value": plain("h = Cast <to = 10> (x)  k = Exp (h)  y = Cast <to = 1> (k)", "<float[4] k>"),
    "an output of a function": calling("h = Cast <to = 10> (a)  c = Exp (h)"),
}


@pytest.mark.parametrize("measure", ["verify", "locate", "bench", "Session"])
@pytest.mark.parametrize("name", MISDECLARED)
def test_a_value_declared_as_another_type_is_refused(name: str, measure: str) -> None:
    reference, candidate, batch = plain("y = Exp (x)"), MISDECLARED[name], {"x": np.ones(4, np.float32)}

    with pytest.raises(ModelError, match=r"declared as another type|Type Error|Type \(tensor"):
        if measure == "verify":
            verify(reference, candidate, batch, rtol=0.01, emulate=True)
        elif measure == "locate":
            locate(reference, candidate, batch)
        elif measure == "bench":
            bench([reference, candidate], batch, rounds=1, memory=False)
        else:
            Session(candidate)


def test_an_op_without_a_kernel_of_its_type_is_still_emulated() -> None:
    """No CPU kernel takes bfloat16 here: the emulation stands for it."""
    body = "h = Cast <to = 16> (x)  i = Erf (h)  y = Cast <to = 1> (i)"
    verdict = verify(plain("y = Erf (x)"), plain(body), BATCH, rtol=0.1, emulate=True)

    assert verdict.ok and "bfloat16 emulated" in verdict.candidate.as_
