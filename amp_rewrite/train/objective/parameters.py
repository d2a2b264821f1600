"""Selection of the trained initializers, with the reason for each."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.files.model import Model
from amp_rewrite.ir.names import as_names
from amp_rewrite.ir.nodes import MAIN, Role, Use, Value
from amp_rewrite.ir.op_classes import LABEL_LOSSES
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.vjp.movement import padding_index
from amp_rewrite.rewrite.autodiff.vjp.paths import Paths, paths
from amp_rewrite.rewrite.autodiff.vjp.rule import Stop
from amp_rewrite.rewrite.autodiff.vjp.table import VJPS
from amp_rewrite.train.door import stated
from amp_rewrite.train.objective import fixed_values
from amp_rewrite.train.objective.fixed_values import WEIGHTED
from amp_rewrite.train.objective.losses import type_name

_HALF = (DType.FLOAT16, DType.BFLOAT16)


TRAINED, FROZEN = "trained", "frozen"
"""Roles of a parameter."""


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """A parameter of a model, trained or not.

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
        """Return the facts about the module in the model's metadata."""
        entry = next((p.value for p in model.proto.metadata_props if p.key == KEY), None)
        return cls() if entry is None else cls(json.loads(entry), complete=True)


class Note(NamedTuple):
    """A sentence about the module for the report; not `always`: for steps in training mode."""

    text: str
    always: bool


def described(model: Model, declared: Mapping[str, str], notes: Sequence[Note] = ()) -> None:
    """Write the facts about the module into the metadata of a model."""
    model.proto.metadata_props.add(key=KEY, value=json.dumps(dict(declared)))
    if notes:
        model.proto.metadata_props.add(key=NOTES, value=json.dumps(notes))


def module_notes(model: Model, training_mode: bool) -> tuple[str, ...]:
    entry = next((p.value for p in model.proto.metadata_props if p.key == NOTES), "[]")
    return tuple(text for text, always in json.loads(entry) if always or training_mode)


@dataclass(frozen=True)
class Selection:
    """The trained initializers in the model's order, and a row for each candidate."""

    names: tuple[str, ...]
    rows: tuple[ParameterRow, ...]


@dataclass(frozen=True, slots=True)
class ParameterGlobs:
    """A user's choice of parameters: globs on names of initializers."""

    parameters: str | Sequence[str] | None = None
    freeze: str | Sequence[str] = ()
    module: ModuleParameters = field(default_factory=ModuleParameters)

    def __post_init__(self) -> None:
        for globs in (self.parameters, self.freeze):
            if not isinstance(globs, (str, Sequence, type(None))) or not all(isinstance(g, str) for g in globs or ()):
                raise TrainingError(f"parameters and freeze take globs on names of initializers, not {stated(globs)}")

    def freezes(self, name: str) -> bool:
        return any(_matches([name], glob) for glob in as_names(self.freeze))


def trained(view: View, loss: str, choice: ParameterGlobs, least: int = 1) -> Selection:
    """Return the trained float32 initializers, and why each is or is not.

    By default it is every initializer that the loss depends on through gradients, except running statistics, initial
    states of recurrent layers, buffers by name, tables of sinusoids, masks, and single numbers (an epsilon, a scale)
    that are not a weight of a product, convolution or normalization. What a name in `parameters` names is trained
    anyway; a glob selects among those that the rules leave.

    TrainingError for a glob without a match, for an initializer in `parameters` that is not float32, for fewer than
    `least`, for weights that an exporter merged, and by default for half-precision weights, which could not be trained.
    O(nodes + uses); reads the values of every candidate.
    """
    initializers = [v for v in view.values if v.scope == MAIN and v.role is Role.INITIALIZER]
    names = {v.name: v for v in initializers}
    frozen, exact = set(_matched(names, choice.freeze)), set(as_names(choice.parameters or ()))
    floats = [v for v in initializers if view.dtype(v.id) is DType.FLOAT]
    if choice.parameters is None:
        half = [v for v in initializers if view.dtype(v.id) in _HALF and v.name not in frozen]
        _check_not_half(view, loss, half)
        asked = set(names)
    else:
        asked = set(_matched(names, choice.parameters))
        other = next((v for v in initializers if v.name in asked and view.dtype(v.id) is not DType.FLOAT), None)
        if other is not None:
            kind = type_name(view.dtype(other.id))
            raise TrainingError(f"parameter {other.name!r} is {kind}, but trained weights must be float32; cast it")
    routes, rows = _routes(view, loss, floats), []
    for value in floats:
        assert value.tensor is not None
        name, role, why = value.name, FROZEN, _reason(view, value, routes, choice.module)
        if name in frozen:
            why = "named in freeze"
        elif why is None and name not in asked:
            why = "not named in parameters"
        elif why is None or name in exact:
            if name not in exact:
                _check_unmerged(view, value, choice.module)
            role, why = TRAINED, _about(view, value, why)
        elif why == _UNREACHED and name not in choice.module.declared:
            continue
        rows.append(ParameterRow(name, role, tuple(map(int, value.tensor.dims)), why))
    left = tuple(row.name for row in rows if row.role == TRAINED)
    if len(left) < least:
        raise TrainingError(
            f"the loss {loss!r} does not depend on a trainable float32 initializer, or all are frozen; export the model"
            " with its weights as initializers, or name them in `parameters`"
        )
    return Selection(left, tuple(rows))


