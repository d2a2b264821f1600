"""Expectations of a report: "float16 >= 95%", "casts <= 4", "ops[Softmax] = float32".

A file whose name says float16 may hold float32. An expectation states what a model should be, and its outcome says in
numbers what it is.

    TYPE, compute            ops of this element type; compute ops in low precision   a number or a share of all
    ops, ops[PATTERN]        ops, by operator, name or path                           a number, a share, or their type
    casts                    casts between floats                                     a number
    io, inputs, outputs      floating inputs and outputs; inputs[PATTERN] by name     their type
    weights, weights[TYPE]   bytes of weights                                         a size, a share, or their type
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.reports.match import RowGraph
from amp_rewrite.reports.render import count, plain, shortened, size
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import DTYPES, FLOATING, LOW, PortRow, Row

TYPES = tuple(DTYPES)
SUBJECTS = ("compute", "ops", "casts", "io", "inputs", "outputs", "weights")
_PORTS = ("io", "inputs", "outputs")
_BRACKETED = ("ops", "inputs", "outputs", "weights")
_FORM = re.compile(r"\s*(\w+)\s*(?:\[([^\]]*)\])?\s*(>=|<=|==|!=|=|<|>)\s*(.*?)\s*")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kMGT]?B|)")
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}
_HELP = (
    "write it like 'compute >= 95%', 'casts <= 4', 'io = float32', 'weights[float32] <= 1 MB' or 'ops[Gemm] = float16'"
)


@dataclass(frozen=True, slots=True)
class CheckedExpectation:
    """An expectation, whether a report meets it, and the numbers."""

    expected: str
    met: bool
    fact: str

    def __str__(self) -> str:
        return plain(f"{self.expected}: {self.fact}")


@dataclass(frozen=True, slots=True)
class Expectation:
    """One expectation. `choice` is the part in brackets; one of `number` and `dtype` is stated. `share`: in percent."""

    text: str
    subject: str
    choice: str | None
    sign: str
    number: float | None = None
    share: bool = False
    dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Parse an expectation. PolicyError, with the way to write it, for other texts."""
        form = _FORM.fullmatch(text)
        if form is None:
            raise PolicyError(f"expectation {text!r} is not a comparison; {_HELP}")
        subject, choice, sign, value = form.groups()
        sign = "=" if sign == "==" else sign
        if subject not in (*SUBJECTS, *TYPES):
            raise PolicyError(
                f"expectation {text!r}: unknown {subject!r}; {advice(subject, (*SUBJECTS, *TYPES), _HELP)}"
            )
        if choice is not None and subject not in _BRACKETED:
            raise PolicyError(f"expectation {text!r}: {subject} takes no brackets; {_HELP}")
        if subject == "weights" and choice is not None and choice not in TYPES:
            raise PolicyError(f"expectation {text!r}: unknown type {choice!r}; {advice(choice, TYPES, _HELP)}")
        stated = " ".join(text.split())
        typed = subject in ("ops", "weights", *_PORTS) and not (subject == "weights" and choice)
        if typed and value in TYPES:
            if sign not in ("=", "!="):
                raise PolicyError(f"expectation {text!r}: a type is equal or not; compare it with = or !=")
            return cls(stated, subject, choice, sign, dtype=value)
        number = _NUMBER.fullmatch(value)
        if number is None or subject in _PORTS:
            wanted = "a type" if subject in _PORTS else "a number, a share or a type"
            raise PolicyError(f"expectation {text!r}: {value!r} is not {wanted}; {_HELP}")
        unit = number[2]
        if (unit.endswith("B") and subject != "weights") or (unit == "%" and subject == "casts"):
            raise PolicyError(f"expectation {text!r}: {subject} cannot be compared with {value!r}; {_HELP}")
        if unit == "%" and subject == "weights" and choice is None:
            raise PolicyError(f"expectation {text!r}: say of which type, as in 'weights[float32] <= 1%'")
        return cls(stated, subject, choice, sign, float(number[1]) * _UNITS.get(unit, 1), unit == "%")

    def outcome(self, report: Report) -> CheckedExpectation:
        """Return whether a report meets the expectation."""
        if self.subject in _PORTS:
            return self._ports(report)
        if self.subject == "weights":
            return self._weights(report)
        if self.subject == "casts":
            live = [c for c in report.casts if c.origin != "folded" and not c.dead and c.from_ != c.to]
            return self._counted(len(live), len(live), "cast")
        rows = [report.rows[i] for i in RowGraph(report).live]
        if self.subject == "ops":
            return self._ops(rows)
        floats = [row for row in rows if row.variables or row.dtype in FLOATING]
        if self.subject == "compute":
            heavy = [row for row in floats if (row.color == "allow" if row.color else row.op in HEAVY)]
            return self._counted(sum(row.dtype in LOW for row in heavy), len(heavy), "compute op")
        if self.subject not in FLOATING:
            return self._counted(sum(row.dtype == self.subject for row in rows), len(rows), "op")
        return self._counted(sum(row.dtype == self.subject for row in floats), len(floats), "float op")

    def _counted(self, part: int, whole: int, noun: str) -> CheckedExpectation:
        if self.share:
            return self._shared(part, whole, f"{part} of {count(whole, noun)}", noun)
        fact = count(part, noun) if part == whole else f"{part} of {count(whole, noun)}"
        return CheckedExpectation(self.text, _COMPARE[self.sign](part, self.number or 0), fact)

    def _shared(self, part: int, whole: int, words: str, noun: str) -> CheckedExpectation:
        if not whole:
            return CheckedExpectation(self.text, False, f"no {noun} is there")
        met = _COMPARE[self.sign](100 * part, (self.number or 0) * whole)
        return CheckedExpectation(self.text, met, f"{100 * part / whole:.4g} % ({words})")

    def _ops(self, rows: Sequence[Row]) -> CheckedExpectation:
        pattern = self.choice if self.choice is not None else "*"
        chosen = [row for row in rows if any(fnmatchcase(text, pattern) for text in (row.op, row.name, row.path))]
        if self.dtype is None:
            return self._counted(len(chosen), len(rows), "op")
        return self._typed([(row.path, row.dtype) for row in chosen], "op")

    def _ports(self, report: Report) -> CheckedExpectation:
        ports: dict[str, Collection[PortRow]] = {"inputs": report.inputs, "outputs": report.outputs}
        listed = ports.get(self.subject, (*report.inputs, *report.outputs))
        if self.choice is not None:
            chosen = [port for port in listed if fnmatchcase(port.name, self.choice)]
        else:
            chosen = [port for port in listed if not FLOATING.isdisjoint(re.findall(r"\w+", port.dtype))]
        noun = {"inputs": "input", "outputs": "output"}.get(self.subject, "floating input or output")
        return self._typed([(port.name, port.dtype) for port in chosen], noun)

    def _typed(self, items: Sequence[tuple[str, str]], noun: str) -> CheckedExpectation:
        if not items:
            chosen = f" matches {self.choice!r}" if self.choice is not None else " is there"
            return CheckedExpectation(self.text, False, f"no {noun}{chosen}")
        wrong = [(name, dtype) for name, dtype in items if (dtype == self.dtype) != (self.sign == "=")]
        if not wrong:
            return CheckedExpectation(self.text, True, f"{len(items)} of {len(items)}")
        examples = shortened([f"{name} is {dtype}" for name, dtype in wrong])
        return CheckedExpectation(self.text, False, f"{len(items) - len(wrong)} of {len(items)}: {examples}")

    def _weights(self, report: Report) -> CheckedExpectation:
        stored = report.weights
        if self.dtype is not None:
            floating = {dtype: number for dtype, number in stored.items() if dtype in FLOATING}
            whole, part = sum(floating.values()), floating.get(self.dtype, 0)
            met = part == whole > 0 if self.sign == "=" else part == 0
            return CheckedExpectation(self.text, met, self._by_type(floating) or "no floating weight is there")
        part, whole = stored.get(self.choice, 0) if self.choice else sum(stored.values()), sum(stored.values())
        if self.share:
            return self._shared(part, whole, self._by_type(stored), "weight")
        return CheckedExpectation(self.text, _COMPARE[self.sign](part, self.number or 0), size(part))

    def _by_type(self, stored: Mapping[str, int]) -> str:
        ordered = sorted(stored.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{size(number)} {dtype}" for dtype, number in ordered)
