"""Subprocesses of this Python, for code that may crash its process."""

from __future__ import annotations

import sys
from pathlib import Path

_HOME = str(Path(__file__).parents[2])


def command(program: str, *arguments: str) -> list[str]:
    """Return the command line of a Python program that can import this package.

    `-P`: nothing is imported from the current folder, which may contain untrusted files.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_HOME!r}); {program}", *arguments]
