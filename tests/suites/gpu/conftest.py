"""Fixtures of the GPU suite: the modules of benchmarks/gpu, and one small model as a skeleton and grown again."""

import sys
from functools import partial
from pathlib import Path

import pytest

from support.commands import output_of
from support.paths import ROOT

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # tests import benchmarks, as `run.py` does

RUN = str(ROOT / "benchmarks" / "run.py")
SMALL = "dense_tiny"


benchmark = partial(output_of, sys.executable, RUN)


@pytest.fixture(scope="session")
def skeletons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense network, small, in every way that needs no other tool, as skeletons."""
    folder = tmp_path_factory.mktemp("skeletons")
    benchmark("gpu_make", folder, SMALL)
    return folder


@pytest.fixture(scope="session")
def grown(skeletons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with its weights."""
    folder = tmp_path_factory.mktemp("grown")
    benchmark("gpu_grow", skeletons, folder, "--workers", 1)
    return folder
