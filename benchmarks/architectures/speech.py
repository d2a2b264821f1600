"""Small speech, sound and time-series architectures, and decoding steps with a cache, with seeded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.architectures.architecture import Architecture, Built, Named, livened, seed_of
from benchmarks.architectures.text import GROUPED, HALVES, ROWS, SMALL, VOCABULARY, made

Inputs = Callable[[], dict[str, Tensor]]
SAMPLES = 800
WAVES: Mapping[str, Any] = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 4),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_codevector_groups": 2,
    "num_codevectors_per_group": 8,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
    "vocab_size": 32,
}
WHISPER: Mapping[str, Any] = {
    **HALVES,
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def sound(name: str, model: str, **settings: Any) -> Architecture:
    """Return a model over raw sound: convolutions, then a transformer; the second row is shorter."""

    def build() -> Built:
        module = made(name, model, {**SMALL, **WAVES, **settings})
        mask = torch.ones(ROWS, SAMPLES, dtype=torch.int64)
        mask[1, 600:] = 0
        inputs = {"input_values": torch.randn(ROWS, SAMPLES), "attention_mask": mask}
        return Named(module, tuple(inputs)), inputs

    axes = {0: "batch", 1: "samples"}
    return Architecture(name, build, {"input_values": axes, "attention_mask": axes})


def called(name: str, model: str, inputs: Inputs, outputs: tuple[str, ...] = (), **settings: Any) -> Architecture:
    """Return a model with the given inputs in fixed shapes."""

    def build() -> Built:
        fixed = settings.get("fixed", {})
        module = made(name, model, {k: v for k, v in settings.items() if k != "fixed"})
        drawn = inputs()
        return Named(module, tuple(drawn), outputs, **fixed), drawn

    return Architecture(name, build)


def wave(samples: int = SAMPLES, key: str = "input_values", channels: int | None = None) -> Inputs:
    shape = (ROWS, samples) if channels is None else (ROWS, channels, samples)
    return lambda: {key: torch.randn(shape)}


def heard(frames: int = 32, bins: int = 8) -> Inputs:
    """Return features of sound, and the first words of the transcript."""
    return lambda: {
        "input_features": torch.randn(ROWS, bins, frames),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (ROWS, 5)),
    }


def spoken() -> dict[str, Tensor]:
    mask = torch.ones(ROWS, 40, dtype=torch.int64)
    mask[1, 30:] = 0
    return {
        "input_features": torch.randn(ROWS, 40, 8),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, VOCABULARY, (ROWS, 5)),
    }


PAST, CONTEXT, FUTURE = 39, 32, 8


def series() -> dict[str, Tensor]:
    """Return past values of a series with a level far from 0, and past and future time features."""
    return {
        "past_values": torch.randn(ROWS, PAST) * 20 + 300,
        "past_time_features": torch.randn(ROWS, PAST, 2),
        "past_observed_mask": torch.ones(ROWS, PAST),
        "future_values": torch.randn(ROWS, FUTURE) * 20 + 300,
        "future_time_features": torch.randn(ROWS, FUTURE, 2),
    }


SERIES: Mapping[str, Any] = {
    **HALVES,
    "prediction_length": FUTURE,
    "context_length": CONTEXT,
    "lags_sequence": [1, 2, 7],
    "num_time_features": 2,
    "scaling": "mean",
}


def patches() -> dict[str, Tensor]:
    return {"past_values": torch.randn(ROWS, 32, 3) * 20 + 300}


PATCHES: Mapping[str, Any] = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "stride": 8,
    "d_model": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "prediction_length": FUTURE,
}


class Step(nn.Module):
    """One decoding step, from a token and the cache to logits and the longer cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        pairs = tuple(zip(past[::2], past[1::2], strict=True))
        cache = transformers.DynamicCache(pairs)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values))


