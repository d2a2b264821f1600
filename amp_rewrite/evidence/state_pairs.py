"""States that a model seems to have: outputs that look like inputs of its next run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from amp_rewrite.evidence.data.feedback import expanded, fits
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import Flow
from amp_rewrite.ir.view import MAIN, View
from amp_rewrite.runtime.ports import input_ports, output_ports

_BEFORE = re.compile(
    r"(?:past_key_values|past|previous|prev|initial|init|old)[._](.+)|(.+?)(?:[._](?:in|prev|past|old)|_?0)"
)
_AFTER = re.compile(r"(?:present|next|new|updated)[._](.+)|(.+?)(?:[._](?:out|next|new|n)|n|N)")
"""Names of a state before and after a run; a group holds what is equal in both."""


def state_pairs(model: Model) -> Mapping[str, str]:
    """Return outputs that look like the next value of an input, each with the input; none if every input is one.

    Their types and shapes fit, and so do their names. Without such names: arithmetic and copies lead from this input
    alone to this output alone, and there are other outputs.
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
    found: dict[str, str] = {}
    for value in main.outputs:
        above = {view.value_name(source) for source in flow.back({value: None})} - {view.value_name(value)}
        sources = [name for name in fitting[view.value_name(value)] if name in above]
        found |= {view.value_name(value): sources[0]} if len(sources) == 1 else {}
    alone = {out: into for out, into in found.items() if list(found.values()).count(into) == 1}
    return alone if len(alone) < len(main.outputs) else {}


def words_of(pairs: Mapping[str, str], outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the fewest words for the option: one with a * for pairs whose names end alike. `outputs`: of the model."""
    words: dict[str, None] = {}
    for out, into in pairs.items():
        shared = len([*takewhile(lambda ends: ends[0] == ends[1], zip(reversed(out), reversed(into), strict=False))])
        star = f"{out[: len(out) - shared]}*={into[: len(into) - shared]}*"
        covered = dict(expanded(star, outputs)) if shared else {}
        words[star if len(covered) > 1 and covered.items() <= pairs.items() else f"{out}={into}"] = None
    return tuple(words)
