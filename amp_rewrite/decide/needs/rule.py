"""Safety rules and fusions as records: a name, a promise, texts under fixed headings and pairs of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar

from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import DOCS
from amp_rewrite.settings.choices import Target

OVERRIDE = "How to override"
HEADINGS = ("What it protects", "Why", "Example", OVERRIDE, "Source")
"""Headings of the texts of a rule."""
_ADVICE = "Lower single ops by name or pattern with `--lower`; `--set safety=none` turns off all rules."
"""The end of each text on overriding."""


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
class Rule(Record):
    """A safety rule: what a reason protects, and why. `needs` and `coloring/where` hold the ops.

    Its texts are in `rules/NAME.md`: one sentence, then the text under each heading.

    Args:
        name: the id of its pins in `decide/reasons.py`.
        cases: what the rule covers, each with a pair of models.
        findings: the kinds of its findings.
        target: the only target for which it holds; "" for all.
    """

    folder = "decide/needs/models"
    cases: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    target: str = ""

    @property
    def reason(self) -> str:
        """Return the id of its pins."""
        return self.name

    @property
    def pairs(self) -> tuple[str, ...]:
        """Return the names of the pairs of models."""
        return self.cases or (self.name,)

    @property
    def promise(self) -> str:
        """Return what the rule promises, in one sentence."""
        return self._parts[0]

    @property
    def sections(self) -> Mapping[str, str]:
        """Return the text under each heading, as one line each, with the advice that holds for all rules."""
        texts = dict(part.split("\n\n", 1) for part in self._parts[1:])
        texts[OVERRIDE] = " ".join(filter(None, (texts.get(OVERRIDE), _ADVICE)))
        return {head: " ".join(texts[head].split()) for head in HEADINGS}

    @property
    def _parts(self) -> list[str]:
        file = resources.files("amp_rewrite").joinpath("decide/needs/rules", f"{self.name}.md")
        return [part.strip() for part in file.read_text("utf-8").split("\n## ")]


RULES = (
    Rule(reasons.WHOLE_NUMBER, ("shape_taint", "index_taint", "element_counts", "compared")),
    Rule(reasons.POSITION, ("angle", "places", "position_bias")),
    Rule(reasons.MASK_FILL, ("additive_mask", "saturated"), findings=("saturated",)),
    Rule(reasons.CONSTANT_RANGE, (reasons.CONSTANT_RANGE, "statistics", "scaled_down", "quantizer")),
    Rule(reasons.MAGNIFIED, ("epsilon", "logarithm", "front_end", "ranked")),
    Rule(reasons.FOLDED),
    Rule(reasons.CANCELLATION, (reasons.CANCELLATION, "distance", "level")),
    Rule(reasons.QUANTIZED),
    Rule(reasons.RUNNING_SUM, ("accumulators", "state", "recursion", "small_step", "disguise", "weighted_mean")),
    Rule(reasons.LONG_SUM, target=Target.WEBGPU.value),
    Rule(reasons.NO_GAIN, ("last_product", "tiny_product", "raw")),
)
"""All safety rules that a report can name. If several hold one op, the first need that reaches it gives the reason."""
