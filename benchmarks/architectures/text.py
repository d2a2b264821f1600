"""Text architectures from small configurations of Hugging Face transformers, with seeded weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.architectures.architecture import Architecture, Built, Named, livened, seed_of

VOCABULARY = 99
ROWS, TOKENS = 2, 16
# Each configuration uses the settings it supports; the rows below add their own.
SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
AXES = {0: "batch", 1: "sequence"}
HALVES: Mapping[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def ids(tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, tokens))


def padding(tokens: int = TOKENS) -> Tensor:
    """Return a mask with the second row shorter by a quarter."""
    mask = torch.ones(ROWS, tokens, dtype=torch.int64)
    mask[1, tokens - tokens // 4 :] = 0
    return mask


def made(name: str, model: str, settings: Mapping[str, Any], **more: Any) -> torch.nn.Module:
    """Build a model of transformers in a small configuration, with seeded weights like those of a trained one.

    `config` names the configuration's class (default: the one at the start of the model's name); `without` names
    settings that it rejects.
    """
    torch.manual_seed(seed_of(name))
    chosen = {**settings, **more}
    without = chosen.pop("without", ())
    family = chosen.pop("config", None) or next(
        f"{model[:n]}Config" for n in range(len(model), 0, -1) if hasattr(transformers, f"{model[:n]}Config")
    )
    config = getattr(transformers, family)(**{k: v for k, v in chosen.items() if k not in without})
    config._experts_implementation = "batched_mm"  # the default counts tokens with an op that has no ONNX form
    return livened(getattr(transformers, model)(config))


def text(name: str, model: str, *, tokens: int = TOKENS, mask: bool = True, **config: Any) -> Architecture:
    """Return a model with ids and a padding mask as dynamic inputs."""

    def build() -> Built:
        module = made(name, model, SMALL, use_cache=False, **config)
        inputs = {"input_ids": ids(tokens)} | ({"attention_mask": padding(tokens)} if mask else {})
        return Named(module, tuple(inputs), return_dict=True), inputs

    dynamic = dict.fromkeys(("input_ids", "attention_mask") if mask else ("input_ids",), AXES)
    return Architecture(name, build, dynamic)


def translation(name: str, model: str, *, tokens: int = TOKENS, **config: Any) -> Architecture:
    """Return an encoder-decoder with two layers each, and ids, a padding mask and the answer's first words."""
    both = {
        **HALVES,
        "decoder_start_token_id": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "forced_eos_token_id": None,
    }

    def build() -> Built:
        module = made(name, model, {**both, **config}, use_cache=False)
        inputs = {"input_ids": ids(tokens), "attention_mask": padding(tokens), "decoder_input_ids": ids(7)}
        return Named(module, tuple(inputs), use_cache=False), inputs

    answer = {0: "batch", 1: "answer"}
    return Architecture(name, build, {"input_ids": AXES, "attention_mask": AXES, "decoder_input_ids": answer})


def t5(name: str, model: str, **config: Any) -> Architecture:
    own = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
    return translation(name, model, **own, **config)


MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}

