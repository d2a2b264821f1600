"""Sizes that are computed from others: sums of products of names and numbers, in one form: equal ones are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """A sum of products: names, sorted, and how often. One whole number or one name stands for itself instead."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    def __str__(self) -> str:
        return " + ".join("*".join((*(() if times == 1 else (str(times),)), *names)) for names, times in self.terms)


Dim = int | str | Size | None
"""How long an axis is: a number, a name that is one size wherever it stands, a sum of such, or not known."""


_MOST_TERMS = 8
"""Of a size that is kept: no exporter's shapes have more, and products of long sums would grow without end."""


def plus(a: Dim, b: Dim) -> Dim:
    """a + b; None where either is not known."""
    if a is None or b is None:
        return None
    total = dict(_terms(a))
    for names, times in _terms(b).items():
        total[names] = total.get(names, 0) + times
    return _dim(total)


def times(a: Dim, b: Dim) -> Dim:
    """a · b; None where either is not known."""
    if a is None or b is None:
        return None
    total: dict[tuple[str, ...], int] = {}
    for left, n in _terms(a).items():
        for right, m in _terms(b).items():
            names = tuple(sorted((*left, *right)))
            total[names] = total.get(names, 0) + n * m
    return _dim(total)


def minus(a: Dim, b: Dim) -> Dim:
    """a − b, which may be less than 0; None where either is not known."""
    return plus(a, times(b, -1))


def product(dims: Iterable[Dim]) -> Dim:
    """All of them multiplied; None where one is not known."""
    total: Dim = 1
    for dim in dims:
        total = times(total, dim)
    return total


def over(a: Dim, b: Dim) -> Dim:
    """a / b where that is whole whatever the names stand for; else None."""
    if a is None or b is None or b == 0:
        return None
    ((names, divisor), *more) = _terms(b).items() or [((), 0)]
    if more or not divisor:
        return None
    total = {}
    for whole, n in _terms(a).items():
        rest = list(whole)
        for name in names:
            if name not in rest:
                return None
            rest.remove(name)
        if n % divisor:
            return None
        total[tuple(rest)] = n // divisor
    return _dim(total)


def countable(dim: Dim) -> bool:
    """Whether it is at least 0 whatever its names stand for."""
    return dim is not None and all(n >= 0 for n in _terms(dim).values())


def names_in(dim: Dim) -> frozenset[str]:
    """The names that a size is computed from."""
    return frozenset() if dim is None else frozenset(name for names in _terms(dim) for name in names)


def renamed(dim: Dim, known: Mapping[str, Dim]) -> Dim:
    """The size with what is known of its names in their place."""
    if isinstance(dim, str):
        return known.get(dim, dim)
    if not isinstance(dim, Size) or not any(name in known for name in names_in(dim)):
        return dim
    total: Dim = 0
    for names, n in dim.terms:
        total = plus(total, times(n, product(known.get(name, name) for name in names)))
    return total


def _terms(dim: int | str | Size) -> dict[tuple[str, ...], int]:
    if isinstance(dim, Size):
        return dict(dim.terms)
    return {(dim,): 1} if isinstance(dim, str) else {(): dim} if dim else {}


def _dim(terms: Mapping[tuple[str, ...], int]) -> Dim:
    kept = {names: n for names, n in terms.items() if n}
    if not kept:
        return 0
    if len(kept) > _MOST_TERMS:
        return None
    ((names, n), *more) = kept.items()
    if not more and not names:
        return n
    return names[0] if not more and n == 1 and len(names) == 1 else Size(tuple(sorted(kept.items())))
