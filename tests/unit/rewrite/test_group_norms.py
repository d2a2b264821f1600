"""GroupNormalization spelled with InstanceNormalization: the same numbers, any rank and length, and what stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.settings.choices import Target
from support.fusing import kinds, outputs_of, standard

SPELLED = ["Reshape", "InstanceNormalization", "Reshape", "Mul", "Add"]


def model(dims: str, *, opset: int = 21, groups: int = 2, scale: str = "1, 2, 3, 4") -> ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}]>
        g (float[{dims}] x) => (float[{dims}] y) <float[4] s = {{{scale}}}, float[4] b = {{0, 1, 0, -1}}>
        {{ y = GroupNormalization <num_groups = {groups}, epsilon = 0.01> (x, s, b) }}""")


@pytest.mark.parametrize(
    ("dims", "shape", "before"),
    [
        ("2,4,6,5", (2, 4, 6, 5), []),
        ("N,4,6,L", (3, 4, 6, 7), []),
        ("N,4,H,W", (1, 4, 3, 2), ["Shape"]),
        ("2,4,L", (2, 4, 9), []),
        ("N,C,4,4,4", (2, 4, 4, 4, 4), []),
        ("2,4" + ",1" * 6, (2, 4, *[1] * 6), []),
    ],
)
def test_the_standard_form_computes_the_same_numbers(dims: str, shape: tuple[int, ...], before: list[str]) -> None:
    proto = model(dims)
    after, _ = standard(proto)
    assert kinds(after) == SPELLED[:1] + before + SPELLED[1:]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 3 + 2
    (exact,), (found,) = outputs_of(proto, {"x": x}), outputs_of(after, {"x": x})
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"to": DType.BFLOAT16}, "no cuda kernel for InstanceNormalization"),
        ({"target": Target.ONNX}, "the target may have a kernel for it"),
    ],
)
def test_without_a_kernel_it_stays_and_says_so(options: dict[str, Any], why: str) -> None:
    after, told = standard(model("2,4,6,5"), **options)
    assert kinds(after) == ["GroupNormalization"]
    assert [(kind, why in message) for kind, _, message in told] == [("not_fused", True)]


def test_at_opset_22_there_is_no_kernel_for_the_spelling() -> None:
    after, _ = standard(model("2,4,6,5", opset=22))
    assert kinds(after) == ["GroupNormalization"]


def test_no_weight_has_the_name_that_a_quantizer_gives_the_scale_of_a_value() -> None:
    after, _ = standard(model("2,4,6,5"))
    values = {name for node in after.graph.node for name in (*node.input, *node.output)}
    weights = {tensor.name for tensor in after.graph.initializer}
    assert len(weights) == 6
    assert not weights & {f"{value}_{part}" for value in values for part in ("scale", "zero_point", "quantized")}
