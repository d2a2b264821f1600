"""Fixtures of the GPU suite: the commands of benchmarks/gpu, and a small model as skeleton and with weights."""

import sys
from functools import partial
from pathlib import Path

import pytest

from support.commands import output_of
from support.paths import ROOT

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # tests import benchmarks like `run.py`

RUN = str(ROOT / "benchmarks" / "run.py")
SMALL = "dense_tiny"


benchmark = partial(output_of, sys.executable, RUN)


@pytest.fixture(scope="session")
def skeletons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write skeletons of the small dense network in every variant that needs no other tool."""
    folder = tmp_path_factory.mktemp("skeletons")
    benchmark("gpu_make", folder, SMALL)
    return folder


@pytest.fixture(scope="session")
def grown(skeletons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same model with its weights."""
    folder = tmp_path_factory.mktemp("grown")
    benchmark("gpu_grow", skeletons, folder, "--workers", 1)
    return folder
