"""Architectures: small modules with seeded weights, and their inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A named architecture. `build` returns a module in evaluation mode, and its inputs in order.

    `dynamic` names the dynamic axes of the inputs.
    """

    name: str
    build: Callable[[], Built]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


def seed_of(name: str) -> int:
    """Derive a seed from a name, the same on all machines."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def livened(module: nn.Module) -> nn.Module:
    """Give a module weights like those of a trained one: magnitude-preserving products, and norms near 1.

    A freshly initialized model has such small activations that a broken one would pass for a rounded one.
    """
    with torch.no_grad():
        for part in module.modules():
            _liven(part)
    return module.eval()


def _liven(part: nn.Module) -> None:
    kind = type(part).__name__
    if "Expert" in kind or "Router" in kind:
        for weights in (p for p in part.parameters(recurse=False) if p.ndim > 1):
            nn.init.normal_(weights, 0, weights.shape[-1] ** -0.5)
    weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
    if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
        return
    if isinstance(part, nn.Embedding):
        nn.init.normal_(weight, 0, 0.5)
    elif isinstance(part, nn.Linear) or "Conv1D" in kind or isinstance(part, nn.modules.conv._ConvNd):
        _spread(part, weight, kind)
        if isinstance(bias, Tensor):
            nn.init.normal_(bias, 0, 0.1)
    elif "Norm" in kind and weight.ndim == 1:
        nn.init.uniform_(weight, 0.7, 1.3)
        if isinstance(bias, Tensor):
            nn.init.normal_(bias, 0, 0.1)
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and part.running_var is not None:
            nn.init.normal_(part.running_mean, 0, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 1.5)


def _spread(part: nn.Module, weight: Tensor, kind: str) -> None:
    """Draw normal weights with deviation 1/√(fan in), except those of a weight norm."""
    if hasattr(part, "parametrizations"):
        return
    fan_in = weight.shape[0] if kind == "Conv1D" else weight[0].numel()
    nn.init.normal_(weight, 0, fan_in**-0.5)


class Named(nn.Module):
    """A model with its inputs in the order of `names`; it returns `outputs`, or else its first output."""

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], outputs: tuple[str, ...] = (), **fixed: object
    ) -> None:
        super().__init__()
        self.model = model
        self.names, self.outputs, self.fixed = names, outputs, fixed

    def forward(self, *values: Tensor) -> Any:
        result = self.model(**dict(zip(self.names, values, strict=True)), **self.fixed)
        if self.outputs:
            return tuple(getattr(result, name) for name in self.outputs)
        return result if isinstance(result, Tensor) else result[0]
