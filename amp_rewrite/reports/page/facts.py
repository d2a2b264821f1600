"""Facts of a model beyond its report: modules and operations of ops, shapes of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from onnx import NodeProto

from amp_rewrite.decide.sizes import Sizes
from amp_rewrite.ir.view import MAIN, View
from amp_rewrite.settings.selectors import TORCH_SCOPES, torch_scopes

_NAMESPACE = "namespace"
_LONGEST = 4096
"""Characters of metadata that are read; more are not the modules of an op."""
_INPUTS = 4
"""Inputs whose shapes are stated."""


@dataclass(frozen=True)
class RowFacts:
    """Facts of the ops of a model, by row."""

    view: View

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self.view)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Module of each op by its metadata, "encoder/layers.0"; empty without them."""
        return tuple(module_of(op.node) for op in self.view.ops)

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """Operations of each op; 0 for all but products, convolutions, recurrent ops and attention."""
        return tuple(self._sizes.flops(op) for op in self.view.ops)

    @property
    def shapes(self) -> str:
        """Shapes of the inputs behind FLOPs: "with x 128×3×224×224"; free dimensions are 128."""
        inputs = [v for v in self.view.scopes[MAIN].inputs if self.view.values[v].tensor is None]
        stated = [(self.view.value_name(v), "×".join(map(str, self._sizes.shape(v))) or "scalar") for v in inputs]
        more = [f"{len(stated) - _INPUTS} more"] if len(stated) > _INPUTS else []
        return "with " + ", ".join([f"{name} {shape}" for name, shape in stated[:_INPUTS]] + more) if stated else ""


def module_of(node: NodeProto) -> str:
    """Return the module of a node, as PyTorch's exporter notes it: "encoder/layers.0"; "" without a note."""
    stated = {entry.key: entry.value for entry in node.metadata_props if len(entry.value) <= _LONGEST}
    if TORCH_SCOPES in stated:
        names = torch_scopes(stated[TORCH_SCOPES])
    elif "/" in stated.get(_NAMESPACE, ""):
        names = [part.partition(":")[0].strip() for part in stated[_NAMESPACE].split("/")]
    else:
        return ""
    parts: list[str] = []
    before = ""
    for name in filter(None, names[:-1]):  # the last one is the op's own name
        parts.append(name.removeprefix(f"{before}."))
        before = name
    return "/".join(parts)
