"""Checkpoints: all state of a training step in one .npz file, written atomically, read without pickle.

Array names are paths: "parameter/<name>", "slot/<name>/<slot>", "buffer/<name>", "step", with a dynamic loss scale
"loss_scale" and "good_steps", and with Dropout or random ops "random". `numpy.load` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.sources import Npz
from amp_rewrite.files.casting import Array
from amp_rewrite.files.disk import replacing
from amp_rewrite.settings.loss_scale import LossScale
from amp_rewrite.train.keras.loss_scale_optimizer import scale_by_path
from amp_rewrite.train.keras.optimizer import LIMIT, StatefulOptimizer
from amp_rewrite.train.update.graph import StateVariable
from amp_rewrite.train.update.optimizer import Optimizer

VERSION = 1
_VERSION, _MODEL = "amp_rewrite/version", "amp_rewrite/model"
# State that a checkpoint may lack or have in addition: a loss scale then starts from its initial value.
_OPTIONAL = ("loss_scale", "good_steps", "micro_batch", "accumulated/", "count/", "random")
_NUMBERS = ("step", "loss_scale", "good_steps", "micro_batch", "count/")
"""State that is one number ≥ 0; a loss scale is above 0."""


def save(path: str | Path, state: Mapping[str, Array], fingerprint: str) -> None:
    """Write the state, by path, of the model with this fingerprint; a checkpoint at `path` is replaced.

    TrainingError for a path that does not end in .npz or cannot be written.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise TrainingError(f"cannot write a checkpoint to {path}: use a file name that ends in .npz")
    header = {_VERSION: np.array(VERSION, np.int64), _MODEL: np.frombuffer(fingerprint.encode(), np.uint8)}
    try:
        with replacing(path) as file:
            np.savez(file, **header, **state)  # type: ignore[arg-type]
    except OSError as cause:
        raise TrainingError(f"cannot write a checkpoint to {path}: {cause.strerror or cause}") from cause


def load(
    path: str | Path,
    variables: Sequence[StateVariable],
    fingerprint: str,
    *,
    micro_batches: int = 1,
    left_out: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Return the state of a checkpoint by path: all `variables`, and counts. A missing loss scale is the initial one.

    `left_out`: prefixes of paths that are not read.

    TrainingError for a checkpoint of another version, model, optimizer or set of parameters, for one saved inside a
    step with more `micro_batches`, and for impossible counts and scales. FeedError for a file that is damaged,
    contains pickled objects, or needs more than `LIMIT` bytes.
    """
    path = Path(path)
    file = Npz(path)
    if not {_VERSION, _MODEL} <= set(file.names):
        raise TrainingError(f"{path} is not a checkpoint of a training step; use a file written by Trainer.save")
    arrays = file.read({name: name for name in file.names}, LIMIT)
    version, model = arrays.pop(_VERSION), arrays.pop(_MODEL)
    if version.shape != () or version.dtype.kind not in "iu" or int(version) != VERSION:
        raise TrainingError(
            f"{path} is a checkpoint of version {version}, but this package reads version {VERSION}; use the package"
            " that wrote it"
        )
    if model.dtype != np.uint8 or model.tobytes() != fingerprint.encode():
        raise TrainingError(
            f"{path} is a checkpoint of another model: its ops or its weights' shapes differ; make the step from that"
            " model"
        )
    arrays = {name: array for name, array in arrays.items() if not name.startswith(left_out)} if left_out else arrays
    return _fitted(path, arrays, variables, micro_batches)


def _fitted(
    path: Path, arrays: Mapping[str, Array], variables: Sequence[StateVariable], micro_batches: int
) -> dict[str, Array]:
    known = {v.name: v for v in variables}
    strange = next((name for name in arrays if name not in known and not name.startswith(_OPTIONAL)), None)
    if strange is not None:
        raise TrainingError(f"{path} has {strange!r}, but this step does not; {_differs(strange)}")
    for name, array in arrays.items():
        _check_possible(path, name, array)
    begun = int(arrays.get("micro_batch", 0))
    if begun >= micro_batches:
        here = "each run is a step" if micro_batches == 1 else f"{micro_batches} runs make a step"
        raise TrainingError(
            f"{path} was saved inside a step, after {begun} of its micro-batches, but here {here}; make the step with"
            " the same number of micro-batches"
        )
    state = {name: array for name, array in arrays.items() if name.startswith("count/")}
    for name, variable in known.items():
        if name not in arrays and not name.startswith(_OPTIONAL):
            raise TrainingError(f"{path} lacks {name!r}; {_differs(name)}")
        array = arrays.get(name, variable.initial)
        if (array.shape, array.dtype) != (variable.initial.shape, variable.initial.dtype):
            expected = f"{variable.initial.dtype} {list(variable.initial.shape)}"
            raise TrainingError(
                f"{path}: {name!r} is {array.dtype} {list(array.shape)}, but the step has {expected}; {_differs(name)}"
            )
        state[name] = array
    return state


def _check_possible(path: Path, name: str, array: Array) -> None:
    if not name.startswith(_NUMBERS):
        return
    kinds, legal = ("f", "above 0") if name == "loss_scale" else ("iu", "≥ 0")
    number = array.shape == () and array.dtype.kind in kinds and bool(np.isfinite(array))
    if not number or array < 0 or (name == "loss_scale" and not array):
        raise TrainingError(
            f"{path} is damaged: {name!r} is {' '.join(str(array).split())[:80]}, but must be a number {legal};"
            " load an older checkpoint"
        )


def _differs(name: str) -> str:
    if name.startswith(_NUMBERS):
        return "it is damaged: load an older checkpoint"
    if name.startswith("slot/"):
        return "it was saved with another optimizer: make the step with that optimizer"
    return "it was saved with other trained parameters: make the step with the same ones"


def brought(
    owner: StatefulOptimizer, scale: LossScale | None, state: Sequence[StateVariable]
) -> tuple[StateVariable, ...]:
    """Return the state of a step with the state of an optimizer object, and the current loss scale.

    TrainingError for a slot of another shape than its parameter.
    """
    values = owner.checkpoint() | scale_by_path(scale)
    return tuple(replace(v, initial=_fitting(v, values[v.name])) if v.name in values else v for v in state)


def check_unchanged(owner: StatefulOptimizer, rule: Optimizer) -> None:
    """Raise TrainingError if a hyperparameter other than the learning rate was set after the step was made."""
    for part in fields(rule):
        now, then = getattr(owner.rule, part.name, None), getattr(rule, part.name)
        if now != then and part.name != "learning_rate":
            raise TrainingError(
                f"{part.name} of the optimizer was set to {now!r} after the step was made with {then!r}, which is a"
                " constant of the step; make the step again"
            )


def _fitting(variable: StateVariable, array: Array) -> Array:
    if array.shape != variable.initial.shape:
        raise TrainingError(
            f"the optimizer's {variable.name!r} has shape {list(array.shape)}, but the step needs"
            f" {list(variable.initial.shape)}; pass an optimizer that trained this model, or a new one"
        )
    return np.array(array, variable.initial.dtype)
