"""Some models of the standard convert correctly in every mode. `make conformance` runs them all."""

from collections.abc import Iterator

import pytest

from suites.conformance.worker import Worker, run_cases

pytestmark = pytest.mark.slow

EACH = 16
"""The test runs every 16th case of the selection."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    found = Worker()
    found.start()
    yield found
    found.close()


def test_models_of_the_standard_convert_and_agree(worker: Worker) -> None:
    assert len(worker.small) > 250
    results = run_cases(worker, worker.small[::EACH])
    found = [f"{o.case}, {o.mode}: {o.verdict}: {o.note[:300]}" for o in results.failures]
    assert not found, "\n".join(found)
    grounds = results.grounds.values()
    assert sum(ground.state == "counted" for ground in grounds) > 0.8 * len(grounds)
