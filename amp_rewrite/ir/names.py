"""New names: derived from the replaced ones, and different from all names in the model."""

from __future__ import annotations

from collections.abc import Container, Iterable


def normal_domain(domain: str) -> str:
    """Return a domain, with "" for both spellings of ai.onnx."""
    return "" if domain == "ai.onnx" else domain


def as_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names in order; a single name is one, and not its letters."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def unused(name: str, taken: Container[str]) -> str:
    """Return the first free name: this one, or with the fewest "_" behind it."""
    while name in taken:
        name += "_"
    return name


def claimed(name: str, taken: set[str]) -> str:
    free = unused(name, taken)
    taken.add(free)
    return free


def unused_prefix(prefix: str, taken: Iterable[str]) -> str:
    """Return the prefix of no name: this one, or with the fewest "_" behind it."""
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return prefix


def numbered(name: str, taken: set[str]) -> str:
    """Return the first free one of `name`, `name_2`, `name_3` …, and take it."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
