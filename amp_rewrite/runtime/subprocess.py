"""Subprocesses of this Python, for code that may crash its process."""

from __future__ import annotations

import sys
from pathlib import Path

_HOME = str(Path(__file__).parents[2])


def command(program: str, *arguments: str) -> list[str]:
    """Return the command line of a program that can import this package; -P: and nothing from the current folder."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_HOME!r}); {program}", *arguments]
