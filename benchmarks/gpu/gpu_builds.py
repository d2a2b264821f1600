"""PyTorch modules of the GPU measurement, with large batches and weights drawn by name.

This needs torch, transformers and onnxscript.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.gpu import skeleton
from benchmarks.gpu.gpu_models import Sources
from benchmarks.gpu.skeleton_files import BESIDE
from benchmarks.shared import zoo
from benchmarks.shared.unet import UNet
from benchmarks.shared.zoo import Built

SEED = 7
OPSET = 18
BIASES = 0.02
"""Standard deviation for parameters initialized to zero."""
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}


class _Step(nn.Module):
    """One decoding step, from one token per row and the cache to logits and the longer cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = transformers.DynamicCache(tuple(zip(past[::2], past[1::2], strict=True)))
        out = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values))


def bert(rows: int, tokens: int, **settings: Any) -> Built:
    """Build a BERT; the second half of the rows is shorter by a quarter."""
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[rows // 2 :, tokens * 3 // 4 :] = 0
    inputs = {"input_ids": torch.randint(0, 30522, (rows, tokens)), "attention_mask": mask}
    model = transformers.BertModel(transformers.BertConfig(**settings), add_pooling_layer=False)
    return Built(zoo._Wrapped.of(model, tuple(inputs), "last_hidden_state"), inputs)


def gpt2(rows: int, tokens: int, **settings: Any) -> Built:
    """Build GPT-2 for a whole text, without a cache."""
    inputs = {"input_ids": torch.randint(0, 50257, (rows, tokens))}
    config = transformers.GPT2Config(use_cache=False, attn_implementation="eager", **settings)
    model = transformers.GPT2LMHeadModel(config)
    return Built(zoo._Wrapped.of(model, tuple(inputs), "logits", use_cache=False), inputs)


def gpt2_step(rows: int, seen: int, **settings: Any) -> Built:
    """Build GPT-2 for one more token after a cache of `seen` tokens."""
    config = transformers.GPT2Config(attn_implementation="eager", **settings)
    inputs = {"input_ids": torch.randint(0, 50257, (rows, 1))}
    head = (rows, config.n_head, seen, config.n_embd // config.n_head)
    inputs |= {f"past_{i}_{kind}": torch.randn(head) for i in range(config.n_layer) for kind in ("key", "value")}
    return Built(_Step(transformers.GPT2LMHeadModel(config)).eval(), inputs)


def llama(rows: int, tokens: int, **settings: Any) -> Built:
    """Build a Llama of TinyLlama's width with 12 layers and 660 M parameters."""
    config = transformers.LlamaConfig(**{**LLAMA, "use_cache": False, **settings})
    inputs = {"input_ids": torch.randint(0, config.vocab_size, (rows, tokens))}
    model = transformers.LlamaForCausalLM(config)
    return Built(zoo._Wrapped.of(model, tuple(inputs), "logits", use_cache=False), inputs)


def images(built: Built, rows: int) -> Built:
    """Return an image model with a batch of `rows` images."""
    return Built(built.module, {"pixel_values": torch.randn(rows, 3, 224, 224)})


def sounds(rows: int) -> Built:
    """Build Whisper's encoder for half a minute per row."""
    return Built(zoo.whisper().module, {"input_features": torch.randn(rows, 80, 3000)})


def unet(rows: int, side: int) -> Built:
    """Build the UNet of a latent diffusion model."""
    inputs = {
        "sample": torch.randn(rows, 4, side, side),
        "timestep": torch.full((rows,), 500.0),
        "text": torch.randn(rows, 77, 768),
    }
    return Built(UNet().eval(), inputs)


def mlp(rows: int, width: int) -> Built:
    """Build two products with a GELU and a norm between, as the smallest model for tests of the steps."""
    layers = (nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, width))
    return Built(nn.Sequential(*layers).eval(), {"x": torch.randn(rows, width)})


BUILDS: Mapping[str, Callable[[], Built]] = {
    "bert_base": lambda: bert(32, 128),
    "resnet50": lambda: images(zoo.resnet(), 128),
    "llama": lambda: llama(2, 1024),
    "unet": lambda: unet(4, 64),
    "bert_large": lambda: bert(16, 384, **LARGE),
    "vit_base": lambda: images(zoo.vit(), 64),
    "gpt2": lambda: gpt2(8, 256),
    "gpt2_step": lambda: gpt2_step(8, 511),
    "whisper": lambda: sounds(8),
    "bert_base_one": lambda: bert(1, 128),
    "resnet50_one": lambda: images(zoo.resnet(), 1),
    "llama_one": lambda: llama(1, 1024),
    "vit_base_one": lambda: images(zoo.vit(), 1),
    "gpt2_one": lambda: gpt2(1, 128),
    "mlp_tiny": lambda: mlp(4, 64),
    "bert_tiny": lambda: bert(2, 16, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128),
    "gpt2_step_tiny": lambda: gpt2_step(2, 7, n_layer=1, n_embd=64, n_head=4),
}


class Module:
    """A PyTorch module as a source of ONNX files."""

    def __init__(self, built: Built, sources: Sources | None = None) -> None:
        self.module, self.tensors = built.module, built.inputs
        self.drawn = redraw(built.module, sources)
        self.inputs = {key: tensor.numpy() for key, tensor in built.inputs.items()}

    @classmethod
    def of(cls, name: str, sources: Sources | None = None, *, exported: bool = True) -> Module:
        """Return a model with the same weights and inputs each time; with PyTorch's fused attention if not exported.

        `sources`: the distributions of its skeleton's weights, if there is a skeleton.
        """
        torch.manual_seed(SEED)
        built = BUILDS[name]()
        if not exported:
            _fuse_attention(built)
        return cls(built, sources)

    def write(self, path: Path, opset: int = OPSET) -> None:
        """Export the module in float32."""
        self._export(path, self.tensors, opset)

    def write_half(self, path: Path) -> None:
        """Export `module.half()`. The module stays in half precision, so this must be the last export."""
        self.module.half()
        self._export(path, {k: t.half() if t.is_floating_point() else t for k, t in self.tensors.items()})

    def _export(self, path: Path, inputs: Mapping[str, Tensor], opset: int = OPSET) -> None:
        with torch.no_grad():
            program = torch.onnx.export(
                self.module,
                tuple(inputs.values()),
                input_names=list(inputs),
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        weights = sum(p.numel() * p.element_size() for p in self.module.parameters())
        program.save(str(path), external_data=weights > BESIDE)


def _fuse_attention(built: Built) -> None:
    """Make a model use `scaled_dot_product_attention`, without a mask if its inputs have none.

    A compiled model would create a mask of ones, which no fused kernel accepts at odd lengths.
    """
    for module in built.module.modules():
        if isinstance(module, transformers.PreTrainedModel) and hasattr(module.config, "num_attention_heads"):
            module.set_attn_implementation("sdpa")
        home = sys.modules[type(module).__module__]
        if "attention_mask" not in built.inputs and hasattr(home, "create_bidirectional_mask"):
            home.create_bidirectional_mask = lambda *_, **__: None


class InHalf(nn.Module):
    """A model in half precision with float32 inputs and outputs, like a converted file."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        """Return the model's outputs in float32."""
        found = self.model(*(x.half() if x.is_floating_point() else x for x in inputs))
        return tuple(x.float() for x in found) if isinstance(found, tuple) else found.float()


def redraw(module: nn.Module, sources: Sources | None = None) -> Sources:
    """Draw the parameters from the distributions in `sources`, or else of `spreads`; return the distributions."""
    sources = spreads(module) if sources is None else sources
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for key, how in sources.items():
            parameters[key].copy_(torch.from_numpy(skeleton.drawn(key, **how)))
    return sources


def spreads(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the distributions of large parameters by name: the mean and deviation of their initialization.

    This includes parameters initialized to zero: trained ones have values, and exporters omit a bias of zeros.
    """
    sources: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for key, parameter in module.named_parameters():
        zero = not parameter.detach().any()
        std = BIASES if zero else float(parameter.detach().std()) if parameter.numel() > 1 else 0.0
        if (parameter.numel() < skeleton.LEAST and not zero) or parameter.data_ptr() in seen or std == 0:
            continue
        mean = float(parameter.detach().mean())
        mean = mean if abs(mean) > 0.1 * std else 0.0
        sources[key] = {"shape": list(parameter.shape), "mean": mean, "std": std}
        seen.add(parameter.data_ptr())
    return sources
