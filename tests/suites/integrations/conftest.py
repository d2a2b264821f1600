"""The marker `integrations` for each test of this folder, in which warnings are those of other packages."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("integrations")
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)
