"""Interrupts: signals that end the process let a command clean up first, and none is lost."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_MOMENT = 0.01  # seconds


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let signals that end the process raise KeyboardInterrupt while the body runs, so that it can clean up."""
    ours = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in _SIGNALS if ours and hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    before = sys.unraisablehook

    def hook(unraisable: UnraisableHookArgs, /) -> None:
        """Interrupt again a moment later: a callback or a finalizer was interrupted, from which nothing is raised."""
        if ours and isinstance(unraisable.exc_value, KeyboardInterrupt):
            _again(next(iter(numbers), signal.SIGINT))
        else:
            before(unraisable)

    try:
        sys.unraisablehook = hook
        for number in numbers:
            signal.signal(number, _raised)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook = before


def _raised(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not in the middle of the import of a compiled module: some crash of it."""
    while frame is not None:
        if frame.f_code.co_qualname.startswith("ExtensionFileLoader."):
            return _again(number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _again(number: int) -> None:
    """Send a signal to this process a moment later."""
    _thread.start_new_thread(_sent, (number,))


def _sent(number: int) -> None:
    time.sleep(_MOMENT)
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # ends a wait, too
    else:  # Windows
        signal.raise_signal(number)
