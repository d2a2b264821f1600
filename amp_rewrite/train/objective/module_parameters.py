"""Parameters and buffers of the module that a model was exported from, in its metadata, and their rows in a report.

A model of `from_torch` or `from_keras` has them. Other models are trained by what their initializers look like.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from amp_rewrite.files.model import Model

TRAINED, FROZEN = "trained", "frozen"
"""Roles of a parameter."""


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """A parameter of a model and what becomes of it.

    Attributes:
        name: the initializer, or the parameter of the PyTorch module.
        role: "trained" or "frozen".
        shape: the shape; that of the trained value.
        why: the reason.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    why: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


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
    `complete`: `declared` has all tensors of the module.
    """

    declared: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def of(cls, model: Model) -> ModuleParameters:
        """Return what the model's metadata know about the module."""
        entry = next((p.value for p in model.proto.metadata_props if p.key == KEY), None)
        try:
            declared = None if entry is None else json.loads(entry)
        except ValueError:
            declared = None
        if isinstance(declared, dict) and all(isinstance(why, str) for why in declared.values()):
            return cls(declared, complete=True)
        return cls()


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
