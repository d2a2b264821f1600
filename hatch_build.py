"""Build hook to choose the wheel's onnxruntime dependency from an environment variable.

All wheels hold the same files under the same name, so one replaces another. An extra would not work: it can add a
dependency but not remove one, and two onnxruntime packages break each other, as they share a folder.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "AMP_REWRITE_RUNTIME"


class RuntimeHook(MetadataHookInterface):
    """Add the dependencies selected by AMP_REWRITE_RUNTIME in `[tool.hatch.metadata.hooks.custom.runtime]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the project's dependencies; raise ValueError for an unknown choice."""
        choices = self.config["runtime"]
        choice = os.environ.get(VARIABLE) or self.config["default"]
        if choice not in choices:
            raise ValueError(f"{VARIABLE}={choice} is not a runtime; use one of {', '.join(choices)}")
        metadata["dependencies"] = [*self.config["dependencies"], *choices[choice]]
