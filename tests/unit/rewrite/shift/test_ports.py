"""Exponents at the ports of one op: they solve its law, and differ from those of its values at one port at most."""

from __future__ import annotations

import random

import pytest

from amp_rewrite.rewrite.shift.laws import OpPort
from amp_rewrite.rewrite.shift.ports import PortProblem, solve_ports

FACTORS = (-2, -1, 1, 2)


@pytest.mark.parametrize("seed", range(60))
def test_one_port_changes_if_that_is_enough(seed: int) -> None:
    rng = random.Random(seed)
    ports = [OpPort("x", slot) for slot in range(rng.choice((2, 3)))]
    law = [(rng.choice(FACTORS), port) for port in ports]
    asked = {port: rng.randint(-6, 6) for port in ports}
    inputs = ports[1:]
    given = {port: asked[port] for port in inputs}
    problem = PortProblem(given, {ports[0]: asked[ports[0]]}, (), inputs, lambda *_: False)
    found = solve_ports([law], problem)
    rest = sum(factor * asked[port] for factor, port in law)
    assert sum(factor * found[port] for factor, port in law) == 0
    changed = [port for port in ports if found[port] != asked[port]]
    if any(rest % factor == 0 for factor, _ in law):
        assert len(changed) == bool(rest)
    else:
        assert not any(found.values())


@pytest.mark.parametrize("seed", range(60))
def test_a_constant_takes_the_exponent_that_is_left(seed: int) -> None:
    rng = random.Random(seed)
    result, x, weight = (OpPort("x", slot) for slot in (-1, 0, 1))
    factor = rng.choice(FACTORS)
    law = [(-1, result), (1, x), (factor, weight)]
    asked = {result: rng.randint(-6, 6), x: rng.randint(-6, 6)}
    found = solve_ports([law], PortProblem({x: asked[x]}, {result: asked[result]}, (weight,), (x,), lambda *_: True))
    left = asked[result] - asked[x]
    assert sum(f * found[port] for f, port in law) == 0
    assert left % factor or found == {**asked, weight: left // factor}
