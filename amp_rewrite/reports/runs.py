"""Runs of ops: two models op by op, as far as neighbours are alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Run:
    """Ops that follow each other and are alike.

    Attributes:
        ops: their number.
        a: their type in A, empty where A lacks them.
        b: their type in B, empty where B lacks them.
        changed: True if they differ.
    """

    ops: int
    a: str
    b: str
    changed: bool


def runs_of(ops: Iterable[tuple[str, str, bool]]) -> tuple[Run, ...]:
    """Return ops as runs.

    Args:
        ops: type in A, type in B, and True if the op differs, in order.
    """
    return tuple(Run(sum(1 for _ in group), *kind) for kind, group in groupby(ops))
