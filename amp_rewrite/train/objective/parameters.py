"""Selection of the trained initializers, with the reason for each."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from amp_rewrite.settings.door import stated
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
    states of recurrent layers, buffers by name, sinusoid tables and inverse frequencies, masks, and single numbers (an
    epsilon, a scale) that are not a weight of a product, convolution or normalization. What a name in `parameters`
    names is trained anyway; a glob selects among those that the rules leave, unless they leave none of its matches.

    TrainingError for a glob without a match, for an initializer in `parameters` that is not float32, for fewer than
    `least`, for weights that an exporter merged, and by default for half-precision weights, which could not be trained.
    O(nodes + uses); reads the values of every candidate.
    """
    initializers = [v for v in view.values if v.scope == MAIN and v.role is Role.INITIALIZER]
    names = {v.name: v for v in initializers}
    excluded = set(_matched(names, choice.freeze))
    floats = [v for v in initializers if view.dtype(v.id) is DType.FLOAT]
    if choice.parameters is None:
        half = [v for v in initializers if view.dtype(v.id) in _HALF and v.name not in excluded]
        _check_not_half(view, loss, half)
        asked = {v.name: False for v in floats}
    else:
        asked = dict.fromkeys(_matched(names, choice.parameters), False)
        other = next((names[n] for n in asked if view.dtype(names[n].id) is not DType.FLOAT), None)
        if other is not None:
            kind = type_name(view.dtype(other.id))
            raise TrainingError(f"parameter {other.name!r} is {kind}, but trained weights must be float32; cast it")
    routes = _routes(view, loss, floats)
    reasons = {v.name: _reason(view, v, routes, choice.module) for v in floats}
    if choice.parameters is not None:
        asked = _insisted(names, choice.parameters, reasons)
    left = [n for n in names if n in asked and n not in excluded and (asked[n] or reasons.get(n) is None)]
    if len(left) < least:
        _check_some(loss, left, [n for n in asked if asked[n] or reasons.get(n) is None])
    _check_unmerged(view, [names[n] for n in left if not asked[n]], choice.module)
    named = {v.name for v in floats} - asked.keys() | {n for n, why in choice.module.declared.items() if not why}
    rows = [*_rows(view, floats, left, reasons, (named, excluded)), *_constants(view)]
    return Selection(tuple(left), tuple(rows))


def _constants(view: View) -> Iterator[ParameterRow]:
    for value, tensor in view.constants.items():
        of_node = view.producer(value) is not None and view.dtype(value) is DType.FLOAT and math.prod(tensor.dims) > 1
        if of_node and any(view.ops[use.op].kind in WEIGHTED for use in view.uses[value]):
            why = "a Constant node; write it as an initializer to train it"
            yield ParameterRow(view.value_name(value), FROZEN, tuple(map(int, tensor.dims)), why)


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


def _insisted(
    names: Mapping[str, Value], globs: str | Sequence[str], reasons: Mapping[str, str | None]
) -> dict[str, bool]:
    asked: dict[str, bool] = {}
    for glob in as_names(globs):
        matched = _matches(names, glob)
        alone = all(reasons.get(name) is not None for name in matched)
        for name in matched:
            asked[name] = asked.get(name, False) or name == glob or alone
    return asked


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none at all"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_some(loss: str, left: Sequence[str], before: Sequence[str]) -> None:
    if before and not left:
        raise TrainingError("every parameter is frozen, so there is nothing to train; freeze fewer")
    if not left:
        raise TrainingError(
            f"the loss {loss!r} does not depend on a trainable float32 initializer; export the model with its weights"
            " as initializers, or name them in `parameters`"
        )


def _check_not_half(view: View, loss: str, half: Sequence[Value]) -> None:
    readers = _routes(view, loss, half).readers if half else ()
    weights = (v for v in half if any(view.ops[use.op].kind in WEIGHTED for use in view.uses[v.id]))
    if left := [v.name for v in weights if v.id in readers]:
        raise TrainingError(
            f"{_some(left)} of the model {'is' if len(left) == 1 else 'are'} in half precision, but trained weights"
            " must be float32; pass the float32 model (training_step lowers it), widen this one with"
            " convert(model, keep=['*']), or name the trained initializers in `parameters`"
        )


def _check_unmerged(view: View, left: Sequence[Value], module: ModuleParameters) -> None:
    for value in left:
        if module.declared or not fixed_values.merged(view, value):
            continue
        readers = len({use.op for use in view.uses[value.id]})
        who = f"{readers} ops read it and all its numbers are equal, so an exporter merged weights that were equal"
        raise TrainingError(
            f"the initializer {value.name!r} stands for several weights: {who}. Trained, they would stay one. Export"
            " with amp_rewrite.train.from_torch(module, example), which keeps them apart; or name it in `parameters`"
            " to train them as one, or in `freeze` to leave them"
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


def _rows(
    view: View,
    floats: Sequence[Value],
    left: Sequence[str],
    reasons: Mapping[str, str | None],
    choices: tuple[set[str], set[str]],
) -> Iterator[ParameterRow]:
    named, excluded = choices
    for value in floats:
        assert value.tensor is not None
        name, shape = value.name, tuple(int(dim) for dim in value.tensor.dims)
        if name in left:
            readers = len({use.op for use in view.uses[value.id]})
            why = [f"read by {readers} ops"] if readers > 1 else []
            lookups = (padding_index(view.ops[use.op].node) for use in view.uses[value.id])
            why += [f"look-ups of row {row} are padding" for row in {*lookups} - {None}]
            if reasons[name] is not None:
                why.append(f"named in parameters, although it is {reasons[name]}")
            yield ParameterRow(name, TRAINED, shape, ", ".join(why))
        elif name in excluded:
            yield ParameterRow(name, FROZEN, shape, "named in freeze")
        elif reasons[name] is not None:
            if reasons[name] != _UNREACHED or name in named:
                yield ParameterRow(name, FROZEN, shape, str(reasons[name]))
        else:
            yield ParameterRow(name, FROZEN, shape, "not named in parameters")
