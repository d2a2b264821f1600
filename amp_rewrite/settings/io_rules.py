"""Rules for the types of a model's inputs and outputs: low, or float32."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PatternError, PolicyError, advice
from amp_rewrite.ir.view import MAIN, ValueId, View
from amp_rewrite.settings.selectors import advice_on


@dataclass(frozen=True, slots=True)
class IoRule:
    """A type (None: the low one) for inputs ("in"), outputs ("out") or both (""). `strict`: the glob must match."""

    text: str
    side: str
    glob: str
    dtype: DType | None
    strict: bool


def parse_io(rules: str | Iterable[str] | None) -> tuple[IoRule, ...]:
    """Return the rules "keep", "low" or "GLOB=TYPE", with or without "in:" or "out:"; PatternError for other text."""
    texts = [] if rules is None else [rules] if isinstance(rules, str) else rules
    return tuple(_io_rule(text.strip()) for text in texts)


def io_types(view: View, rules: Sequence[IoRule], to: DType) -> Mapping[ValueId, DType]:
    """Return the new types of the inputs and outputs that change: float32 ones, and those of another low type.

    The last rule that matches a value wins. PatternError for a glob that matches no such input or output,
    and for a type that is neither float32 nor the one that the model is lowered to.
    """
    main = view.scopes[MAIN]
    sides = {"in": _retypable(view, main.inputs, to), "out": _retypable(view, main.outputs, to)}
    chosen: dict[ValueId, DType | None] = {}
    for rule in rules:
        if rule.dtype not in (None, DType.FLOAT, to):
            raise PatternError(
                f"io {rule.text!r}: the model is lowered to {to.spelling}; use {to.spelling} or float32 here"
            )
        candidates = [v for side, values in sides.items() if rule.side in ("", side) for v in values]
        matched = [v for v in candidates if fnmatch.fnmatchcase(view.value_name(v), rule.glob)]
        if rule.strict and not matched:
            names = [view.value_name(v) for v in candidates]
            kind = {"in": "input", "out": "output", "": "input or output"}[rule.side]
            hint = advice_on(rule.glob, names, f"there are: {', '.join(names[:5]) or 'none'}")
            raise PatternError(f"io {rule.text!r}: no float32 {kind} is named {rule.glob!r}; {hint}")
        kept = rule.dtype is DType.FLOAT and not rule.strict
        chosen.update((v, None if kept else rule.dtype or to) for v in matched)
    return {v: dtype for v, dtype in sorted(chosen.items()) if dtype not in (None, view.dtype(v))}


def _io_rule(text: str) -> IoRule:
    prefix, colon, rest = text.partition(":")
    side, body = (prefix, rest) if colon and prefix in ("in", "out") else ("", text)
    if body in ("keep", "low"):
        return IoRule(text, side, "*", DType.FLOAT if body == "keep" else None, False)
    glob, equals, spelling = body.rpartition("=")
    if not equals or not glob.strip():
        hint = advice(body, ("keep", "low"), "write keep, low or GLOB=TYPE, with in: or out: before it")
        raise PatternError(f"io {text!r} is not a rule; {hint}")
    try:
        return IoRule(text, side, glob.strip(), DType.parse(spelling), True)
    except PolicyError as error:
        raise PatternError(f"io {text!r}: {error}") from error


def _retypable(view: View, values: Sequence[ValueId], to: DType) -> list[ValueId]:
    """Return the tensors of float32, and those of another low type than `to`."""
    dtypes = {DType.FLOAT, *(dtype for dtype in view.low_types if dtype is not to)}
    return [v for v in values if view.tensor_dtype(v) in dtypes]
