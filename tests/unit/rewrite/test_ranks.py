"""Fusions of values with many axes: the arrays of a trial do not grow with the rank."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite import convert
from support.fuse_models import ERF, model_of
from support.fusing import kinds, standard


@pytest.mark.parametrize(("rank", "fused"), [(24, True), (64, False)])
def test_a_softmax_is_fused_where_numpy_can_try_it(rank: int, fused: bool) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        m (float[{",".join(["1"] * (rank - 1))},8] x) => (float[{",".join(["1"] * (rank - 1))},8] y)
        <int64[1] last = {{-1}}> {{
          top = ReduceMax (x, last)
          low = Sub (x, top)
          e = Exp (low)
          sum = ReduceSum (e, last)
          y = Div (e, sum)
        }}
    """)
    assert ([row.op for row in convert(model).report.rows] == ["Softmax"]) == fused


@pytest.mark.parametrize("rank", [4, 30])
def test_a_group_norm_of_any_rank_is_written_out(rank: int) -> None:
    dims = ",".join(["2"] * 2 + ["1"] * (rank - 2))
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        m (float[{dims}] x) => (float[{dims}] y) <float[2] s = {{1, 2}}, float[2] b = {{3, 4}}> {{
          y = GroupNormalization <num_groups = 2> (x, s, b)
        }}
    """)
    assert "InstanceNormalization" in [row.op for row in convert(model, to="float16").report.rows]


def test_an_activation_of_unknown_rank_is_one_operator_if_its_constants_have_no_axes() -> None:
    made, _ = standard(model_of("x = Reshape (r, s)  " + ERF, 20, inputs="float[N] r, int64[K] s"))
    assert kinds(made) == ["Reshape", "Gelu"]
