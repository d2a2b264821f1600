"""Safety rules as records: a name, a promise, a docstring with fixed headings, a function and two models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar, Generic, ParamSpec, TypeVar

from amp_rewrite.decide.reasons import DOCS

P = ParamSpec("P")
R = TypeVar("R")

OVERRIDE = "How to override"
HEADINGS = ("What it protects", "Why", "Example", OVERRIDE, "Source")
"""Headings of a rule's docstring."""
_ADVICE = "Lower single ops by name or pattern with `--lower`; `--safety none` turns off all rules."
"""The end of each text on overriding."""
MODELS = ("hit", "near")
"""The ends of a rule: the smallest model that needs it, and the nearest one that it leaves alone."""
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

    def model(self, end: str) -> str:
        """Return the ONNX text of one of the `MODELS`."""
        file = resources.files("amp_rewrite").joinpath(self.folder, f"{self.name}.{end}.onnxtxt")
        return file.read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Rule(Record, Generic[P, R]):
    """A safety rule, documented by the docstring of its function.

    `reason`: the id of its pins in `decide/reasons.py`, or the kind of its findings. `aliases`: earlier names of the
    rule, and names of rules that it subsumes. `target`: the only target for which it runs; "" for all.
    """

    folder = "decide/hazards/models"
    reason: str
    promise: str
    function: Callable[P, R]
    aliases: tuple[str, ...] = ()
    target: str = ""

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


def rule(
    reason: str, promise: str, *, name: str = "", aliases: tuple[str, ...] = (), target: str = ""
) -> Callable[[Callable[P, R]], Rule[P, R]]:
    """Make a function a rule; its name is its reason, unless another rule with this reason has that name."""
    return lambda function: Rule(name or reason, reason, promise, function, aliases, target)
