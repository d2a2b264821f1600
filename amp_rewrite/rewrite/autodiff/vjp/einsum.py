"""The VJP of Einsum, of any number of operands: an Einsum of the gradient with the other operands."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

from amp_rewrite.ir.attributes import equation
from amp_rewrite.rewrite.autodiff.facts import Shape
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, row, sum_to

_ELLIPSIS = "..."


def _einsum(v: Call, slot: int) -> str:
    """Sum over labels absent from the operand; expand labels that only it has; sum over its broadcast dims."""
    terms, out = _spelled(v)
    own = terms[slot]
    others = [(v.x(i), term) for i, term in enumerate(terms) if i != slot]
    seen = set(out).union(*[term for _, term in others])
    kept = "".join(label for label in own if label in seen)
    equation = ",".join([out, *[term for _, term in others]]) + "->" + kept
    gradient = v.do("Einsum", v.g, *[x for x, _ in others], equation=equation)
    missing = [axis for axis, label in enumerate(own) if label not in seen]
    if missing:
        gradient = v.do("Expand", v.b.unsqueeze(gradient, missing), v.b.shape_of(v.x(slot)))
    return sum_to(v.b, gradient, _dims(v, terms, own), v.x(slot))


def _spelled(v: Call) -> tuple[list[str], str]:
    """Labels of each operand and of the output, with letters for an ellipsis."""
    terms, out = equation(v.op.node)
    hidden = [v.rank(i) - len(t.replace(_ELLIPSIS, "")) for i, t in enumerate(terms)]
    free = [letter for letter in ascii_letters if letter not in "".join(terms)][: max(hidden, default=0)]
    spelled = [t.replace(_ELLIPSIS, "".join(free[len(free) - n :])) for t, n in zip(terms, hidden, strict=True)]
    for term in spelled:
        if len(set(term)) < len(term):
            raise v.error(
                f"no gradient of a diagonal: {v.attr('equation')!r} repeats an axis of one operand; replace the op"
            )
    return spelled, out.replace(_ELLIPSIS, "".join(free))


def _dims(v: Call, terms: Sequence[str], own: str) -> Shape:
    """Shape of the gradient before the sum over broadcast dims."""
    size: dict[str, int | str | None] = {}
    for i, term in enumerate(terms):
        for label, dim in zip(term, v.shape(i) or (None,) * len(term), strict=True):
            if size.get(label, 1) == 1:
                size[label] = dim
    return tuple(size[label] for label in own)


ROWS: Family = {"Einsum": row(_einsum)}
