"""Time of each op, from onnxruntime's profile, and differences between two models."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.errors import ModelError, one_line

_SUFFIX = "_kernel_time"
# onnxruntime's names of element types that differ from ours.
_TYPES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op of a model as it ran: seconds in the median run, provider, and the type of its first output."""

    name: str
    op: str
    provider: str
    dtype: str
    seconds: float

    @property
    def place(self) -> str:
        """Return the short name of its provider: "CUDA", "CPU"."""
        return self.provider.removesuffix("ExecutionProvider")


@dataclass(frozen=True, slots=True)
class OpChange:
    """An op before and after; None on a side without an op of that name and type."""

    before: OpTime | None
    after: OpTime | None

    @property
    def side(self) -> OpTime:
        """The op after the change, or before it if it is gone."""
        op = self.after or self.before
        assert op is not None
        return op

    @property
    def seconds(self) -> float:
        """Return the additional seconds in a run."""
        return (self.after.seconds if self.after else 0.0) - (self.before.seconds if self.before else 0.0)


def read_profile(file: Path, *, skip: int = 0) -> tuple[OpTime, ...]:
    """Read ops in the order of their first run, without the first `skip` runs. Raise ModelError for another file."""
    try:
        events = json.loads(file.read_text(encoding="utf-8"))
        runs = sorted(e["ts"] for e in events if e["name"] == "model_run")
        nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_SUFFIX)]
        ops = _ops(nodes, runs, skip)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        why = one_line(cause)
        raise ModelError(f"{file.name} is not a profile of onnxruntime: {why}; profile the model again") from cause
    if len(runs) <= skip:
        raise ModelError(f"{file.name} holds {len(runs)} runs, and {skip} do not count; run the model more often")
    return ops


def _ops(events: Sequence[Mapping[str, Any]], runs: Sequence[int], skip: int) -> tuple[OpTime, ...]:
    """Return the median of each op over the counted runs; an op in a loop may run several times per run."""
    taken: dict[tuple[str, str, str, str], NDArray[Any]] = defaultdict(lambda: np.zeros(len(runs)))
    for event in events:
        args = event["args"]
        name = event["name"].removesuffix(_SUFFIX)
        run = bisect_right(runs, event["ts"]) - 1
        if run >= 0:
            dtype = next(iter(next(iter(args.get("output_type_shape", ())), {})), "")  # "" if it is not a tensor
            key = (name, args["op_name"], args.get("provider", ""), _TYPES.get(dtype, dtype))
            taken[key][run] += event["dur"] * 1e-6
    counted = {key: seconds[skip:] for key, seconds in taken.items() if seconds[skip:].any()}
    return tuple(OpTime(*key, float(np.median(seconds))) for key, seconds in counted.items())


def changes(before: Sequence[OpTime], after: Sequence[OpTime]) -> tuple[OpChange, ...]:
    """Return the changes of ops paired by name and op type, unpaired ones included, the largest slowdown first."""
    left = {(op.name, op.op): op for op in before}
    pairs = [OpChange(left.pop((op.name, op.op), None), op) for op in after]
    pairs += [OpChange(op, None) for op in left.values()]
    return tuple(sorted(pairs, key=lambda change: -change.seconds))


@dataclass(frozen=True, slots=True)
class TypeChange:
    """All ops of one type, before and after: their number and their seconds in a run."""

    op: str
    count: tuple[int, int]
    seconds: tuple[float, float]


def by_type(changed: Sequence[OpChange]) -> tuple[TypeChange, ...]:
    """Sum changes by op type, the largest slowdown first; useful if the runtime fuses different ops."""
    sides: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for change in changed:
        for side, op in enumerate((change.before, change.after)):
            if op is not None:
                sides[op.op][side].append(op.seconds)
    sums = [TypeChange(op, (len(a), len(b)), (fsum(a), fsum(b))) for op, (a, b) in sides.items()]
    return tuple(sorted(sums, key=lambda change: change.seconds[0] - change.seconds[1]))
