"""`python -m amp_rewrite` is `amp-rewrite`."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

_INTERRUPTED = 130  # as shells report death by SIGINT
_MOMENT = 0.01  # seconds
_HIDING = ("__del__", "__set_name__")


def main() -> None:
    """Run the command line of this process, and exit; Ctrl-C and SIGTERM end it with 130."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    try:
        for number in numbers:
            signal.signal(number, interrupt)
        from amp_rewrite.cli import main as run  # takes a while, in which a user may interrupt

        run()
    except KeyboardInterrupt:
        pass
    except SystemExit as stop:
        if stop.code != _INTERRUPTED:
            raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)  # it comes too late
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(_INTERRUPTED)  # sys.exit would end by SIGINT where an `exec` was interrupted


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but after an import, whose locks lose it, and after what hides an exception.

    A finalizer ignores it, and a class body of Python before 3.12 makes a RuntimeError of it.
    """
    while frame is not None and hasattr(signal, "setitimer"):  # not on Windows
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" or frame.f_code.co_name in _HIDING:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, _MOMENT)
            return
        frame = frame.f_back
    signal.signal(number, signal.SIG_IGN)  # one is enough, and cleaning up must not be interrupted
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
