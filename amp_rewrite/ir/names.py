"""New names for values and nodes, different from all names in the model."""

from __future__ import annotations

from collections.abc import Container, Iterable


def normal_domain(domain: str) -> str:
    """Return the domain, with "" for ai.onnx."""
    return "" if domain == "ai.onnx" else domain


def as_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def unused(name: str, taken: Container[str]) -> str:
    """Return the name, followed by as many "_" as it takes to make it unused."""
    while name in taken:
        name += "_"
    return name


def claimed(name: str, taken: set[str]) -> str:
    free = unused(name, taken)
    taken.add(free)
    return free


def unused_prefix(prefix: str, taken: Iterable[str]) -> str:
    """Return the prefix, followed by as many "_" as it takes until no name starts with it."""
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return prefix


def numbered(name: str, taken: set[str]) -> str:
    """Return the first unused name of `name`, `name_2`, `name_3` …, and add it to `taken`."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
