"""Processes for trials, so that a crash or a hang costs one of them, and all cases in all modes over a few of them."""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from suites.conformance.case import cases, subset
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


@dataclass
class Results:
    """What came of a run: the float32 models by case, and the outcomes by case and mode."""

    grounds: dict[str, Ground] = field(default_factory=dict)
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def add(self, ground: Ground, outcomes: Iterable[Outcome]) -> None:
        """Take in a case."""
        self.grounds[ground.case] = ground
        self.outcomes.update(((outcome.case, outcome.mode), outcome) for outcome in outcomes)

    def of(self, mode: str, *, counted: bool) -> list[Outcome]:
        """The outcomes in a mode, in order: of the cases that count, or of the others."""
        found = (self.outcomes[case, mode] for case in sorted(self.grounds))
        return [outcome for outcome in found if (self.grounds[outcome.case].state == "counted") is counted]

    @property
    def failures(self) -> list[Outcome]:
        """What is not fine, in order."""
        return [self.outcomes[at] for at in sorted(self.outcomes) if not self.outcomes[at].fine]


def run_cases(worker: Worker, keys: Iterable[str]) -> Results:
    """Cases one after another."""
    results = Results()
    for key in keys:
        results.add(worker.ground(key), [worker.attempt(key, mode) for mode in MODES])
    return results


def run_all(keys: Sequence[str], workers: Sequence[Worker], tell: Callable[[int], None]) -> Results:
    """Cases in every mode, spread over the workers. `tell` hears how many are done."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for key in keys:
        todo.put(key)
    results = Results()

    def work(worker: Worker) -> None:
        with suppress(queue.Empty):
            while True:
                key = todo.get_nowait()
                results.add(worker.ground(key), [worker.attempt(key, mode) for mode in MODES])
                tell(len(results.grounds))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
