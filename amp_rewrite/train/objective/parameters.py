"""Selection of the initializers to train, with the reason for each."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.names import as_names
from amp_rewrite.ir.nodes import MAIN, Role, Use, Value
from amp_rewrite.ir.op_classes import COPIES, LABEL_LOSSES, LAYERS, RECURRENT
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.gradients import VJPS
from amp_rewrite.rewrite.autodiff.vjp.movement import padding_index
from amp_rewrite.rewrite.autodiff.vjp.rule import Paths, Stop, paths
from amp_rewrite.train.arguments import quoted
from amp_rewrite.train.objective.losses import type_name

_HALF = (DType.FLOAT16, DType.BFLOAT16)


TRAINED, FROZEN = "trained", "frozen"
"""Roles of a parameter."""


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """A trained or frozen parameter of a model.

    Attributes:
        name: name of the initializer, or of the parameter of the PyTorch module.
        role: "trained" or "frozen".
        shape: the shape.
        why: the reason if it is frozen, otherwise a remark or "".
    """

    name: str
    role: str
    shape: tuple[int, ...]
    why: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


MODULE_KEY = "amp_rewrite.module"
"""Metadata key of the `FrozenReasons`."""
NOTES_KEY = "amp_rewrite.notes"
"""Metadata key of the notes about the module for the report."""
BUFFER = "a buffer of the module"
NO_GRAD = "a parameter with requires_grad=False"


FrozenReasons = Mapping[str, str] | None
"""Reasons for freezing tensors of the exported PyTorch module or Keras model, by name; "" for a trained parameter. None
if the tensors are unknown."""


def frozen_reasons(model: Model) -> FrozenReasons:
    """Read the `FrozenReasons` from the metadata of a model."""
    return next((json.loads(p.value) for p in model.proto.metadata_props if p.key == MODULE_KEY), None)


class Note(NamedTuple):
    """A sentence about the module for the report. `always`: False shows it only in training mode."""

    text: str
    always: bool


def write_module(model: Model, declared: Mapping[str, str], notes: Sequence[Note] = ()) -> None:
    """Write the `FrozenReasons` and the notes about the module to the metadata of a model."""
    model.proto.metadata_props.add(key=MODULE_KEY, value=json.dumps(dict(declared)))
    if notes:
        model.proto.metadata_props.add(key=NOTES_KEY, value=json.dumps(notes))


def module_notes(model: Model, training_mode: bool) -> tuple[str, ...]:
    entry = next((p.value for p in model.proto.metadata_props if p.key == NOTES_KEY), "[]")
    return tuple(text for text, always in json.loads(entry) if always or training_mode)


@dataclass(frozen=True, slots=True)
class ParameterGlobs:
    """Globs for the initializers to train and to freeze."""

    parameters: str | Sequence[str] | None = None
    freeze: str | Sequence[str] = ()
    module: FrozenReasons = None

    def __post_init__(self) -> None:
        for globs in (self.parameters, self.freeze):
            if not isinstance(globs, (str, Sequence, type(None))) or not all(isinstance(g, str) for g in globs or ()):
                raise TrainingError(f"parameters and freeze must be globs that match initializers, not {quoted(globs)}")

    def freezes(self, name: str) -> bool:
        return any(_matches([name], glob) for glob in as_names(self.freeze))


def parameter_rows(view: View, loss: str, choice: ParameterGlobs, minimum: int = 1) -> tuple[ParameterRow, ...]:
    """Return a row for each float32 initializer, in the order of the model.

    By default, every initializer with a gradient of the loss is trained, except running statistics, initial states of
    recurrent layers, buffers (recognized by name), tables of sinusoids, masks, and scalars that no product, convolution
    or normalization reads as a weight (an epsilon, a scale). An exact name in `parameters` trains even these; a glob
    selects only other initializers.

    TrainingError for a glob without a match, for an initializer in `parameters` that is not float32, for fewer than
    `minimum` trained ones, for weights that an exporter merged, and by default for half-precision weights, which cannot
    be trained. O(nodes + uses); reads the values of every candidate.
    """
    initializers = [v for v in view.values if v.scope == MAIN and v.role is Role.INITIALIZER]
    names = {v.name: v for v in initializers}
    frozen, exact_names = set(_matched(names, choice.freeze)), set(as_names(choice.parameters or ()))
    floats = [v for v in initializers if view.dtype(v.id) is DType.FLOAT]
    if choice.parameters is None:
        half = [v for v in initializers if view.dtype(v.id) in _HALF and v.name not in frozen]
        _check_not_half(view, loss, half)
        selected = set(names)
    else:
        selected = set(_matched(names, choice.parameters))
        other = next((v for v in initializers if v.name in selected and view.dtype(v.id) is not DType.FLOAT), None)
        if other is not None:
            kind = type_name(view.dtype(other.id))
            raise TrainingError(f"parameter {other.name!r} is {kind}, but trained weights must be float32; cast it")
    gradients, rows = _gradient_paths(view, loss, floats), []
    for value in floats:
        assert value.tensor is not None
        name, role, why = value.name, FROZEN, _reason(view, value, gradients, choice.module)
        if name in frozen:
            why = "named in freeze"
        elif why is None and name not in selected:
            why = "not named in parameters"
        elif why is None or name in exact_names:
            if name not in exact_names:
                _check_unmerged(view, value, choice.module)
            role, why = TRAINED, _remark(view, value, why)
        elif why == _UNREACHED and name not in (choice.module or ()):
            continue
        rows.append(ParameterRow(name, role, tuple(map(int, value.tensor.dims)), why))
    if sum(row.role == TRAINED for row in rows) < minimum:
        raise TrainingError(
            f"the loss {loss!r} does not depend on any trainable float32 initializer, or all of them are frozen; export"
            " the model with its weights as initializers, or name them in `parameters`"
        )
    return tuple(rows)


def _remark(view: View, value: Value, reason: str | None) -> str:
    readers = len({use.op for use in view.uses[value.id]})
    remarks = [f"read by {readers} ops"] if readers > 1 else []
    lookups = (padding_index(view.ops[use.op].node) for use in view.uses[value.id])
    remarks += [f"row {row} is padding" for row in {*lookups} - {None}]
    if reason is not None:
        remarks.append(f"named in parameters, overriding: {reason}")
    return ", ".join(remarks)


def _matched(names: Mapping[str, Value], globs: str | Sequence[str]) -> list[str]:
    selected: dict[str, None] = {}
    for glob in as_names(globs):
        matched = _matches(names, glob)
        if not matched:
            hint = advice(glob, names, f"the model has {_listed(list(names))}")
            raise TrainingError(f"{glob!r} matches no initializer of the model; {hint}")
        selected.update(dict.fromkeys(matched))
    return list(selected)


def _matches(names: Iterable[str], glob: str) -> list[str]:
    return [name for name in names if name == glob or fnmatch.fnmatchcase(name, glob)]


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no initializers"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_not_half(view: View, loss: str, half: Sequence[Value]) -> None:
    readers = _gradient_paths(view, loss, half).readers if half else ()
    weights = (v for v in half if any(view.ops[use.op].kind in WEIGHTED for use in view.uses[v.id]))
    if affected := [v.name for v in weights if v.id in readers]:
        raise TrainingError(
            f"the model stores {_listed(affected)} in half precision, but trained weights must be float32; pass the"
            " float32 model (training_step lowers it), widen this one with convert(model, keep=['*']), or name the"
            " float32 initializers to train in `parameters`"
        )


def _check_unmerged(view: View, value: Value, module: FrozenReasons) -> None:
    assert value.tensor is not None
    readers = len({use.op for use in view.uses[value.id]})
    if module or readers < 2:
        return
    array = view.model.array(value.tensor)
    if array.size < 2 or array.min() != array.max():  # elements of deliberately tied weights differ
        return
    raise TrainingError(
        f"the initializer {value.name!r} stands for several weights: {readers} ops read it and all its elements are"
        " equal, so an exporter merged equal weights. Training would keep them equal. Export with"
        " amp_rewrite.train.from_torch(module, example), which keeps weights separate, or name the initializer in"
        " `parameters` to train it as one weight, or in `freeze` to leave it unchanged"
    )


def _gradient_paths(view: View, loss: str, candidates: Sequence[Value]) -> Paths:
    target = next(v.id for v in view.values if v.scope == MAIN and v.name == loss)
    return paths(view, MAIN, [target], [v.id for v in candidates], VJPS)


def _reason(view: View, value: Value, gradients: Paths, module: FrozenReasons) -> str | None:
    uses = [use for use in view.uses[value.id] if _has_gradient(view, value, use, gradients)]
    if not uses:
        return _UNREACHED
    if module is not None:
        return module.get(value.name, _FROM_EXPORTER) or None
    return _why_not_a_weight(view, value, {view.ops[u.op].kind for u in uses})


_FROM_EXPORTER = "a constant from the exporter, not a parameter of the module"
_UNREACHED = "no gradient of the loss reaches it"


def _has_gradient(view: View, value: Value, use: Use, gradients: Paths) -> bool:
    op = view.ops[use.op]
    row = VJPS.get(op.kind)
    class_weights = op.op_type in LABEL_LOSSES and use.slot > 1
    stopped = class_weights or (row is not None and isinstance(row.entry(use.slot), Stop))
    if stopped or value.id not in gradients.readers:
        return False
    if op.scope == MAIN:
        return use.slot in gradients.slots.get(op.id, ())
    return any(value.id in captured for captured in gradients.captured.values())


# -- initializers that are not weights: statistics, states, buffers, tables, masks ------------------------------

WEIGHTED = LAYERS | RECURRENT | {"Einsum", "PRelu", "LayerNormalization", "RMSNormalization"}
"""Ops with weights: even a scalar that they read is a weight."""
_STATISTICS = (3, 4)
_STATES = (5, 6)
"""Input slots of recurrent ops for initial states, which exporters fill with zeros."""
_MAX_WEIGHT = 1e4
"""Maximum magnitude of a weight; an initializer with larger numbers is a mask."""
_BUFFER_NAMES = re.compile(
    r"(?:^|[./_])(?:\w*inv_freq|freqs_cis|(?:cos|sin)_cached|running_(?:mean|var)|moving_(?:mean|variance)"
    r"|(?:\w+_)?(?:attn|attention|causal)_mask|masked_bias|alibi|relative_coords_table|relative_position_index"
    r"|position_ids|(?:pixel|image)_(?:mean|std)|mel_filters)$"
)
"""Names of buffers in PyTorch and Keras, as the last part of a path."""
_MAX_ROWS = 4096  # rows of a table to examine
_MIN_ROWS, _MIN_EQUATIONS = 4, 8
_TOLERANCE = 1e-3
_MIN_CURVATURE = 0.1
"""At least one column must have 2 cos(w) this far below 2; for a straight line the distance is 0."""


def _why_not_a_weight(view: View, value: Value, readers: Collection[str]) -> str | None:
    """Return why an initializer is not a weight; None if it is. `readers`: types of ops with a gradient for it."""
    assert value.tensor is not None
    uses = view.uses[value.id]
    if any(view.ops[u.op].kind == "BatchNormalization" and u.slot in _STATISTICS for u in uses):
        return "running statistics"
    if all(_is_state(view, use) for use in uses):
        return "the initial state of a recurrence"
    if _BUFFER_NAMES.search(value.name):
        return "named like a buffer"
    array = view.model.array(value.tensor)
    if array.size <= 1:
        return None if set(readers) & WEIGHTED else "a scalar that no product or norm reads"
    if np.abs(array).max() > _MAX_WEIGHT:
        return f"a mask, with numbers above {_MAX_WEIGHT:g}"
    if set(readers) == {"Mul"} and array.ndim > 1 and np.ptp(array) and np.isin(array, (0, 1)).all():
        return "a mask of zeros and ones"
    squeezed = array.squeeze()
    if squeezed.ndim > 1 and is_sinusoids(squeezed.reshape(len(squeezed), -1)):
        return "a table of sinusoids"
    return None


# -- states ------------------------------------------------------------------------------------------


def _is_state(view: View, use: Use) -> bool:
    """True if the value is used only as an initial state of a recurrence, possibly after reshaping or repetition."""
    op = view.ops[use.op]
    if op.kind in RECURRENT:
        return use.slot in _STATES
    if op.kind in ("Loop", "Scan"):
        scanned = int_attribute(op.node, "num_scan_inputs", 0)
        return (2 if op.kind == "Loop" else 0) <= use.slot < len(op.inputs) - scanned
    if op.kind not in COPIES or use.slot != 0:
        return False
    inner = [u for out in op.outputs if out is not None for u in view.uses[out]]
    return bool(inner) and all(_is_state(view, u) for u in inner)


# -- tables ------------------------------------------------------------------------------------------


def is_sinusoids(table: Array) -> bool:
    """True if each column of a table [positions, features] is a sinusoid of the position.

    A sine or cosine x of angular frequency w satisfies x(p + 1) + x(p - 1) = 2 cos(w) x(p). A padding row of zeros near
    the start is skipped, as are all rows before it.
    """
    padding = np.flatnonzero(~table[:_MIN_ROWS].any(axis=1))
    table = table[padding[-1] + 1 :] if padding.size else table
    if len(table) < _MIN_ROWS or (len(table) - _MIN_ROWS + 1) * table.shape[1] < _MIN_EQUATIONS:
        return False
    first_rows = table[:_MIN_ROWS]  # reject most weights without a copy of the whole table
    for rows in (first_rows, table[:_MAX_ROWS]):
        size = np.abs(rows).max()
        if not 0 < size < np.inf or not np.ptp(rows):
            return False
        x = rows.astype(np.float64) / size
        sums, middle = x[2:] + x[:-2], x[1:-1]
        square = (middle * middle).sum(0)
        factor = np.where(square > 0, (sums * middle).sum(0) / np.where(square > 0, square, 1), 0)
        oscillates = np.abs(factor).max() <= 2 + _TOLERANCE and factor.min() < 2 - _MIN_CURVATURE
        if not oscillates or np.abs(sums - factor * middle).max() > _TOLERANCE:
            return False
    return bool(np.ptp(table[:_MAX_ROWS], axis=0).max() > _TOLERANCE * np.abs(table[:_MAX_ROWS]).max())
