"""A process of its own for trials, so that a crash or a hang costs one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from suites.conformance.case import cases
from suites.conformance.subset import subset
from suites.conformance.trial import MODES, Ground, Outcome, attempt, ground_of
from support.child import Child, Lost, hush

TRIAL_LIMIT = 300.0
"""Seconds for one trial; the slowest, which is measured too, takes about thirty."""


def serve(connection: Connection, talk: str) -> None:
    """Answer requests until there are no more; what is printed goes to the file `talk`."""
    hush(talk)
    connection.send((tuple(cases()), subset(cases())))
    while (request := connection.recv()) is not None:
        key, mode = request
        connection.send(attempt(key, MODES[mode]) if mode else ground_of(key))


@dataclass
class Worker(Child):
    """Trials one after another in another process, which is started anew when one kills it."""

    target: Callable[[Connection, str], None] = serve
    limit: float = TRIAL_LIMIT
    keys: tuple[str, ...] = ()
    """Every case, once the process runs."""
    small: tuple[str, ...] = ()
    """Those of the subset."""

    def ready(self, greeting: Any) -> None:
        """Take in the cases."""
        self.keys, self.small = greeting

    def ground(self, key: str) -> Ground:
        """What the float32 model does; one that kills the process is refused."""
        try:
            found = self.ask((key, ""))
        except Lost as lost:
            return Ground(key, "refused", f"{lost.verdict}: {lost.note}")
        assert isinstance(found, Ground)
        return found

    def attempt(self, key: str, mode: str) -> Outcome:
        """What comes of a trial, whatever that does to the process."""
        try:
            found = self.ask((key, mode))
        except Lost as lost:
            return Outcome(key, mode, lost.verdict, note=lost.note)
        assert isinstance(found, Outcome)
        return found
