"""Slots of the optimizer split among replicas: who keeps which, and the exchange of values that one replica has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.train.parallel.replicas import Replicas
from amp_rewrite.train.step.optimizer_state import slot_of
from amp_rewrite.train.update.graph import StateVariable


def owners_of(state: Sequence[StateVariable], world: int) -> dict[str, int]:
    """Return the replica that keeps the slots of each parameter, and updates it.

    Parameters stay whole. The one with the largest slots is dealt first, each to the replica that has the least so far.
    """
    names = [v.name.removeprefix("parameter/") for v in state if v.name.startswith("parameter/")]
    sizes, kept, owners = Counter[str](), Counter[int](), dict[str, int]()
    for variable in state:
        parameter, slot = slot_of(variable.name)
        if slot:
            sizes[parameter] += variable.initial.nbytes
    for name in sorted(names, key=lambda name: -sizes[name]):
        owners[name] = min(range(world), key=lambda replica: kept[replica])
        kept[owners[name]] += sizes[name]
    return owners


def handed_round(replicas: Replicas, own: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """Return values that one replica each has, with the same bits on all, in one exchange.

    `own`: those of this replica. `like`: arrays of the shapes and floating types of all values, in one order on all.
    Replicas add them up; the others give -0, which changes no number in a sum, not even -0.
    """
    ends = np.cumsum([array.size for array in like.values()])
    bucket = np.full(sum(array.size for array in like.values()), -0.0, np.float32)
    for (name, array), end in zip(like.items(), ends, strict=True):
        if name in own:
            bucket[end - array.size : end] = own[name].ravel()
    parts = dict(zip(like, np.split(replicas.total(bucket), ends[:-1]), strict=True))
    return {name: parts[name].reshape(array.shape).astype(array.dtype) for name, array in like.items()}
