"""Why an op has the type that it has: the chain of reasons, back to the op that decides."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from amp_rewrite.errors import PatternError
from amp_rewrite.reports.render import plain
from amp_rewrite.reports.rows import NO_ROW, ReportData, Row

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View

RULES = {
    "allow_root": "on the allow list",
    "force_all": "the level lowers every op",
    "lower_all": "the level lowers gray and clear ops as well",
    "lower": "you asked for it",
    "between_allow": "between lowered ops, with no denied op on the way",
    "gray_follows_allow": "a gray op right after a lowered one",
    "allow_through_clear": "a clear op beside a lowered one",
    "existing_cast": "a cast of the model itself, in the type in which all that read it do",
    "sequence_cluster": "shares a sequence, which has one element type",
    "deny": "on the deny list",
    "deny_forward": "a denied op reaches it, and what it computes feeds a denied or gray op",
    "keep": "you asked for it",
    "raised": "of a low type in the model, and raised to float32",
    "unraised": "asked to be raised to float32, which cannot be",
    "unlisted": "on no list",
    "boundary": "the edge of a body or of an unknown op keeps its type",
    "unpainted": "no rule lowers it",
    "kernel_gate": "the target has no kernel for it",
    "schema_gate": "its operator does not admit the type",
    "kept_variable": "computed in float32 by every kernel",
    "unknown_type": "an element type at it is unknown, so it stays as it is",
    "shape_follows": "reads no element, so it takes its input as it comes",
    "norm_tail": "scale and bias of a normalization have the type of what it normalizes",
    "cluster": "part of one computation that is lowered as a whole or not at all",
    "shape_taint": "computes a shape, size, axis or scale",
    "index_taint": "holds integers in floats",
    "angle": "computes the angle of a Sin or Cos",
    "constant_range": "a constant of it does not fit the type",
    "epsilon": "guards a division with a number below the type's smallest normal one",
    "folded": "computed from constants alone, once, when a model is loaded",
    "distance": "a distance: small beside the squares and products that it is computed from",
    "places": "adds to places on a grid of positions",
    "cancellation": "a variance as a difference of means: small beside them",
    "logarithm": "computes the argument of a logarithm, from a softmax or sigmoid on",
    "quantizer": "goes beyond the type, by what a quantizer holds times its scale",
    "product": "a product over an axis, beyond the type at either end by nature",
    "growth": "behind placeholder weights: values outgrow the type there",
    "statistics": "its statistics do not fit the type",
    "additive_mask": "adds a mask that would overflow",
    "overflow": "data showed values that the type cannot hold",
    "underflow": "data showed values that vanish in the type",
    "nonfinite": "data showed infinities that it makes in float32 already",
    "unseen": "no data showed what it computes",
    "repair": "pinned so that the outputs are near enough",
    "loss": "computes the loss of a training step, in float32",
    "update": "updates the state of a training step, in float32",
    "min_cut": "Casts and float32 cost least if the border between the types runs so",
    "join": "lowered values meet here: one Cast behind it instead of several before it",
}
"""What each rule says, in words."""


def makers(view: View) -> Mapping[str, int]:
    """Of each value the row of the op that makes it; NO_ROW for inputs and weights."""
    return {
        value.name: NO_ROW if value.producer is None else int(value.producer)
        for value in reversed(view.values)  # of equal names in several bodies the first counts
    }


def explain(report: ReportData, name: str, makers: Mapping[str, int] = MappingProxyType({})) -> str:
    """The reasons behind one op, step by step, the last one being the root. Ends with a newline.

    `name` is an op's name, its path (scope and name), "#12" for the thirteenth row, or the name of a value, whose
    row is in `makers`. PatternError for a name that no op and no value has, or that several ops have; it lists what
    to ask for instead.
    """
    at = _find(report, name, makers)
    if report.inventory:
        row = report.rows[at]
        return plain(f"{row.path} ({row.op}) is {_types(row)} in the model; nothing has decided about it yet") + "\n"
    seen: set[int] = set()
    lines: list[str] = []
    while at != NO_ROW and at not in seen:
        lines += _step(report.rows[at], first=not seen)
        seen.add(at)
        at = report.rows[at].because_row
    return "\n".join(map(plain, lines)) + "\n"


def _step(row: Row, *, first: bool) -> list[str]:
    """One op: what it is, the rule in words, and what the lists say of it."""
    head = f"{'' if first else 'because '}{plain(row.path)} ({row.op}) is {_types(row)}"
    if row.rule is None:
        return [f"{head}: it computes no float32"]
    lines = [f"{head}: {row.rule}", f"    {RULES.get(row.rule, row.rule)}{_noted(row)}"]
    if row.color:
        lines.append(f"    {row.color}: {plain(row.source)}{': ' + plain(row.reason) if row.reason else ''}")
    return lines


def _noted(row: Row) -> str:
    return f": {plain(row.note)}" if row.note else ""


def _types(row: Row) -> str:
    """The type, and the variables where they differ: "float16 (T float16, U float32)"."""
    if len(set(row.variables.values())) < 2:
        return row.dtype
    return f"{row.dtype} ({', '.join(f'{name} {dtype}' for name, dtype in row.variables.items())})"


def _find(report: ReportData, name: str, makers: Mapping[str, int]) -> int:
    """The position of the row that a name or a path stands for; that of an op before that of a value."""
    if name.startswith("#") and name[1:].isdecimal() and len(name) < 12 and int(name[1:]) < len(report.rows):
        return int(name[1:])
    found = [i for i, row in enumerate(report.rows) if row.path == name]
    found = found or [i for i, row in enumerate(report.rows) if row.name == name]
    if not found and name in makers:
        if makers[name] == NO_ROW:
            raise PatternError(
                f"{report.model.name}: no op makes {name!r}, an input or a weight; ask for a reader of it"
            )
        return makers[name]
    if not found:
        names = dict.fromkeys((*(row.name for row in report.rows), *makers))
        near = difflib.get_close_matches(name, names, 3)
        advice = f"did you mean {', '.join(map(repr, near))}?" if near else "report --verbose lists them all"
        raise PatternError(f"{report.model.name}: no op{' or value' if makers else ''} is named {name!r}; {advice}")
    if len(found) > 1:
        paths = [report.rows[i].path for i in found]
        unique = len(set(paths)) == len(paths)
        ways = [repr(path) if unique else f"#{i} ({report.rows[i].op})" for i, path in zip(found, paths, strict=True)]
        raise PatternError(f"{report.model.name}: {len(found)} ops are named {name!r}; ask for {' or '.join(ways)}")
    return found[0]
