"""Folders that tests read, whatever the test's location."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def imported(name: str, folder: Path = ROOT) -> ModuleType:
    """Import a module from a folder of scripts."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        return import_module(name)
    finally:
        sys.path[:] = before
