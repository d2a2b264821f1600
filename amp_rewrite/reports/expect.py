"""Expectations for a report: "float16 >= 95%", "casts <= 4", "ops[Softmax] = float32".

A file named float16 may contain float32. An expectation describes the model; its outcome gives the actual numbers.

    TYPE, compute            ops of this element type; compute ops in low precision   a number or a share of all
    ops, ops[PATTERN]        ops, by operator, name or path                           a number, a share, or their type
    casts                    casts between floats                                     a number
    io, inputs, outputs      floating-point inputs, outputs; inputs[PATTERN] by name  their type
    weights, weights[TYPE]   bytes of weights                                         a size, a share, or their type
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.reports.diff import live, live_casts
from amp_rewrite.reports.render import count, plain, shortened, size
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import DTYPES, FLOATING, LOW

_TYPES = dict.fromkeys(DTYPES, ("", "%"))
_PORTS = dict.fromkeys(("io", "inputs", "outputs"), ("type",))
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS_BY_SUBJECT: Mapping[str, Sequence[str]] = {
    "compute": ("", "%"),
    "ops": ("", "%", "type"),
    "casts": ("",),
    **_PORTS,
    "weights": (*_UNITS, "%", "type"),
    **_TYPES,
}
"""Units of values for each subject; "type" for an element type."""
_BRACKETED = ("ops", "inputs", "outputs", "weights")
_PATTERN = re.compile(r"\s*(\w+)\s*(?:\[([^\]]*)\])?\s*(>=|<=|==|!=|=|<|>)\s*(.*?)\s*")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kMGT]?B|)")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_HELP = (
    "write it like 'compute >= 95%', 'casts <= 4', 'io = float32', 'weights[float32] <= 1 MB' or 'ops[Gemm] = float16'"
)


@dataclass(frozen=True, slots=True)
class CheckedExpectation:
    """An expectation and its outcome for a report: met or not, and the actual numbers."""

    expected: str
    met: bool
    fact: str

    def __str__(self) -> str:
        return plain(f"{self.expected}: {self.fact}")


class _Item(NamedTuple):
    """An op, a cast, an input or output, or the bytes of weights of a type; `chosen`: selected by the expectation."""

    name: str
    dtype: str
    chosen: bool
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Expectation:
    """A parsed expectation. `choice`: the part in brackets. `unit`: the unit of `value`; "type" for an element type."""

    text: str
    subject: str
    choice: str | None
    sign: str
    value: str
    unit: str

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Parse an expectation, or raise PolicyError with examples."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise PolicyError(f"expectation {text!r} is not a comparison; {_HELP}")
        subject, choice, sign, value = match.groups()
        if subject not in _UNITS_BY_SUBJECT:
            raise PolicyError(f"expectation {text!r}: unknown {subject!r}; {advice(subject, _UNITS_BY_SUBJECT, _HELP)}")
        if choice is not None and subject not in _BRACKETED:
            raise PolicyError(f"expectation {text!r}: {subject} takes no brackets; {_HELP}")
        if subject == "weights" and choice is not None and choice not in DTYPES:
            raise PolicyError(f"expectation {text!r}: unknown type {choice!r}; {advice(choice, DTYPES, _HELP)}")
        sign = "=" if sign == "==" else sign
        number = _NUMBER.fullmatch(value)
        amount, unit = number.groups() if number else (value, "type" if value in DTYPES else "?")
        if unit not in _UNITS_BY_SUBJECT[subject] or (unit == "type" and sign not in ("=", "!=")):
            raise PolicyError(f"expectation {text!r}: {subject} cannot be compared with {sign} {value!r}; {_HELP}")
        return cls(" ".join(text.split()), subject, choice, sign, amount, unit)

    def outcome(self, report: Report) -> CheckedExpectation:
        """Check a report against the expectation."""
        noun, items = self._items(report)
        chosen = [item for item in items if item.chosen]
        part, whole = (sum(item.amount for item in some) for some in (chosen, items))
        if self.unit == "type":
            matching = [item for item in chosen if (item.dtype == self.value) == (self.sign == "=")]
            met, fact = 0 < len(matching) == len(chosen), self._types(noun, chosen, len(matching))
        elif self.unit == "%":
            met = whole > 0 and _COMPARE[self.sign](100 * part, float(self.value) * whole)
            fact = f"{100 * part / whole:.4g}% ({self._counted(noun, items, part)})" if whole else f"there is no {noun}"
        else:
            met = _COMPARE[self.sign](part, float(self.value) * _UNITS[self.unit])
            fact = size(part) if self.subject == "weights" else self._counted(noun, items, part)
        return CheckedExpectation(self.text, met, fact)

    def _items(self, report: Report) -> tuple[str, list[_Item]]:
        if self.subject in _PORTS:
            sides = {"inputs": report.inputs, "outputs": report.outputs}
            ports = sides.get(self.subject, (*report.inputs, *report.outputs))
            floating = [not FLOATING.isdisjoint(re.findall(r"\w+", port.dtype)) for port in ports]
            selected = floating if self.choice is None else [fnmatchcase(port.name, self.choice) for port in ports]
            return "input or output", [_Item(p.name, p.dtype, s) for p, s in zip(ports, selected, strict=True)]
        if self.subject == "weights":
            stored = sorted(report.weights.items(), key=lambda item: (-item[1], item[0]))
            typed = self.unit == "type"
            noun = "floating-point weight" if typed else "weight"
            return noun, [_Item(t, t, t in FLOATING if typed else self.choice in (None, t), n) for t, n in stored]
        if self.subject == "casts":
            return "cast", [_Item(cast.value, cast.to, True) for _, cast in live_casts(report)]
        rows = [report.rows[i] for i in live(report)]
        if self.subject == "ops":
            pattern = self.choice if self.choice is not None else "*"
            selected = [any(fnmatchcase(text, pattern) for text in (row.op, row.name, row.path)) for row in rows]
            return "op", [_Item(row.path, row.dtype, chosen) for row, chosen in zip(rows, selected, strict=True)]
        floats = [row for row in rows if row.variables or row.dtype in FLOATING]
        if self.subject == "compute":
            heavy = [row for row in floats if (row.color == "allow" if row.color else row.op in HEAVY)]
            return "compute op", [_Item(row.path, row.dtype, row.dtype in LOW) for row in heavy]
        noun, ops = ("float op", floats) if self.subject in FLOATING else ("op", rows)
        return noun, [_Item(row.path, row.dtype, row.dtype == self.subject) for row in ops]

    def _counted(self, noun: str, items: Sequence[_Item], part: int) -> str:
        if self.subject == "weights":
            return ", ".join(f"{size(item.amount)} {item.dtype}" for item in items)
        return count(part, noun) if part == len(items) and self.unit != "%" else f"{part} of {count(len(items), noun)}"

    def _types(self, noun: str, chosen: Sequence[_Item], matching: int) -> str:
        if not chosen:
            return f"there is no {noun}" if self.choice is None else f"no {noun} matches {self.choice!r}"
        if self.subject == "weights":
            return self._counted(noun, chosen, 0)
        mismatched = [f"{i.name} is {i.dtype}" for i in chosen if (i.dtype == self.value) != (self.sign == "=")]
        return f"{matching} of {len(chosen)}{': ' if mismatched else ''}{shortened(mismatched)}"
