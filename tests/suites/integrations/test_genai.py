"""Folders from onnxruntime-genai's model builder generate the same tokens after conversion."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from amp_rewrite import Outcome, convert_many

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai; make integrations sets it up")

import onnxruntime_genai as og
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from suites.integrations.trained import FIRST, LENGTH, SENTENCES, trained

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **TOKENS, head_dim=16)),
}
CAST_TO = onnx.TensorProto.FLOAT16


def with_tokenizer(folder: Path) -> None:
    """Write a byte tokenizer, which the builder requires."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **words).save_pretrained(folder)


@pytest.fixture(
    scope="module", params=[(name, kind) for name in ARCHITECTURES for kind in ("fp32", "int4")], ids="-".join
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the builder and return its folder."""
    name, precision = request.param
    folder = tmp_path_factory.getbasetemp() / name
    if not folder.exists():
        trained(ARCHITECTURES[name]).save_pretrained(folder)
        with_tokenizer(folder)
    out = folder / precision
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", precision, "-e", "cpu"]
    subprocess.run([*builder, "-i", folder, "-o", out, "-c", folder / "cache"], check=True, capture_output=True)
    return out


def generated(folder: Path) -> list[list[int]]:
    """Return the continuation of each first token."""
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=LENGTH, do_sample=False)
    found = []
    for first in FIRST:
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array([first], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        found.append([int(token) for token in generator.get_sequence(0)])
    return found


def converted(source: Path, out: Path, **options: Any) -> Outcome:
    (outcome,) = convert_many(source, out=out, **options)
    assert not outcome.error and outcome.totals["compute_lowered"] == outcome.totals["compute_ops"] > 10
    return outcome


@pytest.mark.parametrize("options", [{}, {"io": "caches"}, {"io": "low"}], ids=str)
def test_generation_gives_the_same_tokens(built: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    outcome = converted(built, tmp_path / "fp16", **options)
    expected, tokens = generated(built), generated(tmp_path / "fp16")
    assert tokens == expected
    assert len({tuple(row) for row in tokens}) == SENTENCES and all(len(row) == LENGTH for row in tokens)
    graph = onnx.load(outcome.target, load_external_data=False).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    assert {types[name] == CAST_TO for name in types if "key" in name or "value" in name} == {"io" in options}
    assert (types["logits"] == CAST_TO) is (options == {"io": "low"})


def test_operators_of_the_builder_get_low_inputs(built: Path, tmp_path: Path) -> None:
    outcome = converted(built, tmp_path, io="caches")
    assert outcome.totals["casts_to_low"] + outcome.totals["casts_to_float32"] <= 1  # of the logits
    kinds = {node.op_type for node in onnx.load(outcome.target, load_external_data=False).graph.node}
    assert "GroupQueryAttention" in kinds and ("MatMulNBits" in kinds) is (built.name == "int4")
