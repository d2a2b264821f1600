"""What a benchmark says of a command that ends by itself, fails, takes too long, or takes too much memory."""

import re
import sys

import pytest

from support.paths import ROOT, imported

measure = imported("benchmarks.shared.measure")


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_command_that_takes_too_long_is_stopped() -> None:
    run = measure.cost(python("import time; time.sleep(60)"), limit=1)
    assert (run.code, run.said) == (-9, "stopped after 1 s")


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of another process is read from /proc")
def test_a_command_that_takes_too_much_memory_is_stopped() -> None:
    run = measure.cost(python("import time; held = b'1' * (1 << 28); time.sleep(60)"), memory=1 << 27)
    assert (run.code, run.said) == (-9, "stopped at 0.134218 GB of memory")


def test_run_lists_each_script_with_arguments_once() -> None:
    listed = re.findall(r"^  (\w+) ", imported("benchmarks.run").listing(), re.MULTILINE)
    scripts = [path for path in (ROOT / "benchmarks").glob("*/*.py") if "ArgumentParser(" in path.read_text("utf-8")]
    helpers = {"export"}  # started by architectures
    assert sorted(listed) == sorted(path.stem for path in scripts if path.stem not in helpers)
    assert len({path.stem for path in (ROOT / "benchmarks").glob("*/*.py")}) == len(
        [*(ROOT / "benchmarks").glob("*/*.py")]
    )
