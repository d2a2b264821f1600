"""States of a model from run to run: along the runs of a feed with feedback, and as names and graph suggest them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.data.feedback import expanded, fits
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import Flow, reach
from amp_rewrite.ir.view import MAIN, ValueId, View
from amp_rewrite.runtime.ports import input_ports, output_ports
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


_BEFORE = re.compile(
    r"(?:past_key_values|past|previous|prev|initial|init|old)[._](.+)|(.+?)(?:[._](?:in|prev|past|old)|_?0)"
)
_AFTER = re.compile(r"(?:present|next|new|updated)[._](.+)|(.+?)(?:[._](?:out|next|new|n)|n|N)")
"""Names of a state before and after a run; a group holds what is equal in both."""


def state_pairs(model: Model) -> Mapping[str, str]:
    """Return outputs that look like the next value of an input, each with the input; none if every input is one.

    Their types and shapes fit, and so do their names. Without such names: arithmetic and copies lead from this input
    alone to this output alone, which depends on other inputs as well; and another output depends on this input.
    """
    inputs, outputs = input_ports(model), output_ports(model)
    fitting = {out.name: [into.name for into in inputs if fits(out, into)] for out in outputs}
    if len(inputs) < 2 or not any(fitting.values()):
        return {}
    found: dict[str, str] = {}
    for out, names in fitting.items():
        named = [name for name in names if name not in found.values() and _cores(out, _AFTER) & _cores(name, _BEFORE)]
        found |= {out: named[0]} if named else {}
    found = found or _by_flow(model, fitting)
    return found if len(found) < len(inputs) else {}


def _cores(name: str, words: re.Pattern[str]) -> set[str]:
    match = words.fullmatch(name)
    return {name, *filter(None, match.groups() if match else ())}


def _by_flow(model: Model, fitting: Mapping[str, list[str]]) -> dict[str, str]:
    view = View.of(model)
    flow, main = Flow.of(view), view.scopes[MAIN]
    inputs = {view.value_name(value): value for value in main.inputs}
    reached = {name: _outputs_of(view, value) for name, value in inputs.items()}
    found: dict[str, str] = {}
    for value in main.outputs:
        name, above = view.value_name(value), flow.back({value: None})
        sources = [source for source in fitting[name] if inputs.get(source) in above]
        if (
            len(sources) == 1
            and len(reached[sources[0]]) > 1
            and sum(value in outputs for outputs in reached.values()) > 1
        ):
            found[name] = sources[0]
    return {out: into for out, into in found.items() if list(found.values()).count(into) == 1}


def _outputs_of(view: View, value: ValueId) -> set[ValueId]:
    ops = reach(dict.fromkeys(use.op for use in view.uses[value]), view.graph.successors)
    return {output for output in view.scopes[MAIN].outputs if view.values[output].producer in ops}


def words_of(pairs: Mapping[str, str], outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the fewest words for the option: one with a * for pairs whose names end alike. `outputs`: of the model."""
    words: dict[str, None] = {}
    for out, into in pairs.items():
        shared = len([*takewhile(lambda ends: ends[0] == ends[1], zip(reversed(out), reversed(into), strict=False))])
        end = re.search(r"[._/].*", out[len(out) - shared :])
        star = f"{out.removesuffix(end[0])}*={into.removesuffix(end[0])}*" if end else ""
        covered = dict(expanded(star, outputs)) if star else {}
        words[star if len(covered) > 1 and covered.items() <= pairs.items() else f"{out}={into}"] = None
    return tuple(words)
