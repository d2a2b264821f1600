"""Sequences, maps and optionals: their differences by place and key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from amp_rewrite.evidence.metric import Criterion, compare
from amp_rewrite.files.casting import Array
from amp_rewrite.reports.evidence import Difference
from amp_rewrite.runtime.runner import Given

Maps = Sequence[Mapping[Any, Any]]


def differences(
    a: Given, b: Given, by: Criterion, *, equal_nan: bool = False, part: str = ""
) -> Iterator[tuple[str, Difference]]:
    """Yield each part of an output by its place, with its difference from the reference's.

    A map is one part, and so is a sequence of maps: of equal keys a matrix, as ZipMap reads it. An empty sequence
    counts as one value, and so does an empty optional.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        yield part, compare(a, b, by, equal_nan=equal_nan)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and not (a and _maps(a) and _maps(b)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, by, equal_nan=equal_nan, part=f"{part}[{i}]")
        if not a:
            yield part, Difference(0, True, "an empty sequence on both sides", compared=1)
    elif a is None and b is None:
        yield part, Difference(0, True, "nothing on both sides", compared=1)
    elif type(a) is type(b) and _maps(a) and _maps(b) and len(_maps(a)) == len(_maps(b)):
        found = _by_key(_maps(a), _maps(b), by, equal_nan)
        single = isinstance(a, dict) and found.where is not None
        yield part, replace(found, where=found.where[1:]) if single and found.where else found
    else:
        yield part, Difference(0, False, f"the reference gives {_kind(a)}, the candidate {_kind(b)}")


def _maps(value: Given) -> Maps:
    whole = [value] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return whole if all(isinstance(item, dict) for item in whole) else ()


def _uniform(maps: Maps) -> bool:
    return all(entries.keys() == maps[0].keys() for entries in maps)


def _places(maps: Maps) -> list[tuple[int, Any]]:
    shared = maps[0] if _uniform(maps) else None
    return [(place, key) for place, entries in enumerate(maps) for key in (shared or entries)]


def _values(maps: Maps, places: Sequence[tuple[int, Any]]) -> Array:
    values = np.array([maps[place][key] for place, key in places])
    return values.reshape(len(maps), -1) if _uniform(maps) else values


def _by_key(a: Maps, b: Maps, by: Criterion, equal_nan: bool) -> Difference:
    """Return the difference of as many maps; its `where` is a place and a key."""
    places = _places(a)
    lost = [(place, key) for place, key in places if key not in b[place]]
    new = [(place, key) for place, key in _places(b) if key not in a[place]]
    if lost or new:
        facts = [_missing(lost, "here")] if lost else []
        facts += [_missing(new, "in the reference")] if new else []
        return Difference(len(places), False, "; ".join(facts))
    x, y = (_values(side, places) for side in (a, b))
    found = compare(x, y, by, equal_nan=equal_nan)
    if found.where is None:
        return found
    flat = np.ravel_multi_index([int(i) for i in found.where], x.shape)
    return replace(found, where=places[int(flat)])


def _missing(places: Sequence[tuple[int, Any]], side: str) -> str:
    (place, key), *others = places
    more = f" (and {len(others)} more)" if others else ""
    return f"the key {key!r} of map {place}{more} is missing {side}"


def _kind(value: Given) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"a sequence of {len(value)}"
    return "a map" if isinstance(value, dict) else "a tensor"
