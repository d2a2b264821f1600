"""BatchNormalization folded into what stands before it, and what is not and why."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import is_stub
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.canonicalize import fuse_operators
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.settings.choices import Target
from support.fuse_models import agree
from support.fusing import kinds, standard


def with_batch_norm(
    op: str, weight: tuple[int, ...], channels: int, shape: tuple[int, ...], **stated: object
) -> ModelProto:
    """A linear op with or without bias, then BatchNormalization, on random weights."""
    rng = np.random.default_rng(3)
    biased = bool(stated.pop("biased", True))
    arrays = {
        "w": rng.standard_normal(weight),
        "b": rng.standard_normal(channels),
        "gamma": rng.standard_normal(channels),
    }
    arrays |= {"beta": rng.standard_normal(channels), "mean": rng.standard_normal(channels)}
    arrays["var"] = rng.uniform(0.1, 2, channels)
    reads = ["x", "w", "b"] if biased else ["x", "w"]
    nodes = [
        helper.make_node(op, reads, ["a"], "linear", **stated),
        helper.make_node("BatchNormalization", ["a", "gamma", "beta", "mean", "var"], ["y"], "norm", epsilon=1e-3),
    ]
    tensors = [
        numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items() if n in reads or n not in "wb"
    ]
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))]
    graph = helper.make_graph(nodes, "g", values, out, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


FORMS = {
    "conv": ("Conv", (6, 4, 3, 3), 6, (2, 4, 5, 5), {"pads": [1, 1, 1, 1]}),
    "no bias": ("Conv", (6, 4, 3, 3), 6, (2, 4, 5, 5), {"biased": False}),
    "grouped": ("Conv", (6, 2, 3), 6, (2, 4, 9), {"group": 2, "dilations": [2]}),
    "transposed": ("ConvTranspose", (4, 6, 2, 2), 6, (2, 4, 5, 5), {"strides": [2, 2]}),
    "gemm": ("Gemm", (4, 6), 6, (2, 4), {"alpha": 0.5}),
    "gemm of rows": ("Gemm", (6, 4), 6, (2, 4), {"transB": 1}),
}


@pytest.mark.parametrize("form", FORMS)
def test_batch_normalization_is_folded_into_what_stands_before_it(form: str) -> None:
    op, weight, channels, shape, stated = FORMS[form]
    model = with_batch_norm(op, weight, channels, shape, **stated)
    made, told = standard(model)
    assert kinds(made) == [op]
    assert [t.name for t in made.graph.initializer] == ["w_folded", "w_folded_bias"]
    assert told == [("fused", "norm", f"batch normalization: one {op} in place of linear, norm")]
    agree(model, made, shape)


def changed(model: ModelProto, name: str, array: object) -> ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(array, np.float32), name))
    return model


def conv(**stated: object) -> ModelProto:
    op, weight, channels, shape, rest = FORMS["conv"]
    return with_batch_norm(op, weight, channels, shape, **{**rest, **stated})


def with_reader(model: ModelProto) -> ModelProto:
    model.graph.node.append(helper.make_node("Relu", ["a"], ["z"], "reader"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None] * 4))
    return model


def with_fed(model: ModelProto, name: str) -> ModelProto:
    kept = [t for t in model.graph.initializer if t.name != name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [6]))
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (with_reader(conv()), "other ops read the result of linear, or it is in another graph"),
        (with_fed(conv(), "mean"), "mean is not a constant"),
        (changed(conv(), "gamma", [9e9] * 6), "its folded weights would reach 1.97e+10, beyond the range of float16"),
        (changed(conv(), "gamma", [1e-9] * 6), "the folded weights of 6 channels would be subnormal in float16"),
        (changed(conv(), "var", [-1] * 6), "its folded weights are not finite"),
        (with_batch_norm("ConvTranspose", (4, 3, 2, 2), 6, (2, 4, 5, 5), group=2), "its ConvTranspose has groups"),
        (with_batch_norm("Gemm", (4, 6), 6, (2, 4), beta=0.5), "its Gemm scales its bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_normalization_that_does_not_fold_says_why(model: ModelProto, why: str) -> None:
    made, told = standard(model)
    found = re.sub(r"reach [\d.e+]+", "reach N", told[0][2])
    wanted = re.sub(r"reach [\d.e+]+", "reach N", why)
    assert (len(told), told[0][:2], found) == (
        1,
        ("not_fused", "batch_normalization"),
        f"1 stays unfused (ends in norm): {wanted}",
    )
    assert kinds(made) == kinds(model)


def test_a_shared_weight_is_folded_for_each_of_its_readers() -> None:
    model = conv(biased=False)
    twin = [onnx.NodeProto(), onnx.NodeProto()]
    for copy, node in zip(twin, model.graph.node, strict=True):
        copy.CopyFrom(node)
    twin[0].output[0], twin[0].name = "a2", "linear2"
    twin[1].input[:] = ["a2", "beta", *twin[1].input[2:]]
    twin[1].output[0], twin[1].name = "y2", "norm2"
    model.graph.node.extend(twin)
    model.graph.output.append(helper.make_tensor_value_info("y2", TensorProto.FLOAT, [None] * 4))
    made, _ = standard(model)
    assert [list(n.input) for n in made.graph.node] == [
        ["x", "w_folded", "w_folded_bias"],
        ["x", "w_folded_2", "w_folded_bias_2"],
    ]
    assert [t.name for t in made.graph.initializer] == [n for node in made.graph.node for n in list(node.input)[1:]]


def test_weights_that_nothing_folds_stay_in_their_file(tmp_path: Path) -> None:
    model = conv()
    large = numpy_helper.from_array(np.zeros((6, 6, 32, 32), np.float32), "large")
    model.graph.initializer.append(large)
    model.graph.node.append(helper.make_node("Conv", ["y", "large"], ["z"], "last", pads=[16, 16, 16, 16]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None] * 4))
    onnx.save(model, tmp_path / "m.onnx")
    view, told = fuse_operators(View.of(Model.load(tmp_path / "m.onnx")), Context(DType.FLOAT16), Target.ORT_CUDA)
    stubs = {t.name: is_stub(t) for t in view.model.proto.graph.initializer}
    assert ([f.kind for f in told], stubs) == (["fused"], {"large": True, "w_folded": False, "w_folded_bias": False})
