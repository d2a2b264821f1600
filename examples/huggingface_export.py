"""Export, convert and verify a Hugging Face transformer, built from a config with random weights.

    pip install . torch transformers onnxscript
    python examples/huggingface_export.py

This downloads nothing. For your own checkpoint, use `AutoModel.from_pretrained(...)` in `Encoder`.
"""

from __future__ import annotations

import logging

import torch
from transformers import BertConfig, BertModel

import amp_rewrite

# Hide the exporter's notes about packages that this script does not use.
logging.getLogger("torch.onnx").setLevel(logging.ERROR)


class Encoder(torch.nn.Module):
    """The encoder in its deployed form, from token ids and a mask to the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            vocab_size=500,
            max_position_embeddings=64,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def exported(encoder: Encoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.onnx.ONNXProgram:
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens", max=64)
    program = torch.onnx.export(
        encoder,
        (ids, mask),
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"],
        dynamic_shapes=({0: batch, 1: tokens}, {0: batch, 1: tokens}),
        opset_version=20,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return program


def main() -> None:
    torch.manual_seed(0)
    encoder = Encoder().eval()
    ids = torch.randint(0, 500, (3, 17))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0  # one padded sequence, to exercise the mask

    program = exported(encoder, ids, mask)
    converted = amp_rewrite.convert(program, to="float16")
    print(converted.report)

    # This runs on CUDA if onnxruntime can use it. Otherwise float32 kernels round each result to float16.
    verdict = amp_rewrite.verify(program, converted, {"input_ids": ids, "attention_mask": mask}, tolerance=1e-2)
    print(verdict)
    if not verdict.ok:
        raise SystemExit("the converted model differs too much from the original")


if __name__ == "__main__":
    main()
