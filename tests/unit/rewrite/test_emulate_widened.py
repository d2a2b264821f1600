"""The widened twin: a mixed model as if its low types were float32, the reference of one that is half already."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from amp_rewrite.dtypes import DType
from support.objections import run
from unit.rewrite.test_emulate import (
    both_types,
    has_low,
    kinds,
    parsed,
    twin,
)


def widened(model: object, io: str = "float32") -> ModelProto:
    """The widened twin, which must be a valid model of unique names."""
    return twin(model, io=io, rounding=False)


def as_float32(
    text: str, feeds: Mapping[str, object], low: DType, functions: str = "", **options: object
) -> ModelProto:
    """The widened twin of a model written with LOW for its low type; equal to the model written with float."""
    low_model = parsed(text.replace("LOW", low.onnx_name), functions.replace("LOW", low.onnx_name), **options)
    wide_model = parsed(text.replace("LOW", "float"), functions.replace("LOW", "float"), **options)
    found = widened(low_model)
    assert not has_low(found)
    assert [kind for kind in kinds(found) if kind.startswith("Cast→")] == []
    expected = ReferenceEvaluator(wide_model).run(None, dict(feeds))
    for level in ("BASIC", "ALL"):
        for mine, right in zip(run(found, feeds, level), expected, strict=True):
            np.testing.assert_array_equal(mine, right)
    return found


# -- nothing is rounded --------------------------------------------------------------------------------


@both_types
def test_what_would_overflow_or_lose_digits_does_not(low: DType) -> None:
    found = as_float32(
        "g (LOW[3, 4] x) => (LOW[3, 4] y) { e = Mul (x, x) \n y = Mul (e, e) }",
        {"x": np.float32([[1 + 2.0**-20, 300, 1e-5, 1e9]] * 3)},
        low,
    )
    assert kinds(found) == ["Mul", "Mul"]


@both_types
def test_casts_between_float32_and_low_types_become_identities(low: DType) -> None:
    model = parsed(f"""g (float[2] x, {low.onnx_name}[2] h) => (float[2] y, int64[2] n, float[2] z, float[2] d) {{
        a = Cast <to = {low.code}> (x)
        y = Cast <to = 1> (a)
        n = Cast <to = 7> (a)
        l = CastLike (x, h)
        z = CastLike (l, x)
        i = Cast <to = {low.code}> (n)
        e = Cast <to = 11> (i)
        k = Cast <to = {low.code}> (e)
        d = Cast <to = 1> (k)
    }}""")
    found = widened(model)
    assert kinds(found) == [
        *("Identity", "Identity", "Cast→int64", "Identity", "Identity"),
        *("Cast→float32", "Cast→float64", "Cast→float32", "Identity"),
    ]
    x = np.float32([0.1, 4097.9])
    y, n, z, d = run(found, {"x": x, "h": x})
    for array in (y, z):
        np.testing.assert_array_equal(array, x)
    np.testing.assert_array_equal(n, x.astype(np.int64))
    np.testing.assert_array_equal(d, np.trunc(x))


# -- edges ---------------------------------------------------------------------------------------------


def test_what_stands_behind_a_kept_output_is_not_rounded() -> None:
    model = parsed("""g (float16[2] x) => (float16[2] y, float[2] z, float16[2] w) <float16[2] w = {15872, 16640}> {
        y = Mul (x, x)
        d = Div (y, x)
        z = Cast <to = 1> (d)
    }""")
    x = np.float16([300, 2])
    with np.errstate(over="ignore"):
        y, z, w = run(widened(model, "numpy"), {"x": x})
    np.testing.assert_array_equal(y, np.float16([np.inf, 4]))
    np.testing.assert_array_equal(z, np.float32([300, 2]))
    np.testing.assert_array_equal(w, np.float16([1.5, 2.5]))
