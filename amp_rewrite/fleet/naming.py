"""Names of what is written: a rule for models, and with it for their weights."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, advice, spelled

SAME = "{stem}.onnx"
"""The rule by which models keep their names."""
_DATA = re.compile(r"(?:\.onnx[._]data|[._]data|\.bin)(?:_[0-9]+)?$", re.IGNORECASE)
_WORDS = ("stem", "type", "folder")


@dataclass(frozen=True, slots=True)
class NamingRule:
    """A rule such as "{stem}_fp16.onnx"; {stem} is the source's name without .onnx, {type} the low type."""

    text: str
    to: DType

    @classmethod
    def of(cls, text: str, to: DType) -> NamingRule:
        """Return the rule in a text. PolicyError for one that names no .onnx file in the same folder."""
        words = fields_of(text, "name", _WORDS[:2])
        if not text.endswith(".onnx") or "stem" not in words or {*text} & {"/", "\\", "\0"}:
            way = "write {stem} once and .onnx at its end, without a folder, as in '{stem}_fp16.onnx'"
            raise PolicyError(f"{spelled('name', text)} is not a rule for names; {way}")
        return cls(text, to)

    def model(self, source: Path) -> str:
        """Return the name of the model that is made of a file."""
        return self._filled(source.stem)

    def data(self, model: str) -> str:
        """Return the name of the weights of a written model, as optimum and transformers.js know it."""
        return f"{model}_data"

    def shared(self, data: Path) -> str:
        """Return the name of weights that several models share, from that of the source's."""
        if self.text != SAME:
            return f"{self._filled(_DATA.sub('', data.name))}_data"
        return data.name if data.suffix else f"{data.name}.data"

    def _filled(self, stem: str) -> str:
        return self.text.format(stem=stem, type=self.to.spelling)


def fields_of(text: str, keyword: str, known: tuple[str, ...] = _WORDS) -> set[str]:
    """Return the words in braces in a rule. PolicyError for an unknown one, or braces that do not match."""
    try:
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise PolicyError(f"{spelled(keyword, text)}: {error}; double a brace that is part of a name") from error
    for _, name, form, conversion in parts:
        if name not in known or form or conversion:
            words = ", ".join(f"{{{word}}}" for word in known)
            raise PolicyError(
                f"{spelled(keyword, text)}: unknown word {{{name}}}; {advice(name, known, f'use one of {words}')}"
            )
    return {str(part[1]) for part in parts}


def placed(rule: str, source: Path, relative: Path) -> str:
    """Return a path that belongs to a model: a rule with {stem}, and {folder} for its folder below the source's."""
    return rule.format(stem=source.stem, folder=relative.parent.as_posix()) if "{" in rule else rule
