"""Nodes of a layer on CUDA after onnxruntime's default optimization; nothing is run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import amp_rewrite
from benchmarks.gpu import gpu_fused

pytestmark = [*(pytest.mark.stub, pytest.mark.torch, pytest.mark.transformers), pytest.mark.filterwarnings("ignore")]
LAYERS = 2
WIDE = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 128}


def bert() -> Any:
    from benchmarks.gpu import gpu_builds

    return gpu_builds.bert(2, 16, **WIDE)


def vit() -> Any:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    from benchmarks.shared.zoo import Built, _Wrapped

    model = ViTForImageClassification(ViTConfig(image_size=32, num_labels=8, **WIDE))
    return Built(_Wrapped.of(model, ("pixel_values",), "logits"), {"pixel_values": torch.randn(2, 3, 32, 32)})


def gpt2() -> Any:
    from benchmarks.gpu import gpu_builds

    return gpu_builds.gpt2(2, 16, n_layer=LAYERS, n_embd=64, n_head=4)


def llama() -> Any:
    from benchmarks.gpu import gpu_builds

    return gpu_builds.llama(2, 16, num_key_value_heads=2, **WIDE)


CLAIMS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "bert": (bert, {"Gemm": 0, "MatMul": 12, "attention": 2, "norm": 5, "GELU, SiLU": 2, "Add of rank 3": 2}),
    "vit": (vit, {"Conv": 0, "attention": 2, "norm": 5, "GELU, SiLU": 2}),
    "gpt2": (gpt2, {"Gemm": 0, "attention": 2, "causal": 2, "norm": 5, "GELU, SiLU": 2}),
    "llama": (llama, {"Gemm": 0, "attention": 2, "causal": 2, "norm": 5, "Expand, Concat": 0}),
}
"""Models and the contents of their layers: in BERT, six products per layer, one of them with a bias; one norm belongs
to no layer."""


def opened(name: str, opset: int, folder: Path) -> dict[str, int]:
    """Return the counts of a float16 conversion, which must also open on the CPU."""
    import torch

    from benchmarks.gpu import gpu_builds

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(gpu_builds.SEED)
    source, low = folder / f"{name}{opset}.onnx", folder / f"{name}{opset}_low.onnx"
    gpu_builds.Module(CLAIMS[name][0]()).write(source, opset)
    amp_rewrite.convert(source).save(low)
    gpu_fused.optimized(low, "CPUExecutionProvider")
    return gpu_fused.under_stub(low)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_layer_becomes_operators_that_are_fast_on_cuda(name: str, tmp_path: Path, cuda_stub: Path) -> None:
    found = opened(name, 18, tmp_path)
    claimed = CLAIMS[name][1]
    assert {key: found[key] for key in claimed} == claimed


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_an_export_at_opset_23_becomes_the_same_operators(name: str, tmp_path: Path, cuda_stub: Path) -> None:
    assert opened(name, 23, tmp_path) == opened(name, 18, tmp_path)
