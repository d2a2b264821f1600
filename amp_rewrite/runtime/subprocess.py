"""Another process of this Python, for what may end the one that it runs in."""

from __future__ import annotations

import sys
from pathlib import Path

_HOME = str(Path(__file__).parents[2])


def command(program: str, *arguments: str) -> list[str]:
    """The words that run a Python program which can import this package.

    `-P`: nothing is imported from the current folder, which may have come with somebody else's model.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_HOME!r}); {program}", *arguments]
