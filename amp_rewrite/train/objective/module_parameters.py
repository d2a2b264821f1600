"""Parameters and buffers of the PyTorch module that a model was exported from, and what the exporter made of them.

An exporter merges parameters of equal values, transposes some, and folds others into constants (a learned scale that
is exponentiated). A program of `torch.onnx.export` still knows the module's parameters; a model of `from_torch` has
their names in its metadata. Other models are trained by what their initializers look like.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.train.objective.parameter_row import FOLDED, MERGED, ParameterRow

KEY = "amp_rewrite.module"
"""Metadata of a model with the reasons why tensors of the module are not trained, by name; "" for a parameter."""
NOTES = "amp_rewrite.notes"
"""Metadata of a model with sentences about the module for the report."""
BUFFER = "a buffer of the module"
NO_GRAD = "a parameter with requires_grad=False"


@dataclass(frozen=True)
class ModuleParameters:
    """The parameters of the module behind a model, as far as they are known.

    `declared`: its tensors among the initializers, each with the reason why it is not trained, "" for a parameter.
    `merged`: parameters that are now another initializer, with its name. `folded`: parameters that are in no
    initializer. Shapes are those of the module. `complete`: `declared` has all tensors of the module.
    """

    declared: Mapping[str, str] = field(default_factory=dict)
    merged: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    folded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def of(cls, source: object, model: Model) -> ModuleParameters:
        """Return what the model's metadata, or the torch program that it was loaded from, know about the module."""
        entry = next((p.value for p in model.proto.metadata_props if p.key == KEY), None)
        if entry is not None:
            try:
                declared = json.loads(entry)
            except ValueError:
                declared = None
            if isinstance(declared, dict) and all(isinstance(why, str) for why in declared.values()):
                return cls(declared, complete=True)
            return cls()
        program = getattr(source, "exported_program", None)
        signature = getattr(program, "graph_signature", None)
        if program is None or signature is None:
            return cls()
        return _of_program(program, signature, model)

    def merged_into(self, name: str) -> tuple[str, ...]:
        """Return the parameters that an exporter merged into this initializer."""
        return tuple(lost for lost, (kept, _) in self.merged.items() if kept == name)

    def lost(self) -> Iterator[ParameterRow]:
        """Yield a row for each parameter that is not an initializer of its own."""
        for name, (kept, shape) in self.merged.items():
            yield ParameterRow(name, MERGED, shape, f"the exporter merged it into {kept}")
        for name, shape in self.folded.items():
            why = (
                "the exporter folded it into a constant; use amp_rewrite.train.from_torch(module, example) to train it"
            )
            yield ParameterRow(name, FOLDED, shape, why)


class Note(NamedTuple):
    """A sentence about the module for the report; not `always`: for steps in training mode."""

    text: str
    always: bool


def described(model: Model, declared: Mapping[str, str], notes: Sequence[Note] = ()) -> None:
    """Write what is known about the module into the metadata of a model."""
    model.proto.metadata_props.add(key=KEY, value=json.dumps(dict(declared)))
    if notes:
        model.proto.metadata_props.add(key=NOTES, value=json.dumps(notes))


def module_notes(model: Model, training_mode: bool) -> tuple[str, ...]:
    """Return the sentences about the module for a step."""
    entry = next((p.value for p in model.proto.metadata_props if p.key == NOTES), "[]")
    return tuple(text for text, always in json.loads(entry) if always or training_mode)


def _of_program(program: Any, signature: Any, model: Model) -> ModuleParameters:
    """Compare the module's tensors with the initializers of its export."""
    initializers = {t.name: t for t in model.proto.graph.initializer}
    tensors: Mapping[str, Any] = program.state_dict
    declared: dict[str, str] = {name: BUFFER for name in signature.buffers if name in initializers}
    merged: dict[str, tuple[str, tuple[int, ...]]] = {}
    folded: dict[str, tuple[int, ...]] = {}
    others = [t for t in initializers.values() if t.data_type == DType.FLOAT.code]
    for name in signature.parameters:
        tensor = tensors[name]
        if name in initializers:
            declared[name] = "" if tensor.requires_grad else NO_GRAD
            continue
        value = np.asarray(tensor.detach().float().cpu().numpy())
        kept = _holder(model, others, value)
        if kept is None:
            folded[name] = value.shape
        elif kept in signature.parameters or kept in (k for k, _ in merged.values()):
            merged[name] = (kept, value.shape)
        else:  # the first of its kind: a transposed weight, or one that the exporter renamed
            declared[kept] = "" if tensor.requires_grad else NO_GRAD
    return ModuleParameters(declared, merged, folded)


def _holder(model: Model, tensors: Sequence[TensorProto], value: Array) -> str | None:
    """Return the initializer that holds these numbers, perhaps transposed, or expanded to a batch."""
    for tensor in tensors:
        dims = tuple(tensor.dims)
        expanded = len(dims) == value.ndim > 1 and value.shape[0] == 1 and dims[1:] == value.shape[1:]
        if sorted(dims) != sorted(value.shape) and not expanded:
            continue
        array = model.array(tensor)
        if (dims == value.shape or expanded) and (array == value).all():
            return str(tensor.name)
        if value.ndim == 2 and dims == value.shape[::-1] and np.array_equal(array, value.T):
            return str(tensor.name)
    return None
