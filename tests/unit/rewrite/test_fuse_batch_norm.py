"""BatchNormalization folded into what stands before it, and what is not and why."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import is_stub
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.canonicalize import fuse_operators
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.settings.choices import Target
from support import cases
from support.fuse_models import agree
from support.fusing import kinds, standard

IMAGE = (2, 4, 5, 5)
NORM = ";y=BatchNormalization[epsilon=0.001](a,gamma,beta,mean,var)"
CONV = "a=Conv[pads=1 1 1 1](x,w,b)" + NORM
FORMS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "conv": (CONV, (6, 4, 3, 3), IMAGE),
    "no bias": ("a=Conv(x,w)" + NORM, (6, 4, 3, 3), IMAGE),
    "grouped": ("a=Conv[group=2,dilations=2](x,w,b)" + NORM, (6, 2, 3), (2, 4, 9)),
    "transposed": ("a=ConvTranspose[strides=2 2](x,w,b)" + NORM, (4, 6, 2, 2), IMAGE),
    "gemm": ("a=Gemm[alpha=0.5](x,w,b)" + NORM, (4, 6), (2, 4)),
    "gemm of rows": ("a=Gemm[transB=1](x,w,b)" + NORM, (6, 4), (2, 4)),
}


def model(
    text: str = CONV,
    weight: tuple[int, ...] = (6, 4, 3, 3),
    shape: tuple[int, ...] = IMAGE,
    outputs: str = "y",
    **more: Any,
) -> ModelProto:
    """A linear op of six channels, then BatchNormalization, on random weights; None: fed."""
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {"w": rng.standard_normal(weight)}
    arrays |= {name: rng.standard_normal(6) for name in ("b", "gamma", "beta", "mean")}
    arrays |= {"var": rng.uniform(0.1, 2, 6), **more}
    read = {name: array for name, array in arrays.items() if re.search(rf"\b{name}\b", text) and array is not None}
    shapes = {"x": shape, "mean": (6,)}
    return cases.build(text, outputs.split(), shapes=shapes, constants=read, opset=13)


@pytest.mark.parametrize("form", FORMS)
def test_batch_normalization_is_folded_into_what_stands_before_it(form: str) -> None:
    proto = model(*FORMS[form])
    made, told = standard(proto)
    op = proto.graph.node[0].op_type
    assert kinds(made) == [op]
    assert [t.name for t in made.graph.initializer] == ["w_folded", "w_folded_bias"]
    assert told == [("fused", "y", f"batch normalization: one {op} in place of a, y")]
    agree(proto, made, FORMS[form][2])


@pytest.mark.parametrize(
    ("proto", "why"),
    [
        (model(CONV + ";z=Relu(a)", outputs="y z"), "other ops read the result of a, or it is in another graph"),
        (model(mean=None), "mean is not a constant"),
        (model(gamma=np.full(6, 9e9)), "its folded weights would reach N, beyond the range of float16"),
        (model(gamma=np.full(6, 1e-9)), "the folded weights of 6 channels would be subnormal in float16"),
        (model(var=np.full(6, -1.0)), "its folded weights are not finite"),
        (
            model("a=ConvTranspose[group=2](x,w,b)" + NORM, (4, 3, 2, 2)),
            "its ConvTranspose has groups",
        ),
        (model("a=Gemm[beta=0.5](x,w,b)" + NORM, (4, 6), (2, 4)), "its Gemm scales its bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_normalization_that_does_not_fold_says_why(proto: ModelProto, why: str) -> None:
    made, ((kind, subject, message),) = standard(proto)
    assert (kind, subject) == ("not_fused", "batch_normalization")
    assert re.sub(r"reach [\d.e+]+", "reach N", message) == f"1 stays unfused (ends in y): {why}"
    assert kinds(made) == kinds(proto)


def test_a_shared_weight_is_folded_for_each_of_its_readers() -> None:
    text = "a=Conv(x,w)" + NORM + ";a2=Conv(x,w);y2=BatchNormalization[epsilon=0.001](a2,beta,beta,mean,var)"
    made, _ = standard(model(text, outputs="y y2"))
    assert [list(n.input) for n in made.graph.node] == [
        ["x", "w_folded", "w_folded_bias"],
        ["x", "w_folded_2", "w_folded_bias_2"],
    ]
    assert [t.name for t in made.graph.initializer] == [n for node in made.graph.node for n in list(node.input)[1:]]


def test_weights_that_nothing_folds_stay_in_their_file(tmp_path: Path) -> None:
    text = CONV + ";z=Conv[pads=16 16 16 16](y,large)"
    onnx.save(model(text, outputs="z", large=np.zeros((6, 6, 32, 32))), tmp_path / "m.onnx")
    view, told = fuse_operators(View.of(Model.load(tmp_path / "m.onnx")), Context(DType.FLOAT16), Target.ORT_CUDA)
    stubs = {t.name: is_stub(t) for t in view.model.proto.graph.initializer}
    assert ([f.kind for f in told], stubs) == (["fused"], {"large": True, "w_folded": False, "w_folded_bias": False})
