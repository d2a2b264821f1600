"""Processes for trials, so that a crash or a hang costs only one trial, and a run of all cases in all modes."""

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
"""Seconds for one trial; the slowest takes about thirty."""


def serve(connection: Connection, file: str) -> None:
    """Answer requests until there are no more, with output redirected to `file`."""
    hush(file)
    connection.send((tuple(cases()), subset(cases())))
    while (request := connection.recv()) is not None:
        key, mode = request
        connection.send(attempt(key, MODES[mode]) if mode else ground_of(key))


@dataclass
class Worker(Child):
    """Trials in a separate process, which is restarted after a crash."""

    target: Callable[[Connection, str], None] = serve
    limit: float = TRIAL_LIMIT
    keys: tuple[str, ...] = ()
    """Every case, once the process is running."""
    small: tuple[str, ...] = ()
    """The cases of the subset."""

    def ready(self, greeting: Any) -> None:
        """Store the cases."""
        self.keys, self.small = greeting

    def ground(self, key: str) -> Ground:
        """Return the float32 model's result; a model that crashes the process is refused."""
        try:
            found = self.ask((key, ""))
        except Lost as lost:
            return Ground(key, "refused", f"{lost.verdict}: {lost.note}")
        assert isinstance(found, Ground)
        return found

    def attempt(self, key: str, mode: str) -> Outcome:
        """Return the outcome of a trial, even if it crashes the process."""
        try:
            found = self.ask((key, mode))
        except Lost as lost:
            return Outcome(key, mode, lost.verdict, note=lost.note)
        assert isinstance(found, Outcome)
        return found


@dataclass
class Results:
    """The results of a run: the float32 models by case, and the outcomes by case and mode."""

    grounds: dict[str, Ground] = field(default_factory=dict)
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def add(self, ground: Ground, outcomes: Iterable[Outcome]) -> None:
        """Add a case."""
        self.grounds[ground.case] = ground
        self.outcomes.update(((outcome.case, outcome.mode), outcome) for outcome in outcomes)

    def of(self, mode: str, *, counted: bool) -> list[Outcome]:
        """Return the outcomes in a mode in order, for counted cases or the others."""
        found = (self.outcomes[case, mode] for case in sorted(self.grounds))
        return [outcome for outcome in found if (self.grounds[outcome.case].state == "counted") is counted]

    @property
    def failures(self) -> list[Outcome]:
        """The failed outcomes, in order."""
        return [self.outcomes[at] for at in sorted(self.outcomes) if not self.outcomes[at].fine]


def run_cases(worker: Worker, keys: Iterable[str]) -> Results:
    """Run cases one at a time."""
    results = Results()
    for key in keys:
        results.add(worker.ground(key), [worker.attempt(key, mode) for mode in MODES])
    return results


def run_all(keys: Sequence[str], workers: Sequence[Worker], tell: Callable[[int], None]) -> Results:
    """Run cases in every mode, distributed over workers. `tell` receives the number of finished cases."""
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
