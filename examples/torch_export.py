"""Go from PyTorch to onnxruntime in one pipeline: export, convert, verify, and run in a session.

    pip install . torch onnxscript
    python examples/torch_export.py

This writes nothing to disk: `convert` takes the exporter's ONNXProgram, and `verify` the result of `convert`.
"""

from __future__ import annotations

import logging

import onnxruntime
import torch
from torch import nn

import amp_rewrite

# Hide the exporter's notes about packages that this script does not use.
logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def edge_detector() -> nn.Module:
    """Build a small fully convolutional network, from an image to one probability per pixel."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 1, 1),
        nn.Sigmoid(),
    ).eval()


def main() -> None:
    torch.manual_seed(0)
    network = edge_detector()
    images = torch.rand(4, 3, 32, 32)

    program = torch.onnx.export(
        network,
        (images,),
        input_names=["image"],
        output_names=["edges"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=20,
        dynamo=True,
        verbose=False,
    )
    converted = amp_rewrite.convert(program, to="float16")
    print(converted.report)

    # This runs on CUDA if onnxruntime can use it. Otherwise float32 kernels round each result to float16.
    verdict = amp_rewrite.verify(program, converted, images, tolerance=1e-2)
    print(verdict)
    if not verdict.ok:
        raise SystemExit("the converted model differs too much from the original")

    session = onnxruntime.InferenceSession(converted.model.SerializeToString(), providers=["CPUExecutionProvider"])
    (edges,) = session.run(None, {"image": images.numpy()})
    print(f"edges: {edges.shape} {edges.dtype}, from {edges.min():.3f} to {edges.max():.3f}")


if __name__ == "__main__":
    main()
