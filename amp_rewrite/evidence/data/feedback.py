"""Feedback of a model's outputs to the inputs of its next run, such as the states of a streaming model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from amp_rewrite.errors import FeedError, advice, spelled
from amp_rewrite.files.model import Model
from amp_rewrite.ir.names import as_names
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.reports.render import count, shortened
from amp_rewrite.runtime.ports import Port, input_ports, output_ports

_MAX_NAMES = 8  # in an error message


@dataclass(frozen=True, slots=True)
class Feedback:
    """Pairs of an output and an input to feed with it in the next run.

    `steps`: runs per batch, where each batch is its own sequence; None means that all batches are the steps of one
    sequence. `ports`: the inputs of the model, by name.
    """

    pairs: tuple[tuple[str, str], ...]
    steps: int | None
    ports: Mapping[str, Port]

    @classmethod
    def of(cls, texts: Sequence[str] | str, steps: int | None, model: Model) -> Feedback | None:
        """Parse pairs such as "hn=h" or "present.*=past.*"; return None if there are none.

        Raise FeedError for pairs that do not fit the model, and for steps below 1 or without feedback.
        """
        if steps is not None and (steps < 1 or not texts):
            raise FeedError(f"{spelled('steps', steps)} needs {spelled('feedback', 'OUT=IN')} and at least 1 step")
        outputs = [port.name for port in output_ports(model)]
        pairs = tuple(pair for text in as_names(texts) for pair in expand(text, outputs))
        return cls(pairs, steps, {}).for_model(model) if pairs else None

    def for_model(self, model: Model) -> Feedback:
        """Return the same pairs for a model. Raise FeedError for missing names or unequal types."""
        inputs = {port.name: port for port in input_ports(model)}
        outputs = {port.name: port for port in output_ports(model)}
        sources: dict[str, str] = {}
        for out, into in self.pairs:
            where = spelled("feedback", f"{out}={into}")
            for kind, name, known in (("output", out, outputs), ("input", into, inputs)):
                if name not in known:
                    hint = advice(name, known, f"it has {_quoted(list(known))}")
                    raise FeedError(f"{where}: the model has no {kind} {name!r}; {hint}")
            if not fits(outputs[out], inputs[into]):
                types = f"output {out!r} is {_describe(outputs[out])}, but input {into!r} is {_describe(inputs[into])}"
                fitting = [port.name for port in outputs.values() if fits(port, inputs[into])]
                raise FeedError(f"{where}: {types}; outputs that fit {into!r}: {_quoted(fitting)}")
            if sources.setdefault(into, out) != out:
                raise FeedError(f"{where}: input {into!r} is already fed from {sources[into]!r}; name only one output")
        return replace(self, ports=inputs)

    def __str__(self) -> str:
        (out, into), *others = self.pairs
        more = f" and {len(others)} more" if others else ""
        length = "one sequence" if self.steps is None else f"{count(self.steps, 'step')} each"
        return f"{length}, {out} fed back to {into}{more}"

    @property
    def states(self) -> frozenset[str]:
        """Names of the inputs in the pairs."""
        return frozenset(into for _, into in self.pairs)

    def place(self, run: int) -> tuple[int, int | None]:
        """Return the index of a run's batch, and of its step if each batch has several."""
        return (run, None) if self.steps is None else divmod(run, self.steps)

    def inputs(self, run: int, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a run: the batch, with the previous run's states unless the run begins a sequence."""
        begins = run == 0 if self.steps is None else run % self.steps == 0
        return batch if begins else {**batch, **{into: outputs[out] for out, into in self.pairs}}

    def runs(self, number: int, batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the batch once per run, with zeros for missing states if it begins a sequence.

        Raise FeedError for a missing state of unknown shape.
        """
        if self.steps is not None or number == 0:
            batch = {**batch, **self._zeros(batch)}
        for _ in range(self.steps or 1):
            yield batch

    def _zeros(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return zeros for the required states missing in a batch; its arrays fix the sizes of free dimensions."""
        sizes: dict[int | str | None, int] = {}
        for name, array in batch.items():
            sizes |= dict(zip(self.ports[name].shape or (), getattr(array, "shape", ()), strict=False))
        zeros = {}
        missing = [self.ports[name] for name in sorted(self.states - batch.keys())]
        for port in (port for port in missing if port.required):
            shape = [dim if isinstance(dim, int) else sizes.get(dim or "") for dim in port.shape or (None,)]
            known = [size for size in shape if size is not None]
            if port.dtype is None or port.container != TENSOR or len(known) < len(shape):
                raise FeedError(
                    f"the first batch is missing {port.name!r}, which cannot be initialized to zeros because it is not"
                    f" a tensor of known type and size ({_describe(port)}); add {port.name!r} to the first batch"
                )
            zeros[port.name] = np.zeros(known, port.dtype.numpy)
        return zeros


_BEFORE = re.compile(
    r"(?:past_key_values|past|previous|prev|initial|init|old)[._](.+)|(.+?)(?:[._](?:in|prev|past|old)|_?0)"
)
_AFTER = re.compile(r"(?:present|next|new|updated)[._](.+)|(.+?)(?:[._](?:out|next|new|n)|n|N)")
"""Patterns of a state's name before and after a run; their groups match the common part."""


def state_pairs(model: Model) -> Mapping[str, str]:
    """Pair outputs with inputs of matching name, type and shape, like the states of a recurrent model.

    The result is empty if it would contain every input.
    """
    inputs, outputs = input_ports(model), output_ports(model)
    fitting = {out.name: [into.name for into in inputs if fits(out, into)] for out in outputs}
    if len(inputs) < 2 or not any(fitting.values()):
        return {}
    pairs: dict[str, str] = {}
    for out, names in fitting.items():
        free = (name for name in names if name not in pairs.values())
        into = next((name for name in free if _stems(out, _AFTER) & _stems(name, _BEFORE)), None)
        pairs |= {} if into is None else {out: into}
    return pairs if len(pairs) < len(inputs) else {}


def _stems(name: str, pattern: re.Pattern[str]) -> set[str]:
    match = pattern.fullmatch(name)
    return {name, *filter(None, match.groups() if match else ())}


def option_values(pairs: Mapping[str, str], outputs: Sequence[str]) -> tuple[str, ...]:
    """Return short `--feedback` values for pairs: a * joins pairs with equal endings.

    `outputs`: names of all outputs of the model.
    """
    values: dict[str, None] = {}
    for out, into in pairs.items():
        shared = len([*takewhile(lambda ends: ends[0] == ends[1], zip(reversed(out), reversed(into), strict=False))])
        end = re.search(r"[._/].*", out[len(out) - shared :])
        star = f"{out.removesuffix(end[0])}*={into.removesuffix(end[0])}*" if end else ""
        covered = dict(expand(star, outputs)) if star else {}
        values[star if len(covered) > 1 and covered.items() <= pairs.items() else f"{out}={into}"] = None
    return tuple(values)


def expand(text: str, outputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of "OUT=IN". A * in OUT matches any text, and the * in IN is replaced with it.

    Raise FeedError for an invalid form or a pattern without a match.
    """
    out, _, into = (part.strip() for part in text.partition("="))
    if not out or not into or out.count("*") != into.count("*") or out.count("*") > 1:
        raise FeedError(f"{spelled('feedback', text)} is not of the form OUT=IN, such as hn=h or present.*=past.*")
    if "*" not in out:
        yield out, into
        return
    pattern = re.compile("(.+)".join(map(re.escape, out.split("*"))))
    matches = [match for match in map(pattern.fullmatch, outputs) if match]
    if not matches:
        raise FeedError(f"{spelled('feedback', text)} matches no output; the model has {_quoted(outputs)}")
    yield from ((match[0], into.replace("*", match[1])) for match in matches)


def fits(out: Port, into: Port) -> bool:
    """True if an output can be fed to an input: equal types, and no conflicting sizes."""
    if out.dtype is None or (out.dtype, out.container) != (into.dtype, into.container):
        return False
    if out.shape is None or into.shape is None:
        return True
    sizes = [(a, b) for a, b in zip(out.shape, into.shape, strict=False) if isinstance(a, int) and isinstance(b, int)]
    return len(out.shape) == len(into.shape) and all(a == b for a, b in sizes)


def _describe(port: Port) -> str:
    dtype = port.dtype.spelling if port.dtype else "of unknown type"
    container = "" if port.container == TENSOR else f"{port.container} of "
    return f"{container}{dtype} {port.dims if port.shape is not None else 'of unknown shape'}"


def _quoted(names: Sequence[str]) -> str:
    return shortened(list(map(repr, names)), _MAX_NAMES) or "none"
