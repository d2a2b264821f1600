"""A sandboxed process for hostile input, and a folder with a model."""

import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from suites.fuzz.cage import Cage
from suites.hostile.given import sound


@pytest.fixture(scope="module")
def cage() -> Iterator[Cage]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the limits of the sandbox need Linux")
    with Cage() as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(sound(), tmp_path / "m.onnx")
    return tmp_path
