"""Runs of the switchable twin with a single op in the low type, all of them, or none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.evidence.instrument.switchable import SwitchableModel
from amp_rewrite.ir.view import OpId
from amp_rewrite.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class LowOps:
    """A choice of low ops, all of whose variables are low."""

    ops: Collection[OpId]

    def lowered(self, op: OpId, variable: str | None) -> bool:
        """True if a variable of an op is low."""
        return op in self.ops


@dataclass(frozen=True)
class SingleOpRuns:
    """Runs of a twin, opened at the first one unless it is open already."""

    twin: SwitchableModel
    opened: Runner | None = None

    def __call__(self, op: OpId, batch: Batch) -> Mapping[str, Any]:
        """Return the outputs for a batch if this op alone is low."""
        return self._run((op,), batch)

    def together(self, batch: Batch) -> Mapping[str, Any]:
        """Return the outputs for a batch if all ops are low."""
        return self._run({op for op, _ in self.twin.may}, batch)

    def reference(self, batch: Batch) -> Mapping[str, Any]:
        """Return the outputs in float32."""
        return self._run((), batch)

    def _run(self, ops: Collection[OpId], batch: Batch) -> Mapping[str, Any]:
        return self.twin.run(self._runner, self.twin.mask(LowOps(ops)), batch)

    @cached_property
    def _runner(self) -> Runner:
        return self.opened or Runner.open(self.twin.model)
