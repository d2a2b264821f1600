"""Small vision, detection, video, document and image-text architectures of transformers, with seeded weights.

The configurations here only make them small: layers, widths, and image sizes of a few patches. Their forward passes are
the library's own, with position grids, anchors, masks, window shifts, deformable sampling and top-k queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.architectures.architecture import Architecture, Built, Named, livened, seed_of

Inputs = Callable[[], dict[str, Tensor]]


def image(size: int = 64, channels: int = 3, rows: int = 1) -> Inputs:
    """Return images, normalized as by processors."""
    return lambda: {"pixel_values": torch.randn(rows, channels, size, size)}


def video(frames: int, size: int) -> Inputs:
    return lambda: {"pixel_values": torch.randn(1, frames, 3, size, size)}


def captioned(size: int = 64, tokens: int = 8, words: int = 200) -> Inputs:
    """Return an image and two texts, the second shorter than the first."""

    def make() -> dict[str, Tensor]:
        mask = torch.ones(2, tokens, dtype=torch.int64)
        mask[1, tokens - 3 :] = 0
        ids = torch.randint(3, words - 1, (2, tokens))
        ids[:, -1] = words - 1  # some models find the end of the text by the largest id
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, size, size), "attention_mask": mask}

    return make


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model class of transformers, with its configuration, its inputs, and the outputs to keep.

    `parts`: nested configurations, each (class, settings). `fixed`: other arguments of forward.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Inputs
    outputs: tuple[str, ...]
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def build(self, name: str) -> Built:
        """Return the module, with a tuple of outputs, and one batch of its inputs by name."""
        torch.manual_seed(seed_of(name))
        inputs = self.inputs()
        parts = {name: getattr(transformers, kind)(**options) for name, (kind, options) in self.parts.items()}
        config = getattr(transformers, self.config)(**self.settings, **parts)
        model = livened(getattr(transformers, self.model)(config))
        _codebooks(model)
        return Named(model, tuple(inputs), self.outputs, **self.fixed), inputs


def architectures(recipes: Mapping[str, Recipe]) -> tuple[Architecture, ...]:
    """Return the recipes as architectures."""
    return tuple(Architecture(name, partial(recipe.build, name)) for name, recipe in recipes.items())


def _codebooks(model: nn.Module) -> None:
    """Fill the codebooks, since codecs start with zeros."""
    for name, book in model.named_buffers():
        if name.endswith(("codebook.embed", "codebook.embed_sum")):
            nn.init.normal_(book, 0, 0.5)


_VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_STAGES = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
_DETR = (
    {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 10, "num_labels": 5}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    | {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
)
_TEXT = {**_VIT, "vocab_size": 200, "max_position_embeddings": 16}
_EYES = {**_VIT, "image_size": 64, "patch_size": 16}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}
_SWIN4 = {**_SWIN, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], **_STAGES}
_LOGITS = ("logits",)
_BOXES = ("logits", "pred_boxes")
_LAST = ("last_hidden_state",)
_RTDETR = (
    {"d_model": 32, "encoder_hidden_dim": 32, "encoder_in_channels": [32, 48, 64], "encoder_ffn_dim": 64}
    | {"decoder_in_channels": [32, 32, 32], "decoder_layers": 2, "decoder_ffn_dim": 64, "num_queries": 10}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_labels": 5, "anchor_image_size": None}
    | {"num_feature_levels": 3, "use_pretrained_backbone": False, "freeze_backbone_batch_norms": True}
)
_RTBACK = {"backbone_config": ("RTDetrResNetConfig", {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]})}

RECIPES: dict[str, Recipe] = {
    "resnet": Recipe("ResNetForImageClassification", "ResNetConfig", _RESNET, image(), _LOGITS),
    "regnet": Recipe(
        *("RegNetForImageClassification", "RegNetConfig"),
        {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "groups_width": 8},
        *(image(), _LOGITS),
    ),
    "convnext": Recipe(
        *("ConvNextForImageClassification", "ConvNextConfig"),
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "layer_scale_init_value": 0.1},
        *(image(), _LOGITS),
    ),
    "convnextv2": Recipe(
        *("ConvNextV2ForImageClassification", "ConvNextV2Config"),
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
        *(image(), _LOGITS),
    ),
    "efficientnet": Recipe(
        *("EfficientNetForImageClassification", "EfficientNetConfig"),
        {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320, "image_size": 64},
        *(image(), _LOGITS),
    ),
    "mobilenet_v1": Recipe(
        *("MobileNetV1ForImageClassification", "MobileNetV1Config"),
        *({"depth_multiplier": 0.25, "image_size": 64}, image(), _LOGITS),
    ),
    "mobilenet_v2": Recipe(
        *("MobileNetV2ForImageClassification", "MobileNetV2Config"),
        *({"depth_multiplier": 0.35, "image_size": 64}, image(), _LOGITS),
    ),
    "mobilevit": Recipe(
        *("MobileViTForSemanticSegmentation", "MobileViTConfig"),
        {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 16, 24, 32, 32, 32, 64], "image_size": 64}
        | {"aspp_out_channels": 16, "num_labels": 5, "atrous_rates": [1, 2, 3]},
        *(image(), _LOGITS),
    ),
    "vit": Recipe("ViTForImageClassification", "ViTConfig", _EYES, image(), _LOGITS),
    "vit_interpolated": Recipe(
        *("ViTForImageClassification", "ViTConfig", _EYES, image(96), _LOGITS),
        fixed={"interpolate_pos_encoding": True},
    ),
    "deit": Recipe("DeiTForImageClassificationWithTeacher", "DeiTConfig", _EYES, image(), _LOGITS),
    "beit": Recipe(
        *("BeitForImageClassification", "BeitConfig"),
        *({**_EYES, "use_relative_position_bias": True, "layer_scale_init_value": 0.1}, image(), _LOGITS),
    ),
    "swin": Recipe("SwinForImageClassification", "SwinConfig", _SWIN, image(), _LOGITS),
    "swinv2": Recipe("Swinv2ForImageClassification", "Swinv2Config", _SWIN, image(), _LOGITS),
    "pvt": Recipe(
        *("PvtForImageClassification", "PvtConfig"),
        {"image_size": 64, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]}
        | {"num_attention_heads": [1, 2, 4, 4], "mlp_ratios": [2, 2, 2, 2]},
        *(image(), _LOGITS),
    ),
    "segformer": Recipe(
        *("SegformerForSemanticSegmentation", "SegformerConfig"),
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 4, 4]}
        | {"mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 32, "num_labels": 5},
        *(image(), _LOGITS),
    ),
    "cvt": Recipe(
        *("CvtForImageClassification", "CvtConfig"),
        {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
        *(image(), _LOGITS),
    ),
    "dinov2": Recipe("Dinov2Model", "Dinov2Config", {**_EYES, "mlp_ratio": 2}, image(96), _LAST),
    "dinov3": Recipe("DINOv3ViTModel", "DINOv3ViTConfig", {**_EYES, "num_register_tokens": 2}, image(96), _LAST),
    "vit_mae": Recipe(
        *("ViTMAEForPreTraining", "ViTMAEConfig"),
        _EYES
        | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
        | {"decoder_intermediate_size": 64},
        lambda: {**image()(), "noise": torch.rand(1, 16)},
        ("logits", "mask"),
    ),
    "focalnet": Recipe(
        *("FocalNetForImageClassification", "FocalNetConfig"),
        *({"image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1]}, image(), _LOGITS),
    ),
    "hiera": Recipe(
        *("HieraModel", "HieraConfig"),
        {"image_size": [64, 64], "embed_dim": 16, "num_heads": [1, 2, 4, 8], "depths": [1, 1, 2, 1]},
        *(image(), _LAST),
    ),
    "detr": Recipe(
        *("DetrForObjectDetection", "DetrConfig", _DETR, image(96), _BOXES),
        parts={"backbone_config": ("ResNetConfig", {**_RESNET, "out_features": ["stage4"]})},
    ),
    "deformable_detr": Recipe(
        *("DeformableDetrForObjectDetection", "DeformableDetrConfig"),
        *({**_DETR, "with_box_refine": True, "two_stage": True, "two_stage_num_proposals": 10}, image(96), _BOXES),
        parts={"backbone_config": ("ResNetConfig", {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]})},
    ),
    "conditional_detr": Recipe(
        *("ConditionalDetrForObjectDetection", "ConditionalDetrConfig", _DETR, image(96), _BOXES),
        parts={"backbone_config": ("ResNetConfig", {**_RESNET, "out_features": ["stage4"]})},
    ),
    "rt_detr": Recipe(
        *("RTDetrForObjectDetection", "RTDetrConfig", _RTDETR, image(96), _BOXES),
        parts=_RTBACK,
    ),
    "rt_detr_v2": Recipe("RTDetrV2ForObjectDetection", "RTDetrV2Config", _RTDETR, image(96), _BOXES, parts=_RTBACK),
    "yolos": Recipe(
        *("YolosForObjectDetection", "YolosConfig"),
        *({**_EYES, "image_size": [64, 64], "num_detection_tokens": 10, "num_labels": 5}, image(), _BOXES),
    ),
    "owlvit": Recipe(
        *("OwlViTForObjectDetection", "OwlViTConfig"),
        {
            "text_config": {**_TEXT, "max_position_embeddings": 8},
            "vision_config": _EYES,
            "projection_dim": 32,
        },
        *(captioned(), _BOXES),
    ),
    "maskformer": Recipe(
        *("MaskFormerForInstanceSegmentation", "MaskFormerConfig"),
        *({"fpn_feature_size": 32, "mask_feature_size": 32}, image(96)),
        ("class_queries_logits", "masks_queries_logits"),
        parts={
            "backbone_config": ("SwinConfig", _SWIN4),
            "decoder_config": ("DetrConfig", _DETR),
        },
    ),
    "mask2former": Recipe(
        *("Mask2FormerForUniversalSegmentation", "Mask2FormerConfig"),
        {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 64}
        | {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 4, "dim_feedforward": 64}
        | {"num_queries": 10, "use_pretrained_backbone": False},
        image(96),
        ("class_queries_logits", "masks_queries_logits"),
        parts={"backbone_config": ("SwinConfig", _SWIN4)},
    ),
    "upernet": Recipe(
        *("UperNetForSemanticSegmentation", "UperNetConfig"),
        {"hidden_size": 32, "num_labels": 5, "auxiliary_in_channels": 48, "auxiliary_channels": 16}
        | {"use_pretrained_backbone": False},
        *(image(), _LOGITS),
        parts={
            "backbone_config": (
                "ConvNextConfig",
                {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], **_STAGES},
            )
        },
    ),
    "dpt": Recipe(
        *("DPTForDepthEstimation", "DPTConfig"),
        {**_EYES, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
        | {"neck_hidden_sizes": [16, 24, 32, 32], "fusion_hidden_size": 32, "is_hybrid": False},
        *(image(), ("predicted_depth",)),
    ),
    "glpn": Recipe(
        *("GLPNForDepthEstimation", "GLPNConfig"),
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 4, 4]}
        | {"mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 16},
        *(image(), ("predicted_depth",)),
    ),
    "depth_anything": Recipe(
        *("DepthAnythingForDepthEstimation", "DepthAnythingConfig"),
        {"neck_hidden_sizes": [16, 24, 32, 32], "fusion_hidden_size": 32, "patch_size": 14}
        | {"reassemble_hidden_size": 32, "use_pretrained_backbone": False},
        *(image(70), ("predicted_depth",)),
        parts={
            "backbone_config": (
                "Dinov2Config",
                {**_EYES, "patch_size": 14, "image_size": 70, "num_hidden_layers": 4, **_STAGES}
                | {"reshape_hidden_states": False},
            )
        },
    ),
    "sam": Recipe(
        *("SamModel", "SamConfig"),
        {
            "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 128}
            | {"mlp_dim": 64, "output_channels": 32, "global_attn_indexes": [1], "window_size": 4}
            | {"num_pos_feats": 16},
            "prompt_encoder_config": {"hidden_size": 32, "image_size": 128, "patch_size": 16},
            "mask_decoder_config": {
                "hidden_size": 32,
                "mlp_dim": 64,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 32,
            },
        },
        lambda: {
            "pixel_values": torch.randn(1, 3, 128, 128),
            "input_points": torch.tensor([[[[17.0, 93.0], [101.5, 3.25]]]]),
        },
        ("pred_masks", "iou_scores"),
    ),
    "swin2sr": Recipe(
        *("Swin2SRForImageSuperResolution", "Swin2SRConfig"),
        {"image_size": 32, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}
        | {"upscale": 2, "upsampler": "pixelshuffle"},
        *(image(32), ("reconstruction",)),
    ),
    "clip": Recipe(
        *("CLIPModel", "CLIPConfig"),
        {"text_config": {**_TEXT, "eos_token_id": 199}, "vision_config": _EYES, "projection_dim": 32},
        *(captioned(), ("logits_per_image", "text_embeds", "image_embeds")),
    ),
    "siglip": Recipe(
        *("SiglipModel", "SiglipConfig", {"text_config": {**_TEXT, "projection_size": 32}, "vision_config": _EYES}),
        *(captioned(), ("logits_per_image", "text_embeds")),
    ),
}

VISION = architectures(RECIPES)
