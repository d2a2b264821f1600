"""A hook of the build: which onnxruntime a wheel depends on, chosen by the environment where it is built.

All wheels hold the same files under the same name, so that one replaces the other. An extra could not do this: it adds
a dependency, and cannot take one away; and two packages that own one folder break each other.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "AMP_REWRITE_RUNTIME"


class RuntimeHook(MetadataHookInterface):
    """Add the dependencies of `[tool.hatch.metadata.hooks.custom.runtime]` that AMP_REWRITE_RUNTIME names."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies of the project; `cuda` is the default. ValueError for an unknown choice."""
        choices = self.config["runtime"]
        choice = os.environ.get(VARIABLE) or self.config["default"]
        if choice not in choices:
            raise ValueError(f"{VARIABLE}={choice} is not a runtime; use one of {', '.join(choices)}")
        metadata["dependencies"] = [*self.config["dependencies"], *choices[choice]]
