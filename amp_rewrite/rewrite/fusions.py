"""Records of the fusions: a pattern, the operator in its place, the obstacles, and two example models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from amp_rewrite.decide.reasons import Documented
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.settings.choices import Fuse

_SHARED = "an intermediate value that another op reads; a source type other than float32; a target without a kernel"
_AGREEMENT = "On random inputs in float64, both forms agree within 4 float32 roundoff units; constants match exactly."


@dataclass(frozen=True, slots=True)
class FusionRule(Documented):
    """A fusion: its kind (`Replacement.kind`), its operator, the pattern it replaces, and its reasons for refusal."""

    folder = "rewrite/models"
    operator: str
    spelling: str
    refusals: str
    fuse: Fuse = "basic"
    shared: str = _SHARED
    reason: str = "fused"

    @property
    def summary(self) -> str:
        return f"{self.spelling} becomes one {self.operator}."

    @property
    def sections(self) -> Mapping[str, str]:
        """The text under each heading of the record's page."""
        first = FIRST_FUSED.get(self.operator)
        where = f" from opset {first} on" if first and self.fuse == "basic" else ""
        off, mode = _MODES[self.fuse]
        return {
            "What it replaces": f"{self.spelling} becomes {self.operator}{where}, {mode}.",
            "What prevents it": f"Any of these obstacles: {'; '.join(filter(None, (self.refusals, self.shared)))}.",
            "Verification": _AGREEMENT,
            "How to override": f"Pass `--fuse {off}`, or name one of the ops in `--keep` or `--lower`.",
        }


_MODES = {
    "basic": ("none", "unless you pass `--fuse none`"),
    "contrib": ("basic", "with `--fuse contrib`, the default for `ort-cuda`"),
    "diffusion": ("contrib", "with `--fuse diffusion`"),
}
"""For each mode: the option to turn its fusions off, and the text about the option to turn them on."""
_LAST_AXIS = (
    "an axis other than the last, or of unknown size; an epsilon that is not a constant scalar under the square root"
)
_NORM = f"{_LAST_AXIS}; a scale or bias that does not have one number per element"
_MASKS = "two masks; a mask that does not cover every query and key"
_ATTENTION = f"scores capped by Tanh; a computed scale; {_MASKS}; an unknown number of heads"
_SKIP = "shapes of x and skip that may differ; an axis other than the last"
_BIAS = "a bias that is not a vector of the last axis's size"
_IMAGES = "a rank other than 4; groups with an odd number of channels, or with more than 512"
_GELU = "constants that differ from GELU's in float32"

_contrib = partial(FusionRule, fuse="contrib")

FUSIONS: tuple[FusionRule, ...] = (
    FusionRule(
        "constant",
        "Constant",
        "Arithmetic on constants of at most 4096 elements",
        "an op that is neither exact nor correctly rounded; a result of more than 4096 elements",
        shared="",
    ),
    FusionRule(
        "batch_normalization",
        "Conv, ConvTranspose or Gemm with new weights",
        "A BatchNormalization after a linear op with constant weights",
        "training mode; a ConvTranspose with groups; new weights beyond the low type's range",
    ),
    FusionRule(
        "layer_normalization", "LayerNormalization", "(x − mean x) / √(mean (x − mean x)² + ε) · scale + bias", _NORM
    ),
    FusionRule("rms_normalization", "RMSNormalization", "x / √(mean x² + ε) · scale", _NORM),
    FusionRule(
        "group_normalization",
        "InstanceNormalization between two Reshapes",
        "A float16 GroupNormalization at opset 21, where onnxruntime lacks a CUDA kernel for it,",
        "a scale or bias that is not a constant with one number per channel",
    ),
    FusionRule(
        "division",
        "Div",
        "x · (1 / √s) in a norm that is not fused",
        "a reciprocal computed by another op, for example Div (onnxruntime itself merges the Div and the product)",
    ),
    FusionRule("softmax", "Softmax", "exp(x − max x), divided by its sum,", "an axis other than the last"),
    FusionRule("gelu_erf", "Gelu", "x · ½ (1 + erf(x / √2))", _GELU),
    FusionRule("gelu_tanh", "Gelu", "x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³)))", _GELU),
    FusionRule("attention", "Attention", "softmax(Q Kᵀ · scale, masked) V", _ATTENTION),
    _contrib(
        "multi_head_attention",
        "MultiHeadAttention",
        "softmax(Q Kᵀ · scale, masked) V",
        f"{_ATTENTION}; a mask with fewer than four axes",
    ),
    _contrib(
        "group_query_attention",
        "GroupQueryAttention",
        "Causal attention with keys and values repeated for several query heads",
        "a mask that is not constant and causal; unknown sizes; heads wider than 256; an op that might"
        " remain in float32, which the CUDA kernel does not support",
    ),
    _contrib(
        "rotary_embedding",
        "RotaryEmbedding",
        "x · cos + (−x₂, x₁) · sin, with the halves x₁ and x₂ of x,",
        "cosines or sines whose halves may differ, or that differ between the rows of a batch",
    ),
    _contrib(
        "patches",
        "MatMul",
        "A Conv over adjacent patches, with its result laid out as tokens by features,",
        "padding, groups or dilation; an image size that is not a multiple of the patch size",
    ),
    _contrib("skip_layer_normalization", "SkipLayerNormalization", "A LayerNormalization of x + skip", _SKIP),
    _contrib("skip_rms_normalization", "SkipSimplifiedLayerNormalization", "An RMSNormalization of x + skip", _SKIP),
    _contrib("bias_gelu", "BiasGelu", "The GELU of x + bias", _BIAS),
    _contrib("bias_gelu_tanh", "FastGelu", "The tanh approximation of the GELU of x + bias", _BIAS),
    FusionRule(
        "bias_split_gelu",
        "BiasSplitGelu",
        "The first half of x + bias, times the GELU of the second half,",
        "a rank other than 3; a number of features other than 2560, 5120 or 10240; the tanh approximation of GELU",
        "diffusion",
    ),
    FusionRule(
        "group_norm",
        "GroupNorm",
        "A group normalization, optionally followed by x · sigmoid(x),",
        f"{_IMAGES}; a scale or shift that is not a constant with one number per channel",
        "diffusion",
    ),
    FusionRule(
        "skip_group_norm",
        "SkipGroupNorm",
        "A group normalization of x + skip, optionally followed by x · sigmoid(x),",
        f"{_IMAGES}; unknown sizes; a skip with neither the shape of x nor one number per image and channel",
        "diffusion",
    ),
    _contrib("quick_gelu", "QuickGelu", "x · sigmoid(a x)", "a factor `a` that is not a constant scalar"),
)
"""All fusions. With `contrib` and `diffusion`, GELU is also fused below its opset."""
