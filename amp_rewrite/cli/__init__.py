"""The command line: parse, one library call, print, exit.

stdout is for what was asked for, stderr for talk. Exit codes: 0 ok; 1 a finding or a difference; 2 usage,
configuration or I/O; 130 interrupted.
"""

from __future__ import annotations

import gc
import os

from amp_rewrite.cli.benching import bench
from amp_rewrite.cli.commands import door
from amp_rewrite.cli.doctoring import doctor
from amp_rewrite.cli.emulating import emulate
from amp_rewrite.cli.ranging import calibrate, ranges
from amp_rewrite.cli.rules import rule
from amp_rewrite.cli.training import train_step
from amp_rewrite.cli.verifying import locate, verify

door.add_command(emulate)
door.add_command(calibrate)
door.add_command(ranges)
door.add_command(verify)
door.add_command(locate)
door.add_command(train_step)
door.add_command(doctor)
door.add_command(bench)
door.add_command(rule)


def main() -> None:
    """Run the command line of this process, and exit."""
    # No matrix is multiplied by numpy here, and the threads that it would start for that spin for a tenth of a second.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        door.main()
    finally:
        gc.freeze()  # Python would search all that is left for cycles once more, twice: a tenth of a small conversion


__all__ = ["door", "main"]
