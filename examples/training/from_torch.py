"""Export a PyTorch module as a trainable ONNX model, with each parameter as an initializer under its own name.

An export for inference would not work. The exporter merges parameters with equal values (all LayerNorm weights start as
ones), so training would tie them, and it transposes the weights of Linear into new, unnamed tensors. Therefore this
exports the parameters as inputs, which the exporter must leave alone, and turns them into initializers afterwards.
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

# Hide the exporter's notes about packages that these examples do not use.
logging.getLogger("torch.onnx").setLevel(logging.ERROR)

# onnxruntime has no CUDA kernel for MaxPool from opset 22.
OPSET = 20


def trainable(module: nn.Module, inputs: Mapping[str, Tensor], output: str) -> onnx.ModelProto:
    """Export the module in eval mode, with a dynamic first dim of its inputs and its state as initializers.

    `training_step(..., training_mode=True)` turns normalizations and dropout back on.
    """
    state = {name: tensor.detach() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    stateless = _Stateless(module.eval(), tuple(state), len(inputs))
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter itself
        program = torch.onnx.export(
            stateless,
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


class _Stateless(nn.Module):
    """The module as a function of inputs and state. A tuple hides its own state from the export."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], inputs: int) -> None:
        super().__init__()
        self.module = (module,)
        self.names = names
        self.inputs = inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        state = dict(zip(self.names, tensors[self.inputs :], strict=True))
        return functional_call(self.module[0], state, tensors[: self.inputs])


def _without_notes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the exporter's notes from the model, in place."""
    graph = proto.graph
    # their stack traces contain paths of the exporting machine
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for holder in (proto, graph, *graph.node, *values):
        holder.ClearField("metadata_props")
        holder.ClearField("doc_string")
    onnx.checker.check_model(proto, full_check=True)
    return proto
