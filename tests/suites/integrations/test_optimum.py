"""Folders exported by optimum-onnx load in ORTModel classes after conversion and give the same results."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from amp_rewrite import Outcome, convert, convert_many

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx; make integrations sets it up")

import torch
import transformers
from optimum import onnxruntime
from optimum.exporters.onnx import main_export

from suites.integrations.trained import LENGTH, SENTENCES, VOCABULARY, sentences, trained

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WIDE = {"initializer_range": 0.2}  # logits of a size that shows an error
PROMPT = 4


def bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TOKENS, **SIZES, **WIDE)).eval()


def vit() -> Any:
    sizes = {**SIZES, "image_size": 32, "patch_size": 8}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **WIDE)).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(**TOKENS, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return trained(lambda: transformers.GPT2LMHeadModel(config))


def llama() -> Any:
    config = transformers.LlamaConfig(**TOKENS, **SIZES, num_key_value_heads=2, max_position_embeddings=64)
    return trained(lambda: transformers.LlamaForCausalLM(config))


def t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**TOKENS, **sizes, decoder_start_token_id=0)
    return trained(lambda: transformers.T5ForConditionalGeneration(config), input_ids=sentences()[:, :PROMPT])


def whisper() -> Any:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 128))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.WhisperConfig(
        **TOKENS, **sizes, **heads, d_model=64, decoder_start_token_id=1, max_target_positions=64,
        max_source_positions=1500, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.model.encoder.requires_grad_(False)  # its output is computed once
    return trained(lambda: model, encoder_outputs=model.model.encoder(sounds()))


def sounds() -> torch.Tensor:
    """Return spectrograms of thirty seconds, Whisper's input length."""
    return torch.randn(SENTENCES, 80, 3000, generator=torch.Generator().manual_seed(1))


def exported(build: Any, task: str, folder: Path) -> Path:
    """Save a model in the hub's layout and export it."""
    build().save_pretrained(folder / "hub")
    if task == "image-classification":
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "hub")
    if task.startswith("automatic-speech"):
        transformers.WhisperFeatureExtractor().save_pretrained(folder / "hub")
    main_export(str(folder / "hub"), output=str(folder / "onnx"), task=task, do_validation=False)
    return folder / "onnx"


def done(outcomes: Iterator[Outcome]) -> list[Outcome]:
    known = list(outcomes)
    assert known and not any(outcome.error for outcome in known), known
    assert all(outcome.totals["compute_lowered"] > 0.9 * outcome.totals["compute_ops"] for outcome in known)
    return known


def caches(folder: Path) -> set[int]:
    """Return the types of all inputs and outputs that are caches."""
    graphs = [onnx.load(path, load_external_data=False).graph for path in folder.glob("*.onnx")]
    values = [value for graph in graphs for value in (*graph.input, *graph.output)]
    return {v.type.tensor_type.elem_type for v in values if v.name.startswith(("past_key_values.", "present."))}


@pytest.mark.parametrize(
    ("build", "task", "cls"),
    [
        (bert, "text-classification", onnxruntime.ORTModelForSequenceClassification),
        (vit, "image-classification", onnxruntime.ORTModelForImageClassification),
    ],
)
def test_a_classifier_predicts_the_same_classes(build: Any, task: str, cls: Any, tmp_path: Path) -> None:
    source = exported(build, task, tmp_path)
    done(convert_many(source, out=tmp_path / "fp16"))
    if task == "image-classification":
        inputs = {"pixel_values": torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    else:
        inputs = {"input_ids": sentences(), "attention_mask": torch.ones(SENTENCES, LENGTH, dtype=torch.int64)}
    expected, logits = (cls.from_pretrained(folder)(**inputs).logits for folder in (source, tmp_path / "fp16"))
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.01 * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("io", [None, "caches"])
@pytest.mark.parametrize(
    ("build", "task", "cls"),
    [
        (gpt2, "text-generation-with-past", onnxruntime.ORTModelForCausalLM),
        (llama, "text-generation-with-past", onnxruntime.ORTModelForCausalLM),
        (t5, "text2text-generation-with-past", onnxruntime.ORTModelForSeq2SeqLM),
        (whisper, "automatic-speech-recognition-with-past", onnxruntime.ORTModelForSpeechSeq2Seq),
    ],
)
def test_generate_gives_the_same_tokens(
    build: Any, task: str, cls: Any, io: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / build.__name__
    source = folder / "onnx" if folder.exists() else exported(build, task, folder)
    out = folder / f"io-{io}"
    outcomes = done(convert_many(source, out=out, io=io))
    assert len(outcomes) == len(list(source.glob("*.onnx")))
    assert caches(out) == {onnx.TensorProto.FLOAT16 if io else onnx.TensorProto.FLOAT}
    if task.startswith("automatic-speech"):
        inputs = {"input_features": sounds()}
    else:
        inputs = {"input_ids": sentences()[:, :PROMPT]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"max_length": LENGTH, "do_sample": False, "num_beams": 1}
    expected, tokens = (cls.from_pretrained(folder).generate(**inputs, **options) for folder in (source, out))
    assert torch.equal(tokens, expected)
    assert len(torch.unique(tokens[0])) > LENGTH // 2  # a sentence rather than one repeated token


def test_a_result_beside_the_source_loads_by_its_name(tmp_path: Path) -> None:
    source = exported(bert, "text-classification", tmp_path)
    convert(source / "model.onnx").save(source / "model_fp16.onnx")
    model = onnxruntime.ORTModelForSequenceClassification.from_pretrained(source, file_name="model_fp16.onnx")
    assert model(input_ids=sentences(), attention_mask=torch.ones_like(sentences())).logits.shape == (SENTENCES, 2)
