"""States that a model seems to have: outputs that look like inputs of its next run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from amp_rewrite.evidence.data.feedback import expanded, fits
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import Flow, reach
from amp_rewrite.ir.view import MAIN, ValueId, View
from amp_rewrite.runtime.ports import input_ports, output_ports

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
    told = {name: _told(view, value) for name, value in inputs.items()}
    found: dict[str, str] = {}
    for value in main.outputs:
        name, above = view.value_name(value), flow.back({value: None})
        sources = [source for source in fitting[name] if inputs.get(source) in above]
        if len(sources) == 1 and len(told[sources[0]]) > 1 and sum(value in outputs for outputs in told.values()) > 1:
            found[name] = sources[0]
    return {out: into for out, into in found.items() if list(found.values()).count(into) == 1}


def _told(view: View, value: ValueId) -> set[ValueId]:
    """Return the outputs that depend on a value."""
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
