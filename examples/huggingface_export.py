"""A Hugging Face transformer, built from a config with random weights: export, convert, verify.

    pip install . torch transformers onnxscript
    python examples/huggingface_export.py

Nothing is downloaded. For a checkpoint of your own use `AutoModel.from_pretrained(...)` in `encoder`.
"""

from __future__ import annotations

import logging

import torch
from transformers import BertConfig, BertModel

import amp_rewrite

# The exporter's own notes about packages that this script does not use.
logging.getLogger("torch.onnx").setLevel(logging.ERROR)


class Encoder(torch.nn.Module):
    """The encoder as deployments call it: token ids and mask in, the last hidden state out."""

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
    mask[1, 9:] = 0  # one padded sequence, so that the mask matters

    program = exported(encoder, ids, mask)
    converted = amp_rewrite.convert(program, to="float16")
    print(converted.report)

    # On CUDA where onnxruntime opens it, else emulated: float32 kernels, each float16 result rounded.
    verdict = amp_rewrite.verify(program, converted, {"input_ids": ids, "attention_mask": mask}, tolerance=1e-2)
    print(verdict)
    if not verdict.ok:
        raise SystemExit("the converted model is too far from the original")


if __name__ == "__main__":
    main()
