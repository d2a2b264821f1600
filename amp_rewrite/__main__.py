"""The entry point of the command line and of `python -m amp_rewrite`."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

_INTERRUPTED = 130  # the exit code that shells report for SIGINT
_RETRY_DELAY = 0.01  # seconds
_SWALLOWING = ("__del__", "__set_name__")  # functions whose exceptions Python swallows or wraps


def main() -> None:
    """Run the command line and exit; after Ctrl-C or SIGTERM the exit code is 130."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    try:
        for number in numbers:
            signal.signal(number, interrupt)
        from amp_rewrite.cli import main as run  # slow enough to be interrupted

        run()
    except KeyboardInterrupt:
        pass
    except SystemExit as stop:
        if stop.code != _INTERRUPTED:
            raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)  # too late to interrupt
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(_INTERRUPTED)  # sys.exit would kill the process with SIGINT if an `exec` was interrupted


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or try again later if Python would swallow it here.

    The locks of an import lose the exception, a finalizer ignores it, and before Python 3.12 a class body turns it into
    a RuntimeError.
    """
    while frame is not None and hasattr(signal, "setitimer"):  # not on Windows
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" or frame.f_code.co_name in _SWALLOWING:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, _RETRY_DELAY)
            return
        frame = frame.f_back
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
