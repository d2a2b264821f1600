"""The command line. A command parses its arguments, makes one library call, prints the result, and exits.

Results go to stdout, remarks to stderr. Exit codes: 0 for success; 1 for a finding or a difference; 2 for an error in
usage, configuration or I/O; 130 after an interrupt.
"""

from __future__ import annotations

import gc
import os

from amp_rewrite.cli.group import program


def main() -> None:
    """Run the command line and exit."""
    # numpy multiplies no matrix here, and the threads that it would start for that spin for a tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        program.main()
    finally:
        gc.freeze()  # saves two final garbage collections, a tenth of the time of a small conversion


__all__ = ["main", "program"]
