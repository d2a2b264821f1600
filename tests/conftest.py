"""Settings of random tests, and skips for features missing from older packages (`support/features.py`)."""

from collections.abc import Generator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from amp_rewrite.runtime import kernels
from support import stub
from support.features import LACKING, reason_for, reason_of

# The same examples on each machine, however slow it is.
settings.register_profile(
    "project", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")

# Tests expect the kernels of the newest table; other releases have their own tests.
if LACKING or kernels.installed_release() not in kernels.releases():
    newest = wraps(kernels.installed_release.__wrapped__)(lambda: kernels.releases()[-1])
    kernels.installed_release = newest  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of features missing from an old version; ignore other packages' warnings in integrations."""
    for item in items:
        if LACKING and (reason := reason_for(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        if "suites/integrations" in item.path.as_posix():
            item.add_marker("integrations")
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Turn a failure caused by an old version into a skip."""
    report = yield
    if LACKING and report.failed and call.excinfo is not None:
        reason = reason_of(call.excinfo.value)
        if reason is not None:
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, reason)
    return report


@pytest.fixture(scope="session")
def cuda_stub() -> Path:
    """The folder of the CUDA stub libraries; skips the test if they cannot be built."""
    libraries, reason = stub.folder()
    if libraries is None:
        pytest.skip(reason)
    return libraries


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked torch or transformers if the package is not installed."""
    for package in ("torch", "transformers"):
        if item.get_closest_marker(package) is not None:
            pytest.importorskip(package, reason=f"{package} is not installed: make extras")
