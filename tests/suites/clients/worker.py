"""Trials in a process of their own, so that a tool or a runtime that crashes or hangs costs one of them."""

from __future__ import annotations

from multiprocessing.connection import Connection

from suites.clients.trial import Outcome, attempt
from support.child import Child, Lost, hush

TRIAL_LIMIT = 180.0
"""Seconds for one trial; the slowest takes about ten."""


def serve(connection: Connection, talk: str) -> None:
    """Answer requests until there are no more; what is printed goes to the file `talk`."""
    hush(talk)
    connection.send(None)
    while (request := connection.recv()) is not None:
        connection.send(attempt(*request))


def worker() -> Child:
    return Child(serve, TRIAL_LIMIT)


def try_in(child: Child, tool: str, model: str, order: str) -> Outcome:
    """What comes of a trial, whatever that does to the process."""
    try:
        outcome = child.ask((tool, model, order))
    except Lost as lost:
        return Outcome(tool, model, order, lost.verdict, lost.note)
    assert isinstance(outcome, Outcome)
    return outcome
