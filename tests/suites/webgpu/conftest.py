"""The tests of this folder need a WebGPU device."""

from collections.abc import Iterator

import pytest

from suites.webgpu.worker import Device


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """The device, in a process of its own; a test that wants it is skipped where there is none."""
    made = Device()
    if made.absence is not None:
        made.close()
        pytest.skip(made.absence)
    yield made
    made.close()
