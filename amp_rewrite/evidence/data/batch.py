"""One batch as its user gives it: arrays of numpy and of other libraries, by name or in the order of the inputs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError
from amp_rewrite.reports.render import count
from amp_rewrite.runtime.ports import Port

Raw = Mapping[str, Any]
"""A batch by input name, before any other check."""
_FORMS = "a mapping from input names to arrays"


def is_array(value: object) -> bool:
    """True for an array of numpy, or of another library that converts to one, such as a tensor."""
    return hasattr(value, "__array__") and hasattr(value, "shape")


def as_array(value: object) -> Any:
    """Return a value as a numpy array; a tensor of torch from its device, without gradient, in its own type."""
    if type(value).__module__.partition(".")[0] != "torch" or not is_array(value):
        return np.asarray(value)
    torch, tensor = sys.modules["torch"], value.detach().cpu()  # type: ignore[attr-defined]
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(DType.BFLOAT16.numpy)  # numpy itself has no bfloat16


def nbytes(batch: object) -> int:
    """Return the bytes of the arrays in a batch."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return sum(int(getattr(part, "nbytes", 0)) for part in parts)


def kept(batch: object) -> object:
    """Return a batch with copies of its arrays: a generator may fill the same ones again."""
    if isinstance(batch, Mapping):
        return {name: kept(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map(kept, batch))
    return np.array(as_array(batch)) if is_array(batch) else batch


def named(batch: object, ports: tuple[Port, ...], where: str) -> tuple[Raw, str]:
    """Return a batch by input name, and a note of arrays left out or "".

    Arrays without names are those of the inputs that have no default, in order. Arrays beyond them, such as labels, are
    left out if there is no other input. FeedError, beginning with `where`, for other batches.
    """
    if isinstance(batch, Mapping):
        return batch, ""
    arrays = [batch] if is_array(batch) else list(batch) if isinstance(batch, (list, tuple)) else []
    if not arrays or not all(map(is_array, arrays)):
        inside = " and ".join(sorted({type(item).__name__ for item in arrays}))
        kind = f"{type(batch).__qualname__}{' of ' + inside if inside else ''}"
        raise FeedError(f"{where} is {kind}; give {_FORMS}, an array, or a tuple of arrays")
    needed = [port.name for port in ports if port.required]
    spare = [port.name for port in ports if not port.required]
    fact, inputs = f"{where} is {count(len(arrays), 'array')}", ", ".join(map(repr, needed))
    if len(arrays) < len(needed):
        raise FeedError(
            f"{fact}, and the model has the inputs {inputs}; give a tuple of arrays in this order, or {_FORMS}"
        )
    left = len(arrays) - len(needed)
    if left and spare:
        raise FeedError(f"{fact}, and input {spare[0]!r} has a default: it or a label may be meant; give {_FORMS}")
    note = f"{count(left, 'array')} after those for {inputs or 'no input'} not fed: the model has no other input"
    return dict(zip(needed, arrays, strict=False)), note if left else ""
