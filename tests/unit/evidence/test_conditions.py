"""Conditions: their defaults are those of the functions that fold their keywords into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature

import pytest

from amp_rewrite import calibrate, locate, repair, verify
from amp_rewrite.evidence.conditions import Conditions


@pytest.mark.parametrize("door", [calibrate, locate, repair, verify], ids=lambda door: door.__name__)
def test_conditions_have_the_defaults_of_the_public_function(door: Callable[..., object]) -> None:
    stated = {name: p.default for name, p in signature(door).parameters.items()}
    shared = [part for part in fields(Conditions) if part.name in stated and part.name not in ("chunk", "threads")]
    assert "allow_nonfinite" in {part.name for part in shared}
    assert {part.name: part.default for part in shared} == {part.name: stated[part.name] for part in shared}
