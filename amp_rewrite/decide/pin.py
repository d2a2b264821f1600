"""Pins: ops that are held in float32."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.ir.view import OpId


@dataclass(frozen=True, slots=True)
class Pin:
    """An op that stays float32: the rule that says so, the op that caused it, and one line for people.

    `raises`: what the op computes in a low type already becomes float32 as well. So it is with pins that data
    asks for; a rule that only foresees trouble leaves alone what the model's author chose.
    """

    op: OpId
    rule: str
    because: OpId | None
    note: str
    raises: bool = False
