"""Safety rules as records: a name, a promise, a docstring with fixed headings, a function and two models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar, Generic, NamedTuple, ParamSpec, TypeVar

from amp_rewrite.decide.pin import Pin
from amp_rewrite.decide.reasons import DOCS
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.view import OpId, View

P = ParamSpec("P")
R = TypeVar("R")

OVERRIDE = "How to override"
HEADINGS = ("What it protects", "Why", "Example", OVERRIDE, "Source")
"""Headings of a rule's docstring."""
_ADVICE = "Lower single ops by name or pattern with `--lower`; `--set safety=none` turns off all rules."
"""The end of each text on overriding."""
_SECTION = re.compile(rf"^({'|'.join(HEADINGS)}): ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Record:
    """A rule or fusion with a page in the docs and two models: one that needs it, and one that it leaves alone."""

    name: str
    folder: ClassVar[str]
    """The folder of the models, in the package."""

    @property
    def docs(self) -> str:
        """Return the page of the record."""
        return f"{DOCS}/{self.name}.md"

    @property
    def pairs(self) -> tuple[str, ...]:
        """Return the names of the pairs of models."""
        return (self.name,)

    def model(self, end: str, case: str = "") -> str:
        """Return the ONNX text of a model; `case`: another pair than the first.

        `end`: "hit" for the smallest model that needs the rule, "near" for the nearest one that it leaves alone.
        """
        file = f"{case or self.pairs[0]}.{end}.onnxtxt"
        return resources.files("amp_rewrite").joinpath(self.folder, file).read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Rule(Record, Generic[P, R]):
    """A safety rule, documented by the docstring of its function.

    `reason`: the id of its pins in `decide/reasons.py`. `cases`: what the rule covers, each with a pair of models.
    `findings`: the kinds of its findings. `target`: the only target for which it runs; "" for all.
    """

    folder = "decide/hazards/models"
    reason: str
    promise: str
    function: Callable[P, R]
    cases: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    target: str = ""

    @property
    def pairs(self) -> tuple[str, ...]:
        """Return the names of the pairs of models."""
        return self.cases or (self.name,)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the rule."""
        return self.function(*args, **kwargs)

    @property
    def sections(self) -> Mapping[str, str]:
        """Return the text under each heading, as one line each."""
        _, *parts = _SECTION.split(inspect.getdoc(self.function) or "")
        texts = dict(zip(parts[::2], (" ".join(text.split()) for text in parts[1::2]), strict=True))
        texts[OVERRIDE] = " ".join(filter(None, (texts.get(OVERRIDE), _ADVICE)))
        return {head: texts[head] for head in HEADINGS if head in texts}


class HeldOp(NamedTuple):
    """An op that a rule holds in float32, the op that is the cause, and a one-line note for reports."""

    op: OpId
    because: OpId | None
    note: str


PinningRule = Rule[[View, DType], Iterator[HeldOp]]


def pinned(reason: str, held: Iterable[HeldOp], view: View) -> Iterator[Pin]:
    """Pin what a rule holds, where the op computes in float32: a pin on another op has no effect."""
    return (Pin(op, reason, because, note) for op, because, note in held if computes_float32(view, view.ops[op]))


def rule(
    reason: str,
    promise: str,
    *,
    cases: tuple[str, ...] = (),
    findings: tuple[str, ...] = (),
    target: str = "",
) -> Callable[[Callable[P, R]], Rule[P, R]]:
    """Make a function the rule that has the name of its reason."""
    return lambda function: Rule(reason, reason, promise, function, cases, findings, target)
