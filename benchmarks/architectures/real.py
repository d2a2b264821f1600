"""Architectures at real widths and lengths, with two layers each and weights with the spread of trained models.

The widths are those of common models: 768 to 4096 channels, vocabularies of 30,000 and more, 512 to 2048 tokens, images
of 224 to 640 pixels. Two layers keep a model within memory; a problem in one layer occurs in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.architecture import Architecture, Built, Named, seed_of
from benchmarks.architectures.long_nets import (
    Embeddings,
    Forecast,
    LinearAttention,
    Rays,
    Retention,
    Sound,
    Tagger,
)
from benchmarks.architectures.nets import Decoder, DiffusionTransformer, Graph, Recommender, StyleGenerator, livened
from benchmarks.architectures.speech import Step
from benchmarks.architectures.text import AXES, made
from benchmarks.architectures.vision import _STAGES, Recipe, captioned, image

OUTLIERS, GAIN = 1 / 256, 8.0
"""The share of outlier channels in a norm, as in large models, and their gain relative to the others."""
LLAMA: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
BERT: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 2050,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Mapping[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8}
EXPERTS: Mapping[str, Any] = {
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "intermediate_size": 512,
}


def spread(module: nn.Module) -> nn.Module:
    """Give weights the spread of trained ones: rows of different magnitude, norms with a few large gains."""
    with torch.no_grad():
        for part in module.modules():
            if type(part).__name__ == "T5Attention":  # T5 does not scale scores; trained queries are small
                part.q.weight.mul_(part.key_value_proj_dim**-0.5)
            weight = getattr(part, "weight", None)
            if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
                continue
            if "Norm" in type(part).__name__ and weight.ndim == 1:
                weight.mul_(torch.exp(0.3 * torch.randn_like(weight)))
                chosen = torch.randperm(len(weight))[: math.ceil(len(weight) * OUTLIERS)]
                weight[chosen] *= GAIN
            elif isinstance(part, nn.Linear):
                weight.mul_(torch.exp(0.2 * torch.randn(len(weight), 1)))
    return module


def tokens(length: int, vocabulary: int) -> dict[str, Tensor]:
    """Return one row of ids, with its last eighth as padding."""
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[0, length - length // 8 :] = 0
    return {"input_ids": torch.randint(3, vocabulary, (1, length)), "attention_mask": mask}


def text(name: str, model: str, length: int, *, mask: bool = True, answer: int = 0, **config: Any) -> Architecture:
    """Return a model that reads ids, a padding mask and the beginning of an answer, with dynamic lengths."""

    def build() -> Built:
        module = spread(made(name, model, config, use_cache=False))
        inputs = tokens(length, config["vocab_size"])
        if not mask:
            del inputs["attention_mask"]
        if answer:
            inputs["decoder_input_ids"] = torch.randint(3, config["vocab_size"], (1, answer))
        return Named(module, tuple(inputs), **({"use_cache": False} if answer else {"return_dict": True})), inputs

    axes = {"input_ids": AXES, "attention_mask": AXES, "decoder_input_ids": {0: "batch", 1: "answer"}}
    return Architecture(name, build, {k: v for k, v in axes.items() if (k != "attention_mask" or mask)})


def called(
    name: str, model: str, inputs: Callable[[], dict[str, Tensor]], outputs: tuple[str, ...] = (), **config: Any
) -> Architecture:
    """Return a model with the given inputs in fixed shapes."""

    def build() -> Built:
        fixed = config.get("fixed", {})
        module = spread(made(name, model, {k: v for k, v in config.items() if k != "fixed"}))
        drawn = inputs()
        return Named(module, tuple(drawn), outputs, **fixed), drawn

    return Architecture(name, build)


def step(name: str, model: str, heads: int, width: int, seen: int, **config: Any) -> Architecture:
    """Return a two-layer decoder with a cache of many tokens and one more token."""

    def build() -> Built:
        module = spread(made(name, model, config))
        mask = torch.ones(1, seen + 1, dtype=torch.int64)
        mask[0, : seen // 8] = 0
        inputs = {"input_ids": torch.randint(3, config["vocab_size"], (1, 1)), "attention_mask": mask}
        inputs |= {f"past_{i}_{kind}": torch.randn(1, heads, seen, width) for i in (0, 1) for kind in "kv"}
        return Step(module).eval(), inputs

    return Architecture(name, build)


def net(name: str, make: Callable[[], nn.Module], inputs: Callable[[], dict[str, Tensor]]) -> Architecture:
    """Return a network of `nets` at a different width."""

    def build() -> Built:
        torch.manual_seed(seed_of(name))
        return spread(livened(make())), inputs()

    return Architecture(name, build)


def recipe(name: str, base: Recipe) -> Architecture:
    """Return a vision or image-text model."""

    def build() -> Built:
        module, inputs = base.build(name)
        return spread(module), inputs

    return Architecture(name, build)


def series(past: int, future: int, features: int = 4) -> Callable[[], dict[str, Tensor]]:
    """Return past hourly values with a level far from 0, and past and future time features."""
    return lambda: {
        "past_values": torch.randn(2, past) * 50 + 4000,
        "past_time_features": torch.rand(2, past, features) - 0.5,
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, future) * 50 + 4000,
        "future_time_features": torch.rand(2, future, features) - 0.5,
    }


SERIES: Mapping[str, Any] = {
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
    "prediction_length": 96,
    "context_length": 336,
    "lags_sequence": [1, 2, 3, 24, 168],
    "num_time_features": 4,
    "scaling": "mean",
}
PATCHES: Mapping[str, Any] = {
    "num_input_channels": 7,
    "context_length": 512,
    "patch_length": 16,
    "patch_stride": 8,
    "stride": 8,
    "d_model": 128,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 16,
    "ffn_dim": 512,
    "prediction_length": 96,
}


def _diffused() -> dict[str, Tensor]:
    return {"latent": torch.randn(1, 4, 32, 32), "timestep": torch.tensor([981]), "label": torch.tensor([3])}


def _clicked() -> dict[str, Tensor]:
    """Return ids, and counts as in web logs: mostly small, a few in the hundred thousands."""
    counts = torch.floor(torch.exp(torch.randn(256, 13) * 3 + 2)).clamp(max=5e5)
    return {"counts": counts, "ids": torch.randint(0, 20000, (256, 26)), "history": torch.randint(0, 20000, (256, 50))}


def _edges() -> dict[str, Tensor]:
    return {"features": torch.randn(2000, 256), "edges": torch.randint(0, 2000, (2, 16000))}


def _padded(rows: int, length: int, width: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length)
    mask[-1, length // 2 :] = 0
    return {"x": torch.randn(rows, length, width), "mask": mask}


def _rays() -> dict[str, Tensor]:
    depth = (torch.arange(64) * 0.05 + torch.rand(256, 64) * 0.04) + 2
    return {"start": torch.randn(256, 3), "direction": torch.randn(256, 3) / 2, "depth": depth}


LONG: tuple[Architecture, ...] = (
    net("retention_1024", lambda: Retention(512, 8, 1024), lambda: {"x": torch.randn(1, 1024, 512)}),
    net("linear_attention_4096", lambda: LinearAttention(512, 8), lambda: _padded(2, 4096, 512)),
    net("forecast_720", lambda: Forecast(720, 96, 512), lambda: {"series": torch.randn(8, 720) * 50 + 48000}),
    net("tagger_200", lambda: Tagger(256, 20), lambda: {"x": torch.randn(2, 200, 256)}),
    net("sound_5s", Sound, lambda: {"wave": torch.randn(1, 80000) * torch.logspace(-4, -0.5, 80000)}),
    net("rays_64", Rays, _rays),
    net("embeddings_4096", lambda: Embeddings(384), lambda: _padded(4, 4096, 384)),
)

_BOTTLENECK = {
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [1, 1, 1, 1],
    "layer_type": "bottleneck",
}
_DETR = (
    {"d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 100, "num_labels": 91}
    | {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
    | {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
)
_RTDETR = (
    {"d_model": 256, "encoder_hidden_dim": 256, "encoder_in_channels": [512, 1024, 2048], "encoder_ffn_dim": 1024}
    | {"decoder_in_channels": [256, 256, 256], "decoder_layers": 2, "decoder_ffn_dim": 1024, "num_queries": 300}
    | {"num_labels": 80, "anchor_image_size": None, "num_feature_levels": 3}
    | {"use_pretrained_backbone": False, "freeze_backbone_batch_norms": True}
)
_VIT = {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072}
_EYES = {**_VIT, "image_size": 224, "patch_size": 16}
_BOXES = ("logits", "pred_boxes")
_LATER = {"out_features": ["stage2", "stage3", "stage4"]}

VISION: Mapping[str, Recipe] = {
    "rt_detr_640": Recipe(
        *("RTDetrForObjectDetection", "RTDetrConfig", _RTDETR, image(640), _BOXES),
        parts={"backbone_config": ("RTDetrResNetConfig", {**_BOTTLENECK, **_LATER})},
    ),
    "deformable_detr_512": Recipe(
        *("DeformableDetrForObjectDetection", "DeformableDetrConfig"),
        *({**_DETR, "with_box_refine": True, "two_stage": True, "two_stage_num_proposals": 100}, image(512), _BOXES),
        parts={"backbone_config": ("ResNetConfig", {**_BOTTLENECK, **_LATER})},
    ),
    "detr_512": Recipe(
        *("DetrForObjectDetection", "DetrConfig", _DETR, image(512), _BOXES),
        parts={"backbone_config": ("ResNetConfig", {**_BOTTLENECK, "out_features": ["stage4"]})},
    ),
    "swin_224": Recipe(
        *("SwinForImageClassification", "SwinConfig"),
        {"image_size": 224, "embed_dim": 96, "depths": [2, 2, 2, 2], "num_heads": [3, 6, 12, 24], "window_size": 7},
        *(image(224), ("logits",)),
    ),
    "dinov3_224": Recipe(
        "DINOv3ViTModel", "DINOv3ViTConfig", {**_EYES, "num_register_tokens": 4}, image(224), ("last_hidden_state",)
    ),
    "convnext_224": Recipe(
        *("ConvNextForImageClassification", "ConvNextConfig"),
        {"hidden_sizes": [96, 192, 384, 768], "depths": [1, 1, 2, 1], "layer_scale_init_value": 1e-6},
        *(image(224), ("logits",)),
    ),
    "segformer_512": Recipe(
        *("SegformerForSemanticSegmentation", "SegformerConfig"),
        *({"depths": [1, 1, 1, 1], "num_labels": 150}, image(512), ("logits",)),
    ),
    "dpt_384": Recipe(
        *("DPTForDepthEstimation", "DPTConfig"),
        {**_EYES, "image_size": 384, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False},
        *(image(384), ("predicted_depth",)),
    ),
    "mask2former_384": Recipe(
        *("Mask2FormerForUniversalSegmentation", "Mask2FormerConfig"),
        {"encoder_layers": 2, "decoder_layers": 3, "use_pretrained_backbone": False},
        *(image(384), ("class_queries_logits", "masks_queries_logits")),
        parts={
            "backbone_config": (
                "SwinConfig",
                {"embed_dim": 96, "depths": [1, 1, 1, 1], "num_heads": [3, 6, 12, 24], "window_size": 7, **_STAGES},
            )
        },
    ),
    "clip_224": Recipe(
        *("CLIPModel", "CLIPConfig"),
        {
            "text_config": {
                **_VIT,
                "hidden_size": 512,
                "num_attention_heads": 8,
                "intermediate_size": 2048,
                "vocab_size": 49408,
                "eos_token_id": 49407,
            },
            "vision_config": {**_EYES, "patch_size": 32},
            "projection_dim": 512,
        },
        captioned(224, 77, 49408),
        ("logits_per_image", "text_embeds", "image_embeds"),
    ),
}

REAL: tuple[Architecture, ...] = (
    text("bloom_2048", "BloomModel", 2048, **{**LLAMA, "hidden_size": 1024, "n_head": 16, "n_layer": 2}),
    text(
        *("mpt_2048", "MptModel", 2048),
        **{**LLAMA, "d_model": 1024, "n_heads": 16, "n_layers": 2, "max_seq_len": 2048, "vocab_size": 50368},
    ),
    text(
        *("t5_1024", "T5ForConditionalGeneration", 1024),
        answer=128,
        **{**LLAMA, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 2, "num_heads": 12, "vocab_size": 32128},
        decoder_start_token_id=0,
    ),
    called("time_series_transformer_336", "TimeSeriesTransformerModel", series(336 + 168, 96), **SERIES),
    called(
        *("timesfm_512", "TimesFmModelForPrediction"),
        lambda: {"past_values": torch.randn(2, 512) * 50 + 4000, "freq": torch.zeros(2, dtype=torch.int64)},
        ("mean_predictions",),
        patch_length=32,
        context_length=512,
        horizon_length=128,
        hidden_size=1280,
        intermediate_size=1280,
        num_hidden_layers=2,
        num_attention_heads=16,
        head_dim=80,
    ),
    net("recommender_64", lambda: Recommender(13, 26, 20000, 64, 512), _clicked),
    recipe("deformable_detr_512", VISION["deformable_detr_512"]),
    recipe("rt_detr_640", VISION["rt_detr_640"]),
    called(
        *("whisper_1500", "WhisperForConditionalGeneration"),
        lambda: {"input_features": torch.randn(1, 80, 3000), "decoder_input_ids": torch.randint(3, 51865, (1, 64))},
        d_model=768,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        vocab_size=51865,
        fixed={"use_cache": False},
    ),
    text(
        *("llama_4096", "LlamaForCausalLM", 512),
        **{**LLAMA, **GROUPED, "hidden_size": 4096, "intermediate_size": 5632},
    ),
    text(
        *("mixtral_1024", "MixtralForCausalLM", 32),
        **{**LLAMA, **EXPERTS, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4},
    ),
    text(
        *("qwen2_moe_1024", "Qwen2MoeForCausalLM", 32),
        **{**LLAMA, **EXPERTS, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4},
        shared_expert_intermediate_size=512,
    ),
    text(
        *("mamba2_768", "Mamba2ForCausalLM", 512),
        mask=False,
        **{**LLAMA, "hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1},
        chunk_size=256,
    ),
    text(
        *("deberta_v2_512", "DebertaV2Model", 512),
        **BERT,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["c2p", "p2c"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    called("autoformer_336", "AutoformerModel", series(336 + 168, 96), **SERIES, moving_average=25, label_length=48),
    called("informer_336", "InformerModel", series(336 + 168, 96), **SERIES),
    called(
        "patchtst_512", "PatchTSTForPrediction", lambda: {"past_values": torch.randn(2, 512, 7) * 50 + 4000}, **PATCHES
    ),
    net("vae_decoder_512", lambda: Decoder(512, 32), lambda: {"latent": torch.randn(1, 4, 32, 32)}),
    net("dit_1152", lambda: DiffusionTransformer(1152, 16, 32), _diffused),
    net(
        *("stylegan_512", lambda: StyleGenerator(512)),
        lambda: {"z": torch.randn(1, 512), "noise": torch.randn(1, 1, 32, 32)},
    ),
    net("graph_attention_256", lambda: Graph(256, 256), _edges),
    text(
        *("gemma2_2304", "Gemma2ForCausalLM", 512),
        **{**LLAMA, "hidden_size": 2304, "intermediate_size": 4608, "num_attention_heads": 8},
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=256,
    ),
    text("longformer_1024", "LongformerModel", 1024, **BERT, attention_window=[256, 256]),
    text("bert_512", "BertForMaskedLM", 512, **BERT),
    text("roberta_512", "RobertaModel", 512, **BERT),
    text(
        *("qwen2_1536", "Qwen2ForCausalLM", 1024),
        **{**LLAMA, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12},
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=512,
        max_window_layers=1,
    ),
    text(
        *("gpt_neox_2048", "GPTNeoXForCausalLM", 1024),
        **{**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "rotary_pct": 0.25},
    ),
    step(
        "bloom_step_1024",
        "BloomForCausalLM",
        16,
        64,
        1023,
        **{**LLAMA, "hidden_size": 1024, "n_head": 16, "n_layer": 2},
    ),
    step(
        *("llama_step_2048", "LlamaForCausalLM", 8, 64, 2047),
        **{**LLAMA, **GROUPED, "hidden_size": 2048, "intermediate_size": 5632},
    ),
    text(
        *("rwkv_768", "RwkvForCausalLM", 32),
        mask=False,
        **{**LLAMA, "hidden_size": 768, "attention_hidden_size": 768, "context_length": 1024},
    ),
    text(
        *("mamba_768", "MambaForCausalLM", 32),
        mask=False,
        **{**LLAMA, "hidden_size": 768, "state_size": 16, "time_step_rank": 48},
    ),
    *(recipe(name, VISION[name]) for name in VISION if name not in ("rt_detr_640", "deformable_detr_512")),
    text(
        *("xlnet_512", "XLNetModel", 512),
        **{**LLAMA, "d_model": 768, "n_layer": 2, "n_head": 12, "d_inner": 3072},
        without=("max_position_embeddings",),
    ),
    called(
        *("wav2vec2_768", "Wav2Vec2ForCTC"),
        lambda: {"input_values": torch.randn(1, 48000)},
        **{**BERT, "vocab_size": 32},
    ),
    *LONG,
)
