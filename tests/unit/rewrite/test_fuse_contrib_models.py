"""Whole conversions with operators of onnxruntime: reports, data, emulation, and what they cost."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper, numpy_helper

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.canonicalize import fuse_operators
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.settings.choices import Fuse, Target
from support.contrib_models import (
    LAYER_NORM,
    NORM,
    SUM,
    model_of,
)
from support.fusing import kinds
from support.paths import TESTS

MODELS = TESTS / "models"


# -- whole conversions --------------------------------------------------------------------------------


def between_products(body: str) -> ModelProto:
    body = "x0 = MatMul (x, v0)  " + body.replace("Add (x,", "Add (x0,") + "  y1 = MatMul (y, w)"
    return model_of(body, "float[2,3,8] x, float[8,4] v0, float[2,3,4] z", OUT1)


OUT1 = "float[2,3,4] y1"


def test_no_cast_parts_a_sum_from_its_norm() -> None:
    made = amp_rewrite.convert(between_products(SUM + LAYER_NORM), fuse="contrib")
    assert kinds(made.model)[-4:] == ["MatMul", "SkipLayerNormalization", "MatMul", "Cast"]
    assert {row.op: row.dtype for row in made.report.rows} == {
        "MatMul": "float16",
        "com.microsoft::SkipLayerNormalization": "float16",
    }


def test_converting_twice_changes_nothing() -> None:
    once = amp_rewrite.convert(between_products(SUM + LAYER_NORM), fuse="contrib").model
    twice = amp_rewrite.convert(once, fuse="contrib")
    assert twice.plan.empty
    assert twice.model.SerializeToString() == once.SerializeToString()


@pytest.mark.parametrize("target", ["onnx", "tensorrt"])
def test_another_target_refuses_operators_of_onnxruntime(target: str) -> None:
    said = (
        f"fuse 'contrib' makes operators that only onnxruntime has, and the target is '{target}'; use target"
        " 'ort-cuda', or fuse 'basic'"
    )
    with pytest.raises(PolicyError, match=f"^{re.escape(said)}$"):
        amp_rewrite.convert(model_of(SUM + NORM), fuse="contrib", target=target)


def test_what_else_a_model_carries_stays() -> None:
    """Metadata, docs, sparse weights, value_info."""
    model = between_products(SUM + LAYER_NORM)
    model.metadata_props.add(key="made by", value="hand")
    model.doc_string = "words"
    model.graph.node[1].metadata_props.add(key="scope", value="block")
    model.graph.node[-2].metadata_props.add(key="scope", value="block/norm")
    sparse = model.graph.sparse_initializer.add(dims=[8])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "few"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([2]), "few_at"))
    model.graph.node.append(helper.make_node("Add", ["x", "few"], ["f"], "the_f"))
    model.graph.output.append(helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, [2, 3, 8]))
    made = amp_rewrite.convert(model, fuse="contrib").model
    assert "SkipLayerNormalization" in kinds(made)
    assert [s.values.name for s in made.graph.sparse_initializer] == ["few"]
    assert made.metadata_props[0].value == "hand"
    assert made.doc_string == "words"
    (norm,) = (n for n in made.graph.node if n.op_type == "SkipLayerNormalization")
    assert [p.value for p in norm.metadata_props] == ["block/norm"]


# -- costs --------------------------------------------------------------------------------------------


def test_onnxruntime_is_not_imported() -> None:
    code = f"""import sys, amp_rewrite
made = amp_rewrite.convert({str(MODELS / "vit_ts17.onnx")!r}, opset=23)
assert any(n.domain == "com.microsoft" for n in made.model.graph.node)
print("onnxruntime" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_of_matrices_only_the_projections_of_attentions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved with a norm, an activation or a scale are vectors and numbers; other matrices stay."""
    read: Counter[int] = Counter()
    array = Model.array

    def counted(self: Model, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        read[len([d for d in tensor.dims if d > 1])] += 1
        return array(self, tensor)

    monkeypatch.setattr(Model, "array", counted)
    view = View.of(Model.load(MODELS / "bert_dynamo20.onnx"))
    for fuse in ("basic", "contrib"):
        found = canonical_reads(read, view, fuse)  # type: ignore[arg-type]
        assert found.total() > 9
        assert {rank: count for rank, count in found.items() if rank > 1} == {2: 2}


def canonical_reads(read: Counter[int], view: View, fuse: Fuse) -> Counter[int]:
    """How many tensors of how many axes fusing reads."""
    read.clear()
    fuse_operators(view, Context(DType.FLOAT16), Target.ORT_CUDA, fuse=fuse)
    return Counter(read)
