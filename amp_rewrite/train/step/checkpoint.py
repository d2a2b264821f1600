"""Checkpoints: all state of a training step in one .npz file, written atomically and read without pickle.

Array names are paths: "parameter/<name>", "slot/<name>/<slot>", "buffer/<name>" and "step". A dynamic loss scale
adds "loss_scale" and "good_steps"; Dropout and random ops add "random". `numpy.load` lists the names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.sources import Npz
from amp_rewrite.files.casting import Array
from amp_rewrite.files.disk import replacing
from amp_rewrite.train.update.graph import StateVariable

MAX_BYTES = 1 << 40
"""Maximum size of a checkpoint in memory, in bytes."""
SLOT = "slot/"
PATHS = (
    *("step", SLOT, "parameter/", "buffer/", "loss_scale", "good_steps", "count/", "micro_batch", "accumulated/"),
    *("random", "amp_rewrite/"),
)
"""Prefixes of all paths in files of `Trainer.save`."""
VERSION = 1
_VERSION, _MODEL = "amp_rewrite/version", "amp_rewrite/model"
# State that may be missing from a checkpoint (the initial value is used) or unused (it is ignored).
_OPTIONAL = ("loss_scale", "good_steps", "micro_batch", "accumulated/", "count/", "random")


def save(path: str | Path, state: Mapping[str, Array], fingerprint: str) -> None:
    """Write the state by path, with the fingerprint of the model; a checkpoint at `path` is replaced.

    TrainingError for a path that does not end in .npz, or cannot be written.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise TrainingError(f"cannot write a checkpoint to {path}; use a file name ending in .npz")
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
    omitted: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Return the state in a checkpoint by path: all `variables`, and counts. A loss scale is optional.

    `omitted`: prefixes of paths to ignore.

    TrainingError for a checkpoint of another version, model, optimizer or set of parameters, and for one
    saved within a step with more `micro_batches`. FeedError for a file that is damaged, contains pickled objects, or
    needs more than `MAX_BYTES` bytes.
    """
    path = Path(path)
    file = Npz(path)
    if not {_VERSION, _MODEL} <= set(file.names):
        raise TrainingError(f"{path} is not a checkpoint of a training step; use a file written by Trainer.save")
    arrays = file.read({name: name for name in file.names}, MAX_BYTES)
    version, model = arrays.pop(_VERSION), arrays.pop(_MODEL)
    if version.tolist() != VERSION:
        raise TrainingError(
            f"{path} is a checkpoint of version {version}, but this package reads version {VERSION}; use the package"
            " that wrote it"
        )
    if model.tobytes() != fingerprint.encode():
        raise TrainingError(
            f"{path} is a checkpoint of another model: its ops or its weights' shapes differ; create the step from"
            " that model"
        )
    completed = int(arrays.get("micro_batch", 0))
    if completed >= micro_batches:
        raise TrainingError(
            f"{path} was saved within a step, after {completed} of its micro-batches, but this step has"
            f" {micro_batches}; create it with the same number"
        )
    arrays = {name: array for name, array in arrays.items() if not name.startswith(omitted)}
    initial = {v.name: v.initial for v in variables}
    state = {name: array for name, array in arrays.items() if name in initial or name.startswith("count/")}
    state |= {name: array for name, array in initial.items() if name not in arrays and name.startswith(_OPTIONAL)}
    extra = (name for name in arrays if name not in state and not name.startswith(_OPTIONAL))
    wrong = (n for n, a in initial.items() if n not in state or (state[n].shape, state[n].dtype) != (a.shape, a.dtype))
    differing = next(iter((*extra, *wrong)), None)
    if differing is not None:
        raise TrainingError(
            f"{path} and this step differ in {differing!r}: the file was saved with another optimizer or other trained"
            " parameters; create the step with the same ones"
        )
    return state


def saved_state(saved: Mapping[str, Array] | str | os.PathLike[str]) -> Mapping[str, Array]:
    """Return a state by path: the mapping itself, or the contents of a file. FeedError for a damaged file."""
    if not isinstance(saved, (str, os.PathLike)):
        return saved
    file = Npz(Path(saved))
    return file.read({name: name for name in file.names}, MAX_BYTES)


def by_path(iterations: int, slots: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return the step count and the slots by path in checkpoints."""
    by_slot = {f"{SLOT}{name}/{slot}": array for name, arrays in slots.items() for slot, array in arrays.items()}
    return {"step": np.array(iterations, np.int64), **by_slot}