def _about(view: View, value: Value, reason: str | None) -> str:
    readers = len({use.op for use in view.uses[value.id]})
    about = [f"read by {readers} ops"] if readers > 1 else []
    lookups = (padding_index(view.ops[use.op].node) for use in view.uses[value.id])
    about += [f"look-ups of row {row} are padding" for row in {*lookups} - {None}]
    if reason is not None:
        about.append(f"named in parameters, although it is {reason}")
    return ", ".join(about)


def _matched(names: Mapping[str, Value], globs: str | Sequence[str]) -> list[str]:
    selected: dict[str, None] = {}
    for glob in as_names(globs):
        matched = _matches(names, glob)
        if not matched:
            hint = advice(glob, names, f"it has {_some(list(names))}")
            raise TrainingError(f"parameter {glob!r} is not an initializer of the model; {hint}")
        selected.update(dict.fromkeys(matched))
    return list(selected)


def _matches(names: Iterable[str], glob: str) -> list[str]:
    return [name for name in names if name == glob or fnmatch.fnmatchcase(name, glob)]


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none at all"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_not_half(view: View, loss: str, half: Sequence[Value]) -> None:
    readers = _routes(view, loss, half).readers if half else ()
    weights = (v for v in half if any(view.ops[use.op].kind in WEIGHTED for use in view.uses[v.id]))
    if left := [v.name for v in weights if v.id in readers]:
        raise TrainingError(
            f"{_some(left)} of the model {'is' if len(left) == 1 else 'are'} in half precision, but trained weights"
            " must be float32; pass the float32 model (training_step lowers it), widen this one with"
            " convert(model, keep=['*']), or name the trained initializers in `parameters`"
        )


def _check_unmerged(view: View, value: Value, module: ModuleParameters) -> None:
    if module.declared or not fixed_values.merged(view, value):
        return
    readers = len({use.op for use in view.uses[value.id]})
    raise TrainingError(
        f"the initializer {value.name!r} stands for several weights: {readers} ops read it and all its numbers are"
        " equal, so an exporter merged weights that were equal. Trained, they would stay one. Export with"
        " amp_rewrite.train.from_torch(module, example), which keeps them apart; or name it in `parameters` to train"
        " them as one, or in `freeze` to leave them"
    )


def _routes(view: View, loss: str, candidates: Sequence[Value]) -> Paths:
    target = next(v.id for v in view.values if v.scope == MAIN and v.name == loss)
    return paths(view, MAIN, [target], [v.id for v in candidates], VJPS)


def _reason(view: View, value: Value, routes: Paths, module: ModuleParameters) -> str | None:
    passed = [u for u in view.uses[value.id] if value.id in routes.readers and _passes(view, value, u, routes)]
    if not passed:
        return _UNREACHED
    if value.name in module.declared:
        return module.declared[value.name] or None
    if module.complete:
        return _OF_EXPORTER
    return fixed_values.reason(view, value, {view.ops[u.op].kind for u in passed})


_OF_EXPORTER = "a constant of the exporter, not a parameter of the module"
_UNREACHED = "no gradient of the loss reaches it"


def _passes(view: View, value: Value, use: Use, routes: Paths) -> bool:
    op = view.ops[use.op]
    row = VJPS.get((op.domain, op.op_type))
    class_weights = op.op_type in LABEL_LOSSES and use.slot > 1
    if class_weights or (row is not None and isinstance(row.entry(use.slot), Stop)):
        return False
    if op.scope == MAIN:
        return use.slot in routes.slots.get(op.id, ())
    return any(value.id in captured for captured in routes.captured.values())
