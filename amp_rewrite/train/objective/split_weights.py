"""Weights that an exporter split: two initializers hold the numbers of one weight, perhaps transposed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.nodes import Value
from amp_rewrite.ir.view import View


def split(view: View, values: Iterable[Value]) -> dict[str, str]:
    """Return the initializers that hold the numbers of one before them, with the name of that one.

    An exporter that transposes the weight of a product leaves a tied embedding as it is. Equal numbers, as of norms,
    do not count. O(bytes); two arrays are compared only if their ends agree, which a transposition leaves in place.
    """
    found: dict[str, str] = {}
    seen: dict[tuple[object, ...], list[tuple[str, Array]]] = {}
    for value in values:
        assert value.tensor is not None
        array = view.model.array(value.tensor)
        if array.ndim < 2 or not array.size or (array == array.flat[0]).all():
            continue
        others = seen.setdefault((tuple(sorted(array.shape)), array.flat[0].item(), array.flat[-1].item()), [])
        twin = next((name for name, other in others if _same(array, other)), None)
        if twin is None:
            others.append((value.name, array))
        else:
            found[value.name] = twin
    return found


def _same(a: Array, b: Array) -> bool:
    return np.array_equal(a, b) or (a.ndim == 2 and np.array_equal(a, b.T))