def step(name: str, model: str, heads: int, width: int = 8, seen: int = 11, **settings: Any) -> Architecture:
    """Return a two-layer decoder with a cache of some tokens and one more token."""

    def build() -> Built:
        module = made(name, model, {**SMALL, **settings})
        mask = torch.ones(ROWS, seen + 1, dtype=torch.int64)
        mask[1, :3] = 0
        inputs = {"input_ids": torch.randint(3, VOCABULARY, (ROWS, 1)), "attention_mask": mask}
        inputs |= {f"past_{i}_{kind}": torch.randn(ROWS, heads, seen, width) for i in (0, 1) for kind in "kv"}
        return Step(module).eval(), inputs

    return Architecture(name, build)


class Cells(nn.Module):
    """Two bidirectional layers of recurrent cells over embedded tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.cells = getattr(nn, kind)(32, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(self.embed(input_ids))[0])
        return found


def cells(name: str, kind: str) -> Architecture:
    def build() -> Built:
        torch.manual_seed(seed_of(name))
        return livened(Cells(kind)), {"input_ids": torch.randint(0, VOCABULARY, (ROWS, 12))}

    return Architecture(name, build)


SPEECH: tuple[Architecture, ...] = (
    sound("wav2vec2_ctc", "Wav2Vec2ForCTC"),
    sound("wav2vec2_stable", "Wav2Vec2Model", do_stable_layer_norm=True, feat_extract_norm="layer"),
    sound("wav2vec2_pretraining", "Wav2Vec2ForPreTraining"),
    sound("hubert", "HubertModel"),
    sound("wavlm", "WavLMModel", num_buckets=16, max_bucket_distance=32),
    sound("sew", "SEWModel", squeeze_factor=2),
    sound("sew_d", "SEWDModel", squeeze_factor=2, position_buckets=8, max_position_embeddings=128),
    sound("unispeech_sat", "UniSpeechSatModel"),
    sound("data2vec_audio", "Data2VecAudioModel"),
    sound("wav2vec2_conformer", "Wav2Vec2ConformerModel", position_embeddings_type="relative"),
    sound("wav2vec2_rotary", "Wav2Vec2ConformerModel", position_embeddings_type="rotary"),
    called(
        "whisper",
        "WhisperForConditionalGeneration",
        heard(),
        **WHISPER,
        fixed={"use_cache": False},
    ),
    called(
        "speech2text",
        "Speech2TextForConditionalGeneration",
        spoken,
        **HALVES,
        vocab_size=VOCABULARY,
        input_feat_per_channel=8,
        conv_channels=16,
        num_conv_layers=2,
        max_source_positions=64,
        max_target_positions=16,
        fixed={"use_cache": False},
    ),
    called(
        "moonshine",
        "MoonshineForConditionalGeneration",
        lambda: {
            "input_values": torch.randn(ROWS, 4000),
            "decoder_input_ids": torch.randint(3, VOCABULARY, (ROWS, 5)),
        },
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        pad_head_dim_to_multiple_of=None,
        fixed={"use_cache": False},
    ),
    called(
        "ast",
        "ASTForAudioClassification",
        lambda: {"input_values": torch.randn(ROWS, 32, 16) * 2 - 4},
        **SMALL,
        max_length=32,
        num_mel_bins=16,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
    ),
    called(
        "encodec",
        "EncodecModel",
        lambda: {"input_values": torch.randn(1, 1, 640)},
        ("audio_values",),
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=32,
        hidden_size=16,
        codebook_dim=16,
        num_lstm_layers=1,
        target_bandwidths=[24.0],
        sampling_rate=8000,
    ),
    called(
        "mimi",
        "MimiModel",
        lambda: {"input_values": torch.randn(1, 1, 1920)},
        ("audio_values",),
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=32,
        hidden_size=32,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        intermediate_size=64,
        num_quantizers=4,
        num_semantic_quantizers=1,
        sampling_rate=8000,
        frame_rate=500,
        upsample_groups=32,
    ),
    called(
        "dac",
        "DacModel",
        lambda: {"input_values": torch.randn(1, 1, 640)},
        ("audio_values",),
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        n_codebooks=3,
        codebook_size=32,
        codebook_dim=4,
    ),
    called(
        "vits",
        "VitsModel",
        lambda: {"input_ids": torch.randint(1, 38, (1, 12))},
        ("waveform",),
        vocab_size=38,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=64,
        flow_size=16,
        spectrogram_bins=9,
        upsample_initial_channel=32,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        noise_scale=0.0,
        noise_scale_duration=0.0,
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=2,
        duration_predictor_num_flows=2,
        use_stochastic_duration_prediction=False,
        duration_predictor_filter_channels=32,
    ),
    called(
        "univnet",
        "UnivNetModel",
        lambda: {"input_features": torch.randn(1, 20, 8), "noise_sequence": torch.randn(1, 20, 16)},
        model_in_channels=16,
        model_hidden_channels=16,
        num_mel_bins=8,
        kernel_predictor_hidden_channels=8,
        resblock_stride_sizes=[2, 2, 2],
    ),
    called(
        "speecht5_vocoder",
        "SpeechT5HifiGan",
        lambda: {"spectrogram": torch.randn(20, 8)},
        model_in_dim=8,
        upsample_initial_channel=16,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
    ),
    called(
        "speecht5",
        "SpeechT5ForSpeechToText",
        lambda: {
            "input_values": torch.randn(ROWS, SAMPLES),
            "decoder_input_ids": torch.randint(3, VOCABULARY, (ROWS, 5)),
        },
        **(WAVES | HALVES | {"vocab_size": VOCABULARY}),
        hidden_size=32,
        fixed={"use_cache": False},
    ),
    called(
        "wav2vec2_bert",
        "Wav2Vec2BertModel",
        lambda: {"input_features": torch.randn(ROWS, 24, 16)},
        **SMALL,
        feature_projection_input_dim=16,
        left_max_position_embeddings=8,
        right_max_position_embeddings=8,
    ),
    called(
        "fastspeech2_conformer",
        "FastSpeech2ConformerModel",
        lambda: {"input_ids": torch.randint(1, 38, (1, 12))},
        ("spectrogram",),
        hidden_size=32,
        vocab_size=38,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        encoder_linear_units=32,
        decoder_linear_units=32,
        speech_decoder_postnet_units=16,
        duration_predictor_channels=16,
        pitch_predictor_channels=16,
        energy_predictor_channels=16,
    ),
    called("time_series_transformer", "TimeSeriesTransformerModel", series, **SERIES),
    called("informer", "InformerModel", series, **SERIES),
    called("autoformer", "AutoformerModel", series, **SERIES, moving_average=5, label_length=8),
    called("patchtst", "PatchTSTForPrediction", patches, **PATCHES),
    called("patchtsmixer", "PatchTSMixerForPrediction", patches, **PATCHES),
    called(
        "timesfm",
        "TimesFmModelForPrediction",
        lambda: {"past_values": torch.randn(ROWS, 64) * 20 + 300, "freq": torch.zeros(ROWS, dtype=torch.int64)},
        ("mean_predictions",),
        patch_length=8,
        context_length=64,
        horizon_length=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
    ),
    step("gpt2_step", "GPT2LMHeadModel", 4, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    step("llama_step", "LlamaForCausalLM", 2, **GROUPED),
    step("qwen3_step", "Qwen3ForCausalLM", 2, **GROUPED),
    step("gemma2_step", "Gemma2ForCausalLM", 2, query_pre_attn_scalar=8, sliding_window=64, **GROUPED),
    step("gpt_neox_step", "GPTNeoXForCausalLM", 4, rotary_pct=0.5),
    step("bloom_step", "BloomForCausalLM", 4, n_layer=2, n_head=4),
    cells("lstm", "LSTM"),
    cells("gru", "GRU"),
    cells("rnn", "RNN"),
)
