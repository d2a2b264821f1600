"""The measurements of one model in a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_rewrite.deploy.bench.profile import OpChange
from amp_rewrite.deploy.bench.timing import SpeedUp, Timing


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """One batch size: its timing, and peak memory in bytes; `fault` is the reason for a missing timing."""

    items: int
    timing: Timing | None = None
    memory: int | None = None
    fault: str = ""

    @property
    def throughput(self) -> float | None:
        """Return items per second, by the median run."""
        return self.items / self.timing.median if self.timing else None


@dataclass(frozen=True)
class BenchEntry:
    """One model in one mode. `types`: its low types. `tf32`: float32 may be computed in TF32.

    `latency`: inputs and outputs stay on the device; `copies`: they are copied from and to numpy. `speed_ups`: against
    each baseline, by its name. `memory`: peak bytes for the given batch; None if not measured, with the reason in
    `fault` if measuring failed.
    """

    name: str
    types: tuple[str, ...]
    tf32: bool
    latency: Timing
    copies: Timing
    speed_ups: Mapping[str, SpeedUp]
    memory: int | None = None
    sweep: tuple[BatchTiming, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class OpChanges:
    """Changes of one model's ops against the first model, the largest slowdown first."""

    name: str
    ops: tuple[OpChange, ...]
