"""Objects as plain dictionaries, in the form of Keras: the name of a class, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from amp_rewrite.errors import TrainingError


def serialize(part: Any) -> dict[str, Any]:
    """Return an object as a plain dict, without its state."""
    return {"class_name": type(part).__name__, "config": part.get_config()}


def class_of(
    config: Mapping[str, Any], what: str, classes: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> tuple[Any, Mapping[str, Any]]:
    """Return class and configuration of a `serialize` result. TrainingError, naming `what`, for anything else.

    `classes`: those of the package, by name or by name in lower case. `custom_objects`: others by name.
    """
    name, inner = str(config.get("class_name")), config.get("config")
    found = (custom_objects or {}).get(name) or classes.get(name) or classes.get(name.lower())
    if found is None or not isinstance(inner, Mapping):
        known = ", ".join(sorted({known.__name__ for known in classes.values()}))
        raise TrainingError(
            f"not a serialized {what}: {dict(config)!r}; use the result of serialize() of {known}, and name your own"
            " classes in custom_objects"
        )
    return found, inner


def configured(made: Any, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Return a dataclass with these settings. TrainingError, quoting the configuration, for unknown or missing ones."""
    try:
        return made(**settings)
    except TypeError as cause:
        known = ", ".join(part.name for part in fields(made))
        raise TrainingError(f"not the configuration of {made.__name__}: {dict(config)!r}; it has {known}") from cause
