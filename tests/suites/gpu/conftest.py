"""Fixtures of the GPU suite: the modules of benchmarks/gpu, and one small model as a skeleton and grown again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # tests import benchmarks, as `run.py` does

RUN = str(ROOT / "benchmarks" / "run.py")
SMALL = "dense_tiny"


def ran(*words: object) -> str:
    """Run a benchmark to its end, and return what it says."""
    command = [sys.executable, RUN, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def skeletons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense network, small, in every way that needs no other tool, as skeletons."""
    folder = tmp_path_factory.mktemp("skeletons")
    ran("gpu_make", folder, SMALL)
    return folder


@pytest.fixture(scope="session")
def grown(skeletons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with its weights."""
    folder = tmp_path_factory.mktemp("grown")
    ran("gpu_grow", skeletons, folder, "--workers", 1)
    return folder
