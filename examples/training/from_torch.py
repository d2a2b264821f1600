"""A PyTorch module as an ONNX model that can be trained: each parameter an initializer under its own name.

An export for inference is no good for that. The exporter merges parameters of equal values (all LayerNorm weights are
ones at first), so that training would tie them, and it transposes the weights of Linear into new, nameless ones. So
parameters are exported as inputs, about which it can assume nothing, and become initializers afterwards.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

import onnx
import torch
from torch import Tensor, nn
from torch.func import functional_call

from amp_rewrite.train import bind

# The exporter's own notes about packages that these examples do not use.
logging.getLogger("torch.onnx").setLevel(logging.ERROR)

# From opset 22 on, MaxPool has no CUDA kernel in onnxruntime.
OPSET = 20


def trainable(module: nn.Module, inputs: Mapping[str, Tensor], output: str) -> onnx.ModelProto:
    """The module, in eval mode, from inputs with a free first dim to one output, with its state as initializers.

    Normalizations and dropout are turned on again by `training_step(..., training_mode=True)`.
    """
    state = {name: tensor.detach() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    called = _Called(module.eval(), tuple(state), len(inputs))
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter itself
        program = torch.onnx.export(
            called,
            (*inputs.values(), *state.values()),
            input_names=[*inputs, *state],
            output_names=[output],
            dynamic_shapes=((*({0: batch} for _ in inputs), *(None for _ in state)),),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = _without_notes(program.model_proto)
    return bind(proto, {name: tensor.numpy() for name, tensor in state.items()}).to_proto()


class _Called(nn.Module):
    """The module as a function of inputs and state. It is kept in a tuple, so that its own state is not exported."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], inputs: int) -> None:
        super().__init__()
        self.held = (module,)
        self.names = names
        self.inputs = inputs

    def forward(self, *given: Tensor) -> Tensor:
        state = dict(zip(self.names, given[self.inputs :], strict=True))
        return functional_call(self.held[0], state, given[: self.inputs])


def _without_notes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the exporter's notes, in place."""
    graph = proto.graph
    # their stack traces name the files of the exporting machine
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for holder in (proto, graph, *graph.node, *values):
        holder.ClearField("metadata_props")
        holder.ClearField("doc_string")
    onnx.checker.check_model(proto, full_check=True)
    return proto
