"""Pins of a safety rule, or of a part of one, on a view."""

from __future__ import annotations

from collections.abc import Iterable

from amp_rewrite.decide.hazards.rule import HeldOp, pinned
from amp_rewrite.decide.pin import Pin
from amp_rewrite.ir.view import View


def pins_of(held: Iterable[HeldOp], view: View, reason: str = "") -> list[Pin]:
    """Return a pin for each op that computes in float32, the first of several, in the order in which they come."""
    pins: dict[int, Pin] = {}
    for pin in pinned(reason, held, view):
        pins.setdefault(pin.op, pin)
    return list(pins.values())
