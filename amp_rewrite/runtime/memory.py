"""Main memory of this machine."""

import os


def main_memory() -> int:
    """Return the bytes of memory of this machine; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 0
