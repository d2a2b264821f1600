"""All tools that are installed, on all shipped models, before and after the conversion.

    PYTHONPATH=tests python -m suites.clients [--workers N] [--write PAGE] [--only TEXT]

Prints the table and what no limit covers, and exits 1 if there is such a thing. Writes the page if all tools ran.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from suites.clients.limits import problems, stale
from suites.clients.page import complete, table, write
from suites.clients.tools import TOOLS
from suites.clients.trial import MODELS, ORDERS, Outcome
from suites.clients.worker import try_in, worker


def run_tool(tool: str) -> list[Outcome]:
    """The outcomes of one tool, in one process unless that dies."""
    child = worker()
    try:
        return [try_in(child, tool, model, order) for model in sorted(MODELS) for order in ORDERS]
    finally:
        child.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="page to update; it is not written unless all tools ran")
    parser.add_argument("--only", default="", help="only tools whose name has this text")
    arguments = parser.parse_args()
    tools = [tool for tool in TOOLS.values() if arguments.only in tool.name]
    for tool in tools:
        if not tool.installed:
            print(f"{tool.name} is not installed: pip install {tool.package}", file=sys.stderr)
    with ThreadPoolExecutor(arguments.workers) as pool:
        names = [tool.name for tool in tools if tool.installed]
        outcomes = [outcome for part in pool.map(run_tool, names) for outcome in part]
    print(table(outcomes))
    lines = [*problems(outcomes), *(stale(outcomes) if complete(outcomes) else ())]
    print("\n".join(lines))
    if arguments.write is not None and complete(outcomes):
        write(arguments.write, outcomes)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
