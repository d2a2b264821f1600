"""`python -m amp_rewrite` is `amp-rewrite`."""

import sys


def main() -> None:
    """Run the command line of this process, and exit."""
    try:
        import signal  # takes a while, in which a user may interrupt

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be undone before and after a command
        from amp_rewrite.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # as shells report death by SIGINT
    finally:
        exec("")  # else Python ends itself by SIGINT if the last text that it executed was interrupted


if __name__ == "__main__":
    main()
