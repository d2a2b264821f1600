"""Peak memory for a batch, and the largest batch that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from amp_rewrite.deploy.bench.batches import BatchAxis
from amp_rewrite.deploy.bench.candidate import Candidate
from amp_rewrite.deploy.bench.child import Outcome
from amp_rewrite.deploy.bench.result import Entry, Largest, Sized
from amp_rewrite.errors import PolicyError

Tell = Callable[[str, int, int], None]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|b|[kmg]b|[kmg]ib)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_STEPS = 4  # halvings between a batch that fits and one that does not: to a sixteenth
_MOST_ITEMS = 1 << 20


@dataclass(frozen=True)
class Weigher:
    """Measurement of the memory of candidates, one process at a time. `axis`: the axis of the batch size."""

    candidates: Sequence[Candidate]
    axis: BatchAxis | None
    tell: Tell

    def weighed(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries with peak memory, for the given batch and for those of the sweep."""
        found = []
        for done, (candidate, entry) in enumerate(zip(self.candidates, entries, strict=True)):
            outcome = candidate.weighed(candidate.batch)
            sweep = tuple(self._row(candidate, row) for row in entry.sweep)
            found.append(replace(entry, memory=outcome.memory, fault=outcome.fault, sweep=sweep))
            self.tell("memory", done + 1, len(entries))
        return found

    def _row(self, candidate: Candidate, row: Sized) -> Sized:
        if row.timing is None:
            return row
        outcome = self._of(candidate, row.items)
        return replace(row, memory=outcome.memory, fault=outcome.fault)

    def largest(self, entries: Sequence[Entry], limit: int) -> list[Entry]:
        """Return the entries with the largest batch that fits into `limit` bytes."""
        found = []
        for done, (candidate, entry) in enumerate(zip(self.candidates, entries, strict=True)):
            assert self.axis is not None
            start = self.axis.size(candidate.batch)
            faults: dict[int, str] = {}
            good, bad = largest(partial(self._fits, candidate, limit, faults), start, _MOST_ITEMS)
            fault = "" if bad is None else faults.get(bad, "")
            found.append(replace(entry, largest=Largest(limit, good, bad, fault)))
            self.tell("largest batch", done + 1, len(entries))
        return found

    def _fits(self, candidate: Candidate, limit: int, faults: dict[int, str], items: int) -> bool:
        assert self.axis is not None
        if self.axis.nbytes(candidate.batch, items) > limit:
            return False
        outcome = self._of(candidate, items)
        if outcome.fault:
            faults[items] = outcome.fault
        return outcome.memory is not None and outcome.memory <= limit

    def _of(self, candidate: Candidate, items: int) -> Outcome:
        assert self.axis is not None
        return candidate.weighed(self.axis.resized(candidate.batch, items))


def parse_bytes(text: str) -> int:
    """Parse bytes from a text such as "8GB", "512 MiB" or "1000000"; kB, MB, GB are powers of 1000."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise PolicyError(f"{text!r} is not a size of memory; write it as 8GB, 512MiB or in bytes")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def largest(fits: Callable[[int], bool], start: int, most: int) -> tuple[int, int | None]:
    """Return the largest number that fits, to a sixteenth, and the smallest tried that does not; O(log) trials.

    The first trial is `start`. The former is 0 if 1 does not fit; the latter is None if all up to `most` fit.
    """
    good, bad = _bracket(fits, start, most)
    if bad is None:
        return good, None
    for _ in range(_STEPS):
        if bad - good < 2:
            break
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


def _bracket(fits: Callable[[int], bool], start: int, most: int) -> tuple[int, int | None]:
    """Return a number that fits, or 0, and twice that number, which does not, by doubling or halving."""
    if fits(start):
        good = start
        while good * 2 <= most:
            if not fits(good * 2):
                return good, good * 2
            good *= 2
        return good, None
    bad = start
    while bad > 1:
        if fits(bad // 2):
            return bad // 2, bad
        bad //= 2
    return 0, 1
