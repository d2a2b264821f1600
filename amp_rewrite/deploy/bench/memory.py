"""Peak memory for a batch."""

from __future__ import annotations

from dataclasses import replace

from amp_rewrite.deploy.bench.batches import BatchAxis
from amp_rewrite.deploy.bench.candidate import Candidate
from amp_rewrite.deploy.bench.entry import BenchEntry


def with_memory(candidate: Candidate, entry: BenchEntry, axis: BatchAxis | None) -> BenchEntry:
    """Return the entry with peak memory, for the batch and for each size of the sweep."""
    outcome = candidate.weighed(candidate.batch)
    sweep = list(entry.sweep)
    for number, row in enumerate(sweep):
        if row.timing is not None and axis is not None:
            weighed = candidate.weighed(axis.resized(candidate.batch, row.items))
            sweep[number] = replace(row, memory=weighed.memory, fault=weighed.fault)
    return replace(entry, memory=outcome.memory, fault=outcome.fault, sweep=tuple(sweep))
