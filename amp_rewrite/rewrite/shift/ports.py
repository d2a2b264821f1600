"""The exponents at the ports of one op: those at which its laws hold, as near as possible to those of its values."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.rewrite.shift.laws import Law, OpPort

Allowed = Callable[[OpPort, int], bool]
"""True if a constant or an attribute may be stored times 2⁻ᵉ."""


@dataclass(frozen=True, slots=True)
class PortProblem:
    """The exponents at the ports of one op before laws are solved.

    `given`: exponents of its computed inputs; `wanted`: those of its results. `knobs`: constants and attributes, which
    take any exponent that is `allowed`. `order`: the computed inputs, those first that a Mul should stand before.
    `poor`: those of them that would lose digits if they were shifted further.
    """

    given: Mapping[OpPort, int]
    wanted: Mapping[OpPort, int]
    knobs: Sequence[OpPort]
    order: Sequence[OpPort]
    allowed: Allowed
    poor: Container[OpPort] = ()


def solve_ports(laws: Sequence[Law], asked: PortProblem) -> Mapping[OpPort, int]:
    """Return exponents of all ports at which every law holds.

    Where computed inputs and results do not agree, a result is made at another exponent, or a Mul stands before an
    input. All exponents are 0, which always holds, if no others are found.
    """
    found: dict[OpPort, int] = {**asked.given, **asked.wanted}
    changed: set[OpPort] = set()
    for law in laws:
        if not _settled(law, found, asked) and not _changed(law, found, changed, asked):
            return _neutral(laws, asked)
    for knob in asked.knobs:
        found.setdefault(knob, 0)
    if any(sum(factor * found[port] for factor, port in law) for law in laws):
        return _neutral(laws, asked)
    return found


def _neutral(laws: Sequence[Law], asked: PortProblem) -> Mapping[OpPort, int]:
    ports = {port: 0 for law in laws for _, port in law}
    return {**ports, **dict.fromkeys((*asked.given, *asked.wanted, *asked.knobs), 0)}


def _settled(law: Law, found: dict[OpPort, int], asked: PortProblem) -> bool:
    """Settle the open constants and attributes of a law; True if it then holds."""
    for factor, port in [term for term in law if term[1] not in found]:
        rest = sum(f * found.get(other, 0) for f, other in law)
        exponent = -rest // factor
        fits = rest % factor == 0 and asked.allowed(port, exponent)
        found[port] = exponent if fits else 0
    return sum(factor * found[port] for factor, port in law) == 0


def _changed(law: Law, found: dict[OpPort, int], changed: set[OpPort], asked: PortProblem) -> bool:
    """Change a port of a law so that it holds; False if none can change, or once more."""
    rest = sum(factor * found[port] for factor, port in law)
    terms = {port: factor for factor, port in law}
    if len(terms) < len(law):  # a port twice: its own factors add up
        terms = {port: sum(f for f, other in law if other == port) for port in terms}
    results = [port for port in terms if port in asked.wanted]
    inputs = [port for port in asked.order if port in terms]
    equal = len(terms) == 2 and not sum(terms.values()) and not any(port in asked.knobs for port in terms)
    sums = len(terms) > 1 and not equal
    late = bool(results) and (rest * terms[results[0]] < 0 if sums else not inputs)
    if sums:
        inputs.sort(key=lambda port: port in asked.poor)
    good = [port for port in inputs if not sums or port not in asked.poor]
    for port in (*results, *inputs) if late else (*good, *results, *inputs):
        if port not in changed and terms[port] and rest % terms[port] == 0:
            found[port] -= rest // terms[port]
            changed.add(port)
            return True
    return False
