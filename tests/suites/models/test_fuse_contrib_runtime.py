"""Exported models with operators of onnxruntime: how many, that the runtime opens them, and that they round no worse.

The runtime makes such operators itself when it opens a model, where no Cast stands in the way. A converted model is to
have at least as many of each kind as the runtime makes of the float32 model.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.runtime.runner import CPU, Runner, SessionOptions
from support import stub
from support.paths import TESTS

MODELS = TESTS / "models"
SKIP, RMS = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
MHA = "MultiHeadAttention"
MADE: Mapping[str, tuple[dict[str, int], int, int]] = {
    "bert_dynamo20": ({SKIP: 4, "BiasGelu": 2, MHA: 2}, 2, 2),
    "bert_dynamo23": ({SKIP: 4, "BiasGelu": 2, MHA: 2}, 2, 2),
    "bert_ts13": ({SKIP: 4, "BiasGelu": 2, MHA: 2}, 10, 3),
    "cnn_dynamo18": ({}, 4, 4),
    "gpt2_dynamo18": ({SKIP: 5, "FastGelu": 2, MHA: 2}, 9, 9),
    "gpt2_ts17": ({SKIP: 5, "FastGelu": 2, MHA: 2}, 9, 9),
    "llama_dynamo21": ({"RotaryEmbedding": 4, RMS: 4, "QuickGelu": 2, MHA: 2}, 13, 5),
    "llama_dynamo23": ({RMS: 4, "QuickGelu": 2, MHA: 2}, 9, 9),
    "llama_ts16": ({RMS: 4, "QuickGelu": 2, MHA: 2}, 6, 2),
    "t5_dynamo18": ({RMS: 10, MHA: 6}, 26, 6),
    "t5_ts14": ({RMS: 10, MHA: 6}, 26, 6),
    "unet_dynamo21": ({"QuickGelu": 13}, 3, 3),
    "unet_ts15": ({"QuickGelu": 13}, 4, 4),
    "vit_dynamo22": ({SKIP: 5, "BiasGelu": 2, MHA: 2}, 2, 2),
    "vit_ts17": ({SKIP: 5, "BiasGelu": 2, MHA: 2}, 2, 2),
    "whisper_encoder_dynamo19": ({SKIP: 5, "BiasGelu": 2, "Gelu": 2, MHA: 2}, 2, 2),
    "whisper_encoder_ts17": ({SKIP: 5, "BiasGelu": 2, "Gelu": 2, MHA: 2}, 2, 2),
    "whisper_step_dynamo20": ({SKIP: 7, "BiasGelu": 2, MHA: 4}, 2, 2),
}
"""Operators of onnxruntime, and Casts inserted into the model that is fused the usual way and into this one."""

every_model = pytest.mark.parametrize("name", MADE)


@functools.cache
def converted(name: str, fuse: str) -> amp_rewrite.Converted:
    return amp_rewrite.convert(MODELS / f"{name}.onnx", fuse=fuse)


def inserted(made: amp_rewrite.Converted) -> int:
    return sum(cast.origin == "inserted" for cast in made.report.casts)


@every_model
def test_how_many_of_each_are_made_and_how_many_casts_stay(name: str) -> None:
    made = converted(name, "contrib")
    found = Counter(node.op_type for node in made.result.proto.graph.node if node.domain == "com.microsoft")
    assert (dict(found), inserted(converted(name, "basic")), inserted(made)) == MADE[name]
    rows = [row for row in made.report.rows if row.op.startswith("com.microsoft")]
    assert {row.dtype for row in rows} <= {"float16"}


@every_model
@pytest.mark.parametrize("level", ["BASIC", "ALL"])
def test_the_runtime_opens_it_at_every_level(name: str, level: str) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = 4
    whole = converted(name, "contrib").model
    onnx.checker.check_model(whole, full_check=True)
    session = onnxruntime.InferenceSession(whole.SerializeToString(), options, providers=[CPU])
    assert [v.name for v in session.get_outputs()] == [v.name for v in whole.graph.output]


ROUNDOFF = 2.0**-11  # of float16 (IEEE 754-2019, table 3.5)


@every_model
def test_under_emulation_it_is_off_by_no_more_than_eight_roundings(name: str) -> None:
    """Relative to the largest of an output: each block adds some. The usual way is off by up to five here."""
    with np.load(MODELS / f"{name}.npz") as stored:
        feed = {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}
    reference = Runner.open(amp_rewrite.Model.load(MODELS / f"{name}.onnx"), SessionOptions()).run(feed)
    twin = Runner.open(amp_rewrite.emulate(converted(name, "contrib").result), SessionOptions()).run(feed)
    for output, exact in reference.items():
        if isinstance(exact, np.ndarray) and exact.dtype.kind == "f":
            gap = float(np.abs(np.asarray(twin[output]) - exact).max())
            assert gap <= 8 * ROUNDOFF * float(np.abs(exact).max()), output


@functools.cache
def placements() -> Mapping[str, dict[str, Mapping[str, Any]]]:
    """What the runtime makes of the float32 model and of the converted ones for CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name in MADE:
            paths[name, "float32"] = MODELS / f"{name}.onnx"
            for low in ("float16", "bfloat16"):
                paths[name, low] = Path(folder, f"{name}_{low}.onnx")
                onnx.save(amp_rewrite.convert(paths[name, "float32"], to=low, fuse="contrib").model, paths[name, low])
        rows = stub.placements(list(paths.values()))
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for (name, way), row in zip(paths, rows, strict=True):
        assert "error" not in row, (name, way, row)
        found.setdefault(name, {})[way] = row
    return found


both_types = pytest.mark.parametrize("low", ["float16", "bfloat16"])


@pytest.mark.slow
@pytest.mark.stub
@every_model
@both_types
def test_nothing_leaves_the_gpu_for_it(name: str, low: str, cuda_stub: Path) -> None:
    before, after = placements()[name]["float32"], placements()[name][low]
    assert after["memcpy"] <= before["memcpy"]
    computed = [[op for op in row["cpu_float"] if not op.startswith("Cast ")] for row in (before, after)]
    assert len(computed[1]) <= len(computed[0])
