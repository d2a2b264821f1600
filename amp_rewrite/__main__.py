"""`python -m amp_rewrite` is `amp-rewrite`."""

import sys


def main() -> None:
    """Run the command line of this process, and exit."""
    try:
        from amp_rewrite.cli import main as run  # takes a while, in which a user may interrupt
    except KeyboardInterrupt:
        sys.exit(130)  # as shells report death by SIGINT
    run()


if __name__ == "__main__":
    main()
