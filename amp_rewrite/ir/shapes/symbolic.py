"""Computed sizes: sums of products of names and numbers, in one form: equal sizes compare equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class Size:
    """A sum of products: sorted names, with a factor. A single integer or name is a plain int or str instead."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    def __str__(self) -> str:
        return " + ".join("*".join((*(() if times == 1 else (str(times),)), *names)) for names, times in self.terms)


Dim = int | str | Size | None
"""The length of an axis: a number, a name that is one size wherever it stands, a sum of such, or None if unknown."""


_MOST_TERMS = 8
"""The terms of a size that is kept. No exporter's shapes have more, and products of long sums would grow endlessly."""


def plus(a: Dim, b: Dim) -> Dim:
    """Return a + b; None if either is unknown."""
    if a is None or b is None:
        return None
    total = Counter(_terms(a))
    total.update(_terms(b))
    return _dim(total)


def times(a: Dim, b: Dim) -> Dim:
    """Return a · b; None if either is unknown."""
    if a is None or b is None:
        return None
    total: Counter[tuple[str, ...]] = Counter()
    for left, n in _terms(a).items():
        for right, m in _terms(b).items():
            total[tuple(sorted((*left, *right)))] += n * m
    return _dim(total)


def minus(a: Dim, b: Dim) -> Dim:
    """Return a − b, perhaps less than 0; None if either is unknown."""
    return plus(a, times(b, -1))


def product(dims: Iterable[Dim]) -> Dim:
    """Multiply sizes; None if one is unknown."""
    one: Dim = 1
    return reduce(times, dims, one)


def over(a: Dim, b: Dim) -> Dim:
    """Return a / b if it is an integer for all values of the names; else None."""
    if a is None or b is None or b == 0:
        return None
    ((names, divisor), *more) = _terms(b).items()
    if more:
        return None
    total = {}
    for whole, n in _terms(a).items():
        rest = Counter(whole)
        rest.subtract(names)
        if n % divisor or min(rest.values(), default=0) < 0:
            return None
        total[tuple(sorted(rest.elements()))] = n // divisor
    return _dim(total)


def countable(dim: Dim) -> bool:
    """True if a size is at least 0 for all values of its names."""
    return dim is not None and all(n >= 0 for n in _terms(dim).values())


def names_in(dim: Dim) -> frozenset[str]:
    """Return the names in a size."""
    return frozenset() if dim is None else frozenset(name for names in _terms(dim) for name in names)


def renamed(dim: Dim, known: Mapping[str, Dim]) -> Dim:
    """Replace the names in a size by known sizes."""
    if isinstance(dim, str):
        return known.get(dim, dim)
    if not isinstance(dim, Size) or not any(name in known for name in names_in(dim)):
        return dim
    return reduce(plus, (times(n, product(known.get(name, name) for name in names)) for names, n in dim.terms))


def _terms(dim: int | str | Size) -> dict[tuple[str, ...], int]:
    if isinstance(dim, Size):
        return dict(dim.terms)
    return {(dim,): 1} if isinstance(dim, str) else {(): dim} if dim else {}


def _dim(terms: Mapping[tuple[str, ...], int]) -> Dim:
    kept = {names: n for names, n in terms.items() if n}
    if len(kept) > _MOST_TERMS:
        return None
    ((names, n), *more) = kept.items() or [((), 0)]
    if not more and not names:
        return n
    return names[0] if not more and n == 1 and len(names) == 1 else Size(tuple(sorted(kept.items())))
