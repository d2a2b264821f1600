"""States of a model from run to run, along the runs of a feed with feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner

Run = Callable[[int, Batch], Mapping[str, Any]]
"""The outputs of a run, from its number and what it is fed."""


@dataclass
class Stepped:
    """The runs of one model, in the order of a feed. Inputs take outputs of the run before, as the feedback says."""

    feed: Feed
    run: Run
    _states: dict[str, Any] = field(default_factory=dict)

    def __call__(self, number: int, batch: Batch) -> Mapping[str, Any]:
        """Return the outputs of the run of that number."""
        back = self.feed.feedback
        if back is None:
            return self.run(number, batch)
        outputs = self.run(number, batch if back.begins(number) else {**batch, **self._states})
        self._states = {into: outputs[out] for out, into in back.pairs}
        return outputs


def unrolled(feed: Feed, model: Model) -> Feed:
    """Return a feed whose batches hold the states that a float32 model gives, one batch for each run."""
    back = feed.feedback
    if back is None:
        return feed
    runner, names = Runner.open(model), list(dict(back.pairs))

    def source() -> Iterator[Batch]:
        states: dict[str, Any] = {}
        for number, batch in enumerate(feed):
            fed = batch if back.begins(number) else {**batch, **states}
            yield fed
            outputs = runner.run(fed, names)
            states = {into: outputs[out] for out, into in back.pairs}

    return replace(feed, feedback=None, _allow_nonfinite=True, _source=source, _count=len(feed), _mark=None)
