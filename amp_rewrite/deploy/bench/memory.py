"""Peak memory for a batch, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from amp_rewrite.deploy.bench.batches import BatchAxis
from amp_rewrite.deploy.bench.candidate import Candidate
from amp_rewrite.deploy.bench.entry import BenchEntry, LargestBatch
from amp_rewrite.errors import PolicyError
from amp_rewrite.files.layout import bytes_in

_STEPS = 4  # halvings between a batch that fits and one that does not: to a sixteenth
_MOST_ITEMS = 1 << 20


def with_memory(candidate: Candidate, entry: BenchEntry, axis: BatchAxis | None) -> BenchEntry:
    """Return the entry with peak memory, for the batch and for each size of the sweep."""
    outcome = candidate.weighed(candidate.batch)
    sweep = list(entry.sweep)
    for number, row in enumerate(sweep):
        if row.timing is not None and axis is not None:
            weighed = candidate.weighed(axis.resized(candidate.batch, row.items))
            sweep[number] = replace(row, memory=weighed.memory, fault=weighed.fault)
    return replace(entry, memory=outcome.memory, fault=outcome.fault, sweep=tuple(sweep))


def with_largest(candidate: Candidate, entry: BenchEntry, axis: BatchAxis, limit: int) -> BenchEntry:
    """Return the entry with the largest batch that fits into `limit` bytes."""
    faults: dict[int, str] = {}

    def fits(items: int) -> bool:
        if axis.nbytes(candidate.batch, items) > limit:
            return False
        outcome = candidate.weighed(axis.resized(candidate.batch, items))
        if outcome.fault:
            faults[items] = outcome.fault
        return outcome.memory is not None and outcome.memory <= limit

    good, bad = largest(fits, axis.size(candidate.batch), _MOST_ITEMS)
    return replace(entry, largest=LargestBatch(limit, good, bad, "" if bad is None else faults.get(bad, "")))


def parse_bytes(text: str) -> int:
    """Parse bytes from a text such as "8GB", "512 MiB" or "1000000". Raise PolicyError for any other text."""
    if (count := bytes_in(text)) is None:
        raise PolicyError(f"{text!r} is not a size of memory; write it as 8GB, 512MiB or in bytes")
    return int(count)


def largest(fits: Callable[[int], bool], start: int, most: int) -> tuple[int, int | None]:
    """Return the largest number that fits, to a sixteenth, and the smallest tried that does not; O(log) trials.

    The first trial is `start`. The former is 0 if 1 does not fit; the latter is None if all up to `most` fit.
    """
    good, bad = _bracket(fits, start, most)
    for _ in range(_STEPS):
        if bad is None or bad - good < 2:
            break
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


def _bracket(fits: Callable[[int], bool], start: int, most: int) -> tuple[int, int | None]:
    """Return a number that fits, or 0, and twice that number, which does not, by doubling or halving."""
    if fits(start):
        while start * 2 <= most:
            if not fits(start * 2):
                return start, start * 2
            start *= 2
        return start, None
    while start > 1:
        if fits(start // 2):
            return start // 2, start
        start //= 2
    return 0, 1
