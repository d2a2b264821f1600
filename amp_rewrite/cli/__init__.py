"""The command line: parse, one library call, print, exit.

stdout holds results, stderr remarks. Exit codes: 0 ok; 1 a finding or a difference; 2 usage,
configuration or I/O; 130 interrupted.
"""

from __future__ import annotations

import gc
import os

from amp_rewrite.cli.group import program


def main() -> None:
    """Run the command line of this process, and exit."""
    # No matrix is multiplied by numpy here, and the threads that it would start for that spin for a tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        program.main()
    finally:
        gc.freeze()  # Python would search all that is left for cycles once more, twice: a tenth of a small conversion


__all__ = ["main", "program"]
