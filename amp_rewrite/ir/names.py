"""New names: what a pass adds to a model is called after what was there, and never as something is that is there."""

from __future__ import annotations

from collections.abc import Container


def normal_domain(domain: str) -> str:
    """The domain, with "" for ai.onnx, which has both spellings."""
    return "" if domain == "ai.onnx" else domain


def unused(name: str, taken: Container[str]) -> str:
    """The name with as few "_" behind it as make it one that is not taken."""
    while name in taken:
        name += "_"
    return name


def claimed(name: str, taken: set[str]) -> str:
    """The same, and it is taken from now on."""
    found = unused(name, taken)
    taken.add(found)
    return found


def numbered(name: str, taken: set[str]) -> str:
    """The first of `name`, `name_2`, `name_3` … that is not taken; it is from now on."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found
