"""Pins: ops that are held in float32, and groups of ops that must share one color."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.ir.view import OpId, ValueId


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


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ops that compute one thing together ("layer_normalization", "softmax" …) and must share one color.

    `entry` is the value that is normalized or activated, before any Cast that the cluster starts with.
    `tail` are the scale Mul and bias Add that end a normalization, Casts between them included; they stand in
    `ops` too. onnxruntime fuses a decomposed normalization into one node whose input is `entry`, looking past
    the Casts, and then refuses the model unless scale and bias have the type of that input.
    """

    kind: str
    ops: tuple[OpId, ...]
    entry: ValueId | None = None
    tail: tuple[OpId, ...] = ()
