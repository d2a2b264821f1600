"""Export full-size models with seeded random weights from PyTorch into a cache folder.

    python benchmarks/run.py zoo CACHE [NAME ...]

This needs torch and transformers. It downloads nothing: architectures come from configurations, and weights from a
seed. Each model is `CACHE/NAME.onnx` (with inline weights up to 2 GB, or else external data), with one batch of inputs
in `CACHE/NAME.npz`. Existing models are left alone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7


@dataclass(frozen=True, slots=True)
class Built:
    """A module and its inputs by name."""

    module: Any
    inputs: Mapping[str, Any]


class _Wrapped:
    """A Hugging Face model wrapped as a module with named inputs and a single output tensor."""

    @staticmethod
    def of(model: Any, names: tuple[str, ...], output: str, **fixed: object) -> Any:
        import torch

        class Wrapped(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *values: Any) -> Any:
                return getattr(self.model(**dict(zip(names, values, strict=True)), **fixed), output)

        return Wrapped().eval()


def bert(rows: int = 2, tokens: int = 128) -> Built:
    """Build BERT-base with 110 M parameters for rows × tokens; the last half of the rows are shorter."""
    import torch
    from transformers import BertConfig, BertModel

    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[rows // 2 :, tokens * 3 // 4 :] = 0
    inputs = {"input_ids": torch.randint(0, 30522, (rows, tokens)), "attention_mask": mask}
    model = BertModel(BertConfig(), add_pooling_layer=False)
    return Built(_Wrapped.of(model, tuple(inputs), "last_hidden_state"), inputs)


def bert_masked() -> Built:
    """Build BERT-base with attention logits of up to 30, as in trained models, and a fully masked row."""
    built = bert()
    for layer in built.module.model.encoder.layer:
        _sharpen(built, layer.attention.self, 30.0)
    built.inputs["attention_mask"][1] = 0
    return built


def _sharpen(built: Built, attention: Any, largest: float) -> None:
    """Scale an attention's queries so that its largest logit on the inputs equals `largest`."""
    import torch

    seen: dict[str, Any] = {}
    hooks = [
        getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
        for name in ("query", "key")
    ]
    with torch.no_grad():
        built.module(*built.inputs.values())
        heads = attention.num_attention_heads
        query, key = (seen[name].unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("query", "key"))
        logits = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        for parameter in attention.query.parameters():
            parameter *= largest / logits.abs().max()
    for hook in hooks:
        hook.remove()


def vit(pixels: int = 224) -> Built:
    """Build ViT-base/16 with 86 M parameters for one square image."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    inputs = {"pixel_values": torch.randn(1, 3, pixels, pixels)}
    model = ViTForImageClassification(ViTConfig(num_labels=1000, image_size=pixels))
    return Built(_Wrapped.of(model, tuple(inputs), "logits"), inputs)


def resnet(pixels: int = 224) -> Built:
    """Build ResNet-50 with 26 M parameters for one square image, with statistics like a trained network's."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        torch.nn.init.normal_(norm.running_mean, 0, 0.2)
        torch.nn.init.uniform_(norm.running_var, 0.5, 1.5)
    inputs = {"pixel_values": torch.randn(1, 3, pixels, pixels)}
    return Built(_Wrapped.of(model, tuple(inputs), "logits"), inputs)


def gpt2(tokens: int = 64) -> Built:
    """Build GPT-2 with 124 M parameters, without a cache."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    inputs = {"input_ids": torch.randint(0, 50257, (1, tokens))}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager"))
    return Built(_Wrapped.of(model, tuple(inputs), "logits", use_cache=False), inputs)


def llama(tokens: int = 32) -> Built:
    """Build a Llama of TinyLlama's width with 12 layers and 660 M parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    inputs = {"input_ids": torch.randint(0, 32000, (1, tokens))}
    return Built(_Wrapped.of(LlamaForCausalLM(config), tuple(inputs), "logits", use_cache=False), inputs)


def whisper() -> Built:
    """Build the encoder of Whisper small with 88 M parameters for 30 seconds of features."""
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072)
    inputs = {"input_features": torch.randn(1, 80, 3000)}
    return Built(_Wrapped.of(WhisperEncoder(config), tuple(inputs), "last_hidden_state"), inputs)


def unet(pixels: int = 32, tokens: int = 77) -> Built:
    """Build a UNet like Stable Diffusion's, with residual blocks, self- and cross-attention at three widths."""
    import torch

    from benchmarks.shared.unet import UNet

    inputs = {
        "sample": torch.randn(1, 4, pixels, pixels),
        "timestep": torch.tensor([500.0]),
        "text": torch.randn(1, tokens, 768),
    }
    return Built(UNet().eval(), inputs)


ZOO: dict[str, Callable[[], Built]] = {
    "bert_base": bert,
    "bert_base_masked": bert_masked,
    "vit_base": vit,
    "resnet50": resnet,
    "gpt2": gpt2,
    "whisper_small_encoder": whisper,
    "llama": llama,
    "unet": unet,
}


def export(name: str, cache: Path, build: Callable[[], Built] | None = None) -> Path:
    """Return the path of a model of the zoo, or of the result of `build`, after exporting it if missing."""
    path = cache / f"{name}.onnx"
    if path.exists() and path.with_suffix(".npz").exists():
        return path
    import torch

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(SEED)
    built = (build or ZOO[name])()
    with torch.no_grad():
        program = torch.onnx.export(
            built.module,
            tuple(built.inputs.values()),
            input_names=list(built.inputs),
            opset_version=18,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    weights = sum(parameter.numel() * 4 for parameter in built.module.parameters())
    program.save(str(path), external_data=weights > 1_900_000_000)
    np.savez(path.with_suffix(".npz"), **{key: value.numpy() for key, value in built.inputs.items()})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("names", nargs="*", default=list(ZOO))
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    for name in args.names or list(ZOO):
        if name not in ZOO:
            sys.exit(f"there is no model {name!r}; choose from {', '.join(ZOO)}")
        path = export(name, args.cache)
        data = path.with_name(path.name + ".data")
        size = path.stat().st_size + (data.stat().st_size if data.exists() else 0)
        print(f"{path}  {size / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
