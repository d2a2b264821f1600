"""The tests of this folder need a WebGPU device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from suites.webgpu.worker import Device
from support import webgpu


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """The device, in a process of its own; a test that wants it is skipped where there is none."""
    if reason := webgpu.absence():
        pytest.skip(reason)
    made = Device()
    yield made
    made.close()
