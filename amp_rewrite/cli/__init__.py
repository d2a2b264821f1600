"""The command line: parse, one library call, print, exit.

stdout is for what was asked for, stderr for talk. Exit codes: 0 ok; 1 a finding or a difference; 2 usage,
configuration or I/O; 130 interrupted.
"""

from __future__ import annotations

from amp_rewrite.cli.commands import door


def main() -> None:
    """Run the command line of this process, and exit."""
    door.main()


__all__ = ["door", "main"]
