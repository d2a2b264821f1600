"""Saved state of optimizers: the mapping of `checkpoint`, and checkpoints of a `Trainer`, which hold the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from amp_rewrite.evidence.data.npy import Npz
from amp_rewrite.settings.loss_scale import Array

SCALE_KEYS = ("loss_scale/current_loss_scale", "loss_scale/good_steps")
"""Paths of a dynamic loss scale's state."""
COUNT = "iter"
LIMIT = 1 << 40
"""Limit for the bytes of a checkpoint in memory."""
_OF_TRAINER = {"step": COUNT, "loss_scale": SCALE_KEYS[0], "good_steps": SCALE_KEYS[1]}
_SLOT = "slot/"
_HEADER = "amp_rewrite/"


def saved_state(saved: Mapping[str, Array] | str | os.PathLike[str]) -> dict[str, Array]:
    """Return the state of an optimizer by the paths of `checkpoint`: "iter", "<variable>/<slot>", the loss scale.

    `saved`: the result of `checkpoint`, or the contents or the path of a file of `Trainer.save`. FeedError for a file
    that is damaged.
    """
    if isinstance(saved, (str, os.PathLike)):
        file = Npz(Path(saved))
        saved = file.read({name: name for name in file.names}, LIMIT)
    if not any(name.startswith(_HEADER) for name in saved) and "step" not in saved:
        return dict(saved)
    own = {key: saved[name] for name, key in _OF_TRAINER.items() if name in saved}
    return own | {name.removeprefix(_SLOT): array for name, array in saved.items() if name.startswith(_SLOT)}