TEXT: tuple[Architecture, ...] = (
    # Encoders.
    text("bert", "BertForMaskedLM"),
    text("roberta", "RobertaModel"),
    text("albert", "AlbertModel", embedding_size=16),
    text("electra", "ElectraForPreTraining", embedding_size=16),
    text("distilbert", "DistilBertForSequenceClassification", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    text(
        "deberta_v2",
        "DebertaV2Model",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["c2p", "p2c"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        conv_kernel_size=3,
        conv_act="gelu",
    ),
    text("deberta", "DebertaModel", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
    text("mpnet", "MPNetModel", relative_attention_num_buckets=32),
    text("xlnet", "XLNetModel", d_model=32, n_layer=2, n_head=4, d_inner=64, without=("max_position_embeddings",)),
    text("xlm", "XLMModel", emb_dim=32, n_layers=2, n_heads=4, n_words=VOCABULARY, pad_index=0),
    text("longformer", "LongformerModel", tokens=32, attention_window=[8, 8]),
    text("bigbird", "BigBirdModel", tokens=64, attention_type="original_full"),
    text("bigbird_sparse", "BigBirdModel", tokens=96, max_position_embeddings=128, block_size=8, num_random_blocks=1),
    text(
        "funnel",
        "FunnelModel",
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        without=("num_hidden_layers",),
    ),
    text(
        "reformer",
        "ReformerModel",
        tokens=32,
        attn_layers=["local", "local"],
        axial_pos_shape=(8, 8),
        axial_pos_embds_dim=(16, 16),
        attention_head_size=8,
        feed_forward_size=64,
        local_attn_chunk_length=8,
        local_attention_chunk_length=8,
        is_decoder=False,
    ),
    text("fnet", "FNetModel", mask=False),
    text("convbert", "ConvBertModel", embedding_size=32, head_ratio=2, conv_kernel_size=5),
    text("squeezebert", "SqueezeBertModel", embedding_size=32),
    text("mobilebert", "MobileBertModel", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    text("layoutlm", "LayoutLMModel"),
    text(
        "nystromformer", "NystromformerModel", mask=False, num_landmarks=8, segment_means_seq_len=16, conv_kernel_size=5
    ),
    text("roformer", "RoFormerModel", embedding_size=32),
    text("rembert", "RemBertModel", input_embedding_size=16, output_embedding_size=32),
    text("ibert", "IBertModel"),
    text("esm", "EsmModel", position_embedding_type="rotary", mask_token_id=3, token_dropout=True),
    text("canine", "CanineModel", tokens=64, local_transformer_stride=16, num_hash_buckets=64, downsampling_rate=4),
    text("modernbert", "ModernBertModel", local_attention=8, global_attn_every_n_layers=2),
    # Decoders.
    text("gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    text(
        "gpt_neo", "GPTNeoModel", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4
    ),
    text("gpt_neox", "GPTNeoXForCausalLM", rotary_pct=0.5),
    text("gptj", "GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    text("codegen", "CodeGenForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    text("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    text("bloom", "BloomForCausalLM", n_layer=2, n_head=4),
    text("falcon", "FalconForCausalLM", new_decoder_architecture=False, multi_query=True),
    text("falcon_alibi", "FalconForCausalLM", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    text("mpt", "MptForCausalLM", d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    text("llama", "LlamaForCausalLM", **GROUPED),
    text("mistral", "MistralForCausalLM", sliding_window=4, **GROUPED),
    text("mixtral", "MixtralForCausalLM", **GROUPED, **MOE),
    text("qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4, max_window_layers=1, **GROUPED),
    text("qwen3", "Qwen3ForCausalLM", **GROUPED),
    text("qwen2_moe", "Qwen2MoeForCausalLM", shared_expert_intermediate_size=32, **GROUPED, **MOE),
    text("qwen3_moe", "Qwen3MoeForCausalLM", **GROUPED, **MOE),
    text(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        **GROUPED,
        **MOE,
    ),
    text("gemma", "GemmaForCausalLM", **GROUPED),
    text("gemma2", "Gemma2ForCausalLM", sliding_window=4, query_pre_attn_scalar=8, **GROUPED),
    text(
        "gemma3", "Gemma3ForCausalLM", config="Gemma3TextConfig", sliding_window=4, query_pre_attn_scalar=8, **GROUPED
    ),
    text("phi", "PhiForCausalLM", partial_rotary_factor=0.5),
    text("phi3", "Phi3ForCausalLM", sliding_window=4),
    text("stablelm", "StableLmForCausalLM", use_qkv_bias=True, num_key_value_heads=4, partial_rotary_factor=0.5),
    text("olmo", "OlmoForCausalLM"),
    text("olmo2", "Olmo2ForCausalLM"),
    text("olmoe", "OlmoeForCausalLM", **MOE),
    text("granite", "GraniteForCausalLM", attention_multiplier=0.1, residual_multiplier=0.3, logits_scaling=8.0),
    text("gpt_oss", "GptOssForCausalLM", sliding_window=4, **GROUPED, **MOE),
    text(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_shared_experts=1,
        **(MOE | {"num_key_value_heads": 4}),
    ),
    text("ctrl", "CTRLModel", n_embd=32, n_layer=2, n_head=4, dff=64, n_positions=64),
    text("nemotron", "NemotronForCausalLM", **GROUPED),
    text("cohere", "CohereForCausalLM", **GROUPED),
    # State spaces and recurrences.
    text("mamba", "MambaForCausalLM", mask=False, state_size=8, time_step_rank=4),
    text("mamba2", "Mamba2ForCausalLM", mask=False, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8),
    text("falcon_mamba", "FalconMambaForCausalLM", mask=False, state_size=8, time_step_rank=4),
    text("rwkv", "RwkvForCausalLM", mask=False, attention_hidden_size=32, context_length=64),
    text(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
        **GROUPED,
    ),
    text(
        "jamba",
        "JambaForCausalLM",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        **GROUPED,
        **MOE,
    ),
    # Encoders with decoders.
    t5("t5", "T5ForConditionalGeneration"),
    t5("mt5", "MT5ForConditionalGeneration"),
    t5("long_t5", "LongT5ForConditionalGeneration", encoder_attention_type="local", local_radius=4),
    t5(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    translation("bart", "BartForConditionalGeneration"),
    translation("pegasus", "PegasusForConditionalGeneration"),
    translation("marian", "MarianMTModel"),
    translation("m2m100", "M2M100ForConditionalGeneration"),
    translation("blenderbot", "BlenderbotForConditionalGeneration"),
    translation(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        hidden_size=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        ngram=2,
        num_buckets=8,
        relative_max_distance=16,
        without=("encoder_layers", "decoder_layers"),
    ),
    translation(
        "led",
        "LEDForConditionalGeneration",
        tokens=32,
        attention_window=[8, 8],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
)
