"""Small image-text, document, video and audio-codec architectures of transformers, with seeded weights."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.architectures.vision import (
    _EYES,
    _LAST,
    _LOGITS,
    _SWIN,
    _TEXT,
    _VIT,
    Recipe,
    architectures,
    captioned,
    image,
    video,
)


def _page() -> dict[str, Tensor]:
    """Return words with their boxes on a page of 1000 × 1000, and the page."""
    corner = torch.randint(0, 900, (1, 12, 2))
    boxes = torch.cat((corner, corner + torch.randint(1, 100, (1, 12, 2))), dim=-1)
    return {
        "input_ids": torch.randint(3, 200, (1, 12)),
        "bbox": boxes,
        "attention_mask": torch.ones(1, 12, dtype=torch.int64),
        **image()(),
    }


def _patches() -> dict[str, Tensor]:
    """Return flattened patches, each after its row and column; the last ones are padding."""
    places = torch.stack(torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij"), -1).reshape(1, 16, 2)
    patches = torch.cat((places.float(), torch.randn(1, 16, 48)), dim=-1)
    patches[:, 13:] = 0
    return {"flattened_patches": patches, "attention_mask": (patches[..., 0] != 0).float()}


def _seen() -> dict[str, Tensor]:
    """Return a text with a placeholder for each of an image's 16 patches."""
    ids = torch.randint(3, 190, (1, 24))
    ids[:, 2:18] = 199
    return {"input_ids": ids, **image()(), "attention_mask": torch.ones(1, 24, dtype=torch.int64)}


def _words(rows: int = 1, length: int = 8) -> Tensor:
    return torch.randint(3, 199, (rows, length))


_LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}

RECIPES: dict[str, Recipe] = {
    "blip": Recipe(
        *("BlipForImageTextRetrieval", "BlipConfig"),
        {
            "text_config": {**_TEXT, "encoder_hidden_size": 32, "projection_dim": 32},
            "vision_config": _EYES,
            "image_text_hidden_size": 32,
        },
        *(captioned(), ("itm_score",)),
    ),
    "align": Recipe(
        *("AlignModel", "AlignConfig"),
        {
            "text_config": _TEXT,
            "vision_config": {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 80},
            "projection_dim": 80,
        },
        *(captioned(), ("logits_per_image", "text_embeds", "image_embeds")),
    ),
    "chinese_clip": Recipe(
        *("ChineseCLIPModel", "ChineseCLIPConfig"),
        {"text_config": _TEXT, "vision_config": _EYES, "projection_dim": 32},
        *(captioned(), ("logits_per_image", "text_embeds")),
    ),
    "groupvit": Recipe(
        *("GroupViTModel", "GroupViTConfig"),
        {
            "text_config": {**_TEXT, "eos_token_id": 199},
            "vision_config": {
                **_EYES,
                "depths": [1, 1, 1],
                "num_group_tokens": [8, 4, 0],
                "num_output_groups": [8, 4, 0],
            }
            | {"num_hidden_layers": 3},
            "projection_dim": 32,
            "projection_intermediate_dim": 64,
        },
        *(captioned(), ("logits_per_image", "text_embeds")),
    ),
    "perceiver": Recipe(
        *("PerceiverForImageClassificationFourier", "PerceiverConfig"),
        {"num_latents": 16, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2}
        | {"num_self_attention_heads": 4, "num_cross_attention_heads": 1, "image_size": 224},
        lambda: {"inputs": torch.randn(1, 3, 224, 224)},
        _LOGITS,
    ),
    "videomae": Recipe(
        *("VideoMAEForVideoClassification", "VideoMAEConfig"),
        {**_EYES, "image_size": 32, "num_frames": 4, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}
        | {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 64},
        *(video(4, 32), _LOGITS),
    ),
    "timesformer": Recipe(
        *("TimesformerForVideoClassification", "TimesformerConfig"),
        *({**_EYES, "image_size": 32, "num_frames": 4}, video(4, 32), _LOGITS),
    ),
    "vivit": Recipe(
        *("VivitModel", "VivitConfig"),
        *({**_VIT, "image_size": 32, "num_frames": 4, "tubelet_size": [2, 16, 16]}, video(4, 32), _LAST),
    ),
    "layoutlmv3": Recipe(
        *("LayoutLMv3ForTokenClassification", "LayoutLMv3Config"),
        {**_TEXT, "input_size": 64, "max_2d_position_embeddings": 1024, "coordinate_size": 6, "shape_size": 4}
        | {"patch_size": 16, "max_position_embeddings": 64},
        *(_page, _LOGITS),
    ),
    "donut_swin": Recipe("DonutSwinModel", "DonutSwinConfig", _SWIN, image(80), _LAST),
    "trocr": Recipe(
        *("TrOCRForCausalLM", "TrOCRConfig"),
        {"vocab_size": 200, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
        | {"decoder_ffn_dim": 64, "max_position_embeddings": 32, "use_cache": False}
        | {"cross_attention_hidden_size": 32},
        lambda: {"input_ids": _words(), "encoder_hidden_states": torch.randn(1, 16, 32)},
        _LOGITS,
        fixed={"use_cache": False},
    ),
    "llava": Recipe(
        *("LlavaForConditionalGeneration", "LlavaConfig"),
        {"image_token_index": 199, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        *(_seen, _LOGITS),
        parts={"vision_config": ("CLIPVisionConfig", _EYES), "text_config": ("LlamaConfig", _LLAMA)},
        fixed={"use_cache": False},
    ),
    "pix2struct": Recipe(
        *("Pix2StructVisionModel", "Pix2StructVisionConfig"),
        {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "seq_len": 16},
        *(_patches, _LAST),
    ),
    "superpoint": Recipe(
        *("SuperPointForKeypointDetection", "SuperPointConfig"),
        {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 32, "descriptor_decoder_dim": 32}
        | {"keypoint_threshold": 0.0155, "border_removal_distance": 4},
        *(image(), ("keypoints", "scores", "descriptors")),
    ),
    "vitpose": Recipe(
        *("VitPoseForPoseEstimation", "VitPoseConfig"),
        *({"num_labels": 5, "use_simple_decoder": False, "scale_factor": 4}, image(), ("heatmaps",)),
        parts={
            "backbone_config": (
                "VitPoseBackboneConfig",
                {"image_size": [64, 64], "patch_size": [16, 16], "hidden_size": 32, "num_hidden_layers": 2}
                | {"num_attention_heads": 4, "out_features": ["stage2"]},
            )
        },
    ),
    "encodec": Recipe(
        *("EncodecModel", "EncodecConfig"),
        {"num_filters": 4, "hidden_size": 16, "codebook_dim": 16, "codebook_size": 64}
        | {"upsampling_ratios": [4, 2], "target_bandwidths": [18.0], "normalize": False},
        lambda: {"input_values": torch.randn(1, 1, 640)},
        ("audio_codes", "audio_values"),
    ),
    "dac": Recipe(
        *("DacModel", "DacConfig"),
        {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "downsampling_ratios": [2, 4]}
        | {"n_codebooks": 3, "codebook_size": 64, "codebook_dim": 4},
        lambda: {"input_values": torch.randn(1, 1, 640)},
        ("audio_codes", "audio_values"),
    ),
}

MULTIMODAL = architectures(RECIPES)
