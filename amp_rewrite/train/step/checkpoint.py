"""Checkpoints: all state of a training step in one .npz file, written whole or not at all, read without pickle.

The arrays are named by their paths: "parameter/<name>", "slot/<name>/<slot>", "buffer/<name>", "step", and with a
dynamic loss scale "loss_scale" and "good_steps"; so `numpy.load` shows what is in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.npy import Npz
from amp_rewrite.files.scratch import replacing
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.step.update import StateVariable

VERSION = 1
LIMIT = 1 << 40
"""Bytes that a checkpoint may need when it is read, unless told otherwise."""

_VERSION, _MODEL = "amp_rewrite/version", "amp_rewrite/model"
# State without which a step can begin, and which it need not know: a loss scale starts from its beginning.
_OPTIONAL = ("loss_scale", "good_steps", "micro_batch", "accumulated/", "count/")
_BEGUN = "micro_batch"
_NUMBERS = ("step", "loss_scale", "good_steps", "micro_batch", "count/")
"""State that is one number of 0 or more; a loss scale of 1 or more."""


def save(path: str | Path, state: Mapping[str, Array], fingerprint: str) -> None:
    """Write the state, by path, of the model with this fingerprint; an older checkpoint at `path` is replaced.

    TrainingError for a path that does not end in .npz or cannot be written.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise TrainingError(f"cannot write a checkpoint to {path}: name a .npz file")
    arrays = {
        _VERSION: np.array(VERSION, np.int64),
        _MODEL: np.frombuffer(fingerprint.encode(), np.uint8),
        **state,
    }
    try:
        with replacing(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as cause:
        raise TrainingError(f"cannot write a checkpoint to {path}: {cause.strerror or cause}") from cause


def load(
    path: str | Path,
    variables: Sequence[StateVariable],
    fingerprint: str,
    *,
    micro_batches: int = 1,
    limit: int = LIMIT,
) -> dict[str, Array]:
    """The state of a checkpoint by path: all of `variables`, and counts. A loss scale that it lacks is the initial one.

    TrainingError for a checkpoint of another version, model, optimizer or set of parameters, for one saved within a
    step that these `micro_batches` would not end, and for counts and scales that no step leaves behind; FeedError
    for a file that is damaged, holds pickled objects, or needs more than `limit` bytes.
    """
    path = Path(path)
    file = Npz(path)
    if not {_VERSION, _MODEL} <= set(file.names):
        raise TrainingError(f"{path} is no checkpoint of a training step; name one that Trainer.save wrote")
    found = file.read({name: name for name in file.names}, limit)
    version, model = found.pop(_VERSION), found.pop(_MODEL)
    if version.shape != () or version.dtype.kind not in "iu" or int(version) != VERSION:
        raise TrainingError(f"{path} is a checkpoint of version {version}; this package reads version {VERSION}")
    if model.dtype != np.uint8 or model.tobytes() != fingerprint.encode():
        raise TrainingError(f"{path} is a checkpoint of another model: its ops or its weights' shapes differ")
    return _fitted(path, found, variables, micro_batches)


def _fitted(
    path: Path, found: Mapping[str, Array], variables: Sequence[StateVariable], micro_batches: int
) -> dict[str, Array]:
    known = {v.name: v for v in variables}
    strange = next((name for name in found if name not in known and not name.startswith(_OPTIONAL)), None)
    if strange is not None:
        raise TrainingError(f"{path} holds {strange!r}, and this step has no such state; {_differs(strange)}")
    for name, array in found.items():
        _check_possible(path, name, array)
    _check_begun(path, found, micro_batches)
    state = {name: array for name, array in found.items() if name.startswith("count/")}
    for name, variable in known.items():
        if name not in found and not name.startswith(_OPTIONAL):
            raise TrainingError(f"{path} lacks {name!r}; {_differs(name)}")
        array = found.get(name, variable.initial)
        if (array.shape, array.dtype) != (variable.initial.shape, variable.initial.dtype):
            wanted = f"{variable.initial.dtype} {list(variable.initial.shape)}"
            raise TrainingError(f"{path}: {name!r} is {array.dtype} {list(array.shape)}, and the step has {wanted}")
        state[name] = array
    return state


def _check_begun(path: Path, found: Mapping[str, Array], micro_batches: int) -> None:
    """TrainingError for the gradients of a step that was begun, and that these micro-batches would not end."""
    begun = int(found.get(_BEGUN, 0))
    if begun >= micro_batches:
        here = "each run is a step" if micro_batches == 1 else f"{micro_batches} runs make a step"
        raise TrainingError(
            f"{path} was saved within a step, after {begun} of its micro-batches, and here {here}; make the step with"
            " as many micro-batches as the one that was saved"
        )


def _check_possible(path: Path, name: str, array: Array) -> None:
    """TrainingError for a number that no step leaves behind, and from which training would not go on."""
    if not name.startswith(_NUMBERS):
        return
    kinds, least = ("f", 1) if name == "loss_scale" else ("iu", 0)
    if array.shape != () or array.dtype.kind not in kinds or not np.isfinite(array) or array < least:
        raise TrainingError(
            f"{path} is damaged: {name!r} is {' '.join(str(array).split())[:80]}, and must be a number of {least} or"
            " more; load an older one"
        )


def _differs(name: str) -> str:
    if name.startswith(_NUMBERS):
        return "it is damaged: load an older one"
    if name.startswith("slot/"):
        return "it was saved with another optimizer: make the step with that one"
    return "it was saved with other parameters trained: make the step with the same ones"
