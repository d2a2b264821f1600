"""Pins: ops that stay float32."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.ir.view import OpId, View


@dataclass(frozen=True, slots=True)
class Pin:
    """An op that stays float32, the rule that pins it, the op that caused it, and a one-line note for reports.

    `raises`: results that the model computes in a low type become float32 too. Pins from data set it; rules that only
    predict a problem respect a low type chosen by the model's author.
    """

    op: OpId
    rule: str
    because: OpId | None
    note: str
    raises: bool = False


def described(view: View, op_id: OpId) -> str:
    """Return the name and kind of an op as notes spell them."""
    return f"{view.ops[op_id].name!r} ({view.ops[op_id].kind})"
