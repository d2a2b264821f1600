"""The time of each op, from the profile that onnxruntime writes, and which op of one model takes longer in another."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.errors import ModelError

_SUFFIX = "_kernel_time"
# onnxruntime's words for element types, where they are not ours.
_TYPES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op of a model as it ran: seconds in the median run, where, and the type of its first output."""

    name: str
    op: str
    provider: str
    dtype: str
    seconds: float

    @property
    def place(self) -> str:
        """Its provider, short: "CUDA", "CPU"."""
        return self.provider.removesuffix("ExecutionProvider")


@dataclass(frozen=True, slots=True)
class OpChange:
    """An op before and after; None on the side where there is no op of that name and type."""

    before: OpTime | None
    after: OpTime | None

    @property
    def seconds(self) -> float:
        """How much longer it takes in a run."""
        return (self.after.seconds if self.after else 0.0) - (self.before.seconds if self.before else 0.0)


def read_profile(file: Path, *, skip: int = 0) -> tuple[OpTime, ...]:
    """Each op in the order of its first run; the first `skip` runs do not count. ModelError for another file."""
    try:
        events = json.loads(file.read_text(encoding="utf-8"))
        runs = sorted(e["ts"] for e in events if e["name"] == "model_run")
        nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_SUFFIX)]
        found = _ops(nodes, runs, skip)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        said = " ".join(str(cause).split())
        raise ModelError(f"{file.name} is no profile of onnxruntime: {said}; profile the model again") from cause
    if len(runs) <= skip:
        raise ModelError(f"{file.name} holds {len(runs)} runs, and {skip} do not count; run the model more often")
    return found


def _ops(events: Sequence[Mapping[str, Any]], runs: Sequence[int], skip: int) -> tuple[OpTime, ...]:
    """Of each op the median over the runs that count; in one run an op in a loop may run often."""
    taken: dict[tuple[str, str, str, str], NDArray[Any]] = defaultdict(lambda: np.zeros(len(runs)))
    for event in events:
        args = event["args"]
        name = event["name"].removesuffix(_SUFFIX)
        run = bisect_right(runs, event["ts"]) - 1
        if run >= 0:
            taken[name, args["op_name"], args.get("provider", ""), _dtype(args)][run] += event["dur"] * 1e-6
    counted = {key: seconds[skip:] for key, seconds in taken.items() if seconds[skip:].any()}
    return tuple(OpTime(*key, float(np.median(seconds))) for key, seconds in counted.items())


def _dtype(args: Mapping[str, Any]) -> str:
    """The element type of the first output; "" where it gives no tensor."""
    first = next(iter(next(iter(args.get("output_type_shape", ())), {})), "")
    return _TYPES.get(first, first)


def changes(before: Sequence[OpTime], after: Sequence[OpTime]) -> tuple[OpChange, ...]:
    """Ops that are in both, in one alone, paired by name and op type: the one that got slower most comes first."""
    left = {(op.name, op.op): op for op in before}
    found = [OpChange(left.pop((op.name, op.op), None), op) for op in after]
    found += [OpChange(op, None) for op in left.values()]
    return tuple(sorted(found, key=lambda change: -change.seconds))


@dataclass(frozen=True, slots=True)
class TypeChange:
    """All ops of one type, before and after: how many there are, and their seconds in a run."""

    op: str
    count: tuple[int, int]
    seconds: tuple[float, float]


def by_type(changed: Sequence[OpChange]) -> tuple[TypeChange, ...]:
    """The same by type of op, which says more where the runtime fuses other ops: the slower first."""
    sides: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for change in changed:
        for side, op in enumerate((change.before, change.after)):
            if op is not None:
                sides[op.op][side].append(op.seconds)
    found = [TypeChange(op, (len(a), len(b)), (sum(a), sum(b))) for op, (a, b) in sides.items()]
    return tuple(sorted(found, key=lambda change: change.seconds[0] - change.seconds[1]))
