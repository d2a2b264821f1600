"""An architecture: a small module with seeded weights, and the inputs that it is called with."""

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
    """A name, and what gives a module in evaluation mode with the tensors that it is called with, in order.

    `dynamic` names the axes of inputs that are exported with symbols.
    """

    name: str
    build: Callable[[], Built]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


def seed_of(name: str) -> int:
    """A seed that belongs to a name, the same on all machines."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def livened(module: nn.Module) -> nn.Module:
    """The module with weights as of a trained one: products that keep the size of what they read, norms near 1.

    Freshly initialised models have such small activations that a broken one would pass for a rounded one.
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
    """Normal weights of deviation 1/√(fan in); those of a weight norm are left as they are."""
    if hasattr(part, "parametrizations"):
        return
    fan_in = weight.shape[0] if kind == "Conv1D" else weight[0].numel()
    nn.init.normal_(weight, 0, fan_in**-0.5)


class Named(nn.Module):
    """A model called with tensors in the order of `names`; gives what `outputs` names, else its first output."""

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], outputs: tuple[str, ...] = (), **fixed: object
    ) -> None:
        super().__init__()
        self.model = model
        self.names, self.outputs, self.fixed = names, outputs, fixed

    def forward(self, *values: Tensor) -> Any:
        given = self.model(**dict(zip(self.names, values, strict=True)), **self.fixed)
        if self.outputs:
            return tuple(getattr(given, name) for name in self.outputs)
        return given if isinstance(given, Tensor) else given[0]
