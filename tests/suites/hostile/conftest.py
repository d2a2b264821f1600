"""The process in which hostile input is tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from suites.fuzz.cage import Cage


@pytest.fixture(scope="module")
def cage() -> Iterator[Cage]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the limits of the cage are those of Linux")
    with Cage() as opened:
        yield opened
