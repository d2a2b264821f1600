"""Forward and backward pass of a PyTorch module as one ONNX graph, exported by PyTorch itself.

    python tests/support/train/foreign_step.py    # rewrites foreign_step.onnx and .npz; needs torch, onnxscript

`make_fx` traces loss and gradients into plain operators, with the decompositions of core ATen. Without those the
exported gradients are silently wrong: a mean over a batch of 8 loses its division by 8. The gradient of the loss is an
input, so that it can be scaled.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx

HERE = Path(__file__).parent
NAMES = ("embed.weight", "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
ROWS, TOKENS, DIM, CLASSES = 8, 6, 16, 4


def module() -> Any:
    """Build a classifier [rows, 4] of tokens [rows, 6]: an embedding, LayerNorm, GELU between two Linear."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, DIM)
            self.norm = nn.LayerNorm(DIM)
            self.up = nn.Linear(DIM, 24)
            self.down = nn.Linear(24, CLASSES)

        def forward(self, tokens: Any) -> Any:
            x = self.norm(self.embed(tokens)).mean(1)
            return self.down(nn.functional.gelu(self.up(x)))

    torch.manual_seed(0)
    return Net()


def feed() -> dict[str, np.ndarray]:
    """Return tokens and classes of one batch."""
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, 11, (ROWS, TOKENS)), "label": rng.integers(0, CLASSES, ROWS)}


def exported(net: Any) -> onnx.ModelProto:
    """Export the graph from tokens, label, loss_grad and parameters to the loss and each parameter's gradient."""
    import torch
    from torch._decomp import core_aten_decompositions
    from torch.func import functional_call
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(tokens: Any, label: Any, loss_grad: Any, *parameters: Any) -> Any:
        def loss_of(*values: Any) -> Any:
            logits = functional_call(net, dict(zip(NAMES, values, strict=True)), (tokens,))
            return torch.nn.functional.cross_entropy(logits, label)

        loss, pull = torch.func.vjp(loss_of, *parameters)
        return (loss, *pull(loss_grad))

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    data = [torch.from_numpy(array) for array in feed().values()]
    state = [net.state_dict()[name].detach() for name in NAMES]
    inputs = (*data, torch.tensor(1.0), *state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter itself
        traced = make_fx(step, decomposition_table=core_aten_decompositions())(*inputs)
        program = torch.onnx.export(
            traced,
            inputs,
            input_names=["tokens", "label", "loss_grad", *NAMES],
            output_names=["loss", *(f"{name}_grad" for name in NAMES)],
            opset_version=20,
            dynamo=True,
            verbose=False,
        )
    proto = program.model_proto
    for holder in (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        holder.ClearField("metadata_props")  # stack traces of the exporting machine
        holder.ClearField("doc_string")
    for info in (*proto.graph.value_info, *proto.graph.initializer):
        info.ClearField("metadata_props")
    return proto


def differentiated(net: Any) -> dict[str, np.ndarray]:
    """Return loss and gradients by PyTorch's autograd."""
    import torch

    tokens, label = (torch.from_numpy(array) for array in feed().values())
    loss = torch.nn.functional.cross_entropy(net(tokens), label)
    loss.backward()
    return {"loss": loss.detach().numpy(), **{f"{n}_grad": p.grad.numpy() for n, p in net.named_parameters()}}


def main() -> None:
    net = module()
    (HERE / "foreign_step.onnx").write_bytes(exported(net).SerializeToString(deterministic=True))
    state = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    np.savez_compressed(HERE / "foreign_step.npz", **state, **differentiated(net))


if __name__ == "__main__":
    main()
