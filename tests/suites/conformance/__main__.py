"""Run all cases in all modes.

    PYTHONPATH=tests python -m suites.conformance [--workers N] [--write PAGE] [--only TEXT] [--small]

Prints the score and the failures, writes the page, and exits with 1 if there are failures.
"""

import argparse
import sys
from pathlib import Path

from suites.conformance.page import page, score
from suites.conformance.worker import Worker, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="the page to write; nothing is written unless all cases ran")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--small", action="store_true", help="only the cases of `make test`")
    arguments = parser.parse_args()
    workers = [Worker() for _ in range(arguments.workers)]
    try:
        workers[0].start()
        chosen = workers[0].small if arguments.small else workers[0].keys
        keys = [key for key in chosen if arguments.only in key]

        def tell(done: int) -> None:
            if done % 100 == 0 or done == len(keys):
                print(f"{done} of {len(keys)}", file=sys.stderr)

        results = run_all(keys, workers, tell)
    finally:
        for worker in workers:
            worker.close()
    print(score(results))
    for outcome in results.failures:
        print(f"{outcome.case}, {outcome.mode}: {outcome.verdict}: {' '.join(outcome.note.split())[:300]}")
    whole = len(keys) == len(workers[0].keys)
    if arguments.write is not None and whole:
        arguments.write.write_text(page(results), "utf-8")
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
